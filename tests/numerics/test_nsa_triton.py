"""The selection kernels in Triton's interpreter, held to the fp64 oracle; and what surrounds them: launches over ranges of
tokens, cut work items, folded grids, determinism, garbage in padding and in indices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.triton import adapter_nsa, configs_nsa, interpret, launching
from frost import Graph, equivalence, nsa
from frost.fuse import fuse
from frost.gate_matrix_nsa import NSA_BRANCH_MATRIX, NSA_MATRIX, NsaConfig, make_block_idx

pytestmark = pytest.mark.skipif(interpret.unavailable_reason() is not None, reason=str(interpret.unavailable_reason()))

BY_NAME = {op: {c.name: c for c in rows} for op, rows in NSA_MATRIX.items()}
QUICK = ("fp32-g1", "fp32-d192-dv128", "fp32-hostile", "bf16-g7", "bf16-d40-dv24", "bf16-block-24", "one-token",
         "more-slots-than-blocks", "more-queries", "packed-block-16", "layout-last-stride-2", "scale-zero")
BRANCH_QUICK = ("cmp-fp32-g3", "cmp-bf16-d40-dv24", "cmp-more-queries", "cmp-packed-short", "cmp-layout-last-stride-2",
                "cmp-shorter-than-a-block", "topk-ties", "topk-nothing-but-forced", "topk-packed", "topk-one-token")
SLOW = tuple(c.name for c in NSA_MATRIX["nsa_selection_backward"] if "cpu" in c.devices and c.name not in QUICK)


def hold(config: NsaConfig) -> None:
    result = equivalence.run_config(config, "triton")
    assert result.verdict == "pass", result.detail


@pytest.mark.parametrize("op", NSA_MATRIX)
@pytest.mark.parametrize("name", QUICK)
def test_a_row_of_the_gate_matrix(name: str, op: str) -> None:
    hold(BY_NAME[op][name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_further_row_of_the_gate_matrix(name: str) -> None:
    for op in NSA_MATRIX:
        if name in BY_NAME[op]:
            hold(BY_NAME[op][name])


@pytest.mark.parametrize("name", ["fp32-hostile", "bf16-g7", "bf16-d40-dv24", "packed-block-16"])
def test_a_backward_whose_score_tiles_have_queries_as_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other orientation of the same kernel, which some tiles use on a GPU."""
    monkeypatch.setattr(configs_nsa, "BWD", tuple(replace(r, rows_first=not r.rows_first) for r in configs_nsa.BWD))
    hold(BY_NAME["nsa_selection_backward"][name])


@pytest.mark.parametrize("op, config", [pytest.param(op, c, id=f"{op}-{c.name}", marks=() if c.name in BRANCH_QUICK else pytest.mark.slow)
                                        for op, rows in NSA_BRANCH_MATRIX.items() for c in rows if "cpu" in c.devices])
def test_a_row_of_the_other_branches_matrix(op: str, config: Any) -> None:
    hold(config)


SMALL = NsaConfig("small", dtype="fp32", heads=(2, 3), head_dim=(16, 16), block_size=16, seqlen=(150, 150), slots=5,
                  hostile=True)


@pytest.mark.parametrize("packed", [None, (3, 40, 40, 130)])
@pytest.mark.parametrize("launches, parts", [(3, 1), (1, 5), (2, 3)])
def test_ranges_of_tokens_and_cut_work_items(packed: Any, launches: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results of one launch are bounded, so several launches add up; a launch's tokens are dealt out to parts, and
    blocks are cut into items of 32 rows."""
    monkeypatch.setattr(configs_nsa, "PARTIAL_BYTES", 1)
    monkeypatch.setattr(configs_nsa, "MIN_TOKENS", {1: 160, 2: 96, 3: 64}[launches])
    monkeypatch.setattr(configs_nsa, "PART_BYTES", 1 if parts > 1 else 1 << 30)
    monkeypatch.setattr(configs_nsa, "PART_ROWS", 1)
    monkeypatch.setattr(configs_nsa, "FORWARD_ROWS", 32)
    monkeypatch.setattr(configs_nsa, "BACKWARD_ROWS", 32)
    config = SMALL if packed is None else replace(SMALL, packed=packed, seqlen=(133, 133))
    for op in NSA_MATRIX:
        config = replace(config, op=op)
        desc = equivalence._graph(config, *equivalence._place(equivalence.make_case(config), "cpu"))
        made: Any = fuse(desc).steps[0].desc
        g = adapter_nsa.forward_geometry(made)
        assert len(g.launches()) == launches and g.parts(g.tokens) == parts
        hold(config)


def test_a_folded_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs past the count do nothing: the fold is forced at 3."""
    monkeypatch.setattr(launching, "fold_grid", lambda n: (min(n, 3), -(-n // 3), 1))
    for op in NSA_MATRIX:
        hold(replace(SMALL, op=op, seqlen=(40, 40)))


def call(engine: str, x: dict[str, Tensor], block: int, **options: Any) -> tuple[Tensor, ...]:
    leaves = [x[n].clone().requires_grad_() for n in "qkv"]
    given = {n: x[n] for n in ("block_counts", "cu_seqlens") if n in x}
    o, lse = nsa.selection_attn(*leaves, x["block_indices"], block, return_lse=True, engines=[engine], **given, **options)
    return (o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, x["do"]))


def operands(t: int = 45, hk: int = 2, group: int = 3, d: int = 16, slots: int = 4, packed: bool = False) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn((t, heads, d) if packed else (1, heads, t, d), generator=gen)

    x = {"q": normal(hk * group), "k": normal(hk), "v": normal(hk), "do": normal(hk * group)}
    indices = make_block_idx(1, hk, t, 16, slots)
    x["block_indices"] = indices[0].transpose(0, 1).contiguous() if packed else indices
    return x


@pytest.mark.parametrize("garbage", [-(2**31), 2**31 - 1, -1, 3, 1000])
def test_what_is_no_block_is_never_read(garbage: int) -> None:
    """Entries past the count, numbers outside, and the row's own future: bit-equal results whatever they hold."""
    x = operands()
    x["block_counts"] = torch.full((1, 2, 45), 2, dtype=torch.int32)
    clean = call("triton", x, 16)
    x["block_indices"] = x["block_indices"].clone()
    x["block_indices"][..., 2:] = garbage
    assert all(torch.equal(a, b) for a, b in zip(call("triton", x, 16), clean))
    x["block_indices"] = x["block_indices"].long()
    x["block_indices"][..., 2:] = 2**40 + garbage
    assert all(torch.equal(a, b) for a, b in zip(call("triton", x, 16), clean))


@pytest.mark.parametrize("cu", [[0, 60, 20, 45], [-5, 10, 30, 45], [40, 30, 20, 10], [2**31 - 1, 0, 5, 99]])
def test_wrong_offsets_stay_inside_the_buffers(cu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody checks them, offsets give wrong numbers at worst: the outputs' surroundings are untouched and nothing
    faults."""
    monkeypatch.setattr("frost.values.wanted", lambda on_cpu: False)
    x = operands(packed=True)
    x["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32)
    assert all(r.shape[0] == 45 for r in call("triton", x, 16))


def test_runs_are_bit_equal_and_independent_of_the_batch() -> None:
    """flash-attention PR#1870: every sum has a fixed order."""
    x = operands(packed=True)
    x["cu_seqlens"] = torch.tensor([0, 20, 45], dtype=torch.int32)
    first = call("triton", x, 16, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(call("triton", x, 16, deterministic=True), first))
    order = torch.cat([torch.arange(20, 45), torch.arange(0, 20)])
    moved = {n: t[order] if n != "cu_seqlens" else torch.tensor([0, 25, 45], dtype=torch.int32) for n, t in x.items()}
    assert all(torch.equal(a, b[order]) for a, b in zip(call("triton", moved, 16), first))


@pytest.mark.parametrize("t, tk, slots", [(0, 32, 4), (20, 0, 4), (20, 20, 0), (1, 1, 1)])
def test_nothing_there(t: int, tk: int, slots: int) -> None:
    gen = torch.Generator().manual_seed(0)
    x = {"q": torch.randn(2, 4, t, 16, generator=gen), "k": torch.randn(2, 2, tk, 16, generator=gen),
         "v": torch.randn(2, 2, tk, 16, generator=gen), "do": torch.randn(2, 4, t, 16, generator=gen),
         "block_indices": torch.zeros(2, 2, t, slots, dtype=torch.int32)}
    for got, want in zip(call("triton", x, 16), call("reference", x, 16)):
        assert torch.equal(got.isinf(), want.isinf()) and torch.allclose(got, want, atol=1e-5)


def test_what_the_engine_declines_names_the_limit() -> None:
    def reasons(t: int = 64, slots: int = 4, block: int = 16, dtype: str = "fp32", batch: int = 1) -> list[str]:
        g = Graph("case")
        q, k, v = (g.tensor(n, (batch, 2, t, 16), dtype=dtype) for n in "qkv")
        g.output(g.nsa_selection(q, k, v, g.tensor("i", (batch, 2, t, slots), dtype="int32"), block_size=block)[0])
        route = g.compile("cpu", engines=["triton", "reference"]).routes[0]
        return [d.field for d in route.declined]

    assert reasons() == []
    assert reasons(slots=129) == ["block_indices.shape"] and reasons(block=129) == ["block_size"]
    assert reasons(dtype="fp64") == ["dtype"] and reasons(t=2**28 + 1) == ["q.shape", "k.shape"]
    assert reasons(batch=2**28) == ["q.shape"]


def test_the_workspace_is_linear_in_the_tokens() -> None:
    """Forward and backward hold nothing of size T x T / block beyond the map, whose tile sums are a thirtieth of that."""
    from descriptors import NsaSelectionBwdDesc, NsaSelectionDesc, TensorDesc

    def held(t: int) -> tuple[int, int]:
        def desc(*shape: int, dtype: str = "bf16") -> TensorDesc:
            return TensorDesc.make(shape, dtype)

        q, k = desc(1, 64, t, 128), desc(1, 4, t, 128)
        given = {"q": q, "k": k, "v": k, "o": q, "block_indices": desc(1, 4, t, 16, dtype="int32"), "block_size": 64,
                 "lse": desc(1, 64, t, dtype="fp32")}
        forward = adapter_nsa.forward_regions(NsaSelectionDesc(**given))
        backward = adapter_nsa.backward_regions(NsaSelectionBwdDesc(**given, do=q, dq=q, dk=k, dv=k))
        return sum(r.nbytes for r in forward), sum(r.nbytes for r in backward)

    short, long = held(32_768), held(131_072)
    assert long[0] < 3 << 30 and long[1] < 6 << 30
    assert all(b < 4 * a for a, b in zip(short, long))


# ---- compressed attention and the choice of blocks -------------------------------------------------------------

CMP: dict[str, dict[str, Any]] = {
    "group 3": {"group": 3, "t": 45, "tk": 53, "d": 20, "stride": 4, "length": 8},
    "group 1": {"group": 1, "t": 70, "tk": 70, "d": 16, "stride": 8, "length": 16},
    "group 16 bf16": {"group": 16, "t": 33, "tk": 60, "d": 32, "stride": 16, "length": 32, "dtype": torch.bfloat16},
    "length is stride": {"group": 2, "t": 40, "tk": 40, "d": 16, "stride": 8, "length": 8},
    "shorter than a block": {"group": 2, "t": 7, "tk": 7, "d": 16, "stride": 8, "length": 8},
    "more queries": {"group": 2, "t": 60, "tk": 40, "d": 16, "stride": 8, "length": 8},
    "packed": {"group": 2, "t": 66, "tk": 66, "d": 16, "stride": 4, "length": 8, "cu": [2, 2, 20, 22, 61, 63]},
    "one packed": {"group": 4, "t": 66, "tk": 66, "d": 16, "stride": 8, "length": 8, "cu": [0, 66]},
}


def compressed(engine: str, group: int, t: int, tk: int, d: int, stride: int, length: int, cu: Any = None,
               dtype: torch.dtype = torch.float32, hk: int = 2) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    kinds = [(hk * group, t), (hk, tk), (hk, tk)]
    q, k, v = (torch.randn((n, h, d) if cu else (2, h, n, d), generator=gen).to(dtype) for h, n in kinds)
    pool: dict[str, Any] = {"block_len": length, "stride": stride, "cu_seqlens": offsets}
    leaves = [q, nsa.compress(k, **pool), nsa.compress(v, **pool)]
    if engine == "oracle":
        leaves, engine = [x.double() for x in leaves], "reference"
    leaves = [x.requires_grad_() for x in leaves]
    o, lse, importance = nsa.compressed_attn(*leaves, seqlen_kv=tk, block_size=16, engines=[engine], gates="off", **pool)
    do = torch.randn(o.shape, generator=gen, dtype=torch.float32).to(dtype).to(o.dtype)
    loss = (o * do).sum() + torch.where(torch.isfinite(lse), lse, 0.0).square().sum()
    return {"o": o.detach(), "lse": lse.detach(), "importance": importance,
            **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(loss, leaves)))}


@pytest.mark.parametrize("case", CMP)
def test_compressed_attention(case: str) -> None:
    got, ref, yard = (compressed(engine, **CMP[case]) for engine in ("triton", "oracle", "reference"))
    for name in got:
        assert torch.equal(got[name].isinf(), ref[name].isinf())
        same = got[name].double() == ref[name]
        error = torch.where(same, 0.0, (got[name].double() - ref[name]).abs())
        # Twice what the reference in the io dtype is off by, and one rounding of P and dS, which it does not do.
        low = torch.finfo(got["o"].dtype).eps if got["o"].dtype is not torch.float32 else 0.0
        own = torch.where(yard[name].double() == ref[name], 0.0, (yard[name].double() - ref[name]).abs())
        scale = torch.where(torch.isfinite(ref[name]), ref[name].abs(), 0.0)
        limit = 2 * own.amax() + 2e-5 * scale.clamp(min=1) + low * scale.amax() if own.numel() else 0.0
        assert (error <= limit).all(), (name, error.max().item())


@pytest.mark.parametrize("cu", [None, [2, 2, 20, 61]])
@pytest.mark.parametrize("forced", [(1, 2), (0, 1), (0, 0)])
def test_the_choice_of_blocks_is_the_references(cu: Any, forced: tuple[int, int]) -> None:
    """Ties, NaN, infinities and negative zeros included; integers, so equality."""
    gen = torch.Generator().manual_seed(0)
    score = torch.randint(-1, 3, (66, 2, 5) if cu else (2, 2, 50, 5), generator=gen).float()
    score[..., 1] = math.nan
    score[..., 3] = torch.where(score[..., 3] > 0, -math.inf, -0.0)
    offsets = None if cu is None else torch.tensor(cu)
    got, want = (nsa.choose_blocks(score, seqlen_kv=66, block_size=16, n_blocks=3, n_init=forced[0], n_local=forced[1],
                                   cu_seqlens=offsets, engines=[e]) for e in ("triton", "reference"))
    assert torch.equal(got, want)
