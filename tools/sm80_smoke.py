"""First contact of the SM80 engine's kernels with a GPU: correctness row by row, then tile candidates against FA2.

    python -m tools.sm80_smoke                 # a few rows of the gate matrix, and timings
    python -m tools.sm80_smoke --all --no-time # the whole matrix
    python -m tools.sm80_smoke --no-check --direction bwd --candidates
    python -m tools.sm80_smoke --packed        # packed sequences against dense ones of as many FLOPs, nothing else

Every row is guarded: one that fails is shown and the others still run, until the device itself stops answering.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from descriptors import DType, MaskDesc, SdpaBwdDesc, SdpaDesc, TensorDesc
from engines import registry
from engines.base import Launch, Target, Workspace
from engines.sm80 import ENGINE, configs
from engines.sm80.adapter_bwd import SdpaBwdDslSm80, SdpaBwdExecutable, backward_params
from engines.sm80.adapter_fwd import SdpaFwdExecutable, forward_params
from engines.sm80.params import FwdParams, TemplateParams, Tile
from engines.sm80.params_bwd import BwdParams, BwdTile, with_tile
from engines.sm80.params_bwd import sums_dq as tile_sums_dq
from frost.equivalence import ConfigResult, compile_config, configs_for, run_config
from frost.errors import NotSupportedError
from frost.gate_matrix import MATRIX, Config

QUICK = (
    "bf16-d64", "fp16-d64", "bf16-d128", "bf16-d128-causal", "fp16-d40", "bf16-d96", "bf16-d80-dv48", "bf16-d192-dv128",
    "bf16-d256", "group-7", "one-query", "no-keys", "causal-bottom-right-tall", "window-both", "scale-negative", "softcap",
    "bias-full", "bias-minus-inf", "mask-full", "sink-window", "lengths", "packed", "packed-window-sink", "packed-bias",
    "layout-bshd", "layout-slice-of-qkv", "layout-pitch", "layout-offset-by-one",
    # backward only
    "bias-keys", "bias-rows", "bias-one-number", "sink-empty-rows", "dlse-sink-packed", "deterministic-gqa-window",
    "deterministic-packed", "deterministic-bias-row",
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
    (64, 64): (Tile(4, 2, 64, 2, True, 2),),
    (128, 128): (Tile(4, 2, 64, 2, False, 2),),
    (256, 256): (Tile(8, 2, 64, 2, False, 1, 2), Tile(8, 1, 64, 2, False, 1), Tile(4, 1, 64, 1, False, 2),
                 Tile(4, 2, 64, 1, False, 2, 2)),
}


# Backward tiles by (kernel, flavor).
BACKWARD_CANDIDATES: dict[tuple[str, tuple[int, int]], tuple[BwdTile, ...]] = {
    ("dkdv", (64, 64)): (BwdTile(4, 2, 1, 32, 2, 2),),
    ("dkdv", (128, 128)): (BwdTile(4, 1, 1, 64, 2, 2), BwdTile(8, 2, 2, 64, 2, 1), BwdTile(4, 2, 2, 64, 1, 2)),
    ("dkdv", (256, 256)): (BwdTile(8, 1, 2, 64, 2, 1), BwdTile(8, 2, 4, 64, 2, 1)),
    ("dq", (64, 64)): (BwdTile(4, 2, 1, 64, 2, 2),),
    ("dq", (128, 128)): (BwdTile(4, 2, 1, 32, 2, 2), BwdTile(8, 2, 1, 32, 2, 1)),
    ("dq", (256, 256)): (BwdTile(4, 1, 1, 32, 1, 2),),
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments().parse_args(argv)
    if ENGINE.name not in registry.names():
        registry.register(ENGINE, priority=25)
    cc = torch.cuda.get_device_capability() if args.cc is None else (int(args.cc[:-1]), int(args.cc[-1]))
    target = Target.cuda(cc)
    print(_scratch(), flush=True)
    missing = ENGINE.unavailable(target)
    print(f"{target}, {dict(ENGINE.toolchain())}, torch {torch.__version__}", flush=True)
    if missing is not None:
        print(f"unavailable: {missing}")
        return 2
    if args.packed:
        return _time_packed(target)
    rows = [] if args.no_check else _rows(args.direction, args.all, args.only)
    forward = [] if args.no_time or args.direction == "bwd" else list(_timed(target, args.candidates, args.only))
    backward = [] if args.no_time or args.direction == "fwd" else list(_timed_backward(target, args.candidates, args.only))
    _compile_ahead(rows, [p for _, p in forward], [p for _, chains in backward for p in chains.values()], cc)
    if args.compile_only:
        return 0
    failed = _check(rows)
    _time(forward, target)
    for shape, chains in backward:
        _guarded(shape, partial(_time_backward, shape, chains, target))
    return 1 if failed else 0


def _arguments() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("--direction", choices=("fwd", "bwd", "both"), default="both")
    p.add_argument("--all", action="store_true", help="every row of the gate matrix")
    p.add_argument("--only", nargs="*", default=[], help="rows (or timed shapes) whose name contains one of these")
    p.add_argument("--packed", action="store_true", help="time packed sequences against dense ones, and stop")
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
    timed = list(timed)
    for shape in dict.fromkeys(s for s, _ in timed):
        _guarded(shape, partial(_time_shape, shape, [p for s, p in timed if s is shape], target))


def _guarded(shape: Shape, run: Callable[[], None]) -> None:
    try:
        run()
    except Exception as e:
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
        split = f"/{t.d_split}" if t.d_split > 1 else ""
        name = f"{t.warps}x{t.row_tiles * 16}{split}x{t.block_n} s{t.stages} q{int(t.q_in_registers)} b{t.min_blocks}"
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
        calls[name] = partial(_launch, call, stream, operands)
    ms = _medians(calls)
    rate = {n: s.flops / t / 1e9 for n, t in ms.items()}
    told = "  ".join(f"{n}: {rate[n]:.0f} ({rate[n] / rate['FA2']:.2f})" for n in rate)
    print(f"{s.name:24s} TFLOP/s  {told}", flush=True)


def _launch(call: Callable[[int], None], stream: int, operands: dict[str, torch.Tensor]) -> None:
    """`operands` only keeps the buffers alive: a bound call holds addresses."""
    call(stream)


# A chain of backward kernels under a name. All of them, or the statistics and one kernel with some tile.
Chain = dict[str, TemplateParams]


def _backward_desc(s: Shape) -> SdpaBwdDesc:
    d = _desc(s)
    return SdpaBwdDesc(q=d.q, k=d.k, v=d.v, o=d.o, lse=d.lse, band=d.band, do=d.o, dq=d.q, dk=d.k, dv=d.v)


def _timed_backward(target: Target, candidates: bool, only: list[str]) -> Iterator[tuple[Shape, dict[str, Chain]]]:
    limit = configs.SHARED_LIMIT[configs.arch_class(target.cc or (8, 0))]
    for s in SHAPES:
        if only and not any(o in s.name for o in only):
            continue
        desc = _backward_desc(s)
        own, fixed = (backward_params(dataclasses.replace(desc, deterministic=on), target) for on in (False, True))
        chains: dict[str, Chain] = {"all": own, "deterministic": fixed}
        kinds = {"dkdv": fixed["dkdv"], "dq": fixed["dq"]} | ({"sums": own["dkdv"]} if "cast" in own else {})
        for kind, params in kinds.items():
            assert isinstance(params, BwdParams)
            kernel = "dq" if kind == "dq" else "dkdv"
            more = BACKWARD_CANDIDATES.get((kernel, (s.d, s.d)), ()) if candidates else ()
            for t in dict.fromkeys((params.tile, *more)):
                if kind == "sums" and not tile_sums_dq(s.d, t):
                    continue
                made = with_tile(params, t)
                if made.shared_bytes * t.min_blocks <= limit:
                    name = f"{kind} {t.warps}x{t.row_tiles * 16}/{t.d_split}x{t.block} s{t.stages} b{t.min_blocks}"
                    chains[name] = {n: p for n, p in own.items() if n in ("pre", "cast")[:1 + (kind == "sums")]} | {kernel: made}
        yield s, chains


def _time_backward(s: Shape, chains: dict[str, Chain], target: Target) -> None:
    gen = torch.Generator(device="cuda").manual_seed(0)

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(s.batch, heads, s.seqlen, s.d, device="cuda", generator=gen, dtype=torch.bfloat16)

    q, k, v, do = randn(s.heads[0]), randn(s.heads[1]), randn(s.heads[1]), randn(s.heads[0])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    _, o = _fa2(leaves[0], leaves[1], leaves[2], s)
    fa2 = partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
    expected = dict(zip(("dq", "dk", "dv"), fa2(), strict=True))
    desc, stream = _backward_desc(s), torch.cuda.current_stream().cuda_stream
    lse = torch.full(q.shape[:3], float("nan"), device="cuda")
    own_o = torch.empty_like(q)
    forward = {"q": q, "k": k, "v": v, "o": own_o, "lse": lse}
    SdpaFwdExecutable(forward_params(_desc(s), target), target).execute(Launch(_desc(s), forward), Workspace(None, {}), stream)
    calls: dict[str, Callable[[], Any]] = {"FA2": fa2}
    for name, chain in chains.items():
        results = {n: torch.full_like(x, float("nan")) for n, x in expected.items()}
        operands = {**forward, "do": do, **results}
        space, offsets = _workspace(desc)
        call = SdpaBwdExecutable(chain, target).prepare(Launch(desc, operands), Workspace(space, offsets))
        call(stream)
        torch.cuda.synchronize()
        written = [n for n, kernels in (("dq", {"dq", "cast"}), ("dk", {"dkdv"}), ("dv", {"dkdv"})) if kernels & set(chain)]
        worst = {n: ((results[n].float() - expected[n].float()).abs() / (1 + expected[n].float().abs())).max().item()
                 for n in written}
        if not all(x <= 0.04 for x in worst.values()):
            print(f"{s.name}: {name} differs from FA2 by {worst}", flush=True)
            continue
        calls[name] = partial(_launch, call, stream, {**operands, "space": space})
    ms = _medians(calls)
    rate = 2.5 * s.flops / 1e9
    for name in ("FA2", "all", "deterministic"):
        if name in ms:
            print(f"{s.name:24s} backward {name:13s} {rate / ms[name]:.0f} TFLOP/s ({ms['FA2'] / ms[name]:.2f})", flush=True)
    print("  ms  " + "  ".join(f"{n}: {t:.3f}" for n, t in ms.items()), flush=True)


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
            torch.cuda._sleep(500_000)  # longer than the host needs to enqueue the call
            start.record()
            call()
            end.record()
            end.synchronize()
            if rep >= 2:
                samples[name].append(start.elapsed_time(end))
    return {n: statistics.median(x) for n, x in samples.items()}


# ---- packed --------------------------------------------------------------------------------------------------------

# 16k tokens of mixed lengths; six dense sequences of 2752 do as many FLOPs (0.4 % fewer) with as many tokens.
LENGTHS = (4096, 512, 2048, 1024, 4096, 1024, 512, 2048, 1024)
EQUIVALENT = (6, 2752)


def _time_packed(target: Target) -> int:
    worst = 1e9
    for d, heads in ((64, 32), (128, 16)):
        for causal in (False, True):
            sides = {"packed": (LENGTHS, True), "dense": ((EQUIVALENT[1],) * EQUIVALENT[0], False)}
            calls: dict[str, Callable[[], Any]] = {}
            flops = {}
            for name, (lengths, packed) in sides.items():
                work = 4.0 * heads * d * sum(n * n for n in lengths) * (0.5 if causal else 1.0)
                for direction, call in _own_calls(lengths, packed, heads, d, causal, target).items():
                    calls[f"{direction} {name}"], flops[f"{direction} {name}"] = call, work * (1.0 if direction == "fwd" else 2.5)
            rate = {n: flops[n] / t / 1e9 for n, t in _medians(calls).items()}
            for direction in ("fwd", "bwd"):
                ratio = rate[f"{direction} packed"] / rate[f"{direction} dense"]
                worst = min(worst, ratio)
                print(f"d{d} {'causal' if causal else 'full':6s} {direction}  packed {rate[f'{direction} packed']:.0f} TFLOP/s, "
                      f"dense {rate[f'{direction} dense']:.0f} ({ratio:.2f})", flush=True)
    print(f"packed is at worst {worst:.2f} of dense at equal FLOPs (wanted: 0.90)")
    return 0 if worst >= 0.9 else 1


def _own_calls(lengths: tuple[int, ...], packed: bool, heads: int, d: int, causal: bool, target: Target
               ) -> dict[str, Callable[[], Any]]:
    total, n = sum(lengths), len(lengths)
    shape = (total, heads, d) if packed else (n, heads, lengths[0], d)
    t, stats = TensorDesc.make(shape, DType.BF16), TensorDesc.make(shape[:-1], DType.F32)
    desc: dict[str, Any] = {"q": t, "k": t, "v": t, "o": t, "lse": stats, "band": MaskDesc(causal=causal)}
    gen = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, do = (torch.randn(shape, device="cuda", generator=gen, dtype=torch.bfloat16) for _ in range(4))
    operands: dict[str, Any] = {"q": q, "k": k, "v": v, "o": torch.empty_like(q),
                                "lse": torch.empty(shape[:-1], device="cuda")}
    if packed:
        cu = torch.tensor([sum(lengths[:i]) for i in range(n + 1)], dtype=torch.int32, device="cuda")
        offsets = TensorDesc.make((n + 1,), DType.I32)
        desc |= {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
        operands |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    stream = torch.cuda.current_stream().cuda_stream
    forward = SdpaDesc(**desc)
    backward = SdpaBwdDesc(**desc, do=t, dq=t, dk=t, dv=t)
    run = SdpaFwdExecutable(forward_params(forward, target), target).prepare(Launch(forward, operands), Workspace(None, {}))
    run(stream)
    more = {**operands, "do": do, **{g: torch.empty_like(q) for g in ("dq", "dk", "dv")}}
    space, offsets_of = _workspace(backward)
    back = SdpaBwdExecutable(backward_params(backward, target), target).prepare(Launch(backward, more), Workspace(space, offsets_of))
    return {"fwd": partial(_launch, run, stream, operands), "bwd": partial(_launch, back, stream, {**more, "space": space})}


def _workspace(desc: SdpaBwdDesc) -> tuple[torch.Tensor, dict[str, tuple[int, int]]]:
    offsets, size = {}, 0
    for region in SdpaBwdDslSm80().workspace(desc):
        offsets[region.name] = (size, region.nbytes)
        size += -(-region.nbytes // 256) * 256
    return torch.empty(size, dtype=torch.uint8, device="cuda"), offsets


def _scratch() -> str:
    """The scratch of a backward plan, by region."""
    shape = next(s for s in SHAPES if s.name == "d128 s8192 full")
    sizes = {r.name: r.nbytes for r in SdpaBwdDslSm80().workspace(_backward_desc(shape))}
    told = ", ".join(f"{name} {nbytes / 2**20:.1f} MiB" for name, nbytes in sizes.items())
    return f"backward scratch, b{shape.batch} h{shape.heads[0]} s{shape.seqlen} d{shape.d}: {told}"


# ---- compiling in parallel -----------------------------------------------------------------------------------------


Job = tuple["Config | FwdParams | Chain", tuple[int, int]]


def _compile_ahead(rows: list[Config], forward: list[FwdParams], backward: list[Chain], cc: tuple[int, int]) -> None:
    start = time.perf_counter()
    workers = min(16, os.cpu_count() or 1)
    kernels = dict.fromkeys((name, p) for chain in backward for name, p in chain.items())
    jobs: list[Job] = [*((c, cc) for c in rows), *((p, cc) for p in dict.fromkeys(forward)),
                       *(({name: p}, cc) for name, p in kernels)]
    if not jobs:
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        problems = [text for text in pool.map(_compile, jobs) if text]
    print(f"{len(jobs)} jobs compiled in {time.perf_counter() - start:.1f} s on {workers} workers", flush=True)
    for text in dict.fromkeys(problems):
        print(text, flush=True)


def _compile(job: Job) -> str:
    what, cc = job
    torch.set_num_threads(1)
    try:
        if isinstance(what, FwdParams):
            SdpaFwdExecutable(what, Target.cuda(cc))
        elif isinstance(what, dict):
            SdpaBwdExecutable(what, Target.cuda(cc))
        else:
            _compile_row(what, cc)
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:2000]
    return ""


def _compile_row(config: Config, cc: tuple[int, int]) -> None:
    if ENGINE.name not in registry.names():
        registry.register(ENGINE, priority=25)
    with contextlib.suppress(NotSupportedError):  # a row that this engine declines
        compile_config(config, ENGINE.name, Target.cuda(cc))


if __name__ == "__main__":
    sys.exit(main())
