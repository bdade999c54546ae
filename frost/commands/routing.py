"""`frost routing show|diff`: what dumps say, and where two of them differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from .common import FAILED, OK, UsageError, console, print_json


def show(files: list[Path], as_json: bool) -> int:
    from .. import routing

    dump = routing.merge(files)
    shares = routing.shares(dump.stats)
    if as_json:
        print_json(dump.to_wire() | {"shares": shares})
        return OK
    screen = console()
    table = Table("engine", "op", "lowerings", "share of all", "plan-cache hits", title=dump.suite or None)
    for key in sorted({*dump.stats, *dump.stats.cache_hits}):
        engine, _, op = key.partition(":")
        share = dump.stats[key] / dump.stats.lowerings if dump.stats.lowerings else 0.0
        hits = dump.stats.cache_hits.get(key, 0)
        table.add_row(engine, op, str(dump.stats[key]), f"{share:.1%}", str(hits))
    screen.print(table)
    if dump.stats.declines:
        table = Table("declined", "field", "times", "latest reason")
        for key, fields in sorted(dump.stats.declines.items()):
            for name, n in sorted(fields.items(), key=lambda item: -item[1]):
                table.add_row(key, name, str(n), dump.stats.texts.get(key, {}).get(name, ""))
        screen.print(table)
    text = ", ".join(f"{engine} {share:.1%}" for engine, share in shares.items())
    screen.print(f"shares: {text or 'nothing was lowered'}")
    return OK


def diff(before: Path, after: Path, tolerance: float, as_json: bool) -> int:
    """0: the same; 1: an engine's share of an op moved by more than the tolerance; 2: a file cannot be
    read.
    """
    from .. import routing

    try:
        a, b = (routing.load(p).stats for p in (before, after))
    except (OSError, routing.RoutingError) as e:
        raise UsageError(str(e)) from e  # as diff(1): trouble is 2, so that 1 means a difference
    rows = _rows(a, b)
    moved = [r for r in rows if abs(r["share_after"] - r["share_before"]) > tolerance]
    declines = _declines(a.declines, b.declines)
    if as_json:
        print_json({"same": not moved, "rows": rows, "declines": declines})
        return FAILED if moved else OK
    screen = console()
    table = Table("engine", "op", "lowerings", "share of the op", "")
    for r in rows:
        change = r["share_after"] - r["share_before"]
        table.add_row(
            r["engine"],
            r["op"],
            f"{r['before']} -> {r['after']}",
            f"{r['share_before']:.1%} -> {r['share_after']:.1%}",
            "" if r not in moved else f"{change:+.1%}",
            style="red" if r in moved else None,
        )
    screen.print(table)
    if declines:
        table = Table("declined", "field", "times")
        for d in declines:
            table.add_row(d["key"], d["field"], f"{d['before']} -> {d['after']}")
        screen.print(table)
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
