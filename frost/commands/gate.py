"""`frost gate run|check|list`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .common import (
    FAILED,
    OK,
    CommandError,
    UsageError,
    console,
    folder,
    not_makeable,
    print_json,
    table,
    target_for,
    usage,
)


def engine_named(name: str) -> Any:
    from engines import registry

    try:
        return registry.get(name)
    except ValueError as e:
        raise usage("ENGINE", e, "engines") from e


_ON_A_CPU = "note: on a CPU an engine's kernels run in an interpreter: it takes long, and the gate holds on a CPU only"


def _folder_for(out: Path | None) -> None:
    """Where the gates will go, before minutes go into them. Raises GateError as writing one would."""
    from .. import env
    from ..errors import GateError

    where = env.gate_dir() if out is None else out
    if where is None:
        raise GateError("gate folder: none here (no home folder, or FROST_CACHE_DIR=off); pass --out FOLDER")
    problem = not_makeable(where)
    if problem:
        raise GateError(
            f"gate folder: given {where}, expected one that can be written ({problem}); pass --out FOLDER"
        )


def run(engine_name: str, device: str | None, ops: list[str], out: Path | None, as_json: bool) -> int:
    from .. import gates
    from ..equivalence import ConfigResult, gated_ops, run_gate_with_progress

    engine = engine_named(engine_name)
    if not engine.gated:
        raise UsageError(f"ENGINE: given {engine.name!r}, which needs no gate, expected one that does")
    known = [op for op in sorted({adapter.op for adapter in engine.adapters()}) if op in gated_ops()]
    unknown = [op for op in ops if op not in known]
    if unknown:
        raise UsageError(f"--op: given {unknown[0]!r}, expected one of {known}")
    target = target_for(device)
    missing = engine.unavailable(target)
    if missing is not None:
        raise CommandError(f"ENGINE: given {engine.name!r}, which is not available on {target}: {missing}")
    _folder_for(out)
    screen, report, failed = console(), [], False
    if target.device == "cpu" and not as_json:
        console(stderr=True).print(_ON_A_CPU)
    for op in dict.fromkeys(ops or known):
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
    folder("--gate-dir", gate_dir)
    rows = gates.check_shipped(engine, gate_dir)
    bad = sum(not r.ok for r in rows)
    if as_json:
        print_json({"ok": not bad, "gates": [{**vars(r), "ok": r.ok} for r in rows]})
    else:
        listed = table("gate", "", "reason")
        for r in rows:
            listed.add_row(r.name, r.verdict.upper(), r.reason, style=None if r.ok else "red")
        screen = console()
        screen.print(listed)
        screen.print(f"{len(rows)} checked, {bad} failed" if rows else "no engine here needs a gate")
    return FAILED if bad else OK


_LISTED = ("engine", "op", "environment", "recorded", "source", "date", "verdict", "vouched")


def listing(engine: str | None, gate_dir: Path | None, as_json: bool) -> int:
    from .. import gates

    if engine is not None:
        engine_named(engine)
    folder("--gate-dir", gate_dir)
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
    listed = table("engine", "op", "environment", "verdict", "date", "covers", "file")
    for f in files:
        g = f.gate
        if g is None:
            listed.add_row("", "", "", "damaged", "", f.problem, str(f.path), style="red")
            continue
        listed.add_row(
            g.engine,
            g.op,
            ", ".join(f"{k} {v}" for k, v in sorted(g.environment.items())),
            g.verdict + (" (vouched)" if g.vouched else ""),
            g.date[:10],
            f"{len(g.shapes_covered)} configurations",
            str(f.path),
        )
    console().print(listed if files else "no gates in " + ", ".join(map(str, gates.gate_dirs(gate_dir))))
    return OK
