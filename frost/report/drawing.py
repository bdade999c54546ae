"""The drawings of a report as SVG text: no program and no library is needed. All text is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_CHAR, _LINE, _PAD = 6.6, 15, 8  # of the 11 px monospace that labels are set in
_GAP_X, _GAP_Y = 22, 44
_MAX_CHARS = 56


def _cut(text: str, limit: int = _MAX_CHARS) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _svg(width: float, height: float, parts: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(label, quote=True)}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


# ---- the graph -------------------------------------------------------------------------------------------


def graph_svg(nodes: Sequence[Mapping[str, Any]], edges: Sequence[Sequence[Any]]) -> str:
    """Layers by longest path from the inputs, each ordered by where its predecessors lie."""
    boxes = {n["id"]: _box(n) for n in nodes}
    layers = _layers(list(boxes), edges)
    place: dict[int, tuple[float, float]] = {}
    width = max((sum(boxes[i][0] + _GAP_X for i in layer) for layer in layers), default=100.0)
    y = _PAD * 1.0
    for layer in layers:
        x = (width - sum(boxes[i][0] + _GAP_X for i in layer)) / 2 + _GAP_X / 2
        for i in layer:
            place[i] = (x, y)
            x += boxes[i][0] + _GAP_X
        y += max(boxes[i][1] for i in layer) + _GAP_Y
    parts = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" class="tip"/></marker></defs>'
    ]
    for a, b, field in edges:
        (x1, y1), (x2, y2) = place[a], place[b]
        x1, y1, x2 = x1 + boxes[a][0] / 2, y1 + boxes[a][1], x2 + boxes[b][0] / 2
        bend = (y1 + y2) / 2
        parts.append(
            f'<path class="edge" marker-end="url(#tip)" d="M{x1:.1f},{y1:.1f} C{x1:.1f},{bend:.1f} '
            f"{x2:.1f},{bend:.1f} "
            f'{x2:.1f},{y2:.1f}">{_title(str(field))}</path>'
        )
    for node in nodes:
        (x, top), (w, h) = place[node["id"]], boxes[node["id"]]
        radius = 2 if node["kind"] == "op" else h / 2
        parts.append(
            f'<g class="node {escape(node["kind"])}">{_title(" ".join([node["label"], *node["lines"]]))}'
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:.1f}"/>'
        )
        parts += [
            _text(x + w / 2, top + _PAD + 11 + i * _LINE, _cut(line), "name" if i == 0 else "", "middle")
            for i, line in enumerate([node["label"], *node["lines"]])
        ]
        parts.append("</g>")
    return _svg(width, y - _GAP_Y + _PAD, parts, "graph of ops and tensors")


def _box(node: Mapping[str, Any]) -> tuple[float, float]:
    lines = [node["label"], *node["lines"]]
    return max(len(_cut(line)) for line in lines) * _CHAR + 2 * _PAD + 8, len(lines) * _LINE + 2 * _PAD - 4


def _layers(ids: Sequence[int], edges: Sequence[Sequence[Any]]) -> list[list[int]]:
    before: dict[int, list[int]] = {i: [] for i in ids}
    after: dict[int, list[int]] = {i: [] for i in ids}
    for a, b, _ in edges:
        before[b].append(a)
        after[a].append(b)
    depth = dict.fromkeys(ids, 0)
    waiting = {i: len(before[i]) for i in ids}
    ready = [i for i in ids if not waiting[i]]
    for i in ready:  # grows while it is walked
        for j in after[i]:
            depth[j] = max(depth[j], depth[i] + 1)
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    for i in ids:  # an input sits right above what first reads it
        if not before[i] and after[i]:
            depth[i] = min(depth[j] for j in after[i]) - 1
    layers: list[list[int]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for i in ids:
        layers[depth[i]].append(i)
    column: dict[int, float] = {}
    for layer in layers:
        layer.sort(
            key=lambda i: sum(column.get(j, 0.5) for j in before[i]) / len(before[i]) if before[i] else 0.5
        )
        column.update({i: (n + 0.5) / len(layer) for n, i in enumerate(layer)})
    return [layer for layer in layers if layer]


# ---- the workspace map -----------------------------------------------------------------------------------


def workspace_svg(regions: Sequence[Mapping[str, Any]], nbytes: int, steps: int) -> str:
    """Steps to the right, bytes downwards: a region is as wide as its lifetime and as tall as it is large."""
    shown = [r for r in regions if r["bytes"]]
    if not shown or not nbytes:
        return ""
    left, top, column, height = 90.0, 26.0, max(150.0, 600.0 / max(steps, 1)), 260.0
    parts = [_text(left + (i + 0.5) * column, 16, f"step {i}", "axis", "middle") for i in range(steps)]
    parts += [
        f'<line class="grid" x1="{left + i * column:.1f}" y1="{top}" x2="{left + i * column:.1f}" '
        f'y2="{top + height}"/>'
        for i in range(steps + 1)
    ]
    parts += [
        _text(left - 6, top + 10, "0", "axis", "end"),
        _text(left - 6, top + height, human_bytes(nbytes), "axis", "end"),
    ]
    for n, r in enumerate(shown):
        x, w = left + r["first"] * column, (r["last"] - r["first"] + 1) * column
        y, h = top + r["offset"] / nbytes * height, max(r["bytes"] / nbytes * height, 2.0)
        words = f"{r['name']}: {human_bytes(r['bytes'])} at {r['offset']}, steps {r['first']}..{r['last']}"
        parts.append(
            f'<g class="region tone{n % 6}">{_title(words)}<rect x="{x + 1:.1f}" y="{y:.1f}" '
            f'width="{w - 2:.1f}" '
            f'height="{h:.1f}"/>'
        )
        if h >= 12:
            parts.append(_text(x + 6, y + min(h / 2 + 4, h - 2), _cut(r["name"], int((w - 12) / _CHAR))))
        parts.append("</g>")
    return _svg(left + steps * column + 10, top + height + 8, parts, "workspace by lifetime")


def human_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return ""


# ---- bars ------------------------------------------------------------------------------------------------


def bars_svg(rows: Sequence[Mapping[str, Any]], ceilings: Sequence[Mapping[str, Any]]) -> str:
    """TFLOP/s by candidate, and the ceilings of the card as lines. One that could not run has no bar but
    its reason.
    """

    def good(value: Any) -> bool:
        return isinstance(value, (int, float)) and math.isfinite(value)

    speeds = [r["tflops"] for r in rows if good(r["tflops"])]
    fastest = max(speeds, default=1.0)
    # A ceiling far above every bar would leave only slivers of them: it is told in words.
    near = [c for c in ceilings if good(c["tflops"]) and c["tflops"] <= 8 * fastest]
    top_speed = max([fastest, *(c["tflops"] for c in near)]) * 1.04 or 1.0
    left, width, row, head = 190.0, 620.0, 24.0, 14.0 + 15.0 * len(near)
    parts = []
    for i, r in enumerate(rows):
        y = head + i * row
        parts.append(_text(left - 8, y + 15, _cut(r["candidate"], 26), "", "end"))
        if good(r["tflops"]):
            w = max(r["tflops"] / top_speed * width, 1.0)
            ours = (
                "ours"
                if r["candidate"].startswith("frost[") or r["candidate"] in ("triton", "sm80")
                else "peer"
            )
            words = f"{_speed(r['tflops'])} TFLOP/s" + (f", {r['ms']:.4g} ms" if good(r["ms"]) else "")
            parts += [
                f'<rect class="bar {ours}" x="{left}" y="{y + 3:.1f}" width="{w:.1f}" height="{row - 7}">'
                f"{_title(r['candidate'] + ': ' + words)}</rect>",
                _text(left + w + 6, y + 15, words),
            ]
        else:
            parts.append(
                f"<g>{_title(r['status'])}{_text(left + 4, y + 15, _cut(r['status'], 90), 'none')}</g>"
            )
    bottom = head + len(rows) * row
    for n, c in enumerate(sorted(near, key=lambda c: -c["tflops"])):
        x = left + c["tflops"] / top_speed * width
        words = f"{_range(c)} TFLOP/s: {c['label']}"
        parts.append(
            f'<line class="ceiling" x1="{x:.1f}" y1="{12 + 15 * n:.1f}" x2="{x:.1f}" '
            f'y2="{bottom:.1f}">{_title(words)}</line>'
        )
        parts.append(_text(x - 5, 12 + 15 * n, words, "ceiling", "end"))
    return _svg(left + width + 190, bottom + 6, parts, "TFLOP/s by backend")


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.3g}"


def _range(c: Mapping[str, Any]) -> str:
    low, high = c.get("low"), c["tflops"]
    if low is None:
        low = high
    return _speed(high) if low == high else f"{_speed(low)}–{_speed(high)}"


_TONES = {"triton": 0, "torch_sdpa": 1, "reference": 2, "sm80": 3}  # an engine has one colour in every suite


def share_bar(shares: Mapping[str, float]) -> str:
    """One bar, split by engine."""
    width, x, parts = 620.0, 0.0, []
    for engine, share in shares.items():
        w = share * width
        tone = _TONES.get(engine, sum(map(ord, engine)) % 2 + 4)
        parts.append(
            f'<g class="region tone{tone}">{_title(f"{engine} {share:.1%}")}<rect x="{x:.1f}" y="0" '
            f'width="{max(w - 1, 0.5):.1f}" '
            f'height="20"/>'
        )
        label = f"{engine} {share:.0%}"
        if w > len(label) * _CHAR + 8:
            parts.append(_text(x + 5, 14, label))
        parts.append("</g>")
        x += w
    return _svg(width, 20, parts, "share of lowerings by engine")
