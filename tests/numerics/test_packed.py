"""Packed sequences, one by one against each other: empty ones anywhere, gaps, more sequences than tokens."""

from __future__ import annotations

from typing import Any

import compare
import oracle
import pytest
import torch
from cases import run
from torch import Tensor

import frost

ENGINES = ("reference", "triton")

BATCHES: dict[str, tuple[list[int], list[int], int, int]] = {  # cu_q, cu_kv, Hq, Hk
    "empty on either side": ([0, 0, 3, 5, 5], [0, 4, 6, 7, 11], 4, 2),
    "one token each, one without": ([0, 1, 1, 2], [0, 1, 2, 3], 9, 3),
    "no keys": ([0, 2, 5], [0, 0, 0], 2, 1),
    "no queries": ([0, 0, 0], [0, 2, 5], 2, 1),
    "nothing at all": ([0, 0, 0], [0, 0, 0], 2, 2),
    "more sequences than tokens": ([0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 2, 2, 2, 2, 3, 3], 2, 2),
    "over a tile": ([0, 33, 34, 70], [0, 31, 66, 66], 2, 1),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("band", [{}, {"causal": True}, {"causal": True, "align": "bottom_right"}], ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_every_sequence_is_as_if_alone(name: str, band: dict[str, Any], engine: str) -> None:
    """flash-attention#2562: empty query segments crash the backward, empty key segments hang it or give NaN.
    A loop over the sequences, each by the dense oracle, forward and backward; outputs start as NaN. Gaps of 2
    and 3 tokens around."""
    cu_q, cu_kv, hq, hk = BATCHES[name]
    shift = [2, 3]
    q, do = randn(cu_q[-1] + 5, hq, 8), randn(cu_q[-1] + 5, hq, 8, seed=1)
    k, v = randn(cu_kv[-1] + 4, hk, 8, seed=2), randn(cu_kv[-1] + 4, hk, 8, seed=3)
    dlse = randn(cu_q[-1] + 5, hq, seed=4)
    offsets = {
        "cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32) + shift[0],
        "cu_seqlens_kv": torch.tensor(cu_kv, dtype=torch.int32) + shift[1],
    }
    problem = run.problem_of(q, k, v, do, dlse, **offsets, **band)
    got = run.both(engine, problem, **offsets, **band)

    want = {
        "o": torch.zeros(q.shape),
        "lse": torch.full(dlse.shape, -torch.inf),
        "dq": torch.zeros(q.shape),
        "dk": torch.zeros(k.shape),
        "dv": torch.zeros(v.shape),
    }
    want = {n: t.double() for n, t in want.items()}
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:]):
        rows, keys = slice(a + shift[0], b + shift[0]), slice(c + shift[1], d + shift[1])
        alone = run.problem_of(
            *(t[s].transpose(0, 1)[None] for t, s in ((q, rows), (k, keys), (v, keys), (do, rows))),
            dlse[rows].T[None],
            **band,
        )
        for n, t in oracle.reference(alone).items():
            want[n][keys if n in ("dk", "dv") else rows] = t[0].transpose(0, 1)
    ref = oracle.Answer(**want)
    compare.assert_answer(got, problem, ref=ref, context=f"{name} on {engine}")
    outside = torch.ones(q.shape[0], dtype=torch.bool)
    outside[shift[0] : shift[0] + cu_q[-1]] = False
    assert bool((got["o"][outside] == 0).all()) and bool((got["lse"][outside] == -torch.inf).all())
    assert bool((got["dq"][outside] == 0).all())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sinks_gradient_leaves_padding_out(engine: str) -> None:
    """Tokens outside the offsets have no share in dSink, and no sink in their lse."""
    q, do, dlse = randn(9, 2, 8), randn(9, 2, 8, seed=1), randn(9, 2, seed=2)
    k, v, sink = randn(8, 2, 8, seed=3), randn(8, 2, 8, seed=4), randn(2, seed=5)
    offsets = {"cu_seqlens_q": torch.tensor([2, 2, 6]), "cu_seqlens_kv": torch.tensor([0, 4, 7])}
    got, _ = run.check(engine, q, k, v, do, dlse, sink=sink, **offsets)
    dlse[:2], dlse[6:], do[:2], do[6:] = 1e4, 1e4, 1e4, 1e4
    again = run.both(engine, run.problem_of(q, k, v, do, dlse, sink=sink, **offsets), sink=sink, **offsets)
    for name in ("dsink", "dk", "dv", "dq"):
        compare.assert_same(again[name], got[name], name)
    assert bool((got["lse"][:2] == -torch.inf).all())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_statistics_of_one_sequence_are_not_overwritten_by_another(engine: str) -> None:
    """flash-attention#2842: an early exit wrote -inf into another sequence's lse. Needs several sequences
    whose rows share a tile."""
    q, k, v = randn(40, 2, 8), randn(30, 2, 8, seed=1), randn(30, 2, 8, seed=2)
    cu_q, cu_kv = torch.tensor([0, 7, 7, 14, 21, 40]), torch.tensor([0, 5, 10, 10, 10, 30])
    got = run.forward(engine, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    empty = torch.zeros(40, dtype=torch.bool)
    empty[7:21] = True
    assert bool((got["lse"][empty] == -torch.inf).all()) and bool(got["lse"][~empty].isfinite().all())


@pytest.mark.parametrize("engine", [None, ["reference"], ["triton"]])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_a_packed_bias_or_mask_smaller_than_a_sequence_is_refused_on_every_engine(
    name: str, engine: list[str] | None,
) -> None:
    """The offsets are on the CPU, where reading them is free: one error, whoever would have served."""
    q, k = torch.randn(16, 2, 8), torch.randn(12, 2, 8)
    cu_q, cu_kv = torch.tensor([0, 4, 16], dtype=torch.int32), torch.tensor([0, 2, 12], dtype=torch.int32)
    pair = torch.randn(2, 5, 12) if name == "bias" else torch.ones(2, 5, 12, dtype=torch.bool)
    with pytest.raises(frost.BindError, match=rf"cu_seqlens_q\[2\].*12 tokens.*at most the 5 rows of {name}"):
        frost.attention(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, engines=engine, **{name: pair})
