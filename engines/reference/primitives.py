"""The primitive ops in plain torch: op name -> function. What does not fuse into attention runs here.

Every function takes the node's record and its inputs and returns a tensor of the output's shape; the caller casts it
to the output's dtype. Arithmetic is in fp32 (fp64 where an input is fp64), with matrix products in true fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from descriptors import PointwiseDesc

from .sdpa import compute_dtype_for

__all__ = ["PRIMITIVES", "run_primitive"]

Primitive = Callable[..., Tensor]


def _matmul(desc: PointwiseDesc, a: Tensor, b: Tensor) -> Tensor:
    dtype = compute_dtype_for(a)
    return torch.matmul(a.to(dtype), b.to(dtype))


def _softmax(desc: PointwiseDesc, x: Tensor) -> Tensor:
    """A row that is all -inf has no weights: zeros."""
    axis = _axis(desc)
    if x.shape[axis] == 0:
        return x
    top = x.amax(axis, keepdim=True)
    e = torch.exp(x - top.masked_fill(top == -math.inf, 0.0))
    total = e.sum(axis, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


def _softmax_backward(desc: PointwiseDesc, p: Tensor, dp: Tensor) -> Tensor:
    """p * (dp - sum(p * dp)), where a weight of exactly 0 (masked) contributes nothing, whatever dp holds there."""
    masked = p == 0
    weighted = (p * dp).masked_fill(masked, 0.0)
    return (weighted - p * weighted.sum(_axis(desc), keepdim=True)).masked_fill(masked, 0.0)


def _axis(desc: PointwiseDesc) -> int:
    return -1 if desc.axis is None else desc.axis


def _out_shape(desc: PointwiseDesc) -> tuple[int, ...]:
    """The output's extents: the record of a launch has every symbol bound."""
    return tuple(int(d) for d in desc.out.shape)  # type: ignore[arg-type]


def _where(desc: PointwiseDesc, mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(mask, a, b)


def _sum_to(desc: PointwiseDesc, x: Tensor) -> Tensor:
    """Sum over the axes along which the output was broadcast to x's shape."""
    shape = _out_shape(desc)
    lead = x.dim() - len(shape)
    axes = [*range(lead), *(lead + i for i, extent in enumerate(shape) if extent == 1 and x.shape[lead + i] != 1)]
    # Without axes torch would sum over all of them.
    return x.sum(axes, keepdim=True).reshape(shape) if axes else x


PRIMITIVES: Mapping[str, Primitive] = {
    "matmul": _matmul,
    "scale": lambda desc, x: x * _value(desc),
    "add": lambda desc, x, y: x + y,
    "sub": lambda desc, x, y: x - y,
    "mul": lambda desc, x, y: x * y,
    "softmax": _softmax,
    "where": _where,
    "mask_fill": lambda desc, x, mask: torch.where(mask, x, -math.inf),
    "sigmoid": lambda desc, x: torch.sigmoid(x),
    "tanh": lambda desc, x: torch.tanh(x),
    "transpose": lambda desc, x: x.permute(desc.perm),
    "reshape": lambda desc, x: x.reshape(_out_shape(desc)),
    "cast": lambda desc, x: x,
    "sum_to": _sum_to,
    "softmax_backward": _softmax_backward,
    "sigmoid_backward": lambda desc, y, dy: dy * y * (1 - y),
    "tanh_backward": lambda desc, y, dy: dy * (1 - y * y),
    "zeros_like": lambda desc, x: torch.zeros_like(x),
}

# These move values and must not change one, so they skip the trip through the compute dtype.
_MOVES = frozenset({"transpose", "reshape", "cast", "zeros_like"})


def _value(desc: PointwiseDesc) -> float:
    return 1.0 if desc.value is None else desc.value


def run_primitive(desc: PointwiseDesc, inputs: tuple[Tensor, ...], out: Tensor) -> None:
    """Compute the op `desc.kind` of `inputs` (x, y, z as far as the op has them) into `out`, in out's dtype."""
    with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
        if desc.kind not in _MOVES:
            inputs = tuple(_widened(x, inputs) for x in inputs)
        out.copy_(PRIMITIVES[desc.kind](desc, *inputs))


def _widened(x: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    if not x.is_floating_point():
        return x
    wide: Any = torch.float64 if any(t.dtype == torch.float64 for t in inputs) else torch.float32
    return x.to(wide)
