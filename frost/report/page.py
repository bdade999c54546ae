"""The page: one HTML file with its style, its script and its drawings inside. It loads nothing and sends
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .drawing import bars_svg, graph_svg, human_bytes, share_bar, workspace_svg
from .saved import Saved, now

_HERE = Path(__file__).parent
# Nothing may be fetched, whatever ends up in a text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class _Raw(str):
    """HTML that is made here and needs no escaping."""


def render(saved: Saved, title: str = "FROST report") -> str:
    """The whole page."""
    sections = [
        ("graphs", "Graphs and plans", _graphs(saved.graphs)),
        ("gates", "Gates", _gates(saved.gates)),
        ("routing", "Routing shares", _routing(saved.routing)),
        ("benchmarks", "Benchmarks", _benchmarks(saved.benchmarks)),
    ]
    nav = "".join(f'<a href="#{key}">{escape(name)}</a>' for key, name, _ in sections)
    body = "".join(
        f'<section id="{key}"><h2>{escape(name)}</h2>{html}</section>' for key, name, html in sections
    )
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" '
        f'content="{_POLICY}"><title>{escape(title)}</title><style>{style}</style></head>'
        f'<body><header><h1>{escape(title)}</h1><p class="note">Which kernel ran, why that one, and '
        "what proves it right. Made "
        f"{now()}.</p>{_facts(saved.environment.items())}<nav>{nav}</nav></header>"
        f"<main>{body}</main><script>{script}</script></body>"
        f"</html>\n"
    )


def _facts(pairs: Iterable[tuple[str, Any]]) -> str:
    return (
        '<div class="facts">'
        + "".join(f"<span>{escape(k)} <b>{escape(str(v))}</b></span>" for k, v in pairs)
        + "</div>"
    )


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table that sorts and filters. Numbers are right-aligned, and so are the heads of columns that hold
    nothing else; a _Raw cell is HTML.
    """
    listed = [tuple(row) for row in rows]
    head = "".join(
        "<th "
        f'scope="col"{_NUMBER if listed and all(_is_number(r[i]) for r in listed) else ""}>{escape(h)}</th>'
        for i, h in enumerate(heads)
    )
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in listed)
    return f'<table class="data"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


_NUMBER = ' class="number"'


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, _Raw):
        return f"<td>{value}</td>"
    if value is None or not _is_number(value):
        return f"<td>{escape('' if value is None else str(value))}</td>"
    if not math.isfinite(value):
        return f"<td{_NUMBER}>NaN</td>"
    shown = str(value) if isinstance(value, int) else f"{value:.4g}"
    return f'<td{_NUMBER} data-value="{value!r}">{shown}</td>'


def _list(items: Iterable[str]) -> _Raw:
    lines = "".join(f"<li>{escape(i)}</li>" for i in items)
    return _Raw(f"<ul>{lines}</ul>" if lines else "")


def _verdict(ok: bool, text: str) -> _Raw:
    return _Raw(f'<span class="{"pass" if ok else "fail"}">{escape(text)}</span>')


# ---- sections --------------------------------------------------------------------------------------------


def _graphs(graphs: Sequence[dict[str, Any]]) -> str:
    if not graphs:
        return _note(
            "No graph was given. `frost run GRAPH --save run.json` saves one; `--graph GRAPH` "
            "compiles one here."
        )
    return "".join(map(_graph, graphs))


def _graph(g: dict[str, Any]) -> str:
    routes = _table(
        ("node", "op", "engine", "gate", "asked before it, and why not"),
        (
            (r["node"], r["op"], r["engine"], r["gate"], _list(_decline(d) for d in r["declined"]))
            for r in g["routes"]
        ),
    )
    steps = _table(
        ("step", "node", "op", "engine", "what runs"),
        (
            (i, s["name"], s["op"], s["engine"], _list(f"{k}: {v}" for k, v in s["details"].items()))
            for i, s in enumerate(g["steps"])
        ),
    )
    work = g["workspace"]
    drawn = workspace_svg(work["regions"], work["bytes"], len(g["steps"]))
    regions = _table(
        ("region", "offset", "bytes", "first step", "last step"),
        ((r["name"], r["offset"], r["bytes"], r["first"], r["last"]) for r in work["regions"] if r["bytes"]),
    )
    workspace = (
        f'<div class="scroll">{drawn}</div>{regions}' if drawn else _note("This plan needs no workspace.")
    )
    return (
        f"<h3>{escape(g['name'])}</h3>"
        + _facts(
            (
                ("target", g["target"]),
                ("plan", g.get("key", "")),
                ("workspace", human_bytes(work["bytes"])),
                *(_run_facts(g.get("run"))),
            )
        )
        + f'<div class="scroll">{graph_svg(g["nodes"], g["edges"])}</div>'
        + f"<h3>Routes of {escape(g['name'])}</h3>{routes}<h3>Steps</h3>{steps}"
        + f"<h3>Workspace by lifetime</h3>{workspace}{_outputs(g.get('run'))}"
    )


def _decline(d: Sequence[str]) -> str:
    engine, field, got, wanted, text = d
    return f"{engine}: {text or f'{field}: got {got}, wanted {wanted}'}"


def _run_facts(run: dict[str, Any] | None) -> list[tuple[str, str]]:
    return [] if run is None else [("one run", f"{run['ms']:.4g} ms, median of {run['repeat']}")]


def _outputs(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    rows = (
        (name, str(o["shape"]), o["dtype"], o["mean"], o["largest"], o["nan"], o.get("difference"))
        for name, o in run["outputs"].items()
    )
    return "<h3>Outputs</h3>" + _table(
        ("output", "shape", "dtype", "mean", "largest", "NaN", "difference from reference"), rows
    )


def _gates(gates: Sequence[dict[str, Any]]) -> str:
    if not gates:
        return _note(
            "There is no gate here. `frost gate run triton` makes one, in about a minute on your GPU."
        )
    return _note(
        "A kernel is routable on a GPU only while its gate matches its source and the environment."
    ) + _table(
        (
            "gate",
            "engine",
            "op",
            "environment",
            "verdict",
            "source",
            "configurations",
            "declined",
            "date",
            "where",
        ),
        (
            (
                g["name"],
                g["engine"],
                g["op"],
                g.get("environment", ""),
                _verdict(g["verdict"] == "pass", g["verdict"]),
                _verdict(not g.get("problem"), g.get("problem") or "unchanged"),
                g.get("covers", 0),
                g.get("declined", 0),
                g.get("date", ""),
                "shipped" if g.get("shipped") else "own",
            )
            for g in gates
        ),
    )


def _routing(suites: Sequence[dict[str, Any]]) -> str:
    if not suites:
        return _note("No routing dump was given. `pytest --frost-routing=FILE` writes one per suite.")
    rows, declines, bars = [], [], []
    for s in suites:
        bars.append(f"<h3>{escape(s['suite'])}</h3>{share_bar(s['shares'])}")
        total = sum(s["counts"].values())
        for key, n in sorted(s["counts"].items()):
            engine, _, op = key.partition(":")
            rows.append(
                (
                    s["suite"],
                    engine,
                    op,
                    n,
                    100.0 * n / total if total else 0.0,
                    (s.get("cache_hits") or {}).get(key, 0),
                )
            )
        for key, fields in sorted(s["declines"].items()):
            declines += [
                (s["suite"], key, name, n, (s.get("texts") or {}).get(key, {}).get(name, ""))
                for name, n in fields.items()
            ]
    out = (
        "".join(bars)
        + "<h3>Lowerings</h3>"
        + _table(("suite", "engine", "op", "lowerings", "% of the suite", "plan-cache hits"), rows)
    )
    return out + (
        "<h3>Declines</h3>" + _table(("suite", "declined", "field", "times", "latest reason"), declines)
        if declines
        else ""
    )


def _benchmarks(benchmarks: Sequence[dict[str, Any]]) -> str:
    if not benchmarks:
        return _note(
            "No benchmark was given. `frost bench --save run.json` saves one; `--bench FILE` reads a "
            "benchmark's CSV."
        )
    drawn, rows = [], []
    for b in benchmarks:
        far = "" if b["ceilings"] else _note("No ceilings are known for this card.") if b.get("card") else ""
        drawn.append(
            f"<h3>{escape(b['title'])}</h3><div "
            f'class="scroll">{bars_svg(b["rows"], b["ceilings"])}</div>{far}'
        )
        rows += [
            (b["title"], r["candidate"], r["ms"], r["tflops"], r.get("pinned_ms"), r["status"])
            for r in b["rows"]
        ]
    return (
        _note(
            "Bars are TFLOP/s, longer is faster. Dashed lines are what no kernel on this card can "
            "pass: the matrix units, and memory "
            "for a problem of this intensity. Whatever was not right was not timed."
        )
        + "".join(drawn)
        + ("<h3>All figures</h3>" + _table(("case", "backend", "ms", "TFLOP/s", "pinned ms", "status"), rows))
    )
