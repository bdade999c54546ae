"""FROST against PyTorch's MATH attention and FlexAttention, both in fp64, forward and every gradient.

The reference in fp64 must agree to fp64's rounding. The interpreted Triton kernels, in fp32 and bf16, are
held to the tolerance rule with the peer's answer in the oracle's place.
"""

from __future__ import annotations

import dataclasses
import functools

import compare
import oracle
import pytest
import pytorch_peers as peers
import torch
from attention_table import ROWS, Row, problem
from cases import run
from oracle import Answer

ASKED = [
    pytest.param(peer, row, id=f"{peer}-{row.name}")
    for peer, can_say in peers.PEERS.items()
    for row in ROWS
    if can_say(row)
]
# 16 bits change how a kernel rounds, not what it computes: one row of each kind.
NARROW = {
    "plain",
    "causal bottom_right 9x13",
    "dims 192/128",
    "softcap causal grouped",
    "bias [2, 2, 9, 13]",
    "mask",
    "lengths",
    "sink window grouped",
}
KERNELS = [pytest.param(row, torch.float32, id=f"fp32-{row.name}") for row in ROWS] + [
    pytest.param(row, torch.bfloat16, id=f"bf16-{row.name}") for row in ROWS if row.name in NARROW
]
# fp64's unit roundoff is 1.1e-16; sums here have up to some hundred terms of size 1 to 10, in another order.
FP64 = 1e-12


pytestmark = pytest.mark.usefixtures("flex_on_the_cpu")


@functools.cache
def said_by(peer: str, row: Row, narrow: bool) -> dict[str, torch.Tensor]:
    """The peer's answer by name. `narrow`: to the problem rounded to bf16; fp32 and fp64 hold the same
    values."""
    return dict(peers.answer(peer, row, problem(row, torch.bfloat16 if narrow else torch.float64)).items())


@pytest.mark.parametrize(("peer", "row"), ASKED)
def test_reference_agrees_in_fp64(peer: str, row: Row) -> None:
    said, asked = said_by(peer, row, False), problem(row, torch.float64)
    if "lse" not in said:
        asked = dataclasses.replace(asked, dlse=None)
    got = run.both("reference", asked, **asked.options)
    assert set(got) - set(said) <= {"lse"}
    for name, want in said.items():
        torch.testing.assert_close(
            got[name],
            want,
            rtol=FP64,
            atol=FP64,
            msg=lambda text, name=name: f"{name} of {row} against {peer}: {text}",
        )


@pytest.mark.parametrize(("row", "dtype"), KERNELS)
def test_interpreted_kernels_agree(row: Row, dtype: torch.dtype) -> None:
    """Against FlexAttention, which has lse and takes its gradient."""
    said, asked = said_by("flex block mask", row, dtype == torch.bfloat16), problem(row, dtype)
    got = run.both("triton", asked, **asked.options)
    assert set(got) == set(said)
    given = run.problem_of(asked.q, asked.k, asked.v, asked.do, asked.dlse, **asked.options)
    # Both backwards start from the o and lse that the kernels made (see engines/reference/plain.py).
    plain = oracle.plain_composition(given, saved=(got["o"], got["lse"]))
    compare.assert_answer(got, given, ref=Answer(**said), plain=plain, context=str(row))
