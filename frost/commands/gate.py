"""`frost gate run|check|list`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from .common import FAILED, OK, UsageError, console, print_json


def engine_named(name: str) -> Any:
    from engines import registry

    try:
        return registry.get(name)
    except ValueError as e:
        raise UsageError(str(e)) from e


def run(engine_name: str, device: str | None, ops: list[str], out: Path | None, as_json: bool) -> int:
    import torch

    from .. import gates
    from ..equivalence import ConfigResult, gated_ops, run_gate_with_progress

    engine = engine_named(engine_name)
    if not engine.gated:
        raise UsageError(f"engine: given {engine.name!r}, which needs no gate, expected one that does")
    known = [op for op in sorted({adapter.op for adapter in engine.adapters()}) if op in gated_ops()]
    unknown = [op for op in ops if op not in known]
    if unknown:
        raise UsageError(f"--op: given {unknown[0]!r}, expected one of {known}")
    try:
        target = gates.target_of(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except ValueError as e:
        raise UsageError(f"--device: {e}") from e
    screen, report, failed = console(), [], False
    for op in ops or known:
        if not as_json:
            screen.print(f"gate {engine.name}:{op} on {target}")

        def row(result: ConfigResult) -> None:
            if not as_json:
                screen.print(_result_line(result), highlight=False)

        made = run_gate_with_progress(engine.name, op, target, row)
        path = gates.keep(made, out) if made.ok else None
        failed = failed or not made.ok
        report.append(
            {
                "engine": engine.name,
                "op": op,
                "target": str(target),
                "ok": made.ok,
                "summary": made.summary(),
                "path": None if path is None else str(path),
                "results": [_result_json(r) for r in made.results],
            }
        )
        if not as_json:
            verdict, style = ("PASS", "green") if made.ok else ("FAIL", "red")
            screen.print(f"{verdict} {engine.name}:{op}: {made.summary()}", highlight=False, style=style)
            screen.print(f"written to {path}" if path is not None else "nothing written", highlight=False)
    if as_json:
        print_json(report)
    return FAILED if failed else OK


_WORDS = {"pass": "PASS", "fail": "FAIL", "error": "FAIL", "declined": "declined"}


def _result_line(r: Any) -> str:
    errors = " ".join(f"{name} {e.max_error:.1e} ({e.ratio:.0%})" for name, e in r.errors.items())
    return f"{_WORDS[r.verdict]:<8} {r.name:<28} {r.seconds:6.2f} s  {errors} {r.detail}".rstrip()


def _result_json(r: Any) -> dict[str, Any]:
    # As texts: JSON has no word for the inf that a NaN counts as.
    errors = {n: {"max_error": str(e.max_error), "ratio": str(e.ratio)} for n, e in r.errors.items()}
    return {
        "name": r.name,
        "verdict": r.verdict,
        "detail": r.detail,
        "seconds": round(r.seconds, 3),
        "errors": errors,
    }


def check(engine: str | None, gate_dir: Path | None, as_json: bool) -> int:
    from .. import gates

    if engine is not None:
        engine_named(engine)
    rows = gates.check_shipped(engine, gate_dir)
    bad = sum(not r.ok for r in rows)
    if as_json:
        print_json({"ok": not bad, "gates": [{**vars(r), "ok": r.ok} for r in rows]})
    else:
        table = Table("gate", "", "reason")
        for r in rows:
            table.add_row(r.name, r.verdict.upper(), r.reason, style=None if r.ok else "red")
        screen = console()
        screen.print(table)
        screen.print(f"{len(rows)} checked, {bad} failed" if rows else "no engine here needs a gate")
    return FAILED if bad else OK


_LISTED = ("engine", "op", "environment", "recorded", "source", "date", "verdict", "vouched")


def listing(engine: str | None, gate_dir: Path | None, as_json: bool) -> int:
    from .. import gates

    if engine is not None:
        engine_named(engine)
    files = list(gates.iter_gates(gate_dir, engine=engine))
    if as_json:
        print_json(
            [
                {"path": str(f.path), "shipped": f.shipped, "problem": f.problem}
                | ({} if f.gate is None else {n: f.gate[n] for n in _LISTED})
                for f in files
            ]
        )
        return OK
    table = Table("engine", "op", "environment", "verdict", "date", "covers", "file")
    for f in files:
        g = f.gate
        if g is None:
            table.add_row("", "", "", "damaged", "", f.problem, str(f.path), style="red")
            continue
        table.add_row(
            g.engine,
            g.op,
            ", ".join(f"{k} {v}" for k, v in sorted(g.environment.items())),
            g.verdict + (" (vouched)" if g.vouched else ""),
            g.date[:10],
            f"{len(g.shapes_covered)} configurations",
            str(f.path),
        )
    console().print(table if files else "no gates in " + ", ".join(map(str, gates.gate_dirs(gate_dir))))
    return OK
