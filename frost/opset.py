"""The ops of a graph as one table: operands, results, attributes, and how result shapes follow from the operands.

Inference is lenient: a bad graph still gets shapes, so that validation can report everything that is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from descriptors import Dim, Dims, DType, SdpaBwdDesc, SdpaDesc, SymProduct, TensorDesc
from descriptors.dims import multiply, symbols
from frost.nsa_opset import NSA_ROWS

Descs = Mapping[str, TensorDesc]
Infer = Callable[[Descs, Mapping[str, Any]], dict[str, TensorDesc]]


@dataclass(frozen=True)
class OpSpec:
    """`required` and `optional` operands, `results` and attributes (with defaults), in the order of the op's record."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    results: tuple[str, ...]
    attrs: Mapping[str, Any]
    infer: Infer

    @property
    def operands(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


def stats_dtype(io: DType) -> DType:
    """What the LSE is kept in: fp32, and fp64 for fp64 inputs."""
    return DType.F64 if io is DType.F64 else DType.F32


def broadcast(*shapes: Dims) -> Dims:
    """The numpy broadcast of shapes; where extents contradict each other the first one that is not 1 stands."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((d for d in column if d != 1), 1) for column in zip(*padded))


def can_broadcast(shape: Sequence[Dim], onto: Sequence[Dim]) -> bool:
    """Whether `shape` broadcasts to exactly `onto`."""
    if len(shape) > len(onto):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(onto)))


def quotient(total: Dim, known: Dim) -> Dim | None:
    """total / known where that is an extent, None otherwise."""
    coef, over = (d if isinstance(d, int) else d.coef if isinstance(d, SymProduct) else 1 for d in (total, known))
    left = list(symbols(total))
    for s in symbols(known):
        if s not in left:
            return None
        left.remove(s)
    if over == 0 or coef % over:
        return None
    return multiply([coef // over, *left])


def _attention(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    q, v = d["q"], d["v"]
    made = {"o": TensorDesc((*q.shape[:-1], *v.shape[-1:]), q.dtype)}
    if attrs["stats"]:
        made["lse"] = TensorDesc(q.shape[:-1], stats_dtype(q.dtype))
    return made


def _attention_backward(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    asked = [name for name in ("q", "k", "v") if name in attrs["grads"]]
    asked += [name for name in ("bias", "sink") if attrs["d" + name] is True and name in d]
    return {"d" + name: TensorDesc(d[name].shape, d[name].dtype) for name in asked}


def _same(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    return {"out": TensorDesc(d["x"].shape, d["x"].dtype)}


def _elementwise(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    return {"out": TensorDesc(broadcast(*(t.shape for t in d.values())), d["x"].dtype)}


def _where(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    return {"out": TensorDesc(broadcast(*(t.shape for t in d.values())), d["y"].dtype)}


def _matmul(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    a, b = d["x"].shape, d["y"].shape
    return {"out": TensorDesc((*broadcast(a[:-2], b[:-2]), *a[-2:-1], *b[-1:]), d["x"].dtype)}


def _transpose(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    x, perm = d["x"], attrs["perm"]
    ok = all(isinstance(p, int) for p in perm) and sorted(perm) == list(range(x.rank))
    return {"out": TensorDesc(tuple(x.shape[p] for p in perm) if ok else x.shape, x.dtype)}


def _reshape(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    """One extent may be -1: what is left."""
    x, shape = d["x"], tuple(attrs["shape"])
    if shape.count(-1) == 1:
        left = quotient(multiply(x.shape), multiply(s for s in shape if s != -1))
        shape = tuple((1 if left is None else left) if s == -1 else s for s in shape)
    return {"out": TensorDesc(shape, x.dtype)}


def _sum_to(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    return {"out": TensorDesc(tuple(attrs["shape"]), d["x"].dtype)}


def _cast(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    return {"out": TensorDesc(d["x"].shape, attrs["dtype"])}


def _result(d: Descs, attrs: Mapping[str, Any]) -> dict[str, TensorDesc]:
    """Of (forward result x, its gradient y)."""
    return {"out": TensorDesc(d["x"].shape, d["y"].dtype)}


def _primitive(fields: str, infer: Infer, **attrs: Any) -> OpSpec:
    return OpSpec(tuple(fields), (), ("out",), attrs, infer)


_SDPA_ATTRS: dict[str, Any] = {
    "causal": False, "align": "top_left", "window": (None, None), "scale": None, "softcap": None,
    "max_seqlen_q": None, "max_seqlen_kv": None,
}
_TENSOR_OPTIONS = SdpaDesc._TENSOR_OPTIONS

OPS: dict[str, OpSpec] = {
    "sdpa": OpSpec(
        ("q", "k", "v"), _TENSOR_OPTIONS, SdpaDesc.OUTPUTS, {**_SDPA_ATTRS, "stats": False}, _attention),
    "sdpa_backward": OpSpec(
        ("q", "k", "v", "o", "do"), ("lse", *_TENSOR_OPTIONS, "dlse"), SdpaBwdDesc.OUTPUTS,
        {**_SDPA_ATTRS, "dbias": False, "dsink": False, "grads": ("q", "k", "v"), "deterministic": False},
        _attention_backward),
    "matmul": _primitive("xy", _matmul),
    "scale": _primitive("x", _same, value=1.0),
    "add": _primitive("xy", _elementwise),
    "sub": _primitive("xy", _elementwise),
    "mul": _primitive("xy", _elementwise),
    "softmax": _primitive("x", _same, axis=-1),
    "where": _primitive("xyz", _where),
    "mask_fill": _primitive("xy", _elementwise),
    "sigmoid": _primitive("x", _same),
    "tanh": _primitive("x", _same),
    "transpose": _primitive("x", _transpose, perm=()),
    "reshape": _primitive("x", _reshape, shape=()),
    "cast": _primitive("x", _cast, dtype=DType.F32),
    "sum_to": _primitive("x", _sum_to, shape=()),
    "softmax_backward": _primitive("xy", _result, axis=-1),
    "sigmoid_backward": _primitive("xy", _result),
    "tanh_backward": _primitive("xy", _result),
    "zeros_like": _primitive("x", _same),
    **{op: OpSpec(*row) for op, row in NSA_ROWS.items()},
}
ATTENTION = ("sdpa", "sdpa_backward")

