"""PyTorch's attention as an engine, on the device: every backend that a route may name, forward and backward."""

from __future__ import annotations

from typing import Any

import compare
import oracle
import pytest
import torch
from harness import DEVICE, dense_inputs, nan_like
from oracle import Problem

import frost

SHAPES = {  # b, hq, hk, sq, sk, d
    "mha": (2, 4, 4, 130, 130, 64), "gqa": (2, 8, 2, 128, 128, 128), "long keys": (1, 4, 4, 64, 200, 64),
    "d96": (1, 4, 4, 100, 100, 96), "d256": (1, 2, 2, 96, 96, 256), "d40": (1, 4, 4, 70, 70, 40)}


def _run(inputs: dict[str, torch.Tensor], causal: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Results of both directions and the routes' names; NotSupportedError where every backend declines."""
    forward = {n: t for n, t in inputs.items() if n != "do"}
    g = frost.Graph("forward")
    t = {n: g.tensor_like(n, x) for n, x in forward.items()}
    o, lse = g.sdpa(t["q"], t["k"], t["v"], causal=causal, stats=True)
    g.output(o, name="o")
    g.output(lse, name="lse")
    plan = g.compile(DEVICE, engines=["torch_sdpa"])
    out: dict[str, Any] = {"o": nan_like(inputs["do"]), "lse": torch.full(inputs["do"].shape[:3], float("nan"),
                                                                          device=DEVICE)}
    plan.execute({**forward, **out})
    g = frost.Graph("backward")
    saved = {**inputs, **out}
    t = {n: g.tensor_like(n, saved[n]) for n in ("q", "k", "v", "o", "do", "lse")}
    grads = g.sdpa_backward(*(t[n] for n in ("q", "k", "v", "o", "do", "lse")), causal=causal)
    for name in ("dq", "dk", "dv"):
        g.output(getattr(grads, name), name=name)
    back = g.compile(DEVICE, engines=["torch_sdpa"])
    given = {f"d{n}": nan_like(inputs[n]) for n in "qkv"}
    back.execute({**saved, **given})
    return {**out, **given}, [plan.routes[0].engine, back.routes[0].engine]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_what_a_backend_accepts_is_right_and_named(shape: str, dtype: torch.dtype, causal: bool) -> None:
    inputs = dense_inputs(*SHAPES[shape], dtype=dtype)
    try:
        results, engines = _run(inputs, causal)
    except frost.NotSupportedError as e:
        assert e.reasons["torch_sdpa"], "a decline without a reason"
        return
    assert all(e.startswith("torch_sdpa[") and e.endswith("]") for e in engines), engines
    x = {n: t.cpu() for n, t in inputs.items()}
    problem = Problem(x["q"], x["k"], x["v"], x["do"], options={"causal": causal})
    saved = (results["o"].cpu(), results["lse"].cpu())
    plain, grads = oracle.plain_composition(problem), oracle.plain_composition(problem, saved)
    plain.dq, plain.dk, plain.dv = grads.dq, grads.dk, grads.dv
    compare.assert_answer(results, problem, plain=plain, context=f"{shape}, {engines}")


def test_half_precision_is_served() -> None:
    """The sweep above may not pass by declining everything."""
    for dtype in (torch.float16, torch.bfloat16):
        _, engines = _run(dense_inputs(*SHAPES["mha"], dtype=dtype), True)
        assert all(e.startswith("torch_sdpa[") for e in engines)
