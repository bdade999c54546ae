"""Random conjunctions of everything an attention call may be, on one engine after another, against the fp64 oracle.

    python -m tools.conjunctions --engine triton --device cuda --cases 2000 --seed 1 --report out.json
    python -m tools.conjunctions --engine triton --op nsa_selection --device cuda --cases 300
    python -m tools.conjunctions --engine reference --device cpu --cases 200
    python -m tools.conjunctions --engine triton --case 'sdpa dtype=fp16 heads=2/1 seqlens=5/9 causal'

Every case runs forward and backward through the graph API: operands NaN wherever nothing may read, results NaN beforehand and
between canaries. Exit code 0: nothing failed and every case ran; 1: a failure, or cases that were not run; 2: arguments that
mean nothing. A failure prints the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from . import draw
from .case import KINDS, parse, spell
from .groups import draw_groups
from .judge import PASSED, ensure_registered
from .pool import Pool, run_line
from .report import Report, write

MAX_WORKERS = 16
GROUPS = 32          # compiling one costs a core half a minute
FREE_GROUP = 16
COMPILING = ("triton", "sm80")
SAY_EVERY_S = 10.0
SIZES = {"small": draw.INTERPRETER, "device": draw.DEVICE}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m tools.conjunctions", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--engine", default="triton", help="one engine, or several with commas between")
    p.add_argument("--op", default="sdpa", choices=[*KINDS, "all"], help="attention, selection attention, or both")
    p.add_argument("--device", default="cpu", help="cpu (Triton: interpreted, small sizes) or cuda")
    p.add_argument("--cases", type=int, default=100, help="cases per engine and op (100)")
    p.add_argument("--sizes", choices=list(SIZES), default=None, help="small (the interpreter's; default on cpu) or device")
    p.add_argument("--groups", type=int, default=GROUPS, help=f"groups of cases that share compiled kernels ({GROUPS})")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--workers", type=int, default=0, help=f"processes (0: one per core, at most {MAX_WORKERS})")
    p.add_argument("--limit-s", type=float, default=None, help="per engine and op: stop after this, whatever is running")
    p.add_argument("--report", type=Path, default=None, help="write what was found as JSON")
    p.add_argument("--case", default=None, help="run this one case in this process")
    p.add_argument("--list", action="store_true", help="print the cases, one a line, and run nothing")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console(width=160) if not sys.stdout.isatty() else Console()
    try:
        engines = args.engine.split(",")
        for engine in engines:
            ensure_registered(engine)
        if args.cases < 1 or args.groups < 1:
            raise ValueError(f"cases, groups: given {args.cases} and {args.groups}, expected at least 1")
        if args.case is not None:
            line = spell(parse(args.case))
            return max(_one(line, engine, args.device, console) for engine in engines)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    reports: list[Report] = []
    for engine in engines:
        for op in KINDS if args.op == "all" else (args.op,):
            _many(engine, op, args, reports)
    for report in reports:
        report.show(console)
    return 0 if all(r.ok for r in reports) else 1


def _one(line: str, engine: str, device: str, console: Console) -> int:
    outcome = run_line(line, engine, device)
    for v in outcome.verdicts:
        shares = ", ".join(f"{n} {s:.2f}" for n, s in v.shares.items())
        said = f"share of the allowed error: {shares}" if v.verdict == PASSED else v.detail
        console.print(f"{engine} {v.op}: {v.verdict}; {said}", soft_wrap=True, markup=False, highlight=False)
    return int(any(v.bad for v in outcome.verdicts))


def _many(engine: str, op: str, args: argparse.Namespace, reports: list[Report]) -> None:
    """One engine's run; its report is in `reports` from the start and written as it grows."""
    sizes = SIZES[args.sizes or ("small" if args.device == "cpu" else "device")]
    # What compiles nothing needs no company, so it gets more kinds of cases.
    size = -(-args.cases // args.groups) if engine in COMPILING else FREE_GROUP
    groups = sorted(draw_groups(op, engine, args.cases, size, args.seed, sizes), key=lambda g: -g.cost)
    if args.list:
        for group in groups:
            print("\n".join(map(spell, group.cases)))
        return
    workers = args.workers or min(MAX_WORKERS, os.cpu_count() or 1)
    report = Report(engine, args.device, op, args.seed, groups=len(groups))
    reports.append(report)
    pool = Pool(engine, args.device, workers, args.limit_s)
    start = said = time.monotonic()
    print(f"{engine} {op}: {args.cases} cases in {len(groups)} groups on {workers} workers", flush=True)
    for outcome in pool.run([[spell(case) for case in group.cases] for group in groups]):
        report.add(outcome)
        report.seconds = time.monotonic() - start
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            kernels = sum(o.kernels for o in report.outcomes)
            print(f"{engine} {op}: {len(report.outcomes)} of {args.cases} cases, {kernels} kernels compiled, "
                  f"{len(report.failures)} failures, {report.seconds:.0f} s", flush=True)
            report.left = args.cases - len(report.outcomes)
            _save(args, reports)
    report.left, report.seconds = pool.left, time.monotonic() - start
    _save(args, reports)


def _save(args: argparse.Namespace, reports: list[Report]) -> None:
    if args.report is not None:
        write(args.report, reports)


if __name__ == "__main__":
    sys.exit(main())
