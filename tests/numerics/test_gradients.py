"""Gradients that are easily forgotten: of a broadcast bias, of a sink, and through lse; and the same bits
each time."""

from __future__ import annotations

import math
from typing import Any

import compare
import oracle
import pytest
import torch
from cases import run
from torch import Tensor

ENGINES = ("reference", "triton")
B, H, SQ, SK = 3, 2, 6, 5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def tensors(sq: int = SQ, sk: int = SK, hk: int = 1) -> dict[str, Tensor]:
    return {
        "q": randn(B, H, sq, 8),
        "k": randn(B, hk, sk, 8, seed=1),
        "v": randn(B, hk, sk, 8, seed=2),
        "do": randn(B, H, sq, 8, seed=3),
    }


BIASES = [
    (1, 1, 1, SK),
    (1, H, 1, SK),
    (1, 1, SQ, SK),
    (B, 1, 1, 1),
    (1, 1, 1, 1),
    (B, H, SQ, 1),
    (1, H, SQ, 1),
    (SQ, SK),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_dbias_is_the_sum_over_every_broadcast_axis(shape: tuple[int, ...], engine: str) -> None:
    """jax#30593: only [1, H, S, S] was accepted, or batch 1. Masked cells contribute exactly 0: a column that
    nobody sees has a gradient of 0, and a bias of another dtype gets one of its own."""
    mask = torch.ones(SQ, SK, dtype=torch.bool)
    mask[:, 2] = False
    got, _ = run.check(engine, **tensors(), bias=randn(*shape, seed=4), mask=mask)
    assert got["dbias"].shape == shape
    if shape[-1] == SK:
        assert bool((got["dbias"][..., 2] == 0).all())
    half, _ = run.check(engine, **tensors(), bias=randn(*shape, seed=4).bfloat16(), mask=mask)
    assert half["dbias"].dtype is torch.bfloat16


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", BIASES[:5], ids=str)
def test_deterministic_gradients_are_bit_equal(shape: tuple[int, ...], engine: str) -> None:
    """cudnn-frontend PR#707: dBias of a broadcast bias by atomics, in any order. (Under load on a GPU: the
    gpu suite.)"""
    options: dict[str, Any] = {"bias": randn(*shape, seed=4), "sink": randn(H, seed=5)}
    problem = run.problem_of(**tensors(), **options)
    fwd = run.forward(engine, problem.q, problem.k, problem.v, **options)
    runs = [
        run.backward(
            engine,
            problem.q,
            problem.k,
            problem.v,
            fwd["o"],
            problem.do,
            fwd["lse"],
            deterministic=True,
            **options,
        )
        for _ in range(3)
    ]
    for again in runs[1:]:
        for name, t in again.items():
            compare.assert_same(t, runs[0][name], name)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sequences_gradients_do_not_depend_on_its_neighbours(engine: str) -> None:
    """flash-attention PR#1870: batch order shuffled, results the same bits per sequence."""
    given = tensors()
    first = run.both(engine, run.problem_of(**given))
    order = [2, 0, 1]
    second = run.both(engine, run.problem_of(**{n: t[order].contiguous() for n, t in given.items()}))
    for name, t in first.items():
        compare.assert_same(second[name], t[order], name)


# ---- sink and lse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_dsink_includes_the_gradient_of_lse(engine: str) -> None:
    """flash-attention PR#2706: loss = (o * w).sum() + (lse * u).sum(), a sink per query head, grouped heads,
    rows that see nothing."""
    given, dlse = tensors(sq=7, sk=4), randn(B, H, 7, seed=6)
    got, ref = run.check(engine, **given, dlse=dlse, sink=randn(H, seed=5), causal=True, align="bottom_right")
    without = oracle.reference(
        run.problem_of(**given, sink=randn(H, seed=5), causal=True, align="bottom_right")
    )
    assert ref.dsink is not None and not torch.allclose(ref.dsink, without.dsink, atol=1e-2)
    # By autograd, too.
    naive = oracle.naive(
        run.problem_of(**given, dlse=dlse, sink=randn(H, seed=5), causal=True, align="bottom_right")
    )
    torch.testing.assert_close(got["dsink"].double(), naive.dsink, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_on_lse_alone(engine: str) -> None:
    """flash-attention#889: it had no gradient. dO is 0; dv must be, dq and dk must not."""
    given = {**tensors(), "do": torch.zeros(B, H, SQ, 8)}
    got, _ = run.check(engine, **given, dlse=randn(B, H, SQ, seed=6))
    assert bool((got["dv"] == 0).all()) and bool((got["dq"] != 0).any()) and bool((got["dk"] != 0).any())


@pytest.mark.parametrize("engine", ENGINES)
def test_dlse_of_an_empty_row_goes_nowhere(engine: str) -> None:
    """lse is -inf there whatever q is."""
    given, dlse = tensors(sq=7, sk=4), torch.full((B, H, 7), 1e4)
    got, ref = run.check(engine, **given, dlse=dlse, causal=True, align="bottom_right")
    assert bool((got["dq"][:, :, :3] == 0).all()) and bool((ref.lse[:, :, :3] == -math.inf).all())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sink_of_minus_infinity_is_none_and_of_infinity_takes_all(engine: str) -> None:
    given, dlse = tensors(), randn(B, H, SQ, seed=6)
    plain = run.both(engine, run.problem_of(**given, dlse=dlse))
    none, _ = run.check(engine, **given, dlse=dlse, sink=torch.full((H,), -math.inf))
    for name, t in plain.items():
        torch.testing.assert_close(none[name], t, rtol=1e-6, atol=1e-6)
    assert bool((none["dsink"] == 0).all())
    everything, _ = run.check(engine, **given, dlse=dlse, sink=torch.full((H,), math.inf))
    for name in ("o", "dq", "dk", "dv"):
        assert bool((everything[name] == 0).all()), name
    assert bool((everything["lse"] == math.inf).all())
    torch.testing.assert_close(everything["dsink"], dlse.sum((0, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", (*ENGINES, "torch_sdpa"))
@pytest.mark.parametrize("subset", [("q",), ("k",), ("v",), ("q", "v"), ("k", "v"), ("q", "k", "v")])
def test_a_subset_of_gradients_equals_the_full_run(subset: tuple[str, ...], engine: str) -> None:
    """pytorch#116350: what is not asked for is not computed, and the rest comes out the same."""
    from frost.graph import Graph

    given = tensors()
    fwd = run.forward(engine, given["q"], given["k"], given["v"])
    full = run.backward(engine, given["q"], given["k"], given["v"], fwd["o"], given["do"], fwd["lse"])
    buffers = {**given, "o": fwd["o"], "lse": fwd["lse"]}
    g = Graph()
    t = {n: g.tensor(n, tuple(x.shape), dtype=x.dtype) for n, x in buffers.items()}
    made = g.sdpa_backward(*(t[n] for n in ("q", "k", "v", "o", "do", "lse")), grads=subset)
    assert [n for n, x in made._asdict().items() if x is not None] == [f"d{n}" for n in subset]
    for n in subset:
        g.output(getattr(made, f"d{n}"), name=f"d{n}")
    got = g.compile("cpu", engines=[engine], gates="off").execute(buffers)
    for name, x in got.items():
        compare.assert_same(x, full[name], name)


def test_grouped_heads_add_up_in_fp32() -> None:
    """24 query heads per K/V head, in bf16: dk and dv are rounded once."""
    given = {
        "q": randn(1, 24, 5, 8),
        "k": randn(1, 1, 6, 8, seed=1),
        "v": randn(1, 1, 6, 8, seed=2),
        "do": randn(1, 24, 5, 8, seed=3),
    }
    for engine in ENGINES:
        run.check(engine, **{n: t.bfloat16() for n, t in given.items()})
