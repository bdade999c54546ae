"""Layout invariance: the same values in any layout of any operand give what contiguous ones give.

Pairwise over operands: every pair of (operand, layout) choices meets in some row of the sweep. Between and
around the elements of an input lies NaN, around those of an output lie canaries. B = 2 and two heads at
least, since a wrong batch or head stride goes unseen with one. """

from __future__ import annotations

import math
from typing import Any

import compare
import oracle
import pytest
import torch
from cases import run
from layouts import LAYOUTS, check_canaries, lay_out, layouts_for, output_like, pairwise
from torch import Tensor

B, HQ, HK, SQ, SK, D, DV = 2, 4, 2, 5, 7, 6, 5


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


DENSE = {
    "q": (B, HQ, SQ, D),
    "k": (B, HK, SK, D),
    "v": (B, HK, SK, DV),
    "bias": (B, HQ, SQ, SK),
    "do": (B, HQ, SQ, DV),
    "dlse": (B, HQ, SQ),
    "o": (B, HQ, SQ, DV),
    "lse": (B, HQ, SQ),
    "dq": (B, HQ, SQ, D),
    "dk": (B, HK, SK, D),
    "dv": (B, HK, SK, DV),
    "dbias": (B, HQ, SQ, SK),
}
PACKED = {
    "q": (9, HQ, D),
    "k": (8, HK, D),
    "v": (8, HK, DV),
    "do": (9, HQ, DV),
    "dlse": (9, HQ),
    "o": (9, HQ, DV),
    "lse": (9, HQ),
    "dq": (9, HQ, D),
    "dk": (8, HK, D),
    "dv": (8, HK, DV),
}
OFFSETS = {"cu_seqlens_q": torch.tensor([0, 4, 4, 8]), "cu_seqlens_kv": torch.tensor([1, 4, 6, 8])}
WRITTEN = ("o", "lse", "dq", "dk", "dv", "dbias")
OPS = {
    "sdpa": ("q", "k", "v", "bias", "o", "lse"),
    "sdpa_backward": ("q", "k", "v", "bias", "o", "lse", "do", "dlse", "dq", "dk", "dv", "dbias"),
}
ROWS_A_TEST = 12
# One layout of each kind, for the interpreted backward: a row of it takes a second.
KINDS = ("swapped", "padded_pitch", "last_stride_2", "last_dim_outer", "stride_0_head")


def sweep(
    op: str, shapes: dict[str, tuple[int, ...]], kinds: tuple[str, ...] = tuple(LAYOUTS)
) -> list[dict[str, str]]:
    names = [n for n in OPS[op] if n in shapes]
    # In a backward o and lse are read, but an engine wrote them: no layout in which elements share an
    # address.
    return pairwise(
        names,
        [[x.name for x in layouts_for(shapes[n], write=n in WRITTEN) if x.name in kinds] for n in names],
    )


def values(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {n: randn(*s, seed=i) for i, (n, s) in enumerate(shapes.items()) if n not in WRITTEN}


def check_row(engine: str, op: str, shapes: dict[str, tuple[int, ...]], row: dict[str, str]) -> None:
    options: dict[str, Any] = {
        "causal": True,
        "align": "bottom_right",
        **(OFFSETS if shapes is PACKED else {}),
    }
    given = values(shapes)
    views = {n: lay_out(t, row.get(n, "row_major")) for n, t in given.items()}
    clean = {n: t.clone(memory_format=torch.contiguous_format) for n, t in views.items()}
    extra = {"bias": clean["bias"]} if "bias" in clean else {}
    problem = run.problem_of(
        clean["q"], clean["k"], clean["v"], clean["do"], clean["dlse"], **extra, **options
    )
    ref = oracle.reference(problem)
    outs = {
        n: output_like(shapes[n], torch.float32, row[n], name=n)
        for n in row
        if n in WRITTEN and (op == "sdpa" or n not in ("o", "lse"))
    }
    out = {n: c.tensor for n, c in outs.items()}
    if "bias" in views:
        options["bias"] = views["bias"]
    if op == "sdpa":
        got = run.forward(engine, views["q"], views["k"], views["v"], out=out, **options)
    else:
        o, lse = (lay_out(t.float(), row[n]) for n, t in (("o", ref.o), ("lse", ref.lse)))
        got = run.backward(
            engine,
            views["q"],
            views["k"],
            views["v"],
            o,
            views["do"],
            lse,
            dlse=views["dlse"],
            out=out,
            **options,
        )
    check_canaries(*outs.values())
    compare.assert_answer(got, problem, ref=ref, context=f"{op} with {row}")


def parts(engine: str, op: str, shapes: dict[str, tuple[int, ...]]) -> list[list[dict[str, str]]]:
    rows = sweep(op, shapes, KINDS) if (engine, op) == ("triton", "sdpa_backward") else sweep(op, shapes)
    return [rows[i : i + ROWS_A_TEST] for i in range(0, len(rows), ROWS_A_TEST)]


SWEEPS = [
    pytest.param(engine, op, shapes, rows, id=f"{engine}-{op}-{name}-{i}")
    for engine in ("reference", "triton")
    for op in OPS
    for name, shapes in (("dense", DENSE), ("packed", PACKED))
    for i, rows in enumerate(parts(engine, op, shapes))
]


@pytest.mark.parametrize(("engine", "op", "shapes", "rows"), SWEEPS)
def test_any_layout_of_any_operand(
    engine: str, op: str, shapes: dict[str, tuple[int, ...]], rows: list[dict[str, str]]
) -> None:
    """FlagGems#5235, pytorch PR#187506, cudnn-frontend PR#304: base moved by one stride and rows by another,
    statistics addressed as if packed, a last stride taken for 1."""
    for row in rows:
        check_row(engine, op, shapes, row)


def test_the_sweep_covers_every_pair() -> None:
    """The harness itself: each two operands meet in each two of their layouts."""
    rows = sweep("sdpa", DENSE)
    for a, x in (
        ("q", "last_stride_2"),
        ("bias", "last_dim_outer"),
        ("o", "swapped"),
        ("k", "stride_0_head"),
    ):
        for b, y in (("v", "packed_qkv"), ("lse", "padded_pitch")):
            assert any(row[a] == x and row[b] == y for row in rows)


# ---- layouts that arise by themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["reference", "triton", "torch_sdpa"])
@pytest.mark.parametrize("how", ["sum", "mean of a transpose", "every other column", "all rows but one"])
def test_gradients_for_the_do_that_autograd_hands_over(how: str, engine: str) -> None:
    """flash-attention#355, xformers PR#282: o.sum() passes a dO whose strides are all 0, others are views."""
    q, k, v = randn(2, 2, 5, 8, seed=0), randn(2, 2, 6, 8, seed=1), randn(2, 2, 6, 8, seed=2)
    base = torch.ones(())
    do = {
        "sum": base.expand(2, 2, 5, 8),
        "mean of a transpose": randn(2, 5, 2, 8, seed=3).transpose(1, 2),
        "every other column": randn(2, 2, 5, 16, seed=4)[..., ::2],
        "all rows but one": torch.cat([torch.zeros(2, 2, 1, 8), randn(2, 2, 4, 8, seed=5)], 2),
    }[how]
    run.check(engine, q, k, v, do)


@pytest.mark.parametrize("engine", ["reference", "triton"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_statistics_in_five_layouts_from_forward_to_backward(packed: bool, engine: str) -> None:
    """cudnn-frontend PR#304: the backward took the statistics for packed whatever was declared. The forward
    writes them, the backward reads them, in the same layout."""
    shape = (9, 4) if packed else (2, 4, 5)
    q, k, v, do = (
        ((9, 4, 8), (8, 2, 8), (8, 2, 8), (9, 4, 8))
        if packed
        else ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 4, 5, 8))
    )
    tensors = [randn(*s, seed=i) for i, s in enumerate((q, k, v, do))]
    options: dict[str, Any] = dict(OFFSETS) if packed else {}
    problem = run.problem_of(*tensors, **options)
    ref = oracle.reference(problem)
    for name in ("row_major", "swapped", "padded_pitch", "last_stride_2", "last_dim_outer"):
        buffer = output_like(shape, torch.float32, name, name="lse")
        fwd = run.forward(engine, *tensors[:3], out={"lse": buffer.tensor}, **options)
        grads = run.backward(engine, *tensors[:3], fwd["o"], tensors[3], buffer.tensor, **options)
        check_canaries(buffer)
        compare.assert_answer({**fwd, **grads}, problem, ref=ref, context=name)
        assert all(bool((grads[n] != 0).any()) for n in grads)


@pytest.mark.parametrize("engine", ["reference", "triton", "torch_sdpa"])
def test_o_as_a_slice_of_a_wider_buffer(engine: str) -> None:
    """flash-attention PR#2670: o assumed to have q's strides."""
    q, k, v = randn(2, 2, 5, 8, seed=0), randn(2, 2, 6, 8, seed=1), randn(2, 2, 6, 8, seed=2)
    wide = torch.full((2, 2, 5, 20), 1234.0)
    got = run.forward(engine, q, k, v, out={"o": wide[..., 4:12]})
    compare.assert_answer(got, run.problem_of(q, k, v))
    assert (
        bool((wide[..., :4] == 1234).all())
        and bool((wide[..., 12:] == 1234).all())
        and not math.isnan(wide.sum().item())
    )
