"""First contact of the SM80 engine's kernels with a GPU: correctness row by row, then tile candidates against FA2.

    python -m tools.sm80_smoke                 # a few rows of the gate matrix, and timings
    python -m tools.sm80_smoke --all --no-time # the whole matrix
    python -m tools.sm80_smoke --no-check --direction fwd --candidates

Every row is guarded: one that fails is shown and the others still run, until the device itself stops answering.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from descriptors import DType, MaskDesc, SdpaDesc, TensorDesc
from engines import registry
from engines.base import Launch, Target, Workspace
from engines.sm80 import ENGINE, configs
from engines.sm80.adapter_fwd import SdpaFwdExecutable, forward_params
from engines.sm80.params import FwdParams, Tile
from frost.equivalence import ConfigResult, configs_for, make_case, run_config
from frost.gate_matrix import MATRIX, Config

QUICK = (
    "bf16-d64", "fp16-d64", "bf16-d128", "bf16-d128-causal", "fp16-d40", "bf16-d96", "bf16-d80-dv48", "bf16-d192-dv128",
    "bf16-d256", "group-7", "one-query", "no-keys", "causal-bottom-right-tall", "window-both", "scale-negative", "softcap",
    "bias-full", "bias-minus-inf", "mask-full", "sink-window", "lengths", "packed", "packed-window-sink", "packed-bias",
    "layout-bshd", "layout-slice-of-qkv", "layout-pitch", "layout-offset-by-one",
)


@dataclass(frozen=True)
class Shape:
    """One timed shape, bf16."""

    name: str
    batch: int
    heads: tuple[int, int]
    seqlen: int
    d: int
    causal: bool

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.heads[0] * self.seqlen**2 * self.d * (0.5 if self.causal else 1.0)


def _shapes() -> Iterator[Shape]:
    for d, h in ((64, 32), (128, 16), (256, 8)):
        for s in (512, 2048, 8192):
            for causal in (False, True):
                yield Shape(f"d{d} s{s} {'causal' if causal else 'full'}", 16384 // s, (h, h), s, d, causal)
    yield Shape("d128 s4096 causal 32/8", 4, (32, 8), 4096, 128, True)


SHAPES = tuple(_shapes())

# Tiles worth a look beside the table's own, by flavor.
CANDIDATES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (64, 64): (Tile(4, 2, 64, 2, True, 2), Tile(4, 2, 32, 2, True, 3), Tile(4, 2, 64, 2, False, 3),
               Tile(8, 2, 64, 2, True, 1), Tile(8, 1, 64, 2, True, 2), Tile(4, 2, 64, 1, True, 2)),
    (128, 128): (Tile(4, 2, 64, 2, False, 2), Tile(8, 2, 64, 2, False, 1), Tile(4, 2, 32, 2, False, 2),
                 Tile(8, 2, 32, 2, False, 1), Tile(4, 2, 64, 1, False, 2), Tile(8, 1, 64, 2, False, 1)),
    (256, 256): (Tile(8, 1, 64, 2, False, 1), Tile(8, 1, 64, 1, False, 1), Tile(8, 1, 32, 2, False, 1),
                 Tile(4, 1, 64, 1, False, 2)),
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    if ENGINE.name not in registry.names():
        registry.register(ENGINE, priority=25)
    cc = torch.cuda.get_device_capability() if args.cc is None else (int(args.cc[:-1]), int(args.cc[-1]))
    target = Target.cuda(cc)
    missing = ENGINE.unavailable(target)
    print(f"{target}, {dict(ENGINE.toolchain())}, torch {torch.__version__}", flush=True)
    if missing is not None:
        print(f"unavailable: {missing}")
        return 2
    rows = [] if args.no_check else _rows(args.direction, args.all, args.only)
    timed = [] if args.no_time else list(_timed(target, args.candidates, args.only))
    _compile_ahead(rows, timed, cc)
    if args.compile_only:
        return 0
    failed = _check(rows)
    _time(timed, target)
    return 1 if failed else 0


def _arguments() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("--direction", choices=("fwd", "bwd", "both"), default="both")
    p.add_argument("--all", action="store_true", help="every row of the gate matrix")
    p.add_argument("--only", nargs="*", default=[], help="rows (or timed shapes) whose name contains one of these")
    p.add_argument("--candidates", action="store_true", help="time every tile candidate")
    p.add_argument("--no-check", action="store_true")
    p.add_argument("--no-time", action="store_true")
    p.add_argument("--compile-only", action="store_true", help="fill the kernel cache; needs no GPU with --cc")
    p.add_argument("--cc", help="compute capability to compile for, e.g. 90")
    return p


# ---- correctness ---------------------------------------------------------------------------------------------------


def _rows(direction: str, everything: bool, only: list[str]) -> list[Config]:
    served = {a.op for a in ENGINE.adapters()}
    wanted = {"fwd": ("sdpa",), "bwd": ("sdpa_backward",), "both": tuple(MATRIX)}[direction]
    return [c for op in wanted if op in served for c in configs_for(op, "cuda")
            if (any(o in c.name for o in only) if only else everything or c.name in QUICK)]


def _check(rows: Iterable[Config]) -> int:
    failed = 0
    for config in rows:
        result = run_config(config, ENGINE.name, "cuda")
        failed += result.verdict in ("fail", "error")
        print(_line(result), flush=True)
        if result.verdict == "error" and not _alive():
            print("the device no longer answers: what follows is not run")
            sys.exit(3)
    return failed


def _line(r: ConfigResult) -> str:
    note = "" if r.verdict == "pass" else r.detail[:400]
    return f"{r.verdict:9s} {r.ratio:8.3g} {r.seconds:5.1f} s  {r.config.op}:{r.name} {note}"


def _alive() -> bool:
    try:
        torch.cuda.synchronize()
        return True
    except RuntimeError as e:
        print(e)
        return False


# ---- timing --------------------------------------------------------------------------------------------------------


def _desc(s: Shape) -> SdpaDesc:
    def rows(heads: int) -> TensorDesc:
        return TensorDesc.make((s.batch, heads, s.seqlen, s.d), DType.BF16)

    return SdpaDesc(q=rows(s.heads[0]), k=rows(s.heads[1]), v=rows(s.heads[1]), o=rows(s.heads[0]),
                    lse=TensorDesc.make((s.batch, s.heads[0], s.seqlen), DType.F32), band=MaskDesc(causal=s.causal))


def _timed(target: Target, candidates: bool, only: list[str]) -> Iterator[tuple[Shape, FwdParams]]:
    for s in SHAPES:
        if only and not any(o in s.name for o in only):
            continue
        own = forward_params(_desc(s), target)
        tiles = (own.tile, *(CANDIDATES.get((s.d, s.d), ()) if candidates else ()))
        for tile in dict.fromkeys(tiles):
            params = FwdParams(**{**_shallow(own), "tile": tile})
            if params.shared_bytes <= configs.SHARED_LIMIT[configs.arch_class(target.cc or (8, 0))]:
                yield s, params


def _shallow(params: FwdParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def _time(timed: Iterable[tuple[Shape, FwdParams]], target: Target) -> None:
    for shape in dict.fromkeys(s for s, _ in timed):
        try:
            _time_shape(shape, [p for s, p in timed if s is shape], target)
        except Exception as e:  # noqa: BLE001 - the other shapes are still worth a look
            print(f"{shape.name}: {type(e).__name__}: {e}", flush=True)
            if not _alive():
                sys.exit(3)
        torch.cuda.empty_cache()


def _time_shape(s: Shape, candidates: list[FwdParams], target: Target) -> None:
    gen = torch.Generator(device="cuda").manual_seed(0)

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(s.batch, heads, s.seqlen, s.d, device="cuda", generator=gen, dtype=torch.bfloat16)

    q, k, v = randn(s.heads[0]), randn(s.heads[1]), randn(s.heads[1])
    fa2, expected = _fa2(q, k, v, s)
    calls: dict[str, Callable[[], Any]] = {"FA2": fa2}
    desc, stream = _desc(s), torch.cuda.current_stream().cuda_stream
    for params in candidates:
        t = params.tile
        name = f"{t.warps}x{t.row_tiles * 16}x{t.block_n} s{t.stages} q{int(t.q_in_registers)} b{t.min_blocks}"
        o = torch.full_like(q, float("nan"))
        lse = torch.full(q.shape[:3], float("nan"), device="cuda")
        operands = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
        call = SdpaFwdExecutable(params, target).prepare(Launch(desc, operands), Workspace(None, {}))
        call(stream)
        torch.cuda.synchronize()
        worst = (o.float() - expected.float()).abs().max().item()
        if not worst <= 0.02:
            print(f"{s.name}: {name} differs from FA2 by {worst}", flush=True)
            continue
        calls[name] = lambda call=call, keep=operands: call(stream)
    ms = _medians(calls)
    rate = {n: s.flops / t / 1e9 for n, t in ms.items()}
    told = "  ".join(f"{n}: {rate[n]:.0f} ({rate[n] / rate['FA2']:.2f})" for n in rate)
    print(f"{s.name:24s} TFLOP/s  {told}", flush=True)


def _fa2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: Shape) -> tuple[Callable[[], Any], torch.Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(q, k, v, is_causal=s.causal, enable_gqa=s.heads[0] != s.heads[1])

    return run, run()


def _medians(calls: dict[str, Callable[[], Any]], reps: int = 12) -> dict[str, float]:
    """Milliseconds, candidates interleaved so that a clock that drifts drifts for all."""
    samples: dict[str, list[float]] = {n: [] for n in calls}
    for rep in range(reps + 2):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # longer than the host needs to enqueue the call
            start.record()
            call()
            end.record()
            end.synchronize()
            if rep >= 2:
                samples[name].append(start.elapsed_time(end))
    return {n: statistics.median(x) for n, x in samples.items()}


# ---- compiling in parallel -----------------------------------------------------------------------------------------


def _compile_ahead(rows: list[Config], timed: list[tuple[Shape, FwdParams]], cc: tuple[int, int]) -> None:
    start = time.perf_counter()
    workers = min(16, os.cpu_count() or 1)
    jobs = [(c, cc) for c in rows] + [(p, cc) for p in dict.fromkeys(p for _, p in timed)]
    if not jobs:
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        problems = [text for text in pool.map(_compile, jobs) if text]
    print(f"{len(jobs)} jobs compiled in {time.perf_counter() - start:.1f} s on {workers} workers", flush=True)
    for text in dict.fromkeys(problems):
        print(text, flush=True)


def _compile(job: tuple[Config | FwdParams, tuple[int, int]]) -> str:
    what, cc = job
    torch.set_num_threads(1)
    try:
        if isinstance(what, FwdParams):
            SdpaFwdExecutable(what, Target.cuda(cc))
        else:
            _compile_row(what, cc)
    except Exception as e:  # noqa: BLE001 - what does not compile here fails again, and visibly, where it is used
        return f"{type(e).__name__}: {e}"[:2000]
    return ""


def _compile_row(config: Config, cc: tuple[int, int]) -> None:
    from frost.equivalence import _graph, _result_dtype, _wanted, Placed, _MAIN
    from frost.errors import NotSupportedError

    if ENGINE.name not in registry.names():
        registry.register(ENGINE, priority=25)
    case = make_case(config)
    given = {n: Placed.make(x.shape, x.dtype, config.layout if n in _MAIN else "bhsd", "cpu")
             for n, x in case.operands.items()}
    names = _wanted(config) if config.op == "sdpa_backward" else ("o", "lse")
    outputs = {n: Placed.make(case.answer[n].shape, _result_dtype(case, n), config.layout if n in _MAIN else "bhsd", "cpu")
               for n in names}
    try:
        _graph(config, given, outputs).compile(Target.cuda(cc), engines=[ENGINE.name], gates="off")
    except NotSupportedError:
        pass


if __name__ == "__main__":
    sys.exit(main())
