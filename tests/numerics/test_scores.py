"""Scores: scale of the logical head dim, softcap that cannot overflow, statistics of extreme size."""

from __future__ import annotations

import math

import compare
import oracle
import pytest
import torch
from cases import run
from torch import Tensor

ENGINES = ("reference", "triton")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("raw", "capped"),
    [
        (4400.0, 50.0),
        (5000.0, 50.0),
        (-10000.0, -50.0),
        (0.0, 0.0),
        (1e30, 50.0),
        (30.0, 50 * math.tanh(0.6)),
    ],
)
def test_softcap_of_large_scores(raw: float, capped: float, engine: str) -> None:
    """vllm#56578: tanh as (e^x - e^-x) / (e^x + e^-x) is inf / inf beyond 88. One key: lse is the score
    itself."""
    got = run.forward(
        engine,
        torch.ones(1, 1, 1, 1),
        torch.full((1, 1, 1, 1), raw),
        torch.ones(1, 1, 1, 1),
        scale=1.0,
        softcap=50.0,
    )
    torch.testing.assert_close(got["lse"], torch.full((1, 1, 1), capped), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_softcap_gradient_where_the_cap_bites(engine: str) -> None:
    """Raw scores about 3 c, a row that sees nothing, and bias after the cap: 1 - tanh^2 is that of the raw
    score, it scales dq and dk but not dBias."""
    q, k, v, do = (
        randn(1, 2, 6, 8) * 3,
        randn(1, 2, 7, 8, seed=1) * 3,
        randn(1, 2, 7, 8, seed=2),
        randn(1, 2, 6, 8, seed=3),
    )
    mask = torch.ones(6, 7, dtype=torch.bool)
    mask[2] = False
    _, ref = run.check(engine, q, k, v, do, softcap=3.0, scale=1.0, mask=mask, bias=randn(1, 2, 6, 7, seed=4))
    assert ref.dbias is not None and bool(ref.dbias.isfinite().all())


@pytest.mark.parametrize("engine", ENGINES)
def test_softcap_0_is_off(engine: str) -> None:
    q, k, v, do = (
        randn(1, 1, 3, 8),
        randn(1, 1, 4, 8, seed=1),
        randn(1, 1, 4, 8, seed=2),
        randn(1, 1, 3, 8, seed=3),
    )
    off, none = (run.both(engine, run.problem_of(q, k, v, do), softcap=c) for c in (0.0, None))
    for name, t in off.items():
        compare.assert_same(t, none[name], name)


@pytest.mark.parametrize("engine", (*ENGINES, "torch_sdpa"))
@pytest.mark.parametrize("d", [1, 8, 40, 80, 96, 160, 192])
def test_the_default_scale_is_that_of_the_logical_head_dim(d: int, engine: str) -> None:
    """cudnn-frontend PR#493: 96 was padded to 128 and then 1 / sqrt(128) taken; 0.10206, not 0.08839.
    Forward, backward, and packed. The columns beyond D are NaN on the way in and canaries on the way out."""
    from layouts import check_canaries, lay_out, output_like

    q, k, v, do = (randn(1, 2, s, d, seed=i) for i, s in enumerate((5, 6, 6, 5)))
    q, k, v, do = (lay_out(t, "padded_pitch_8") for t in (q, k, v, do))
    given = run.both(engine, run.problem_of(q, k, v, do), scale=d**-0.5)
    outs = {
        n: output_like(t.shape, t.dtype, "padded_pitch_8", name=n)
        for n, t in {"o": q, "dq": q, "dk": k, "dv": v}.items()
    }
    fwd = run.forward(engine, q, k, v, out={"o": outs["o"].tensor})
    default = {
        **fwd,
        **run.backward(
            engine, q, k, v, fwd["o"], do, fwd["lse"], out={n: outs[n].tensor for n in ("dq", "dk", "dv")}
        ),
    }
    check_canaries(*outs.values())
    for name, t in default.items():
        compare.assert_same(t, given[name], name)
    problem = run.problem_of(q, k, v, do)
    compare.assert_answer(default, problem, ref=oracle.reference(problem))
    if engine != "torch_sdpa":
        cu = {"cu_seqlens_q": torch.tensor([0, 5]), "cu_seqlens_kv": torch.tensor([0, 6])}
        packed = run.forward(engine, *(t[0].transpose(0, 1) for t in (q, k, v)), **cu)
        torch.testing.assert_close(packed["o"].transpose(0, 1)[None], default["o"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sk", [127, 128, 129])
@pytest.mark.parametrize("score", [-1e3, -1e4, 1e5])
def test_backward_of_one_row_with_statistics_of_extreme_size(score: float, sk: int, engine: str) -> None:
    """cudnn-frontend#1072: the other rows of its tile are padding, and exp(0 - (-1e4)) is inf there. All
    gradients finite and right, from the engine's own statistics. Eight heads, since dq hangs on the rounding
    of a single row's o."""
    dtype = torch.bfloat16
    q, v, do = (
        torch.ones(1, 8, 1, 64, dtype=dtype),
        randn(1, 8, sk, 64, dtype=dtype),
        randn(1, 8, 1, 64, seed=1, dtype=dtype),
    )
    k = torch.full((1, 8, sk, 64), score / 8, dtype=dtype)
    got, _ = run.check(engine, q, k, v, do, context=f"scores {score}")
    assert all(bool(t.isfinite().all()) for t in got.values())
    # Declaring the full lengths hid it.
    full = {"seq_len_q": torch.tensor([1]), "seq_len_kv": torch.tensor([sk])}
    padded = run.both(engine, run.problem_of(q, k, v, do), **full)
    for name, t in got.items():
        torch.testing.assert_close(padded[name], t)


@pytest.mark.parametrize("engine", ENGINES)
def test_fp32_is_not_tf32(engine: str) -> None:
    """triton#5895: TF32 keeps 10 bits, an error of 5e-4 here; the tolerance's floor is 2e-5."""
    q, k, v, do = (randn(1, 1, s, 64, seed=i) for i, s in enumerate((33, 40, 40, 33)))
    got, ref = run.check(engine, q, k, v, do)
    assert (got["o"].double() - ref.o).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_interpreted_products_of_16_bit_values_are_products_of_their_values(dtype: torch.dtype) -> None:
    """triton#11584: the interpreter multiplied bf16's raw bits. 3 * 5 is 15, not what the bit patterns
    give."""
    q, k = torch.full((1, 1, 1, 1), 3.0, dtype=dtype), torch.full((1, 1, 1, 1), 5.0, dtype=dtype)
    got = run.forward("triton", q, k, torch.full((1, 1, 1, 1), 7.0, dtype=dtype), scale=1.0)
    assert got["lse"].item() == pytest.approx(15.0, abs=1e-5) and got["o"].item() == 7.0


SIZES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("sq", SIZES)
def test_every_pair_of_sizes_on_the_reference(sq: int) -> None:
    for sk in SIZES:
        run.check(
            "reference",
            randn(1, 2, sq, 4),
            randn(1, 1, sk, 4, seed=1),
            randn(1, 1, sk, 4, seed=2),
            randn(1, 2, sq, 4, seed=3),
            causal=True,
            align="bottom_right",
            context=f"{sq} x {sk}",
        )


@pytest.mark.parametrize("sq", SIZES)
def test_pairs_of_sizes_on_the_interpreted_kernels(sq: int) -> None:
    """Each size with its mirror in the list, so that every one meets a long and a short other side."""
    sk = SIZES[-1 - SIZES.index(sq)]
    run.check(
        "triton",
        randn(1, 1, sq, 4),
        randn(1, 1, sk, 4, seed=1),
        randn(1, 1, sk, 4, seed=2),
        randn(1, 1, sq, 4, seed=3),
        causal=True,
        align="bottom_right",
    )
