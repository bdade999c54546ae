"""Every case of the shared table and of the device's own, forward and backward, against the fp64 oracle."""

from __future__ import annotations

import harness
import pytest
import torch
from cases.model import Case
from device_cases import ALL_CASES

CASE_NAMES = [c.name for c in ALL_CASES]


RUNS = [(case, op) for case in ALL_CASES for op in case.ops]


@pytest.mark.parametrize(("case", "op"), RUNS, ids=[f"{case.name}-{op}" for case, op in RUNS])
def test_close_to_the_oracle(case: Case, op: str, compiled_ahead: None) -> None:
    harness.run_case(case, op)


def test_case_names_are_unique() -> None:
    assert len(set(CASE_NAMES)) == len(CASE_NAMES)


@pytest.mark.parametrize("d", [64, 128])
def test_fp32_is_true_fp32(d: int) -> None:
    """The error of fp32 inputs is far below what TF32 products would make of them (triton#5895)."""
    inputs = harness.dense_inputs(1, 2, 2, 512, 512, d, dtype=torch.float32)
    pair = harness.bind_pair(inputs)
    pair.run()
    q, k, v = (inputs[n].double() for n in "qkv")
    exact = torch.softmax(q @ k.mT * d**-0.5, -1) @ v
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        coarse = torch.softmax(inputs["q"] @ inputs["k"].mT * d**-0.5, -1) @ inputs["v"]
    finally:
        torch.set_float32_matmul_precision(before)
    ours, tf32 = ((x.double() - exact).abs().max().item() for x in (pair.results["o"], coarse))
    if torch.cuda.get_device_capability() >= (8, 0):
        assert tf32 > 1e-5, "the yardstick was not rounded to TF32, so it proves nothing"
    assert ours < tf32 / 10, f"error {ours:.2e}, TF32's is {tf32:.2e}"


def test_strided_outputs_do_not_write_beside_themselves() -> None:
    """dq, dk, dv as slices of one buffer, o as a slice of a wider one: what lies beside stays as it was."""
    inputs = harness.dense_inputs(2, 4, 4, 200, 200, 64)
    wide = torch.full((2, 4, 200, 64 + 16), 7.0, dtype=torch.bfloat16, device=harness.DEVICE)
    grads = torch.full(
        (2, 200, 4, 4, 64), 7.0, dtype=torch.bfloat16, device=harness.DEVICE
    )  # [B, S, 3 + 1, H, D]
    slices = {f"d{n}": grads[:, :, i].transpose(1, 2) for i, n in enumerate("qkv")}
    pair = harness.bind_pair(inputs, buffers={"o": wide[..., :64], **slices}, causal=True)
    pair.run()
    pair.check()
    assert torch.all(wide[..., 64:] == 7.0) and torch.all(grads[:, :, 3] == 7.0)


def test_poison_outside_the_sequences_does_not_leak() -> None:
    """NaN in padding rows of every operand, and in keys no query sees (flash-attention#1745)."""
    inputs = harness.dense_inputs(2, 4, 2, 257, 300, 64)
    inputs |= {
        "seq_len_q": torch.tensor([100, 257], dtype=torch.int32, device=harness.DEVICE),
        "seq_len_kv": torch.tensor([300, 70], dtype=torch.int32, device=harness.DEVICE),
    }
    clean = harness.bind_pair(inputs, causal=True)
    clean.run()
    dirty_inputs = {n: t.clone() for n, t in inputs.items()}
    for n in ("q", "do"):
        dirty_inputs[n][0, :, 100:] = float("nan")
    for n in ("k", "v"):
        dirty_inputs[n][1, :, 70:] = float("nan")
        dirty_inputs[n][0, :, 100:] = float("inf")  # causal from the top left: rows 0..99 see keys 0..99
    dirty = harness.bind_pair(dirty_inputs, causal=True)
    dirty.run()
    for name, t in clean.results.items():
        assert harness.same_bits(t, dirty.results[name]), name
