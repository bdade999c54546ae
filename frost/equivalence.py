"""Running an equivalence gate: build a configuration's graph, execute it on one engine, compare with the fp64
oracle.

The oracle is the reference engine's formulas in fp64 on the CPU. The allowed error is the tolerance rule's
(`engines.reference.plain.allowed_error`), element by element; results are reported as a share of it. Inputs
have NaN in every place that nothing may read, outputs are NaN-filled beforehand and their surroundings
checked afterwards.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from descriptors import DType
from engines.base import Target
from engines.reference.plain import allowed_error, plain_composition
from engines.reference.sdpa import sdpa_backward, sdpa_forward

from .equivalence_nsa import nsa_answers, nsa_operands, nsa_results
from .equivalence_nsa_branch import branch_answers, branch_operands, branch_results
from .errors import GateError, NotSupportedError
from .gate_matrix import MATRIX, Config
from .gate_matrix_nsa import NSA_BRANCH_MATRIX, NSA_MATRIX, NsaBranchConfig, NsaConfig
from .gate_prewarm import compile_ahead

if TYPE_CHECKING:
    from .graph import Graph

AnyConfig = Config | NsaConfig
DETERMINISTIC_REPEATS = 3
_MAIN = ("q", "k", "v", "o", "do", "dq", "dk", "dv")  # what lies in the configuration's layout
_GRADS = ("dq", "dk", "dv", "dbias", "dsink")


@dataclass(frozen=True)
class TensorError:
    """How far a result is from the oracle: the largest error, and the largest share of what is allowed
    there."""

    max_error: float
    ratio: float


@dataclass(frozen=True)
class ConfigResult:
    """One row of a gate run. `verdict`: "pass", "fail", "error" (the engine raised) or "declined" (it said
    no)."""

    config: AnyConfig
    verdict: str
    errors: Mapping[str, TensorError] = field(default_factory=dict)
    detail: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def ratio(self) -> float:
        """The worst share of the allowed error, over all results."""
        return max((e.ratio for e in self.errors.values()), default=0.0)

    def described(self) -> str:
        """What ran, and how far each result is from the oracle."""
        said = [f"{t} {e.max_error:.1e}" for t, e in self.errors.items()]
        return f"{self.config.describe()} [largest error: {', '.join(said)}]"


@dataclass(frozen=True)
class GateRun:
    """A run of one op's matrix. Green (`ok`) iff nothing failed and at least one configuration was
    covered."""

    engine: str
    op: str
    target: Target
    results: tuple[ConfigResult, ...]

    def count(self, *verdicts: str) -> int:
        return sum(r.verdict in verdicts for r in self.results)

    @property
    def ok(self) -> bool:
        return self.count("pass") > 0 and self.count("fail", "error") == 0

    def summary(self) -> str:
        """Counts, and the first failure with its reason."""
        text = (f"{self.count('pass')} passed, {self.count('fail', 'error')} failed, "
                f"{self.count('declined')} declined")
        bad = next((r for r in self.results if r.verdict in ("fail", "error")), None)
        if bad is None and not self.ok:
            bad = next(iter(self.results), None)
        return text if bad is None else f"{text}; {bad.name}: {bad.detail}"


# ---- a configuration's data --------------------------------------------------------------------------------


@dataclass
class Case:
    """Operands of one configuration on the CPU, contiguous, NaN where nothing may read; the oracle's answer
    and the plain composition's, by name."""

    config: AnyConfig
    operands: dict[str, Tensor]
    answer: dict[str, Tensor]
    plain: dict[str, Tensor]


def nsa_case(config: NsaConfig) -> Case:
    """As `make_case`, for native sparse attention."""
    if isinstance(config, NsaBranchConfig):
        operands = branch_operands(config)
        answer, plain = branch_answers(config, operands)
    else:
        operands = nsa_operands(config)
        answer, plain = nsa_answers(config, operands)
    if config.op.endswith("_backward"):
        operands.update(o=plain["o"], lse=plain["lse"].float())
    return Case(config, operands, answer, plain)


def make_case(config: AnyConfig) -> Case:
    """Seeded by the configuration's name, so that a failing row can be run again alone.

    The oracle is fp64 from end to end. A backward is given the plain composition's o and lse: rounding o
    costs a sum over all rows (dBias, dSink) an error that depends on how each o happened to fall, so the
    engine's error and the yardstick's can only be compared where both start from the same o. """
    if isinstance(config, NsaConfig):
        return nsa_case(config)
    gen = torch.Generator().manual_seed(zlib.crc32(config.name.encode()))
    operands = _operands(config, gen)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in operands.items()}
    options = _oracle_options(config)
    common: dict[str, Any] = {n: wide[n] for n in _OPTIONAL if n in wide}
    o, lse = sdpa_forward(wide["q"], wide["k"], wide["v"], **common, **options)
    answer = {"o": o, "lse": lse}
    low: dict[str, Any] = {n: operands[n] for n in (*_OPTIONAL, "do", "dlse") if n in operands}
    plain = plain_composition(operands["q"], operands["k"], operands["v"], **low, **options)
    if config.op == "sdpa_backward":
        grads = sdpa_backward(wide["q"], wide["k"], wide["v"], o, wide["do"], lse, dlse=wide.get("dlse"),
                              want=_wanted(config), **common, **options)
        answer.update({n: g for n, g in zip(_GRADS, grads) if g is not None})
        operands.update(o=plain["o"], lse=plain["lse"].float())
    return Case(config, operands, answer, plain)


_OPTIONAL = ("bias", "mask", "sink", "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv")


def _wanted(c: AnyConfig) -> tuple[str, ...]:
    if isinstance(c, NsaConfig):
        return ("dq", "dk", "dv")
    return (*(f"d{n}" for n in c.grads), *(d for d, given in (("dbias", c.bias), ("dsink", c.sink)) if given))


def _oracle_options(c: Config) -> dict[str, Any]:
    return {"scale": c.scale, "causal": c.causal, "align_bottom_right": c.align == "bottom_right",
            "window": c.window, "softcap": c.softcap}


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, DType.parse(name).torch_name)


def _operands(c: Config, gen: torch.Generator) -> dict[str, Tensor]:
    io, (hq, hk), (sq, sk), (d, dv) = _torch_dtype(c.dtype), c.heads, c.seqlen, c.head_dim
    packed = c.packed_q is not None

    def rows(heads: int, seqlen: int, width: int, gain: float = 1.0) -> Tensor:
        shape = (seqlen, heads, width) if packed else (c.batch, heads, seqlen, width)
        return (torch.randn(shape, generator=gen) * gain).to(io)

    out = {"q": rows(hq, sq, d, c.gain), "k": rows(hk, sk, d), "v": rows(hk, sk, dv)}
    if c.opposed:
        out.update(q=out["q"].abs(), k=-out["k"].abs())
    if c.op == "sdpa_backward":
        out["do"] = rows(hq, sq, dv)
        if c.dlse:
            out["dlse"] = torch.randn(out["q"].shape[:-1], generator=gen)
    lengths = {"seq_len_q": c.lens_q, "seq_len_kv": c.lens_kv, "cu_seqlens_q": c.packed_q,
               "cu_seqlens_kv": c.packed_kv}
    index = _torch_dtype(c.index_dtype)
    out.update({n: torch.tensor(x, dtype=index) for n, x in lengths.items() if x is not None})
    for names, cu, lens in ((("q", "do"), c.packed_q, c.lens_q), (("k", "v"), c.packed_kv, c.lens_kv)):
        for name in names:
            if name in out:
                _poison_padding(out[name], cu, lens)
    if c.bias is not None:
        bias = torch.randn(_pair_shape(c, c.bias), generator=gen)
        if c.bias_holes:
            bias[torch.rand(bias.shape, generator=gen) < 0.3] = -math.inf
            bias[..., :3, :] = -math.inf
        out["bias"] = bias.to(io if c.bias_dtype is None else _torch_dtype(c.bias_dtype))
    if c.mask is not None:
        out["mask"] = torch.rand(_pair_shape(c, c.mask), generator=gen) < 0.7
        if c.mask.endswith("qk"):
            out["mask"][..., 1:4, :] = False
    if c.sink is not None:
        out["sink"] = torch.randn(hq, generator=gen).to(_torch_dtype(c.sink))
    return out


def _longest(cu: tuple[int, ...]) -> int:
    return max(b - a for a, b in pairwise(cu))


def _extents(c: Config) -> tuple[int, int]:
    """Sq and Sk as a bias sees them: of the longest sequence where packed."""
    if c.packed_q is None or c.packed_kv is None:
        return c.seqlen
    return _longest(c.packed_q), _longest(c.packed_kv)


def _pair_shape(c: Config, spelled: str) -> tuple[int, ...]:
    q, k = _extents(c)
    return tuple({"b": c.batch, "h": c.heads[0], "q": q, "k": k, "1": 1}[letter] for letter in spelled)


def _poison_padding(x: Tensor, cu: tuple[int, ...] | None, lens: tuple[int, ...] | None) -> None:
    """NaN in every token outside the offsets, or at and past its sequence's length."""
    if cu is not None:
        x[:cu[0]] = math.nan
        x[cu[-1]:] = math.nan
    for b, n in enumerate(lens or ()):
        x[b, :, n:] = math.nan


# ---- layouts -----------------------------------------------------------------------------------------------


def _bshd(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    if len(shape) != 4:
        return _padded(shape, 0)
    _, h, s, d = shape
    return (s * h * d, d, h * d, 1), 0


def _slice_of_qkv(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    # the middle third of rows three times as wide, [B, S, 3, H, D]
    _, h, s, d = shape
    return (s * 3 * h * d, d, 3 * h * d, 1), h * d


def _padded(shape: tuple[int, ...], pad: int, last: int = 1, offset: int = 0) -> tuple[tuple[int, ...], int]:
    strides, step = [], last
    for i, extent in enumerate(reversed(shape)):
        strides.append(step)
        step *= max(extent, 1)
        step += pad if i == 0 else 0
    return tuple(reversed(strides)), offset


def _transposed(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    *outer, s, d = shape
    strides, _ = _padded((*outer, d, s), 0)
    return (*strides[:-2], strides[-1], strides[-2]), 0


# name -> shape -> (strides, offset of the first element), both in elements
LAYOUTS: dict[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], int]]] = {
    "bhsd": lambda s: _padded(s, 0),
    "bshd": _bshd,
    "slice": _slice_of_qkv,
    "pitch": lambda s: _padded(s, 8),
    "last2": lambda s: _padded(s, 0, last=2),
    "transposed": _transposed,
    "offset": lambda s: _padded(s, 0, offset=1),
}


def _filler(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return math.nan
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


@dataclass
class Placed:
    """A tensor laid out in a buffer of its own; what surrounds it there is NaN, in integers the least one."""

    buffer: Tensor
    view: Tensor
    alignment: int

    @property
    def filler(self) -> float | int:
        return _filler(self.buffer.dtype)

    @staticmethod
    def make(shape: Iterable[int], dtype: torch.dtype, layout: str, device: torch.device | str) -> Placed:
        shape = tuple(shape)
        strides, offset = LAYOUTS[layout](shape)
        span = offset + 1 + sum(max(n - 1, 0) * s for n, s in zip(shape, strides))
        buffer = torch.full((span + 8,), _filler(dtype), dtype=dtype, device=device)
        aligned = offset * dtype.itemsize % 16 == 0
        return Placed(buffer, buffer.as_strided(shape, strides, offset), 16 if aligned else dtype.itemsize)

    def stray_writes(self) -> int:
        """Elements around the tensor that something wrote to."""
        around = self.buffer.clone()
        around.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(self.filler)
        touched = ~torch.isnan(around) if around.is_floating_point() else around != self.filler
        return int(touched.sum())


# ---- one configuration on one engine -----------------------------------------------------------------------


def run_config(config: AnyConfig, engine: str, device: torch.device | str = "cpu") -> ConfigResult:
    """Run one configuration on one engine. What goes wrong is told in the result; only an interrupt is
    raised."""
    start = time.monotonic()
    try:
        verdict, errors, detail = _run(make_case(config), engine, torch.device(device))
    except NotSupportedError as e:
        reasons = [text for texts in e.reasons.values() for text in texts]
        verdict, errors, detail = "declined", {}, "; ".join(reasons) or str(e)
    except Exception as e:
        verdict, errors, detail = "error", {}, f"{type(e).__name__}: {e}"
    return ConfigResult(config, verdict, errors, detail, time.monotonic() - start)


def _run(case: Case, engine: str, device: torch.device) -> tuple[str, dict[str, TensorError], str]:
    config = case.config
    given, outputs = _place(case, device)
    names = tuple(outputs)
    plan = _graph(config, given, outputs).compile(device, engines=[engine], gates="off")
    feeds = {n: p.view for n, p in {**given, **outputs}.items()}
    seen: list[dict[str, Tensor]] = []
    for _ in range(DETERMINISTIC_REPEATS if config.deterministic else 1):
        for p in outputs.values():
            p.buffer.fill_(p.filler)
        plan.execute(feeds)
        seen.append({n: p.view.cpu().clone() for n, p in outputs.items()})
    errors = {n: _error(case, n, seen[0][n]) for n in names}
    faults = [f"{n}: {e.ratio:.3g} x the allowed error" for n, e in errors.items() if not e.ratio <= 1]
    faults += [f"{n}: {count} elements around the buffer were written" for n, p in outputs.items()
               if (count := p.stray_writes())]
    faults += [f"{n}: not bit-equal from run to run" for n in names
               if any(not torch.equal(run[n], seen[0][n]) for run in seen[1:])]
    return ("fail" if faults else "pass"), errors, "; ".join(faults)


def _error(case: Case, name: str, got: Tensor) -> TensorError:
    """Numbers have a tolerance; a choice is right or wrong."""
    if not got.is_floating_point():
        wrong = not torch.equal(got, case.answer[name])
        return TensorError(float(wrong), math.inf if wrong else 0.0)
    return compare(name, got, case.answer[name], case.plain[name], case.answer["lse"])


def _place(case: Case, device: torch.device | str) -> tuple[dict[str, Placed], dict[str, Placed]]:
    """A case's operands, and buffers for its results, in the configuration's layout."""
    c = case.config

    def layout(name: str) -> str:
        return c.layout if name in _MAIN else "bhsd"

    given = {n: Placed.make(x.shape, x.dtype, layout(n), device) for n, x in case.operands.items()}
    for name, x in case.operands.items():
        given[name].view.copy_(x)
    names = _wanted(c) if c.op.endswith("_backward") else tuple(case.answer)
    return given, {n: Placed.make(case.answer[n].shape, _result_dtype(case, n), layout(n), device) for n in names}


def compile_config(config: AnyConfig, engine: str, target: Target) -> None:
    """Compile what a configuration needs for a target, without touching a device."""
    case = make_case(config)
    given, outputs = _place(case, "cpu")
    _graph(config, given, outputs).compile(target, engines=[engine], gates="off")


def _result_dtype(case: Case, name: str) -> torch.dtype:
    if name in ("lse", "importance"):
        return torch.float32
    if name == "block_indices":
        return torch.int32
    return case.operands["q" if name == "o" else name[1:]].dtype


def _graph(c: AnyConfig, given: Mapping[str, Placed], outputs: Mapping[str, Placed]) -> Graph:
    from .graph import Graph

    g = Graph(name=f"gate-{c.op}-{c.name}")
    t: dict[str, Any] = {n: g.tensor(n, tuple(p.view.shape), stride=p.view.stride(), dtype=p.view.dtype,
                     alignment=p.alignment) for n, p in given.items()}
    if isinstance(c, NsaConfig):
        results = branch_results(c, g, t) if isinstance(c, NsaBranchConfig) else nsa_results(c, g, t)
        return _handed_out(g, results, outputs)
    options: dict[str, Any] = {n: t[n] for n in _OPTIONAL if n in t}
    options.update(scale=c.scale, causal=c.causal, align=c.align, window=c.window, softcap=c.softcap)
    if c.packed_q is not None and c.bias is not None:
        options.update(zip(("max_seqlen_q", "max_seqlen_kv"), _extents(c)))
    if c.op == "sdpa":
        results = dict(zip(("o", "lse"), g.sdpa(t["q"], t["k"], t["v"], stats=True,
                                                                **options)))
    else:
        grads = g.sdpa_backward(t["q"], t["k"], t["v"], t["o"], t["do"], t["lse"], dlse=t.get("dlse"),
                                dbias=c.bias is not None, dsink=c.sink is not None, grads=c.grads,
                                deterministic=c.deterministic, **options)
        results = dict(zip(_GRADS, grads))
    return _handed_out(g, results, outputs)


def _handed_out(g: Graph, results: Mapping[str, Any], outputs: Mapping[str, Placed]) -> Graph:
    for name, p in outputs.items():
        g.output(results[name], name=name, stride=p.view.stride(), alignment=p.alignment)
    return g


def compare(name: str, got: Tensor, ref: Tensor, plain: Tensor, lse: Tensor) -> TensorError:
    """The error of result `name` under the tolerance rule. All on the CPU; `ref` and `lse` are the oracle's,
    fp64.

    NaN and inf count as right only where the oracle has them, or overflows the result's own type; otherwise
    the ratio is inf.
    """
    rounded = ref.to(got.dtype).double()
    ref = torch.where(torch.isfinite(ref) & ~torch.isfinite(rounded), rounded, ref)
    wide = got.double()
    exact = (wide == ref) | (torch.isnan(wide) & torch.isnan(ref))
    lost = ~exact & ~(torch.isfinite(wide) & torch.isfinite(ref))
    error = torch.where(exact, 0.0, torch.where(lost, math.inf, (wide - ref).abs()))
    # Where something was lost the allowed error may be inf as well, and inf / inf proves nothing.
    share = torch.where(exact | lost, error, error / allowed_error(name, ref, plain, lse))
    return TensorError(*(x.max().item() if x.numel() else 0.0 for x in (error, share)))


# ---- a whole matrix ----------------------------------------------------------------------------------------


def configs_for(op: str, device: str) -> tuple[Any, ...]:
    """The rows that run on a kind of device. Raises GateError for an op without a matrix."""
    rows: tuple[AnyConfig, ...] = MATRIX.get(op) or NSA_MATRIX.get(op) or NSA_BRANCH_MATRIX.get(op) or ()
    if not rows:
        raise GateError(f"op: given {op!r}, expected one with a gate matrix: {', '.join(gated_ops())}")
    return tuple(c for c in rows if device in c.devices)


def gated_ops() -> tuple[str, ...]:
    """The ops that have a gate matrix."""
    return (*MATRIX, *NSA_MATRIX, *NSA_BRANCH_MATRIX)


def run_gate(engine: str, op: str, target: Target,
             on_result: Callable[[ConfigResult], None] | None = None) -> GateRun:
    """Run an op's matrix on the target's device, row by row."""
    device = target.device if target.device == "cpu" else f"{target.device}:{target.index}"
    if target.cc is not None:
        compile_ahead(engine, op, target.cc)
    results = []
    for config in configs_for(op, target.device):
        results.append(run_config(config, engine, device))
        if on_result is not None:
            on_result(results[-1])
    return GateRun(engine, op, target, tuple(results))


def run_gate_with_progress(engine: str, op: str, target: Target,
                           on_result: Callable[[ConfigResult], None] | None = None) -> GateRun:
    """`run_gate` with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"gate {engine}:{op} on {target}", total=len(configs_for(op, target.device)))

        def advance(result: ConfigResult) -> None:
            if on_result is not None:
                on_result(result)
            bar.advance(task)

        return run_gate(engine, op, target, advance)
