"""Rows that see nothing, and memory that nobody sees."""

from __future__ import annotations

import math

import compare
import pytest
import torch
from cases import run
from torch import Tensor

ENGINES = ("reference", "triton")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def empty_row_0() -> dict[str, dict[str, object]]:
    """Three ways to shut row 0 of 2 out of 2 keys."""
    mask = torch.tensor([[False, False], [True, True]])
    return {
        "mask": {"mask": mask},
        "bias": {"bias": torch.where(mask, 0.0, -math.inf)},
        "mask of a row": {"mask": mask[:, :1]},
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ["mask", "bias", "mask of a row"])
@pytest.mark.parametrize("do_row_0", [0.0, 1e4, math.nan])
def test_a_fully_masked_row_gives_zeros_everywhere(engine: str, way: str, do_row_0: float) -> None:
    """pytorch#41508: softmax over -inf alone is 0/0, and 0 * NaN comes back in the backward. The loss need
    not ignore that row: its gradients are zero whatever dO says."""
    options = empty_row_0()[way]
    q, k, v, do = (randn(1, 1, 2, 4, seed=i) for i in range(4))
    do[..., 0, :] = do_row_0
    got = run.both(engine, run.problem_of(q, k, v, do, **options), **options)
    assert torch.equal(got["o"][0, 0, 0], torch.zeros(4)) and got["lse"][0, 0, 0] == -math.inf
    assert torch.equal(got["dq"][0, 0, 0], torch.zeros(4))
    assert all(bool(t.isfinite().all()) for n, t in got.items() if n != "lse")
    alone = run.both(engine, run.problem_of(q[:, :, 1:], k, v, do[:, :, 1:]))
    for name in ("dk", "dv"):
        torch.testing.assert_close(got[name], alone[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("sq", "sk", "options"),
    [
        (4, 2, {"causal": True, "align": "bottom_right"}),
        (5, 5, {"window": (None, 0), "mask": torch.ones(5, 5).tril(-1).bool()}),
        (6, 3, {"window": (0, 0)}),
        (40, 34, {"window": (2, 1), "align": "bottom_right"}),
    ],
)
def test_rows_that_a_band_leaves_empty(engine: str, sq: int, sk: int, options: dict[str, object]) -> None:
    q, k, v, do = (
        randn(1, 2, sq, 8),
        randn(1, 2, sk, 8, seed=1),
        randn(1, 2, sk, 8, seed=2),
        randn(1, 2, sq, 8, seed=3),
    )
    dlse = randn(1, 2, sq, seed=4)
    do[..., 0, :], dlse[..., 0] = 1e4, 1e4
    got, ref = run.check(engine, q, k, v, do, dlse, **options)
    empty = ref.lse == -math.inf
    assert bool(empty.any()) and bool((got["dq"][empty] == 0).all()) and bool((got["o"][empty] == 0).all())


# ---- the statistics of empty rows ----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_lse_of_empty_rows_is_minus_infinity_on_every_path(engine: str) -> None:
    """flashinfer#4452: finite, +inf or 0, depending on the kernel. The same attention dense, packed and
    padded gives the same statistics; the buffers start as NaN, so a slot that nobody writes shows."""
    q, k, v = randn(1, 2, 4, 8), randn(1, 2, 2, 8, seed=1), randn(1, 2, 2, 8, seed=2)
    band = {"causal": True, "align": "bottom_right"}
    dense = run.forward(engine, q, k, v, **band)
    assert torch.equal(dense["lse"][0, :, :2], torch.full((2, 2), -math.inf)) and bool(
        dense["lse"][0, :, 2:].isfinite().all()
    )
    assert torch.equal(dense["o"][0, :, :2], torch.zeros(2, 2, 8))

    def cu(n: int) -> Tensor:
        return torch.tensor([0, n], dtype=torch.int32)

    packed = run.forward(
        engine,
        *(t[0].transpose(0, 1).contiguous() for t in (q, k, v)),
        cu_seqlens_q=cu(4),
        cu_seqlens_kv=cu(2),
        **band,
    )
    wide_k, wide_v = (torch.cat([t, torch.full((1, 2, 3, 8), math.nan)], 2) for t in (k, v))
    padded = run.forward(
        engine, q, wide_k, wide_v, seq_len_kv=torch.tensor([2]), seq_len_q=torch.tensor([4]), **band
    )
    torch.testing.assert_close(packed["lse"].T[None], dense["lse"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded["lse"], dense["lse"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", (*ENGINES, "torch_sdpa"))
def test_lse_is_a_natural_logarithm(engine: str) -> None:
    """pytorch#181645: one backend gave log2. Five equal scores: ln 5, not log2 5."""
    got = run.forward(engine, torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 5, 8), randn(1, 1, 5, 8))
    torch.testing.assert_close(got["lse"], torch.full((1, 1, 3), math.log(5)), rtol=1e-6, atol=1e-6)


# ---- what nobody sees -----------------------------------------------------------------------------------

FILLS = (0.0, 1e30, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", ["lengths", "packed", "mask", "causal"])
def test_results_are_bit_equal_whatever_lies_in_padding(engine: str, path: str) -> None:
    """flashinfer#1745, pytorch#101967: probability 0 times NaN is NaN. Unused slots of k and v, and dO at
    padding rows, in forward and backward."""
    results: list[dict[str, Tensor]] = []
    for fill in FILLS:
        q, k, v, do = (
            randn(2, 2, 6, 8),
            randn(2, 2, 8, 8, seed=1),
            randn(2, 2, 8, 8, seed=2),
            randn(2, 2, 6, 8, seed=3),
        )
        options: dict[str, object] = {}
        if path == "lengths":
            options = {"seq_len_q": torch.tensor([6, 2]), "seq_len_kv": torch.tensor([1, 3])}
            for t, side in ((q, "seq_len_q"), (do, "seq_len_q"), (k, "seq_len_kv"), (v, "seq_len_kv")):
                for b, n in enumerate(options[side].tolist()):  # type: ignore[attr-defined]
                    t[b, :, n:] = fill
        elif path == "packed":
            q, k, v, do = (t.transpose(1, 2).reshape(-1, 2, 8) for t in (q, k, v, do))
            options = {"cu_seqlens_q": torch.tensor([1, 4, 9]), "cu_seqlens_kv": torch.tensor([2, 7, 11])}
            for t, (a, b) in ((q, (1, 9)), (do, (1, 9)), (k, (2, 11)), (v, (2, 11))):
                t[:a], t[b:] = fill, fill
        elif path == "mask":
            mask = torch.ones(6, 8, dtype=torch.bool)
            mask[:, 5:], mask[4] = False, False
            options = {"mask": mask}
            k[:, :, 5:], v[:, :, 5:], do[:, :, 4] = fill, fill, fill
        else:
            options = {"causal": True}
            k[:, :, 6:], v[:, :, 6:] = fill, fill
        results.append(run.both(engine, run.problem_of(q, k, v, do, **options), **options))
    for fill, got in zip(FILLS[1:], results[1:]):
        for name, t in got.items():
            compare.assert_same(t, results[0][name], f"{name} with {fill} in the padding")
    assert bool(results[0]["o"].isfinite().all())


@pytest.mark.parametrize("op", ["k", "v"])
def test_in_the_reference_a_row_is_unaffected_by_nan_in_a_key_that_only_others_see(op: str) -> None:
    """Causal: key 3 is NaN, rows 0 to 2 don't see it. More than the contract asks (a key that *no* query
    sees), and what makes the reference a specification row by row."""
    q, do = randn(1, 1, 4, 8), randn(1, 1, 4, 8, seed=3)
    clean = {"k": randn(1, 1, 4, 8, seed=1), "v": randn(1, 1, 4, 8, seed=2)}
    spoilt = {n: t.clone() for n, t in clean.items()}
    spoilt[op][..., 3, :] = math.nan
    expected = run.both("reference", run.problem_of(q, do=do, **clean), causal=True)
    got = run.both("reference", run.problem_of(q, do=do, **spoilt), causal=True)
    for name in ("o", "lse", "dq"):
        compare.assert_same(got[name][:, :, :3], expected[name][:, :, :3], name)
    assert bool(got["o"][:, :, 3].isnan().all())
