"""Timing attention backends against each other, and only those that are right.

Every candidate computes into a fresh, NaN-filled output and is held to the fp64 oracle, element by element,
before it is timed; ours under the library's tolerance rule, PyTorch's own within `PEER_SLACK` times that.
One that fails is not timed.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines import registry

from .backend_probes import resolve
from .sdpa_baseline import SDPA_BACKENDS

PEER_SLACK = 4.0
OURS = ("triton", "sm80")
_NOT_TIMED = frozenset({*OURS, "torch_sdpa", "reference"})  # the rest of the registry is third parties'
_WARMUP = 3
_CPU_BUDGET_S = 5.0  # of one candidate; at least one call is timed
_CLOCK_HZ, _LONGEST_WAIT_S = 2.0e9, 5e-3
_BLOCK_SCORES = 1 << 27  # of one oracle block: 1 GiB in fp64
# Triton's interpreter runs some 1e5 scores a second: it is there to be right, not to be timed at a model's
# sizes.
INTERPRETER_SCORES = 1 << 21

Call = Callable[[], Tensor]
Progress = Callable[[str, str], None]


@dataclass(frozen=True)
class Problem:
    """Causal attention, forward: q [batch, n_heads, seq, head_dim], k and v [batch, n_kv_heads, seq,
    head_dim].
    """

    batch: int
    seq: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        return self.n_heads // self.n_kv_heads

    @property
    def scores(self) -> int:
        return self.batch * self.n_heads * self.seq * self.seq

    @property
    def flops(self) -> float:
        """2 * B * H * S * S * (D + Dv), halved because it is causal."""
        return 2.0 * self.scores * self.head_dim


class Unusable(Exception):
    """A candidate that cannot run; the message says why."""


@dataclass
class Candidate:
    """`call` computes the result; `poison` spoils what it has to write. `slack`: times the allowed error."""

    call: Call
    poison: Callable[[], None]
    slack: float = 1.0


# ---- the public functions --------------------------------------------------------------------------------


def benchmark_backends(
    batch: int,
    seq: int,
    n_heads: int = 32,
    n_kv_heads: int = 8,
    head_dim: int = 128,
    iters: int = 20,
    *,
    device: Any = None,
    dtype: Any = None,
) -> dict[str, float]:
    """{name: median milliseconds} of one causal forward, over PyTorch's SDPA backends (`FLASH_ATTENTION`,
    `EFFICIENT_ATTENTION`, `CUDNN_ATTENTION`, `MATH`), ours (`frost[triton]`, `frost[sm80]`) and registered
    third-party engines.

    bf16 on a GPU and fp32 on a CPU unless `dtype` says otherwise. NaN for whatever cannot run here or is
    not right; never 0, never missing. FROST's engines run without asking for their gates: the comparison
    with the oracle is made here, on these operands. Raises ValueError for sizes that mean nothing.
    """
    return benchmark_backends_with_reasons(
        batch, seq, n_heads, n_kv_heads, head_dim, iters, device=device, dtype=dtype
    )[0]


def benchmark_backends_with_reasons(
    batch: int,
    seq: int,
    n_heads: int = 32,
    n_kv_heads: int = 8,
    head_dim: int = 128,
    iters: int = 20,
    *,
    device: Any = None,
    dtype: Any = None,
    only: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """(ms, reasons) of `benchmark_backends`: "ok" where it ran, else why not. `only`: these candidates;
    `progress` is called with a candidate's name and what is done to it.
    """
    _check_sizes(batch=batch, seq=seq, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, iters=iters)
    if n_heads % n_kv_heads:
        raise ValueError(f"n_heads: given {n_heads}, expected a multiple of n_kv_heads ({n_kv_heads})")
    names = _candidate_names() if only is None else tuple(only)
    where = resolve(device)
    if where.target is None:
        return dict.fromkeys(names, math.nan), dict.fromkeys(names, where.problem)
    on = torch.device("cpu") if where.target.device == "cpu" else torch.device("cuda", where.target.index)
    problem = Problem(batch, seq, n_heads, n_kv_heads, head_dim, _dtype(dtype, on), on)
    if on.type == "cpu":
        return _run(problem, iters, names, progress)
    with torch.cuda.device(on):
        return _run(problem, iters, names, progress)


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: given {value!r}, expected a whole number >= 1")


def _dtype(given: Any, device: torch.device) -> torch.dtype:
    from descriptors import DType

    if given is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = given if isinstance(given, torch.dtype) else getattr(torch, DType.parse(given).torch_name)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype: given {given!r}, expected fp16, bf16 or fp32")
    return dtype


def _candidate_names() -> tuple[str, ...]:
    others = [name for name in registry.names() if name not in _NOT_TIMED]
    return (*SDPA_BACKENDS, *(f"frost[{name}]" for name in (*OURS, *others)))


# ---- one run ---------------------------------------------------------------------------------------------


def _run(
    problem: Problem, iters: int, names: Sequence[str], progress: Progress | None
) -> tuple[dict[str, float], dict[str, str]]:
    try:
        q, k, v = _operands(problem)
    except (RuntimeError, MemoryError, OverflowError) as e:  # too large for the memory there
        text = f"operands: {_reason(e, ())}"
        return dict.fromkeys(names, math.nan), dict.fromkeys(names, text)
    say = progress or (lambda name, stage: None)
    oracle: _Oracle | None = None
    ms, reasons = dict.fromkeys(names, math.nan), dict.fromkeys(names, "")
    for name in names:
        say(name, "prepare")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                candidate = _make(name, problem, q, k, v)
                oracle = oracle or _Oracle(q, k, v)
                ms[name] = _check_and_time(candidate, oracle, problem, iters, functools.partial(say, name))
                reasons[name] = "ok"
            except Exception as e:
                reasons[name] = _reason(e, told)
                _reraise_if_device_is_lost(problem, e)
        say(name, "done")
    return ms, reasons


def _operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(problem.batch, heads, problem.seq, problem.head_dim, generator=gen)
        .to(problem.dtype)
        .to(problem.device)
        for heads in (problem.n_heads, problem.n_kv_heads, problem.n_kv_heads)
    )
    return q, k, v


def _check_and_time(
    candidate: Candidate, oracle: _Oracle, problem: Problem, iters: int, say: Callable[[str], None]
) -> float:
    say("check")
    candidate.poison()
    oracle.check(candidate.call(), candidate.slack)
    say("time")
    clock = _time_cpu if problem.device.type == "cpu" else _time_cuda
    return clock(candidate.call, iters, problem.device)


def _reason(e: Exception, told: Sequence[Any]) -> str:
    """The exception's text, then what PyTorch said about it in warnings: its exception alone is "No
    available kernel".
    """
    texts = [str(e) or type(e).__name__]
    if isinstance(e, RuntimeError):
        texts += [str(w.message) for w in told]
    lines = [" ".join(t.partition(" (Triggered internally")[0].split()) for t in texts]
    return "; ".join(dict.fromkeys(lines))[:1000]


def _reraise_if_device_is_lost(problem: Problem, e: Exception) -> None:
    """After an illegal access every later call fails too: stop and say so."""
    if problem.device.type == "cuda":
        try:
            torch.cuda.synchronize(problem.device)
        except RuntimeError as lost:
            raise RuntimeError(f"the device is in error after: {type(e).__name__}: {e}") from lost


# ---- candidates ------------------------------------------------------------------------------------------


def _make(name: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Candidate:
    if name in SDPA_BACKENDS:
        return _torch_candidate(getattr(SDPBackend, name), problem, q, k, v)
    if name.startswith("frost[") and name.endswith("]"):
        return _frost_candidate(name[len("frost[") : -1], problem, q, k, v)
    raise ValueError(f"backend: given {name!r}, expected one of {', '.join(_candidate_names())}")


def _torch_candidate(backend: SDPBackend, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Candidate:
    gqa: dict[str, Any] = {"enable_gqa": True} if problem.group > 1 else {}

    def call() -> Tensor:
        with torch.no_grad(), sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **gqa)

    def poison() -> None:
        torch.full_like(q, math.nan)  # freed at once: the memory its output is likely to get

    return Candidate(call, poison, PEER_SLACK)


def _frost_candidate(engine: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Candidate:
    from .errors import NotSupportedError
    from .graph import Graph

    if engine not in registry.names():
        raise Unusable(f"this build has no engine {engine!r}, it has {', '.join(registry.names())}")
    if engine == "triton" and problem.device.type == "cpu" and problem.scores > INTERPRETER_SCORES:
        raise Unusable(
            f"batch * n_heads * seq * seq: given {problem.scores}, expected at most "
            f"{INTERPRETER_SCORES} on a CPU, where "
            f"the Triton engine runs in the interpreter: right, not fast"
        )
    g = Graph("benchmark")
    o, _ = g.sdpa(*(g.tensor_like(n, t) for n, t in (("q", q), ("k", k), ("v", v))), causal=True)
    g.output(o, name="o")
    try:
        plan = g.compile(problem.device, engines=[engine], gates="off")
    except NotSupportedError as e:
        raise Unusable("; ".join(e.reasons.get(engine, ())) or str(e)) from e
    out = torch.empty_like(q)
    bound = plan.bind({"q": q, "k": k, "v": v, "o": out})

    def call() -> Tensor:
        bound()
        return out

    def poison() -> None:
        out.fill_(math.nan)

    return Candidate(call, poison)


# ---- equivalence -----------------------------------------------------------------------------------------


class _Oracle:
    """The fp64 answer, the plain composition's in the io dtype, and lse; whole, made block by block."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        from engines.reference.plain import plain_composition
        from engines.reference.sdpa import sdpa_forward

        batch, heads, seq, _ = q.shape
        group = heads // k.shape[1]
        self.exact = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        self.lse = torch.empty(q.shape[:-1], dtype=torch.float64, device=q.device)
        self.plain = torch.empty_like(q)
        rows = max(1, _BLOCK_SCORES // (group * seq))
        how: dict[str, Any] = {"causal": True, "align_bottom_right": True}
        for b in range(batch):
            for h in range(k.shape[1]):
                of_q, of_kv = slice(h * group, (h + 1) * group), slice(h, h + 1)
                for start in range(0, seq, rows):
                    end = min(start + rows, seq)
                    at = (slice(b, b + 1), of_q, slice(start, end))
                    # Causal rows up to `end` see no later key: in this cut the corner is the bottom right
                    # one.
                    x, y, z = q[at], k[b : b + 1, of_kv, :end], v[b : b + 1, of_kv, :end]
                    self.exact[at], self.lse[at] = sdpa_forward(x.double(), y.double(), z.double(), **how)
                    self.plain[at] = plain_composition(x, y, z, **how)["o"]

    def check(self, got: Tensor, slack: float) -> None:
        """Raises Unusable for a result that is not right."""
        from .equivalence import compare

        if got.shape != self.exact.shape:
            raise Unusable(
                f"equivalence: given a result of shape {list(got.shape)}, expected {list(self.exact.shape)}"
            )
        lost = int((~torch.isfinite(got)).sum())
        if lost:
            raise Unusable(
                f"equivalence: {lost} of {got.numel()} elements of the result are NaN or inf: not "
                "written, or wrong"
            )
        error = compare("o", got, self.exact, self.plain, self.lse)
        if not error.ratio <= slack:
            raise Unusable(
                f"equivalence: largest error {error.max_error:.3g}, {error.ratio:.3g} times the "
                "allowed one, expected at "
                f"most {slack:g} times"
            )


# ---- timing ----------------------------------------------------------------------------------------------


def _time_cpu(call: Call, iters: int, device: torch.device) -> float:
    # The check before it was the warm-up.
    samples: list[float] = []
    while len(samples) < iters and (not samples or sum(samples) < _CPU_BUDGET_S):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e3


def _time_cuda(call: Call, iters: int, device: torch.device) -> float:
    """Median over `iters` calls. Before each the L2 cache is overwritten and the device kept busy for as
    long as the host needs to enqueue the call, so that between the events there is device work only.
    """
    host = []
    for _ in range(_WARMUP):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
    wait = int(min(1.5 * min(host) + 20e-6, _LONGEST_WAIT_S) * _CLOCK_HZ)
    flush = torch.empty(
        max(2 * torch.cuda.get_device_properties(device).L2_cache_size, 64 << 20),
        dtype=torch.uint8,
        device=device,
    )
    samples = []
    for _ in range(iters):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(wait)
        first.record()
        call()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last))
    return statistics.median(samples)


def summary(problem_flops: float, ms: Mapping[str, float]) -> dict[str, float]:
    """TFLOP/s by name; NaN where there is no time."""
    return {name: problem_flops / (t * 1e-3) / 1e12 for name, t in ms.items()}
