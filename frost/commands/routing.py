"""`frost routing show|diff`: what dumps say, and where two of them differ."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .common import FAILED, OK, UsageError, console, print_json, reading, table

_EXPECTED = "a routing dump, as `pytest --frost-routing=FILE` and frost.routing.dump write it"


def _load(option: str, path: Path) -> Any:
    from .. import routing

    with reading(option, path, _EXPECTED):
        return routing.load(path)


def show(files: list[Path], as_json: bool) -> int:
    from .. import routing

    dump = routing.merge_dumps([_load("FILE", path) for path in files])
    shares = routing.shares(dump.stats)
    if as_json:
        print_json(dump.to_wire() | {"shares": shares})
        return OK
    screen = console()
    listed = table("engine", "op", "lowerings", "share of all", "plan-cache hits", title=dump.suite or None)
    for key in sorted({*dump.stats, *dump.stats.cache_hits}):
        engine, _, op = key.partition(":")
        share = dump.stats[key] / dump.stats.lowerings if dump.stats.lowerings else 0.0
        hits = dump.stats.cache_hits.get(key, 0)
        listed.add_row(engine, op, str(dump.stats[key]), f"{share:.1%}", str(hits))
    screen.print(listed)
    if dump.stats.declines:
        listed = table("declined", "field", "times", "latest reason")
        for key, fields in sorted(dump.stats.declines.items()):
            for name, n in sorted(fields.items(), key=lambda item: -item[1]):
                listed.add_row(key, name, str(n), dump.stats.texts.get(key, {}).get(name, ""))
        screen.print(listed)
    text = ", ".join(f"{engine} {share:.1%}" for engine, share in shares.items())
    screen.print(f"shares: {text or 'nothing was lowered'}")
    return OK


def diff(before: Path, after: Path, tolerance: float, as_json: bool) -> int:
    """0: the same; 1: an engine's share of an op moved by more than the tolerance; 2: a file cannot be
    read.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise UsageError(f"--tolerance: given {tolerance}, expected a share between 0 and 1")
    a, b = (_load("A B", p).stats for p in (before, after))
    rows = _rows(a, b)
    moved = [r for r in rows if abs(r["share_after"] - r["share_before"]) > tolerance]
    declines = _declines(a.declines, b.declines)
    if as_json:
        print_json({"same": not moved, "rows": rows, "declines": declines})
        return FAILED if moved else OK
    screen = console()
    listed = table("engine", "op", "lowerings", "share of the op", "")
    for r in rows:
        change = r["share_after"] - r["share_before"]
        listed.add_row(
            r["engine"],
            r["op"],
            f"{r['before']} -> {r['after']}",
            f"{r['share_before']:.1%} -> {r['share_after']:.1%}",
            "" if r not in moved else f"{change:+.1%}",
            style="red" if r in moved else None,
        )
    screen.print(listed)
    if declines:
        listed = table("declined", "field", "times")
        for d in declines:
            listed.add_row(d["key"], d["field"], f"{d['before']} -> {d['after']}")
        screen.print(listed)
    screen.print(f"{len(moved)} shares moved" if moved else "the same shares")
    return FAILED if moved else OK


def _rows(a: Any, b: Any) -> list[dict[str, Any]]:
    totals = [
        {
            op: sum(n for k, n in s.items() if k.partition(":")[2] == op)
            for op in {k.partition(":")[2] for k in s}
        }
        for s in (a, b)
    ]
    rows = []
    for key in sorted({*a, *b}):
        engine, _, op = key.partition(":")
        shares = [s[key] / t[op] if t.get(op) else 0.0 for s, t in zip((a, b), totals)]
        rows.append(
            {
                "engine": engine,
                "op": op,
                "before": a[key],
                "after": b[key],
                "share_before": shares[0],
                "share_after": shares[1],
            }
        )
    return rows


def _declines(a: Any, b: Any) -> list[dict[str, Any]]:
    """Reasons that came or went."""
    pairs = sorted({(key, name) for d in (a, b) for key, fields in d.items() for name in fields})
    found = [
        {"key": k, "field": f, "before": a.get(k, {}).get(f, 0), "after": b.get(k, {}).get(f, 0)}
        for k, f in pairs
    ]
    return [d for d in found if not d["before"] or not d["after"]]
