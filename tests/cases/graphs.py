"""From a case and its buffers to a graph: descriptors as declared, and the tensors to execute it on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases.data import DTYPES, TENSOR_OPTIONS, Data, lse_dtype, shapes
from cases.model import Case
from frost.graph import Graph


def alignment(t: Tensor) -> int:
    """What the pointer really keeps, up to 16 bytes."""
    return min(16, t.data_ptr() & -t.data_ptr()) if t.data_ptr() else 16


def declare(g: Any, name: str, t: Tensor) -> Any:
    """An input laid out as the buffer is. A stride is declared only where it says something."""
    stride = None if t.is_contiguous() else t.stride()
    return g.tensor(name, tuple(t.shape), stride=stride, dtype=t.dtype, alignment=alignment(t))


def options(case: Case, handles: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {name: handles[name] for name in TENSOR_OPTIONS if name in handles}
    out.update(
        scale=case.scale, causal=case.causal, align=case.align, window=case.window, softcap=case.softcap
    )
    return out


def hand_out(g: Any, tensor: Any, name: str, buffer: Tensor) -> None:
    g.output(
        tensor,
        name=name,
        stride=None if buffer.is_contiguous() else buffer.stride(),
        alignment=alignment(buffer),
    )


def forward(case: Case, data: Data, *, stats: bool = True) -> tuple[Any, dict[str, Tensor]]:
    """(graph, tensors): attention with every operand and result in its declared layout."""
    g = Graph(name=case.name.replace(" ", "_"))
    names = ("q", "k", "v", *(n for n in TENSOR_OPTIONS if n in data.views))
    tensors = {name: data.views[name] for name in names}
    handles = {name: declare(g, name, t) for name, t in tensors.items()}
    o, lse = g.sdpa(handles["q"], handles["k"], handles["v"], stats=stats, **options(case, handles))
    results = {"o": (o, DTYPES[case.dtype])} | ({"lse": (lse, lse_dtype(case))} if stats else {})
    for name, (tensor, dtype) in results.items():
        tensors[name] = data.output(name, shapes(case)[name], dtype)
        hand_out(g, tensor, name, tensors[name])
    return g, tensors


def gradients(case: Case) -> dict[str, tuple[str, ...]]:
    """Gradient name -> the operand it is like, for every operand that has one."""
    names = ["q", "k", "v", *(n for n in ("bias", "sink") if getattr(case, n) is not None)]
    return {f"d{name}": name for name in names}  # type: ignore[misc]


def backward(case: Case, data: Data) -> tuple[Any, dict[str, Tensor]]:
    """(graph, tensors): attention backward for every gradient there is."""
    g = Graph(name=case.name.replace(" ", "_"))
    names = ("q", "k", "v", "o", "do", "lse", *(n for n in (*TENSOR_OPTIONS, "dlse") if n in data.views))
    tensors = {name: data.views[name] for name in names}
    handles = {name: declare(g, name, t) for name, t in tensors.items()}
    made = g.sdpa_backward(
        *(handles[n] for n in ("q", "k", "v", "o", "do", "lse")),
        **options(case, handles),
        dlse=handles.get("dlse"),
        dbias="bias" in handles,
        dsink="sink" in handles,
        deterministic=case.deterministic,
    )
    for name, operand in gradients(case).items():
        like = data.views[operand]
        tensors[name] = data.output(name, tuple(like.shape), like.dtype)
        hand_out(g, getattr(made, name), name, tensors[name])
    return g, tensors


def build(case: Case, op: str, data: Data) -> tuple[Any, dict[str, Tensor]]:
    return forward(case, data) if op == "sdpa" else backward(case, data)


def op_desc(case: Case, op: str, data: Data) -> Any:
    """The op record that lowering sees; no values needed beyond layouts."""
    from frost.fuse import fuse
    from frost.validate import validate

    g, _ = build(case, op, data)
    validate(g)
    return fuse(g).steps[0].desc


def execute(
    case: Case, op: str, engine: str, data: Data | None = None
) -> tuple[Any, Data, dict[str, Tensor]]:
    """Compile for the CPU on one engine and execute into the case's outputs. (plan, data, results)."""
    from cases.data import make

    data = make(case) if data is None else data
    g, tensors = build(case, op, data)
    plan = g.compile("cpu", engines=[engine], gates="off")
    results = plan.execute(tensors)
    for name, t in results.items():
        if name in tensors and t is not tensors[name]:
            raise AssertionError(f"{name}: the buffer that was given was not used")
    return plan, data, results


__all__ = ["alignment", "backward", "build", "declare", "execute", "forward", "gradients", "op_desc", "torch"]
