"""Selection attention against its peers: fla-core's kernels where they are installed, dense causal cuDNN attention.

    python -m tools.bench.nsa                        the table: random and realistic selections, forward and backward
    python -m tools.bench.nsa --only T8192 --reps 50
    python -m tools.bench.nsa --long                 128k tokens: runs, time, peak memory
    python -m tools.bench.nsa --profile --only T8192 per kernel
    python -m tools.bench.nsa --set FWD=128x4x3 --set FORWARD_ROWS=2048    other tiles (rows x warps x stages) and sizes
    python -m tools.bench.nsa --only T8192 --try FWD=64x4x2,BWD=32x4x4 --try PART_BYTES=4194304    several, per kernel

Every candidate is checked before it is timed: sampled rows and one sampled block against fp64. Times are medians of CUDA
events, candidates interleaved, L2 flushed. TFLOP/s count visible (query, key) pairs only. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.reference.nsa import Places, selection_mask
from frost.gate_matrix_nsa import make_block_idx
from frost.graph import Graph

from .timing import time_interleaved

SELECTIONS = ("random", "near")
_NEIGHBOURS = 32      # tokens that share most of their blocks in the realistic selection
_SWAPS = 0.15         # how far a token's own preference moves its blocks away from its neighbours'
_TOLERANCE = 2e-2     # relative to a result's own rms, bf16


@dataclass(frozen=True)
class Case:
    """B sequences of T tokens, hq / hk heads of d, s blocks of `block` a row."""

    b: int
    t: int
    hq: int
    hk: int
    d: int
    s: int = 16
    block: int = 64

    @property
    def name(self) -> str:
        return f"B{self.b} T{self.t} {self.hq}/{self.hk} d{self.d}"


CASES = (
    Case(1, 8192, 64, 4, 128), Case(1, 32768, 64, 4, 128), Case(4, 4096, 32, 2, 64), Case(1, 8192, 16, 1, 128),
    # groups below 16, at 16 K/V heads, and 16 beside them
    *(Case(1, 16384, 16 * g, 16, 128) for g in (1, 2, 4, 8, 16)),
)
LONG = Case(1, 131072, 64, 4, 128)


@dataclass
class Operands:
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    indices: Tensor


def choose(case: Case, how: str, device: Any, seed: int = 0) -> Tensor:
    """Block indices [B, Hk, T, S]: "random", or "near", where neighbouring tokens share most blocks."""
    if how == "random":
        return make_block_idx(case.b, case.hk, case.t, case.block, case.s, device, seed)
    gen = torch.Generator(device=device).manual_seed(seed)
    blocks, groups = -(-case.t // case.block), -(-case.t // _NEIGHBOURS)
    out = torch.empty(case.b, case.hk, case.t, case.s, dtype=torch.int32, device=device)
    own = torch.arange(case.t, device=device) // case.block
    number = torch.arange(blocks, device=device)
    for b in range(case.b):
        for h in range(case.hk):
            shared = torch.rand(groups, blocks, generator=gen, device=device).repeat_interleave(_NEIGHBOURS, 0)[:case.t]
            rank = shared + _SWAPS * torch.rand(case.t, blocks, generator=gen, device=device)
            rank = torch.where((number == own[:, None]) | (number == 0), 3.0, rank)
            top = torch.where(number <= own[:, None], rank, -1.0).topk(min(case.s, blocks), -1)
            out[b, h] = -1
            out[b, h, :, :top.indices.shape[-1]] = torch.where(top.values >= 0, top.indices, -1).to(torch.int32)
    return out


def make(case: Case, how: str) -> Operands:
    gen = torch.Generator(device="cuda").manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(case.b, heads, case.t, case.d, generator=gen, device="cuda").to(torch.bfloat16)

    return Operands(normal(case.hq), normal(case.hk), normal(case.hk), normal(case.hq), choose(case, how, "cuda"))


def useful_pairs(case: Case, indices: Tensor) -> int:
    """Visible (query, key) pairs of one head per K/V head, summed: what the FLOPs are counted from."""
    position = torch.arange(case.t, device=indices.device)[:, None]
    start = indices.long() * case.block
    seen = torch.where(indices >= 0, (position + 1 - start).clamp(0, case.block), 0)
    return int(seen.sum())


# ---- candidates: name -> (forward, backward), each returning results by name

Call = Callable[[], Mapping[str, Tensor]]


def frost_calls(case: Case, x: Operands, engine: str = "triton") -> tuple[Call, Call]:
    forward, results = _frost_forward(case, x, engine)
    forward()
    g = Graph("nsa backward")
    given = {"q": x.q, "k": x.k, "v": x.v, "o": results["o"], "do": x.do, "lse": results["lse"], "i": x.indices}
    t = {n: g.tensor_like(n, v) for n, v in given.items()}
    made = g.nsa_selection_backward(t["q"], t["k"], t["v"], t["o"], t["do"], t["lse"], t["i"], block_size=case.block)
    grads = {}
    for name, tensor in made._asdict().items():
        if tensor is not None:
            g.output(tensor, name=name)
        grads[name] = torch.full_like(given[name[1:]], float("nan"))
    plan = g.compile("cuda", engines=[engine], gates="off")
    return forward, plan.bind({**given, **grads})


def _frost_forward(case: Case, x: Operands, engine: str) -> tuple[Call, dict[str, Tensor]]:
    g = Graph("nsa forward")
    given = {"q": x.q, "k": x.k, "v": x.v, "i": x.indices}
    t = {n: g.tensor_like(n, v) for n, v in given.items()}
    o, lse = g.nsa_selection(t["q"], t["k"], t["v"], t["i"], block_size=case.block, stats=True)
    results = {"o": torch.full_like(x.do, float("nan")),
               "lse": torch.full(x.q.shape[:-1], float("nan"), device="cuda")}
    for name, tensor in (("o", o), ("lse", lse)):
        if tensor is not None:
            g.output(tensor, name=name)
    plan = g.compile("cuda", engines=[engine], gates="off")
    return plan.bind({**given, **results}), results


def fla_calls(case: Case, x: Operands) -> tuple[Call, Call]:
    """fla-core's selection kernels alone. Raises ImportError or ValueError where they cannot serve."""
    from importlib import import_module

    function: Any = import_module("fla.ops.nsa.parallel").ParallelNSAFunction

    group = case.hq // case.hk
    if group < 16 or group & (group - 1):
        raise ValueError(f"needs a group that is a power of two, at least 16, given {group}")
    q, k, v, do = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v, x.do))
    indices = x.indices.transpose(1, 2).contiguous().long()

    def attention(*leaves: Tensor) -> Tensor:
        return function.apply(*leaves, indices, case.s, case.block, case.d ** -0.5, None)

    def forward() -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {"o": attention(q, k, v).transpose(1, 2)}

    leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
    o = attention(*leaves)

    def backward() -> Mapping[str, Tensor]:
        grads = torch.autograd.grad(o, leaves, do, retain_graph=True)
        return {n: t.transpose(1, 2) for n, t in zip(("dq", "dk", "dv"), grads)}

    return forward, backward


def dense_calls(case: Case, x: Operands) -> tuple[Call, Call]:
    """Dense causal attention through cuDNN: what selection has to beat."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=case.hq != case.hk)

    def forward() -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {"o": attention(x.q, x.k, x.v)}

    leaves = tuple(t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    o = attention(*leaves)

    def backward() -> Mapping[str, Tensor]:
        return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, x.do, retain_graph=True)))

    return forward, backward


# ---- equivalence on samples


class Samples:
    """fp64 answers for some rows and one block of the first and the last K/V head of the first and last batch."""

    def __init__(self, case: Case, x: Operands, rows: int = 48) -> None:
        self.case = case
        gen = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, case.t, (rows,), generator=gen).sort().values.cuda()
        self.block = max(0, (case.t // case.block) // 3)
        self.places = sorted({(0, 0), (case.b - 1, case.hk - 1)})
        self.answers = [self._answer(x, b, h) for b, h in self.places]

    def _heads(self, h: int) -> slice:
        group = self.case.hq // self.case.hk
        return slice(h * group, (h + 1) * group)

    def _answer(self, x: Operands, b: int, h: int) -> dict[str, Tensor]:
        c, scale, heads = self.case, self.case.d ** -0.5, self._heads(h)
        k, v = x.k[b, h].double(), x.v[b, h].double()
        o, lse = self._attend(x, b, h, torch.arange(c.t, device="cuda"), k, v)
        do = x.do[b, heads].double()
        delta = (do * o).sum(-1)
        keys = slice(self.block * c.block, min(c.t, (self.block + 1) * c.block))
        chosen = (x.indices[b, h] == self.block).any(-1)
        causal = torch.arange(keys.start, keys.stop, device="cuda") <= torch.arange(c.t, device="cuda")[:, None]
        q = x.q[b, heads].double()
        p = torch.where((chosen[:, None] & causal)[None], torch.exp(q @ k[keys].mT * scale - lse[..., None]), 0.0)
        ds = p * (do @ v[keys].mT - delta[..., None])
        out = {"o": o[:, self.rows], "dk": (ds.mT @ q).sum(0) * scale, "dv": (p.mT @ do).sum(0)}
        mask = self._mask(x, b, h, self.rows)
        p = torch.where(mask, torch.exp(q[:, self.rows] @ k.mT * scale - lse[:, self.rows, None]), 0.0)
        out["dq"] = (p * (do[:, self.rows] @ v.mT - delta[:, self.rows, None])) @ k * scale
        return out

    def _mask(self, x: Operands, b: int, h: int, rows: Tensor) -> Tensor:
        c = self.case
        all_rows = Places.dense(c.t, c.t, torch.device("cuda"))
        places = all_rows._replace(row_seq=all_rows.row_seq[rows], row_pos=rows, length=all_rows.length[rows])
        return selection_mask(x.indices[b, h][rows], None, places, c.block)

    def _attend(self, x: Operands, b: int, h: int, rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for part in rows.split(512):
            mask = self._mask(x, b, h, part)
            s = x.q[b, self._heads(h)][:, part].double() @ k.mT * self.case.d ** -0.5
            s = torch.where(mask, s, -torch.inf)
            lse = torch.logsumexp(s, -1)
            parts.append((torch.exp(s - lse[..., None]) @ v, lse))
        return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

    def worst(self, got: Mapping[str, Tensor]) -> dict[str, float]:
        """By result: the rms of the error over the rms of the answer; NaN stays NaN and fails."""
        out: dict[str, float] = {}
        keys = slice(self.block * self.case.block, (self.block + 1) * self.case.block)
        for (b, h), answer in zip(self.places, self.answers):
            for name, ref in answer.items():
                if name in got:
                    part = got[name][b, h, keys] if name in ("dk", "dv") else got[name][b, self._heads(h)][:, self.rows]
                    error = float((part.double() - ref).square().mean().sqrt() / ref.square().mean().sqrt())
                    out[name] = error if error != error else max(out.get(name, 0.0), error)
        return out


# ---- the run


def run(case: Case, how: str, reps: int) -> list[dict[str, Any]]:
    x = make(case, how)
    samples = Samples(case, x)
    flops = 4 * case.d * useful_pairs(case, x.indices) * (case.hq // case.hk)
    rows: list[dict[str, Any]] = []
    makers = {"frost": frost_calls, "fla": fla_calls, "cudnn dense": dense_calls}
    calls: dict[str, tuple[Call, Call]] = {}
    for name, maker in makers.items():
        try:
            calls[name] = maker(case, x)
        except (ImportError, ValueError, RuntimeError) as e:
            rows.append(_row(case, how, "both", name, note=f"unavailable: {str(e).splitlines()[0][:80]}"))
    for direction, which in (("fwd", 0), ("bwd", 1)):
        right = {}
        for name, pair in calls.items():
            error = {} if name == "cudnn dense" else samples.worst(pair[which]())
            if all(e <= _TOLERANCE for e in error.values()):
                right[name] = pair[which]
            else:
                rows.append(_row(case, how, direction, name, note=f"WRONG {error}"))
        times = time_interleaved(right, reps=reps) if right else {}
        best = {n: t.median_ms for n, t in times.items()}
        for name, timing in times.items():
            work = flops * (1.0 if direction == "fwd" else 2.5)
            rows.append(_row(
                case, how, direction, name, ms=round(timing.median_ms, 4), spread=round(timing.spread, 3),
                tflops="" if name == "cudnn dense" else round(work / timing.median_ms / 1e9, 1),
                vs_fla=round(best["fla"] / timing.median_ms, 2) if "fla" in best else "",
                vs_dense=round(best["cudnn dense"] / timing.median_ms, 2) if "cudnn dense" in best else ""))
    return rows


_COLUMNS = ("case", "selection", "direction", "candidate", "ms", "spread", "tflops", "vs_fla", "vs_dense", "note")


def _row(case: Case, how: str, direction: str, name: str, **more: Any) -> dict[str, Any]:
    return {"case": case.name, "selection": how, "direction": direction, "candidate": name, **more}


def run_long(how: str) -> list[dict[str, Any]]:
    """128k tokens: time and peak memory of forward and backward; the workspace is inside the peak."""
    case, rows = LONG, []
    x = make(case, how)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward, backward = frost_calls(case, x)
    for direction, call in (("fwd", forward), ("bwd", backward)):
        times = time_interleaved({"frost": call}, reps=5, warmup=1)
        finite = all(bool(torch.isfinite(t).all()) for n, t in call().items() if n != "lse")
        rows.append(_row(case, how, direction, "frost", ms=round(times["frost"].median_ms, 3),
                         note=f"peak {(torch.cuda.max_memory_allocated() - held) / 2**30:.2f} GiB above operands"
                              f"{'' if finite else ', NOT FINITE'}"))
    return rows


def kernel_times(call: Call, reps: int = 1) -> dict[str, tuple[int, float]]:
    """Kernel -> (launches, device time in ms) of one call, the mean of `reps`."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    call()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(reps):
            call()
        torch.cuda.synchronize()
    times = {e.key: (e.count // reps, e.device_time_total / 1e3 / reps) for e in seen.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1][1]))


def profile(case: Case, how: str) -> None:
    """Device time of each kernel over one forward and one backward."""
    for direction, call in zip(("fwd", "bwd"), frost_calls(case, make(case, how))):
        for name, (count, ms) in kernel_times(call).items():
            print(f"{case.name} | {how} | {direction} | {name} | {count} x | {ms:.4f} ms")


def attempt(case: Case, x: Operands, samples: Samples, settings: str) -> str:
    """One line: errors, and device time by kernel, with other tiles or sizes; they are put back afterwards."""
    from engines.triton import configs_nsa
    from frost import cache

    before = dict(vars(configs_nsa))
    cache.clear()  # a plan's key does not hold what is tried here
    try:
        override([part for part in settings.split(",") if part])
        pair = frost_calls(case, x)
        out = []
        for direction, call in zip(("fwd", "bwd"), pair):
            worst = max(samples.worst(call()).values())
            times = kernel_times(call, reps=3)
            verdict = "" if worst <= _TOLERANCE else f" WRONG {worst:.3g}"
            said = ", ".join(f"{name.removeprefix('nsa_')} {ms:.3f}" for name, (_, ms) in times.items() if ms >= 0.01)
            out.append(f"{direction}{verdict} {sum(ms for _, ms in times.values()):.3f} ({said})")
        return " | ".join(out)
    except (RuntimeError, ValueError) as e:
        return f"failed: {str(e).splitlines()[0][:100]}"
    finally:
        vars(configs_nsa).update(before)
        cache.clear()


def override(settings: Sequence[str]) -> None:
    """Put other values into `configs_nsa`: "FWD=64x8x3" (rows x warps x stages) or a number. Raises ValueError."""
    from engines.triton import configs_nsa
    from engines.triton.params import Blocks

    for text in settings:
        name, _, value = text.partition("=")
        now = getattr(configs_nsa, name, None)
        parts = [int(x) for x in value.split("x")]
        if isinstance(now, int) and len(parts) == 1:
            setattr(configs_nsa, name, parts[0])
        elif isinstance(now, Blocks) and len(parts) == 3:
            setattr(configs_nsa, name, Blocks(parts[0], now.block_n, *parts[1:]))
        elif isinstance(now, tuple) and len(parts) in (3, 4):
            # A fourth number that is not 0: queries as rows.
            made, rows_first = Blocks(parts[0], 16, *parts[1:3]), any(parts[3:])
            setattr(configs_nsa, name, tuple(replace(r, blocks=made, rows_first=rows_first) for r in now))
        else:
            raise ValueError(f"--set: given {text!r}, expected a name of engines/triton/configs_nsa.py and its value")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.nsa", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="cases whose name contains this; may be repeated")
    parser.add_argument("--selection", choices=SELECTIONS, action="append", help="default: both")
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--long", action="store_true", help="the 128k case instead of the table")
    parser.add_argument("--profile", action="store_true", help="device time per kernel instead of the table")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a tile or size to try")
    parser.add_argument("--try", action="append", default=[], dest="tries", metavar="NAME=VALUE,...",
                        help="device time per kernel with these tiles and sizes instead of the table; may be repeated")
    parser.add_argument("--csv", type=Path, help="write the rows here too")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tools.bench.nsa: needs a CUDA device", file=sys.stderr)
        return 2
    override(args.set)
    rows: list[dict[str, Any]] = []
    if not args.profile and not args.tries:
        print(" | ".join(_COLUMNS))
    for how in args.selection or (("random",) if args.long else SELECTIONS):
        for case in (LONG,) if args.long else CASES:
            if args.only and not any(part in case.name for part in args.only):
                continue
            if args.profile:
                profile(case, how)
                continue
            if args.tries:
                x = make(case, how)
                samples = Samples(case, x)
                for settings in args.tries:
                    print(f"{case.name} | {how} | {settings or 'as shipped'} | {attempt(case, x, samples, settings)}", flush=True)
                continue
            made = run_long(how) if args.long else run(case, how, args.reps)
            for row in made:
                print(" | ".join(str(row.get(c, "")) for c in _COLUMNS), flush=True)
            rows += made
            torch.cuda.empty_cache()
    if args.csv is not None:
        with args.csv.open("w", newline="") as f:
            writer = csv.DictWriter(f, _COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return 1 if any("WRONG" in str(r.get("note", "")) or "NOT FINITE" in str(r.get("note", "")) for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
