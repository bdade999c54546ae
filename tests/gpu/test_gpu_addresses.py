"""Addresses: offsets past 2**31 elements, grids past 65,535, pointers and pitches that are not aligned."""

from __future__ import annotations

import harness
import pytest
import torch
from torch import Tensor

from frost.errors import BindError

FAR = 2**30 + 16  # a row pitch below 2**31 whose third row lies past it
MAIN = ("q", "k", "v", "o", "do", "dq", "dk", "dv")


def far_rows(t: Tensor) -> Tensor:
    """[1, 1, 3, D] with rows 2**30 + 16 elements apart. Only the rows that are used are ever touched."""
    buffer = torch.empty(2 * FAR + t.shape[-1], dtype=t.dtype, device=t.device)
    view = buffer.as_strided(t.shape, (1, 1, FAR, 1))
    view.copy_(t)
    return view


@pytest.mark.parametrize("far", MAIN)
def test_rows_past_two_to_the_31(far: str) -> None:
    """A large row pitch alone takes an offset past 2**31 (flash-linear-attention#1080)."""
    inputs = harness.dense_inputs(1, 1, 1, 3, 3, 8, dtype=torch.float16)
    near = harness.bind_pair(inputs)
    near.run()
    near.check("contiguous")
    buffers = {}
    if far in inputs:
        moved = {**inputs, far: far_rows(inputs[far])}
    else:
        moved, buffers = inputs, {far: far_rows(harness.nan_like(near.results[far]))}
    # o and lse are laid out like do unless they are given
    buffers.setdefault("o", torch.full_like(inputs["do"], float("nan")).contiguous())
    pair = harness.bind_pair(moved, buffers=buffers)
    pair.run()
    pair.check(f"{far} far apart")


def test_lse_rows_past_two_to_the_31() -> None:
    inputs = harness.dense_inputs(1, 1, 1, 3, 3, 8, dtype=torch.float16)
    buffer = torch.empty(2 * FAR + 1, dtype=torch.float32, device=harness.DEVICE)
    lse = buffer.as_strided((1, 1, 3), (1, 1, FAR))
    lse.fill_(float("nan"))
    pair = harness.bind_pair(inputs, buffers={"lse": lse})
    pair.run()
    pair.check()


@pytest.mark.parametrize("shape", [(1, 1, 3, 40), (1, 1, 3, 1)], ids=["matrix", "column"])
def test_bias_rows_past_two_to_the_31(shape: tuple[int, ...]) -> None:
    inputs = harness.dense_inputs(1, 1, 1, 3, 40, 8, dtype=torch.float16)
    inputs["bias"] = far_rows(harness.randn(*shape, dtype=torch.float16, seed=9))
    pair = harness.bind_pair(
        inputs,
        buffers={
            "dbias": far_rows(torch.full(shape, float("nan"), dtype=torch.float16, device=harness.DEVICE))
        },
    )
    pair.run()
    pair.check()


def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    """Dense tensors of 2.2e9 elements: the last batch is right, and so is the first."""
    b, h, s, d = 66, 64, 4096, 128
    need = 9 * b * h * s * d * 2
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need >> 30} GiB of free device memory")
    one = harness.dense_inputs(1, 1, 1, s, s, d)
    inputs = {n: torch.zeros(b, h, s, d, dtype=torch.bfloat16, device=harness.DEVICE) for n in one}
    for n, t in one.items():
        inputs[n][0, 0], inputs[n][-1, -1] = t[0, 0], t[0, 0]
    options = {"causal": True, "window": (64, None)}
    small, large = harness.bind_pair(one, **options), harness.bind_pair(inputs, **options)
    small.run()
    large.run()
    for name, t in small.results.items():
        for at in ((0, 0), (b - 1, h - 1)):
            assert harness.same_bits(large.results[name][at], t[0, 0]), f"{name} at {at}"
    del inputs, large
    torch.cuda.empty_cache()


def _batched_reference(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """fp64 by autograd over every (batch, head) at once; only for tiny sequences."""
    q, k, v = (inputs[n].double().requires_grad_() for n in "qkv")
    s = q @ k.mT * q.shape[-1] ** -0.5
    o = torch.softmax(s, -1) @ v
    grads = torch.autograd.grad(o, (q, k, v), inputs["do"].double())
    return {"o": o.detach(), "lse": torch.logsumexp(s, -1).detach(), **dict(zip(harness.GRADS, grads))}


@pytest.mark.parametrize("seqlen", [1, 2])
@pytest.mark.parametrize(("b", "h"), [(65536, 1), (1, 65536), (256, 256), (3, 65537)])
def test_batch_and_head_counts_past_a_grid_axis(b: int, h: int, seqlen: int) -> None:
    """No row is skipped and nothing is refused where batch or heads pass 65,535 (pytorch#146704)."""
    inputs = harness.dense_inputs(b, h, h, seqlen, seqlen, 8, dtype=torch.float16)
    pair = harness.bind_pair(inputs)
    pair.run()
    exact = _batched_reference(inputs)
    for name, want in exact.items():
        got = pair.results[name]
        assert not torch.isnan(got).any(), f"{name}: rows were left unwritten"
        # Products of 8 normal numbers in fp16 with fp32 sums: 2e-3 is two roundings of numbers up to 2.
        error = ((got.double() - want).abs() / want.abs().clamp(min=1)).flatten(2).amax(-1).flatten()
        n = b * h
        for at in (0, min(65534, n - 1), min(65535, n - 1), n - 1):
            assert error[at] <= 4e-3, f"{name}: (batch, head) number {at} is off by {error[at]:.2e}"
        assert error.max() <= 8e-3, (
            f"{name}: (batch, head) number {int(error.argmax())} is off by {error.max():.2e}"
        )


def test_more_than_65536_packed_sequences() -> None:
    n = 65537
    offsets = list(range(n + 1))
    inputs = harness.packed_inputs(n, n, 1, 1, 8, offsets, offsets, dtype=torch.float16)
    pair = harness.bind_pair(inputs)
    pair.run()
    # Every sequence is one token: o = v, dv = dO, and no gradient of a softmax over one key.
    torch.testing.assert_close(pair.results["o"], inputs["v"], rtol=0, atol=0)
    torch.testing.assert_close(pair.results["dv"], inputs["do"], rtol=0, atol=0)
    for name in ("dq", "dk"):
        assert pair.results[name].abs().max() <= 1e-2, name


def _shifted(t: Tensor, offset: int) -> Tensor:
    """The same values, `offset` elements past an aligned address."""
    buffer = torch.empty(t.numel() + 16, dtype=t.dtype, device=t.device)
    view = buffer[offset : offset + t.numel()].view(t.shape)
    view.copy_(t)
    return view


@pytest.mark.parametrize("order", ["aligned first", "misaligned first"])
@pytest.mark.parametrize("offset", range(1, 9))
def test_misaligned_pointers(offset: int, order: str) -> None:
    """What was found out about one pointer is not assumed of the next (pytorch PR#187506, pytorch#112577)."""
    inputs = harness.dense_inputs(1, 2, 2, 65, 65, 64)
    shifted = {n: _shifted(t, offset) for n, t in inputs.items()}
    pairs = [harness.bind_pair(inputs), harness.bind_pair(shifted)]
    for pair in pairs if order == "aligned first" else reversed(pairs):
        pair.run()
    for pair in pairs:
        pair.check(order)


def test_an_aligned_plan_refuses_a_misaligned_pointer() -> None:
    inputs = harness.dense_inputs(1, 2, 2, 65, 65, 64)
    o = harness.nan_like(inputs["q"])
    plan = harness.forward_plan({n: inputs[n] for n in "qkv"}, {"o": o})
    with pytest.raises(BindError, match=r"'k'.*16-byte aligned.*alignment="):
        plan.bind({"q": inputs["q"], "k": _shifted(inputs["k"], 1), "v": inputs["v"], "o": o})
    assert torch.isnan(o).all()


@pytest.mark.parametrize("shape", [(1, 1, 5, 5), (1, 1, 65, 67), (1, 2, 1, 67)])
def test_bias_rows_of_odd_length(shape: tuple[int, ...]) -> None:
    """fp16 bias rows whose starts are not aligned to anything."""
    sq, sk = (5, 5) if shape[-1] == 5 else (65, 67)
    inputs = harness.dense_inputs(1, 2, 2, sq, sk, 64, dtype=torch.float16)
    inputs["bias"] = _shifted(harness.randn(*shape, dtype=torch.float16, seed=9), 1)
    pair = harness.bind_pair(inputs, causal=True)
    pair.run()
    pair.check()


def test_packed_projection_with_an_odd_pitch() -> None:
    """q, k, v as slices of one buffer whose row pitch is odd (D = 40, plus one)."""
    projection = harness.randn(2, 70, 3 * 2 * 40 + 1)
    q, k, v = (
        projection[..., i * 80 : (i + 1) * 80].unflatten(-1, (2, 40)).transpose(1, 2) for i in range(3)
    )
    pair = harness.bind_pair({"q": q, "k": k, "v": v, "do": harness.randn(2, 2, 70, 40, seed=5)}, causal=True)
    pair.run()
    pair.check()
