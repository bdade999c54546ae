"""`python -m tools.bench.sweep`: time a list of tiles for one Triton kernel, on one or more problems.

Every configuration is compiled first, in parallel processes; then each is checked against the fp64 oracle and
those that are right are timed together. Prints a table per problem, fastest first.

    python -m tools.bench.sweep --kernel fwd --head-dims 64,128 --causal both --seqlen 8192
    python -m tools.bench.sweep --kernel dq --head-dims 128 --causal full --tiles "128,32,8,2;64,64,4,3"
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import overrides, prewarm, report
from .cases import Case
from .overrides import Blocks, Tile

# Shared memory of one block, by compute capability; a configuration past it cannot be launched.
_SHARED_LIMIT = {(9, 0): 227 * 1024, (8, 0): 163 * 1024}
# kernel -> what runs it: a direction, and the gradients that are asked for
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fwd": ("fwd", ("q", "k", "v")),
    "dkdv": ("bwd", ("k", "v")),
    "dq": ("bwd", ("q",)),
    "fwd_hopper": ("fwd", ("q", "k", "v")),
    "bwd_hopper": ("bwd", ("q", "k", "v")),
}
DEFAULT_M, DEFAULT_N, DEFAULT_WARPS, DEFAULT_STAGES = (64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)


@dataclass
class Trial:
    """One configuration on one problem."""

    blocks: Tile
    status: str = report.OK
    text: str = ""
    ms: float = math.nan
    registers: int = 0
    spills: int = 0
    shared: int = 0
    compile_s: float = 0.0


def default_tiles(d: int) -> list[Blocks]:
    """A grid over tiles, warps and stages, without what cannot be good: accumulators past the register
    file."""
    out = []
    for m, n, warps, stages in itertools.product(DEFAULT_M, DEFAULT_N, DEFAULT_WARPS, DEFAULT_STAGES):
        lanes = warps * 32
        if (m * d + m * n) / lanes > 224 or m < 16 * warps and m < 64:
            continue
        out.append((m, n, warps, stages))
    return out


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m tools.bench.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--kernel", choices=overrides.GENERAL, default="fwd")
    p.add_argument("--head-dims", default="128", help="comma-separated")
    p.add_argument("--causal", choices=("full", "causal", "both"), default="both")
    p.add_argument("--seqlen", default="8192", help="comma-separated; 16k tokens, hidden 2048")
    p.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    p.add_argument(
        "--tiles", default="", help='"M,N,warps,stages;…"; default: a grid that depends on the head dim'
    )
    p.add_argument("--reps", type=int, default=10)
    p.add_argument("--top", type=int, default=12, help="rows printed per problem")
    p.add_argument("--workers", type=int, default=0)
    p.add_argument("--csv", type=Path, default=None)
    return p


def problems(args: argparse.Namespace) -> list[Case]:
    """The problems of a sweep: 16k tokens, hidden 2048."""
    out = []
    for d, s in itertools.product(_ints(args.head_dims), _ints(args.seqlen)):
        for causal in {"full": (False,), "causal": (True,), "both": (False, True)}[args.causal]:
            heads = max(1, 2048 // d)
            name = f"s{s} d{d} {'causal' if causal else 'full'}"
            out.append(Case("sweep", name, max(1, 16384 // s), heads, heads, s, d, causal, args.dtype))
    return out


def _ints(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def main(argv: Sequence[str] | None = None) -> int:
    """0: some configuration was right on every problem; 1: none on some problem; 2: cannot run."""
    args = parser().parse_args(argv)
    try:
        given = [overrides.parse_blocks(t) for t in args.tiles.split(";") if t.strip()]
        cases = problems(args)
    except ValueError as e:
        parser().error(str(e))
    import torch

    if not torch.cuda.is_available():
        print("tools.bench.sweep needs an NVIDIA GPU, and this process sees none", file=sys.stderr)
        return 2
    cc = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory(prefix="frost-sweep-") as folder:
        os.environ["FROST_CACHE_DIR"] = (
            folder  # everything is compiled anew: its resources and seconds are seen
        )
        tiles: dict[str, list[Tile]] = {case.name: [*(given or default_tiles(case.d))] for case in cases}
        trials = compile_trials(args.kernel, cases, tiles, cc, args.workers)
        for case in cases:
            measure(args.kernel, case, trials[case.name], args.reps)
    return _show(args, cases, trials)


def compile_trials(
    kernel: str,
    cases: Sequence[Case],
    tiles: Mapping[str, Sequence[Tile]],
    cc: tuple[int, int],
    workers: int = 0,
) -> dict[str, dict[Tile, Trial]]:
    """Compiles every (specialisation, tile) once; sizes share. Touches no device. `tiles`: by the case's name."""
    start = time.perf_counter()
    direction, grads = RUNS[kernel]

    def key(case: Case, tile: Tile) -> tuple[object, ...]:
        return case.dtype, case.d, case.causal, case.options, tile

    jobs: dict[tuple[object, ...], prewarm.Job] = {}
    for case in cases:
        for tile in tiles[case.name]:
            jobs.setdefault(
                key(case, tile), prewarm.Job("triton", case, direction, cc, tiles={kernel: tile}, grads=grads)
            )
    results = {
        key(r.job.case, r.job.tiles[kernel]): r for r in prewarm.run_jobs(list(jobs.values()), workers)
    }
    print(
        f"{len(jobs)} configurations compiled in {time.perf_counter() - start:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return {
        case.name: {tile: _trial(kernel, tile, results[key(case, tile)], cc) for tile in tiles[case.name]}
        for case in cases
    }


def _trial(kernel: str, blocks: Tile, result: prewarm.Result, cc: tuple[int, int]) -> Trial:
    if result.error:
        return Trial(blocks, report.ERROR, result.error, compile_s=result.seconds)
    mine = next((k for k in result.kernels if str(k["kernel"]).endswith(kernel)), None)
    if mine is None:
        return Trial(blocks, report.ERROR, f"no kernel named {kernel} was compiled", compile_s=result.seconds)
    trial = Trial(
        blocks,
        registers=int(mine["registers"]),
        spills=int(mine["spill_bytes"]),
        shared=int(mine["shared"]),
        compile_s=result.seconds,
    )
    limit = _SHARED_LIMIT.get(cc, 99 * 1024)
    if trial.shared > limit:
        trial.status, trial.text = (
            report.UNAVAILABLE,
            f"{trial.shared} bytes of shared memory, at most {limit} there",
        )
    return trial


def measure(kernel: str, case: Case, trials: Mapping[Tile, Trial], reps: int) -> None:
    """Check and time the configurations of one problem; all of them share the operands, none shares an
    output."""
    import torch

    from . import candidates, check, operands
    from .timing import time_interleaved

    direction, grads = RUNS[kernel]
    ops = operands.make(case)
    oracle = check.Oracle(case, ops, direction)
    calls = {}
    for blocks, trial in trials.items():
        if trial.status != report.OK:
            continue
        try:
            with overrides.tiles({kernel: blocks}):
                made = (
                    candidates.forward("triton", case, ops, gates="off")
                    if direction == "fwd"
                    else candidates.backward("triton", case, ops, gates="off", grads=grads)
                )
            made.poison()
            ok, trial.text = check.verdict(oracle.shares(made.run(), made.saved))
            torch.cuda.synchronize()
        except Exception as e:
            trial.status, trial.text = report.ERROR, f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            torch.cuda.synchronize()  # raises where the device itself is lost: nothing after it would mean anything
            continue
        if ok:
            calls[repr(blocks)] = made.run
        else:
            trial.status = report.WRONG
    by_name = {repr(tile): trial for tile, trial in trials.items()}
    for name, timing in (time_interleaved(calls, reps=reps) if calls else {}).items():
        by_name[name].ms = timing.median_ms
    torch.cuda.empty_cache()


def _show(args: argparse.Namespace, cases: Sequence[Case], trials: dict[str, dict[Tile, Trial]]) -> int:
    rows, failed = [], 0
    direction, _ = RUNS[args.kernel]
    env = report.environment()
    for case in cases:
        ranked = sorted(trials[case.name].values(), key=lambda t: (math.isnan(t.ms), t.ms))
        print(
            f"\n{args.kernel} {case.name}: {sum(t.status == report.OK for t in ranked)} of {len(ranked)} right\n"
            f"{'M,N,warps,stages':18}{'ms':>9}{'regs':>6}{'spill':>7}{'shared':>8}{'compile':>9}  error used, or why not"
        )
        for t in ranked[: args.top]:
            print(
                f"{','.join(map(str, t.blocks)):18}{t.ms:9.4f}{t.registers:6}{t.spills:7}{t.shared:8}"
                f"{t.compile_s:8.1f}s  {t.status if t.status != report.OK else ''} {t.text[:60]}"
            )
        wrong = [t for t in ranked if t.status == report.WRONG]
        if wrong:
            print(f"WRONG: {'; '.join(','.join(map(str, t.blocks)) for t in wrong[:20])}")
        failed += not any(t.status == report.OK for t in ranked)
        rows += [
            report.Row(
                "sweep",
                case.name,
                direction,
                args.kernel,
                "triton " + ",".join(map(str, t.blocks)),
                t.status,
                ms=t.ms,
                check=t.text,
                compile_s=t.compile_s,
                b=case.b,
                hq=case.hq,
                hk=case.hk,
                s=case.s,
                d=case.d,
                causal=case.causal,
                dtype=case.dtype,
                options=f"regs {t.registers} spills {t.spills} shared {t.shared}",
            )
            for t in ranked
        ]
    if args.csv:
        report.write_csv(args.csv, rows, env)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
