"""Running cases and small problems on the device: operands moved with everything around them, plans, and
oracles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import compare
import layouts
import oracle
import torch
from cases import data as case_data
from cases import graphs
from cases.data import Data
from cases.model import Case
from oracle import Problem
from torch import Tensor

from frost.graph import Graph

DEVICE = "cuda"
ENGINE = "triton"
GRADS = ("dq", "dk", "dv")


@dataclasses.dataclass
class DeviceData(Data):
    """A case's buffers on the device; problem and oracle stay on the CPU."""

    def output(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = layouts.output_like(shape, dtype, self.case.layout(name), device=DEVICE, name=name)
        self._outputs.append(made)
        return made.tensor


def to_device(t: Tensor) -> Tensor:
    """The same view of the same storage on the device: what lies around and between the elements comes
    along."""
    storage = t.untyped_storage()
    whole = torch.empty(0, dtype=t.dtype).set_(storage, 0, (storage.nbytes() // t.element_size(),), (1,))
    return whole.to(DEVICE).as_strided(t.shape, t.stride(), t.storage_offset())


def on_device(case: Case) -> DeviceData:
    """Fresh buffers for a case."""
    made = case_data.make(case)
    views = {name: to_device(t) for name, t in made.views.items()}
    return DeviceData(made.case, views, made.problem, made.ref, made.plain)


def run_case(case: Case, op: str) -> dict[str, float]:
    """Compile, execute into NaN-filled outputs between canaries, compare. The share of the allowed error by
    result."""
    data = on_device(case)
    g, tensors = graphs.build(case, op, data)
    plan = g.compile(DEVICE, engines=[ENGINE], gates="off")
    results = plan.execute(tensors)
    data.check_canaries()
    return compare.assert_answer(
        results, data.problem, ref=data.ref, plain=data.plain, context=f"{case.name}, {op}"
    )


# ---- small problems without a case
# -----------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    pick = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=pick, device=DEVICE, dtype=torch.float32).to(dtype)


def nan_like(t: Tensor) -> Tensor:
    """A NaN-filled buffer with the shape and strides of `t`."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).fill_(float("nan"))


def _declare(g: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: g.tensor(name, tuple(t.shape), stride=t.stride(), dtype=t.dtype, alignment=graphs.alignment(t))
        for name, t in tensors.items()
    }


def _hand_out(g: Graph, results: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        graphs.hand_out(g, results[name], name, buffer)


def forward_plan(
    inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, device: str | None = None, **options: Any
) -> Any:
    """A plan for q, k, v and tensor options by name, with the layouts of the buffers that are given."""
    g = Graph("forward")
    handles = _declare(g, inputs)
    main = [handles.pop(n) for n in "qkv"]
    o, lse = g.sdpa(*main, **handles, stats="lse" in outputs, **options)
    _hand_out(g, {"o": o, "lse": lse}, outputs)
    return g.compile(device or DEVICE, engines=[ENGINE], gates="off")


def backward_plan(
    inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, device: str | None = None, **options: Any
) -> Any:
    """A plan for q, k, v, o, do, lse and tensor options by name; the gradients are those that have a
    buffer."""
    g = Graph("backward")
    handles = _declare(g, inputs)
    main = [handles.pop(n) for n in ("q", "k", "v", "o", "do", "lse")]
    made = g.sdpa_backward(
        *main,
        **handles,
        dbias="dbias" in outputs,
        dsink="dsink" in outputs,
        grads=tuple(n[1:] for n in GRADS if n in outputs),
        **options,
    )
    _hand_out(g, made._asdict(), outputs)
    return g.compile(device or DEVICE, engines=[ENGINE], gates="off")


@dataclasses.dataclass
class Pair:
    """A forward and its backward, bound: call `run`, look at `results`."""

    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    options: dict[str, Any]
    calls: list[Any]

    def run(self) -> None:
        for call in self.calls:
            call()

    def spoil(self) -> None:
        for t in self.results.values():
            t.fill_(float("nan"))

    def copies(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.results.items()}

    def problem(self) -> Problem:
        """On the CPU, for the oracle."""
        how = {
            ("align_bottom_right" if n == "align" else n): (v == "bottom_right" if n == "align" else v)
            for n, v in self.options.items()
            if n != "deterministic"
        }
        given = {n: t.cpu() for n, t in self.inputs.items()}
        main = [given.pop(n) for n in ("q", "k", "v", "do")]
        return Problem(*main, given.pop("dlse", None), options={**given, **how})

    def check(self, context: str = "") -> None:
        """Against the fp64 oracle; the yardstick's gradients start from the o and lse that ours were given."""
        problem = self.problem()
        saved = (self.results["o"].cpu(), self.results["lse"].cpu())
        plain = oracle.plain_composition(problem)
        grads = oracle.plain_composition(problem, saved)
        plain = dataclasses.replace(grads, o=plain.o, lse=plain.lse)
        compare.assert_answer(self.results, problem, plain=plain, context=context)


def bind_pair(
    inputs: Mapping[str, Tensor], *, buffers: Mapping[str, Tensor] | None = None, **options: Any
) -> Pair:
    """Forward with statistics, and backward of q, k, v, and of bias and sink where given, over NaN-filled
    results.

    `inputs`: q, k, v, do, and the optional operands by name. `buffers` replaces results by name.
    """
    q, do = inputs["q"], inputs["do"]
    forward_inputs = {n: t for n, t in inputs.items() if n not in ("do", "dlse")}
    made = {"o": nan_like(do), "lse": torch.full(q.shape[:-1], float("nan"), device=q.device)}
    made |= {f"d{n}": nan_like(inputs[n]) for n in ("q", "k", "v", "bias", "sink") if n in inputs}
    made |= buffers or {}
    forward_options = {n: v for n, v in options.items() if n != "deterministic"}
    outputs = {n: made[n] for n in ("o", "lse")}
    forward = forward_plan(forward_inputs, outputs, **forward_options)
    gradients = {n: t for n, t in made.items() if n not in outputs}
    backward_inputs = {**forward_inputs, **outputs, **{n: inputs[n] for n in ("do", "dlse") if n in inputs}}
    backward = backward_plan(backward_inputs, gradients, **options)
    calls = [forward.bind({**forward_inputs, **outputs}), backward.bind({**backward_inputs, **gradients})]
    return Pair(dict(inputs), made, dict(options), calls)


def dense_inputs(
    b: int, hq: int, hk: int, sq: int, sk: int, d: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, Tensor]:
    """q, k, v and do of a dense problem."""
    return {
        "q": randn(b, hq, sq, d, dtype=dtype, seed=seed),
        "k": randn(b, hk, sk, d, dtype=dtype, seed=seed + 1),
        "v": randn(b, hk, sk, d, dtype=dtype, seed=seed + 2),
        "do": randn(b, hq, sq, d, dtype=dtype, seed=seed + 3),
    }


def packed_inputs(
    total_q: int,
    total_kv: int,
    hq: int,
    hk: int,
    d: int,
    cu_q: list[int],
    cu_kv: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    index: torch.dtype = torch.int32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """q, k, v, do and offsets of a packed problem."""
    return {
        "q": randn(total_q, hq, d, dtype=dtype, seed=seed),
        "k": randn(total_kv, hk, d, dtype=dtype, seed=seed + 1),
        "v": randn(total_kv, hk, d, dtype=dtype, seed=seed + 2),
        "do": randn(total_q, hq, d, dtype=dtype, seed=seed + 3),
        "cu_seqlens_q": torch.tensor(cu_q, dtype=index, device=DEVICE),
        "cu_seqlens_kv": torch.tensor(cu_kv, dtype=index, device=DEVICE),
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
