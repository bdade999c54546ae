"""docs/support.md, generated from the capability rows that lowering itself reads.

`python -m tools.support_matrix` writes it; `--check` exits 1, with the difference, where it is stale.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from descriptors import OP_TYPES, MaskDesc
from engines import registry
from engines.base import Capabilities, Engine

PATH = Path(__file__).resolve().parent.parent / "docs" / "support.md"

_HEAD = """\
# What each engine supports

Generated from the engines' capability rows, the data that decides at run time, by `python -m
tools.support_matrix`. Don't edit it by hand.

An engine may hold several cells for an op; lowering takes it if one of them covers the node. A row says what a
cell consumes; an engine may decline more narrowly, and the route then names the field, what was given and what
would have done. Engines are listed in the order in which `engines=None` asks them.

*A backward: with `deterministic=True`. Without it `sm80` (plain scores) and, on Hopper, `triton` may add dQ up in arrival order.
"""

_FEATURES_HEAD = """\
Options that a cell consumes (fields of the op's descriptor): yes, or – where setting one makes it decline.
"""

# What a column says about a row: (title, text).
_COLUMNS = (
    ("devices", lambda c: ", ".join(c.devices)),
    ("arch", lambda c: "any" if c.min_cc is None else f"sm_{c.min_cc[0]}{c.min_cc[1]} and newer"),
    ("dtypes", lambda c: ", ".join(map(str, c.dtypes))),
    ("head_dim", lambda c: _head_dims(c)),
    ("groups", lambda c: "any" if c.groups == "any" else "Hq = Hk"),
    ("last stride", lambda c: "1" if c.unit_last_stride else "any"),
    ("symbolic dims", lambda c: _yes(c.symbolic)),
    ("bit-reproducible*", lambda c: _yes(c.deterministic)),
    ("allocates", lambda c: _yes(c.allocates)),
    ("note", lambda c: c.note),
)


def _yes(value: bool) -> str:
    return "yes" if value else "–"


def _range(bounds: tuple[int, int] | None) -> str:
    if bounds is None:
        return "any"
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]}–{bounds[1]}"


def _head_dims(c: Capabilities) -> str:
    text = _range(c.head_dim)
    if c.head_dim_v != c.head_dim:
        text += f", Dv {_range(c.head_dim_v)}"
    if c.equal_head_dims:
        text += ", Dv = D"
    return text if c.head_dim_multiple == 1 else f"{text}, multiples of {c.head_dim_multiple}"


def own_engines() -> tuple[Engine, ...]:
    """FROST's engines in order of preference; what a third party installed here has no place in the docs."""
    return tuple(e for e in registry.engines() if type(e).__module__.partition(".")[0] == "engines")


def cells(engines: Iterable[Engine]) -> dict[str, list[tuple[Engine, Capabilities]]]:
    """Every capability row, by op."""
    out: dict[str, list[tuple[Engine, Capabilities]]] = {op: [] for op in OP_TYPES}
    for engine in engines:
        for adapter in engine.adapters():
            out.setdefault(adapter.op, []).extend((engine, row) for row in adapter.capabilities)
    return {op: rows for op, rows in out.items() if rows}


def features(op: str, rows: Sequence[tuple[Engine, Capabilities]]) -> list[str]:
    """The optional fields of an op, in the order of its descriptor; then what only rows name."""
    known: list[str] = []
    for f in fields(OP_TYPES[op]) if op in OP_TYPES else ():  # type: ignore[arg-type]
        if f.name in OP_TYPES[op].BASE:  # every cell understands it
            continue
        if isinstance(f.default, MaskDesc):
            known += ["causal", "align", "window_left", "window_right"]
        else:
            known.append(f.name)
    named = set().union(*(row.features for _, row in rows)) - (OP_TYPES[op].BASE if op in OP_TYPES else frozenset())
    return [n for n in known if n in named] + sorted(named - set(known))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(values: Iterable[str]) -> str:
        return "| " + " | ".join(v.replace("|", "\\|") for v in values) + " |"
    return [line(header), line("---" for _ in header), *map(line, rows)]


def render() -> str:
    """The page."""
    engines = own_engines()
    lines = [_HEAD]
    lines += _table(("engine", "equivalence gate"), (
        (f"`{e.name}`", "required on a GPU" if e.gated else "not needed") for e in engines))
    for op, rows in cells(engines).items():
        # Cells of one engine are numbered where there are several.
        many = {e.name: sum(other is e for other, _ in rows) for e, _ in rows}
        count: dict[str, int] = {}
        names = []
        for engine, _ in rows:
            count[engine.name] = count.get(engine.name, 0) + 1
            names.append(f"`{engine.name}`" + (f" {count[engine.name]}" if many[engine.name] > 1 else ""))
        lines += ["", f"## {op}", ""]
        lines += _table(("cell", *(title for title, _ in _COLUMNS)),
                        ((name, *(text(row) for _, text in _COLUMNS)) for name, (_, row) in zip(names, rows)))
        lines += ["", _FEATURES_HEAD]
        lines += _table(("option", *names), (
            (f"`{option}`", *(_yes(option in row.features) for _, row in rows))
            for option in features(op, rows)))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.support_matrix", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is stale")
    parser.add_argument("--path", type=Path, default=PATH, help="the page (default: docs/support.md)")
    args = parser.parse_args(argv)
    page = render()
    if not args.check:
        args.path.parent.mkdir(parents=True, exist_ok=True)
        args.path.write_text(page, encoding="utf-8")
        return 0
    found = args.path.read_text(encoding="utf-8") if args.path.exists() else ""
    if found == page:
        return 0
    diff = difflib.unified_diff(found.splitlines(True), page.splitlines(True), str(args.path), "generated")
    sys.stdout.writelines(diff)
    print("docs/support.md is stale: run `python -m tools.support_matrix`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
