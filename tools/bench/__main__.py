"""`python -m tools.bench`: FROST's engines against their peers, in one run, on one card.

Ends with tables of TFLOP/s, ratios and geometric means; `--csv` keeps every figure with card, versions and
date."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from . import overrides
from .cases import DIRECTIONS, SUITES, select

ENGINES = ("triton", "sm80", "torch_sdpa", "reference")
PEERS = ("flex", "cudnn", "flash", "efficient")


def _names(known: Sequence[str]):  # type: ignore[no-untyped-def]
    """An argparse type: a comma-separated list of known names; "none" is the empty list."""

    def parse(text: str) -> tuple[str, ...]:
        names = () if text == "none" else tuple(n.strip() for n in text.split(",") if n.strip())
        bad = [n for n in names if n not in known]
        if bad:
            raise argparse.ArgumentTypeError(
                f"given {', '.join(bad)}, expected some of {', '.join(known)}, or none"
            )
        return names

    return parse


def _override(text: str) -> tuple[str, overrides.Blocks]:
    try:
        return overrides.parse_override(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--cases",
        type=_names((*SUITES, "all")),
        default=("dense", "gqa", "short", "host"),
        help=f"comma-separated: {', '.join(SUITES)} or all (default: all but overheads)",
    )
    p.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both")
    p.add_argument(
        "--engines", type=_names(ENGINES), default=("triton",), help="FROST engines (default triton)"
    )
    p.add_argument(
        "--peers",
        type=_names(PEERS),
        default=None,
        help="default: all; the overheads suite has peers only where this is given",
    )
    p.add_argument(
        "--gates", choices=("require", "off"), default="off", help="default off; the route column says so"
    )
    p.add_argument(
        "--layout", choices=("bhsd", "bshd"), default="bhsd", help="how q, k, v and do lie in memory"
    )
    p.add_argument("--reps", type=int, default=0, help="timed calls per candidate (default 20; quick 8)")
    p.add_argument(
        "--quick", action="store_true", help="fewer cases and repetitions: for looking, not for claims"
    )
    p.add_argument("--head-dims", default="", help="comma-separated: only these")
    p.add_argument("--match", default="", help="only cases whose name contains this")
    p.add_argument(
        "--blocks",
        type=_override,
        action="append",
        default=[],
        metavar="KERNEL=M,N,WARPS,STAGES",
        help="run the Triton engine with these tiles; KERNEL is one of " + ", ".join(overrides.GENERAL),
    )
    p.add_argument("--csv", type=Path, default=None, help="write every row here")
    p.add_argument(
        "--workers", type=int, default=0, help="compiling processes (default: one per core, at most 16)"
    )
    p.add_argument(
        "--no-prewarm", action="store_true", help="compile where it is needed, one after the other"
    )
    p.add_argument(
        "--fresh-cache", action="store_true", help="start without compiled kernels: compile times are real"
    )
    p.add_argument("--list", action="store_true", help="print the selected cases and stop; needs no GPU")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """0: everything of ours was right; 1: something of ours was wrong or failed; 2: cannot run."""
    args = parser().parse_args(argv)
    try:
        dims = tuple(int(x) for x in args.head_dims.split(",") if x)
    except ValueError:
        parser().error(f"--head-dims: given {args.head_dims!r}, expected numbers such as 64,128")
    cases = select(args.cases, head_dims=dims, match=args.match, quick=args.quick)
    if not cases:
        print("no case is left by these options", file=sys.stderr)
        return 2
    if args.list:
        for case in cases:
            print(
                f"{case.suite:10} {case.name:34} b{case.b} h{case.hq}/{case.hk} s{case.s} d{case.d} {case.options}"
            )
        return 0
    import torch

    if not torch.cuda.is_available():
        print(
            "tools.bench needs an NVIDIA GPU, and this process sees none (--list works without)",
            file=sys.stderr,
        )
        return 2
    # One inductor thread per process: prewarming already uses one process per core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="frost-bench-") as folder:
        if args.fresh_cache:
            _use_cache(folder)
        return _run(args, cases)


def _use_cache(folder: str) -> None:
    """Compiled kernels from here on live in `folder`; the user's gates stay where they are."""
    from frost import env

    gates = env.gate_dir()
    if gates is not None:
        os.environ["FROST_GATE_DIR"] = str(gates)
    os.environ["FROST_CACHE_DIR"] = folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")


def _run(args: argparse.Namespace, cases: Sequence) -> int:  # type: ignore[type-arg]
    import torch

    from . import host, prewarm, report, runner

    start = time.perf_counter()
    directions = DIRECTIONS if args.direction == "both" else (args.direction,)
    tiles = dict(args.blocks)
    peers = PEERS if args.peers is None else args.peers
    note = " ".join(f"{k}={','.join(map(str, v))}" for k, v in tiles.items())
    settings = runner.Settings(
        engines=args.engines,
        peers=peers,
        gates=args.gates,
        layout=args.layout,
        reps=args.reps or (8 if args.quick else 20),
        route_note=note,
    )
    alone = runner.Settings(**{**settings.__dict__, "peers": args.peers or ()})
    env = report.environment()
    _say(start, f"{env['card']}, torch {env['torch']}, Triton {env['triton']}, {len(cases)} cases")
    if not args.no_prewarm:
        jobs = prewarm.plan_jobs(
            cases,
            directions,
            args.engines,
            peers,
            torch.cuda.get_device_capability(),
            layout=args.layout,
            tiles=tiles,
        )
        _say(start, prewarm.summary(prewarm.run_jobs(jobs, args.workers)))
    rows: list[report.Row] = []
    with overrides.tiles(tiles):
        for case in cases:
            for direction in directions:
                if case.deterministic and direction == "fwd":
                    continue
                if case.suite == "host":
                    made = host.run_host(case, direction, settings)
                else:
                    made = runner.run_case(case, direction, alone if case.suite == "overheads" else settings)
                rows += made
                _say(
                    start,
                    f"{case.name} {direction}: "
                    + ", ".join(
                        f"{r.candidate} {r.tflops:.0f}"
                        if r.status == report.OK
                        else f"{r.candidate} {r.status}"
                        for r in made
                        if r.suite != "host"
                    ),
                )
                if args.csv:  # after every case: a run that is cut short keeps what it has
                    report.write_csv(args.csv, rows, env)
    _print(rows, cases, args, settings, env)
    _say(start, "done")
    bad = [
        r for r in rows if r.candidate.split()[0] in args.engines and r.status in (report.WRONG, report.ERROR)
    ]
    return 1 if bad else 0


def _print(rows, cases, args, settings, env) -> None:  # type: ignore[no-untyped-def]
    from frost import cache

    from . import report

    head = f"{env['card']} | driver {env['driver']} | torch {env['torch']} | Triton {env['triton']} | cuDNN {env['cudnn']}"
    print(
        f"{head} | {env['date']} | median of {settings.reps} | {args.layout} | gates {args.gates}"
        + (" | QUICK: not for claims" if args.quick else "")
        + (f" | {settings.route_note}" if settings.route_note else "")
    )
    parts = [report.table(rows, d, settings.engines, settings.peers) for d in DIRECTIONS]
    parts += [
        report.geomeans(rows, settings.engines, settings.peers),
        report.overheads(rows, cases, settings.engines),
        report.host_table(rows),
        report.problems(rows),
    ]
    print("\n\n".join(p for p in parts if p))
    info = cache.info()
    print(
        f"\nthis process: {info.kernels_compiled} kernels compiled, {info.disk_hits} from disk, {info.plans_built} plans"
    )


def _say(start: float, text: str) -> None:
    print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
