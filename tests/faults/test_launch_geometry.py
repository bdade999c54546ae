"""Grids: no axis beyond 65,535, every program once, and one place that both counts and launches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import run
from cases.small import Spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import GRID_LIMIT, Target, fold_grid
from engines.triton import interpret
from engines.triton.adapter_fwd import SdpaFwdDslTriton
from frost.fuse import fuse


@given(st.one_of(st.integers(0, 10**6), st.integers(0, GRID_LIMIT * GRID_LIMIT)))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_folded_grid_covers_every_program_within_the_limit(n: int) -> None:
    """pytorch#146704: CUDA caps y and z at 65,535. Programs are numbered y * X + x."""
    x, y, z = fold_grid(n)
    assert 1 <= x <= GRID_LIMIT and 1 <= y <= GRID_LIMIT and z == 1
    assert x * y >= n and (y == 1 or x * (y - 1) < n)


def test_more_programs_than_any_grid_is_an_error() -> None:
    with pytest.raises(ValueError, match="programs"):
        fold_grid(GRID_LIMIT * GRID_LIMIT + 1)


SHAPES = {
    "batches": {"batch": 65_536, "heads": (1, 1)},
    "heads": {"batch": 1, "heads": (65_536, 1)},
    "batches times heads": {"batch": 256, "heads": (256, 256)},
    "just at the limit": {"batch": 65_535, "heads": (1, 1)},
}


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
@pytest.mark.parametrize("what", SHAPES)
def test_many_batches_or_heads(what: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of the chain fits, whatever the counts are. (The GPU suite runs them.)"""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(interpret, "run_kernel", lambda module, kernel, grid, args: grids.append(grid))
    spec = Spec(op=op, seqlens=(1, 1), dims=(8, 8), dtype="fp16", **SHAPES[what])
    plan = spec.build().compile("cpu", engines=["triton"], gates="off")
    plan.execute(
        {
            n: torch.zeros(shape, dtype=getattr(torch, {"fp16": "float16", "fp32": "float32"}[dtype]))
            for n, (shape, dtype) in spec.shapes().items()
        }
    )
    assert grids
    for x, y, z in grids:
        assert max(x, y, z) <= GRID_LIMIT
    needed = spec.heads[0] * spec.batch  # type: ignore[operator]
    assert max(x * y for x, y, _ in grids) >= needed


def test_programs_beyond_the_count_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid is folded to a rectangle: the last row is only partly used. Here the fold is forced at 3."""
    from engines.triton import launching

    monkeypatch.setattr(launching, "fold_grid", lambda n: (min(n, 3), -(-n // 3), 1))
    gen = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(5, 2, 4, 8, generator=gen) for _ in range(4))
    run.check(
        "triton", q, k, v, do, sink=torch.randn(2, generator=gen), bias=torch.randn(1, 2, 1, 4, generator=gen)
    )


def test_too_many_tiles_are_declined_at_plan_time() -> None:
    """Never a launch that fails, or an output that nobody writes."""
    spec = Spec(batch=2**20, heads=(2**10, 1), seqlens=(64, 64), dtype="fp16")
    desc: Any = fuse(spec.build()).steps[0].desc
    for target in (Target.cpu(), Target.cuda((9, 0))):
        reasons = SdpaFwdDslTriton().check_support(desc, target).reasons
        assert any("tiles" in r.got for r in reasons)
