"""The primitive ops on the reference engine: values, gradients where a backward exists, dtypes, masked softmax rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from descriptors import PointwiseDesc, TensorDesc
from descriptors.ops import PRIMITIVES
from engines.base import Launch, PointwiseDsl, Target, Workspace
from engines.reference import ENGINE
from engines.reference import primitives as reference_primitives

CPU = Target.cpu()


def run(kind: str, *inputs: Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None,
        **fields: Any) -> Tensor:
    out = torch.full(shape or inputs[0].shape, math.nan, dtype=torch.float64).to(dtype or inputs[0].dtype)
    descs = [TensorDesc.make(x.shape, x.dtype, x.stride()) for x in inputs] + [None] * (3 - len(inputs))
    desc = PointwiseDesc(kind, *descs, TensorDesc.make(out.shape, out.dtype), **fields)
    adapter = ENGINE.adapter(PointwiseDsl)
    assert adapter.check_support(desc, CPU).ok
    operands = {**dict(zip(("x", "y", "z"), inputs)), "out": out}
    adapter.execute(adapter.compile(desc, CPU), Launch(desc, operands), Workspace(None, {}))
    return out


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


EXPECTED = {
    "matmul": lambda: (run("matmul", x(2, 3, 4), x(4, 5), shape=(2, 3, 5)), x(2, 3, 4) @ x(4, 5)),
    "scale": lambda: (run("scale", x(3, 4), value=-2.5), x(3, 4) * -2.5),
    "add": lambda: (run("add", x(3, 4), x(1, 4)), x(3, 4) + x(1, 4)),
    "sub": lambda: (run("sub", x(3, 4), x(1, 4)), x(3, 4) - x(1, 4)),
    "mul": lambda: (run("mul", x(3, 4), x(3, 1)), x(3, 4) * x(3, 1)),
    "softmax": lambda: (run("softmax", x(3, 4), axis=0), torch.softmax(x(3, 4), 0)),
    "where": lambda: (run("where", x(3, 4) > 0, x(3, 4), x(1, 4), dtype=torch.float64),
                      torch.where(x(3, 4) > 0, x(3, 4), x(1, 4))),
    "mask_fill": lambda: (run("mask_fill", x(3, 4), x(3, 4) > 0), x(3, 4).masked_fill(x(3, 4) <= 0, -math.inf)),
    "sigmoid": lambda: (run("sigmoid", x(3, 4)), torch.sigmoid(x(3, 4))),
    "tanh": lambda: (run("tanh", x(3, 4)), torch.tanh(x(3, 4))),
    "transpose": lambda: (run("transpose", x(2, 3, 4), perm=(2, 0, 1), shape=(4, 2, 3)), x(2, 3, 4).permute(2, 0, 1)),
    "reshape": lambda: (run("reshape", x(2, 6).t(), shape=(3, 4)), x(2, 6).t().reshape(3, 4)),
    "cast": lambda: (run("cast", x(3, 4), dtype=torch.float16), x(3, 4).half()),
    "sum_to": lambda: (run("sum_to", x(2, 3, 4), shape=(3, 1)), x(2, 3, 4).sum((0, 2)).reshape(3, 1)),
    "zeros_like": lambda: (run("zeros_like", x(3, 4)), torch.zeros(3, 4, dtype=torch.float64)),
    "softmax_backward": lambda: _backward("softmax", torch.softmax, -1),
    "sigmoid_backward": lambda: _backward("sigmoid", torch.sigmoid),
    "tanh_backward": lambda: _backward("tanh", torch.tanh),
}


def _backward(kind: str, forward: Any, *args: int) -> tuple[Tensor, Tensor]:
    leaf, dy = x(3, 4).requires_grad_(), x(4, 3).t()
    y = forward(leaf, *args)
    fields = {"axis": args[0]} if args else {}
    return run(f"{kind}_backward", y.detach(), dy, **fields), torch.autograd.grad(y, leaf, dy)[0]


@pytest.mark.parametrize("kind", sorted(PRIMITIVES))
def test_primitive_equals_torch(kind: str) -> None:
    got, want = EXPECTED[kind]()
    torch.testing.assert_close(got, want)


def test_every_primitive_has_a_function() -> None:
    assert set(reference_primitives.PRIMITIVES) == set(PRIMITIVES)


def test_a_softmax_row_without_keys_is_zero_and_passes_no_gradient() -> None:
    scores = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
    p = run("softmax", scores, axis=-1)
    assert p.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    dp = torch.tensor([[math.nan, math.inf], [1.0, math.nan]])
    assert run("softmax_backward", p, dp, axis=-1).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_softmax_over_no_element() -> None:
    assert run("softmax", x(3, 0), axis=-1).shape == (3, 0)


def test_half_precision_is_computed_in_fp32() -> None:
    a, b = (x(4, 512).to(torch.bfloat16), x(512, 4).to(torch.bfloat16))
    torch.testing.assert_close(run("matmul", a, b, shape=(4, 4)), (a.double() @ b.double()).to(torch.bfloat16))


def test_moving_ops_change_no_bit() -> None:
    ints = torch.tensor([[2**53 + 1, 3], [5, 7]])
    assert torch.equal(run("transpose", ints, perm=(1, 0), shape=(2, 2)), ints.t())
