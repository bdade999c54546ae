"""Option flip: from one base call, change one option at a time, base -> changed -> base in one process.
Whatever a plan or kernel remembers of one call must not show in the next, and the changed call must not be
answered with the base's plan."""

from __future__ import annotations

from typing import Any

import compare
import pytest
import torch
from cases import run
from torch import Tensor

ENGINES = ("reference", "triton")


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(
    sq: int = 6, sk: int = 9, dtype: torch.dtype = torch.float32, hk: int = 2, d: int = 8
) -> dict[str, Tensor]:
    shapes = {"q": (2, 4, sq, d), "k": (2, hk, sk, d), "v": (2, hk, sk, 8), "do": (2, 4, sq, 8)}
    return {n: randn(*s, seed=i).to(dtype) for i, (n, s) in enumerate(shapes.items())}


MASK = torch.rand(6, 9, generator=torch.Generator().manual_seed(9)) < 0.6
Flip = tuple[dict[str, Tensor], dict[str, Any]]
BASE: Flip = (
    dense(),
    {
        "causal": True,
        "align": "bottom_right",
        "scale": 0.3,
        "softcap": 4.0,
        "bias": randn(1, 4, 6, 9, seed=5),
    },
)


def but(**changes: Any) -> Flip:
    return BASE[0], {n: v for n, v in {**BASE[1], **changes}.items() if v is not None}


FLIPS: dict[str, Flip] = {
    "scale value": but(scale=0.9),
    "default scale": but(scale=None),
    "negative scale": but(scale=-0.3),
    "softcap value": but(softcap=1.5),
    "no softcap": but(softcap=None),
    "corner": but(align="top_left"),
    "no mask": but(causal=False),
    "left bound": but(window=(2, None)),
    "another left bound": but(window=(1, None)),
    "band": but(causal=False, window=(3, 1)),
    "boolean mask": but(mask=MASK),
    "no bias": but(bias=None),
    "other bias": but(bias=randn(1, 4, 6, 9, seed=6)),
    "bias of fewer dims": but(bias=randn(6, 9, seed=7)),
    "bias per key": but(bias=randn(1, 1, 1, 9, seed=7)),
    "bias in another dtype": but(bias=randn(1, 4, 6, 9, seed=5).bfloat16()),
    "sink": but(sink=randn(4, seed=8)),
    "key lengths": but(seq_len_kv=torch.tensor([3, 9])),
    "int32 key lengths": but(seq_len_kv=torch.tensor([3, 9], dtype=torch.int32)),
    "query lengths": but(seq_len_q=torch.tensor([0, 4])),
    "length": (dense(sq=7), {**BASE[1], "bias": randn(1, 4, 7, 9, seed=5)}),
    "keys": (dense(sk=10), {**BASE[1], "bias": randn(1, 4, 6, 10, seed=5)}),
    "group": (dense(hk=1), BASE[1]),
    "head dim": (dense(d=5), BASE[1]),
    "dtype": (dense(dtype=torch.bfloat16), BASE[1]),
    "layout": ({n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in BASE[0].items()}, BASE[1]),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", FLIPS)
def test_base_changed_base(what: str, engine: str) -> None:
    """flash-attention PR#2352 and the like: an option kept at plan time and ignored at run time, or the
    reverse."""
    first, ref = run.check(engine, **BASE[0], **BASE[1])
    tensors, options = FLIPS[what]
    _, other = run.check(engine, **tensors, **options, context=what)
    again = run.both(engine, run.problem_of(**BASE[0], **BASE[1]), **BASE[1])
    for name, t in again.items():
        compare.assert_same(t, first[name], f"{name} after {what}")
    if ref.o.shape == other.o.shape and what not in ("layout", "bias in another dtype", "dtype"):
        assert not torch.allclose(ref.o, other.o, atol=1e-3), (
            "the option changes nothing: the test shows nothing"
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_one_value_after_another_through_one_plan(engine: str) -> None:
    """Values that are no key facts (scale, softcap, widths) come from each graph, not from whoever built the
    plan."""
    from frost import cache

    run.check(engine, **BASE[0], scale=0.1, softcap=2.0, window=(1, 1))
    built = cache.info().plans_built
    for scale, cap, window in (
        (0.7, 2.0, (1, 1)),
        (0.7, 9.0, (1, 1)),
        (0.7, 9.0, (4, 0 + 2)),
        (-0.2, 1.0, (0, 3)),
    ):
        run.check(engine, **BASE[0], scale=scale, softcap=cap, window=window)
    assert cache.info().plans_built == built
