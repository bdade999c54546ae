"""`frost.nsa` on torch tensors: sets of blocks, empty rows, packing, autograd, plans, the three-branch module."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import frost
from frost import BindError, GraphError, NotSupportedError, cache, nsa

F64 = torch.float64


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(b: int = 2, hk: int = 2, group: int = 3, t: int = 37, tk: int | None = None, d: int = 8, dv: int = 6,
           dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    tk = t if tk is None else tk
    return (randn(b, hk * group, t, d, dtype=dtype), randn(b, hk, tk, d, seed=1, dtype=dtype),
            randn(b, hk, tk, dv, seed=2, dtype=dtype))


def entries(shape: tuple[int, ...], low: int, high: int, seed: int = 3) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def by_hand(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: int, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Row by row, as the words of the specification have it."""
    o, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -math.inf)
    b, hq, t, d = q.shape
    group, off = hq // k.shape[1], k.shape[2] - t
    for n in range(b):
        for h in range(hq):
            for i in range(t):
                row = indices[n, h // group, i].tolist()
                row = row if counts is None else row[:max(0, int(counts[n, h // group, i]))]
                seen = [j for j in range(k.shape[2]) if j <= i + off and j // block in set(row)]
                if seen:
                    s = k[n, h // group, seen] @ q[n, h, i] * d ** -0.5
                    o[n, h, i], lse[n, h, i] = torch.softmax(s, 0) @ v[n, h // group, seen], torch.logsumexp(s, 0)
    return o, lse


@pytest.mark.parametrize("t, tk", [(37, 37), (20, 37), (1, 37), (37, 20)])
@pytest.mark.parametrize("attention", [nsa.selection_forward_reference, nsa.selection_attn])
def test_both_say_what_the_words_say(attention: Any, t: int, tk: int) -> None:
    """Order is free, duplicates count once, -1, numbers past the end and blocks of the future are no blocks; queries stand
    at the end of the keys; a count of 0 leaves an empty row."""
    q, k, v = inputs(b=1, hk=2, group=2, t=t, tk=tk)
    indices, counts = entries((1, 2, t, 7), -2, 9), entries((1, 2, t), 0, 8, seed=4)
    o, lse = attention(q, k, v, indices, 5, block_counts=counts, return_lse=True)
    want_o, want_lse = by_hand(q, k, v, indices, 5, counts)
    assert torch.allclose(o, want_o, atol=1e-12) and torch.equal(lse == -math.inf, want_lse == -math.inf)
    assert torch.allclose(lse.exp(), want_lse.exp(), atol=1e-12)


@pytest.mark.parametrize("group", [1, 3, 5, 7])
def test_gradients_are_autograds(group: int) -> None:
    leaves = [x.requires_grad_() for x in inputs(group=group)]
    indices, counts = entries((2, 2, 37, 5), -1, 9), entries((2, 2, 37), 0, 6, seed=4)
    results = []
    for attention in (nsa.selection_attn, nsa.selection_forward_reference):
        o, lse = attention(*leaves, indices, 8, block_counts=counts, return_lse=True)
        loss = (o * randn(*o.shape, seed=5)).sum() + torch.where(torch.isfinite(lse), lse, 0.0).square().sum()
        results.append(torch.autograd.grad(loss, leaves))
    for got, want in zip(*results):
        assert torch.allclose(got, want, atol=1e-11)


def test_shuffled_and_repeated_entries_are_the_same_set() -> None:
    q, k, v = inputs()
    indices = entries((2, 2, 37, 4), -1, 5)
    again = torch.cat([indices.flip(-1), indices, torch.full_like(indices, -1), torch.full_like(indices, 99)], -1)
    assert torch.equal(nsa.selection_attn(q, k, v, indices, 8), nsa.selection_attn(q, k, v, again, 8))
    assert torch.equal(nsa.selection_attn(q, k, v, indices, 8), nsa.selection_attn(q, k, v, indices.long(), 8))


def test_rows_without_blocks() -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    indices = torch.full((2, 2, 37, 3), -1)
    indices[:, :, 30:, 0] = 1
    o, lse = nsa.selection_attn(*leaves, indices, 8, return_lse=True)
    assert (o[:, :, :30] == 0).all() and (lse[:, :, :30] == -math.inf).all() and torch.isfinite(lse[:, :, 30:]).all()
    grads = torch.autograd.grad(o.sum(), leaves)
    assert all(torch.isfinite(g).all() for g in grads) and (grads[0][:, :, :30] == 0).all()
    assert (grads[2][:, :, :8] == 0).all() and (grads[2][:, :, 16:] == 0).all() and (grads[2][:, :, 8:16] != 0).any()


def test_no_slots_at_all() -> None:
    q, k, v = inputs()
    o, lse = nsa.selection_attn(q, k, v, torch.zeros(2, 2, 37, 0, dtype=torch.int32), 8, return_lse=True)
    assert (o == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("attention", [nsa.selection_forward_reference, nsa.selection_attn])
def test_what_no_row_sees_reaches_nothing(attention: Any) -> None:
    """pytorch#101967: NaN in keys that nobody chose, or that lie in everybody's future, and in rows without blocks."""
    q, k, v = inputs()
    indices = torch.full((2, 2, 37, 2), 1)
    indices[:, :, 20:] = 2  # keys 16..23: rows from 20 on; keys 8..15: rows 8..19
    indices[:, :, 36] = 4   # keys 32..36
    indices[:, :, :8] = -1
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    k[:, :, :8], v[:, :, 24:32], k[:, :, 24:32] = math.nan, math.inf, math.nan
    q[:, :, :8] = math.nan
    dirty = [x.requires_grad_() for x in (q, k, v)]
    do = randn(2, 6, 37, 6, seed=7)
    results = []
    for leaves in (clean, dirty):
        o = attention(*leaves, indices, 8)
        bad = do.clone()
        if leaves is dirty and attention is nsa.selection_attn:
            bad[:, :, :8] = math.nan
        results.append((o.detach(), *torch.autograd.grad(o, leaves, bad)))
    for got, want in zip(*results):
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["bthd", "sliced", "last stride 2"])
def test_any_strides_and_the_layout_of_q(layout: str) -> None:
    q, k, v = inputs()
    indices = entries((2, 2, 37, 4), -1, 6)

    def placed(x: Tensor) -> Tensor:
        if layout == "bthd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        buffer = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), math.nan, dtype=x.dtype)
        view = buffer[..., 3:3 + x.shape[-1]] if layout == "sliced" else buffer[..., :2 * x.shape[-1]:2]
        return view.copy_(x)

    o = nsa.selection_attn(placed(q), placed(k), placed(v), indices.transpose(1, 2).contiguous().transpose(1, 2), 8)
    assert torch.allclose(o, nsa.selection_attn(q, k, v, indices, 8), atol=1e-12)
    if layout == "bthd":
        assert o.transpose(1, 2).is_contiguous()


def test_packed_sequences_are_each_their_own() -> None:
    """Block numbers from 0 in each sequence, zero-length sequences, tokens outside the offsets."""
    t, cu = 40, [2, 2, 15, 38]
    q, k, v = (x[0].transpose(0, 1).contiguous().requires_grad_() for x in inputs(t=t))
    indices, counts = entries((t, 2, 4), -1, 4), entries((t, 2), 0, 5, seed=4)
    o, lse = nsa.selection_attn(q, k, v, indices, 8, block_counts=counts, cu_seqlens=torch.tensor(cu), return_lse=True)
    do = randn(*o.shape, seed=6)
    grads = torch.autograd.grad(o, (q, k, v), do)
    assert (o[:2] == 0).all() and (o[38:] == 0).all() and (lse[38:] == -math.inf).all()
    assert all((g[:2] == 0).all() and (g[38:] == 0).all() for g in grads)
    for lo, hi in zip(cu[:-1], cu[1:]):
        part = [x.detach()[lo:hi].transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        alone = nsa.selection_attn(*part, indices[lo:hi].transpose(0, 1)[None], 8,
                                   block_counts=counts[lo:hi].transpose(0, 1)[None])
        assert torch.allclose(o[lo:hi], alone[0].transpose(0, 1), atol=1e-12)
        for got, want in zip(grads, torch.autograd.grad(alone, part, do[lo:hi].transpose(0, 1)[None])):
            assert torch.allclose(got[lo:hi], want[0].transpose(0, 1), atol=1e-12)


def test_other_totals_and_counts_find_the_same_plan(fresh_cache: Any) -> None:
    """cudnn-frontend#604: the token total changes at every step."""
    for t in (30, 31, 44, 30):
        q, k, v = (x[0].transpose(0, 1).contiguous().requires_grad_() for x in inputs(t=t))
        cu = torch.tensor([0, t // 3, t])
        nsa.selection_attn(q, k, v, entries((t, 2, 4), -1, 4), 8, cu_seqlens=cu).sum().backward()
    info = cache.info()
    assert info.plans_built == 2 and info.hits == 6


def test_a_repeated_call_builds_no_graph(fresh_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    indices = entries((2, 2, 37, 4), -1, 6)
    first = nsa.selection_attn(q, k, v, indices, 8)
    monkeypatch.setattr("frost._nsa_plans.Graph", None)
    assert torch.equal(nsa.selection_attn(q, k, v, indices, 8), first)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, True, True)])
def test_only_what_is_asked_for_is_computed(needed: tuple[bool, ...]) -> None:
    full = [x.requires_grad_() for x in inputs()]
    indices = entries((2, 2, 37, 4), -1, 6)
    want = torch.autograd.grad(nsa.selection_attn(*full, indices, 8).sum(), full)
    some = [x.detach().requires_grad_(need) for x, need in zip(full, needed)]
    nsa.selection_attn(*some, indices, 8).sum().backward()
    for x, need, ref in zip(some, needed, want):
        assert (x.grad is None) != need and (not need or torch.equal(x.grad, ref))


def test_a_loss_on_lse_alone_and_a_second_backward() -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    indices = torch.zeros(2, 2, 37, 1, dtype=torch.int32)
    _, lse = nsa.selection_attn(*leaves, indices, 8, return_lse=True)
    first = torch.autograd.grad(lse.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(lse.sum(), leaves)
    assert (first[2] == 0).all() and all(torch.equal(a, b) for a, b in zip(first, again))


def test_double_backward_is_refused_by_name() -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    o = nsa.selection_attn(*leaves, entries((2, 2, 37, 4), -1, 6), 8)
    grad = torch.autograd.grad(o.sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(NotSupportedError, match="double backward"):
        grad.sum().backward()


def test_a_change_in_place_is_autograds_error() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    inner = k * 1
    o = nsa.selection_attn(q, inner, v, entries((2, 2, 37, 4), -1, 6), 8)
    with torch.no_grad():
        inner.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_autocast_casts_and_gradients_come_back() -> None:
    leaves = [x.float().requires_grad_() for x in inputs()]
    indices = entries((2, 2, 37, 4), -1, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = nsa.selection_attn(*leaves, indices, 8)
    o.sum().backward()
    assert o.dtype is torch.bfloat16 and all(x.grad is not None and x.grad.dtype is torch.float32 for x in leaves)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "index dtype": ({"block_indices": torch.zeros(2, 2, 37, 3)}, GraphError, "block_indices.*dtype fp32.*int32 or int64"),
    "index shape": ({"block_indices": torch.zeros(2, 6, 37, 3, dtype=torch.int32)}, GraphError, "Hk = 6"),
    "index rank": ({"block_indices": torch.zeros(2, 37, 3, dtype=torch.int32)}, GraphError, "expected .B, Hk, Tq, S"),
    "index device": ({"block_indices": torch.zeros(2, 2, 37, 3, dtype=torch.int32, device="meta")}, BindError, "device meta"),
    "block size": ({"block_size": 0}, GraphError, "block_size: given 0"),
    "block size type": ({"block_size": 8.0}, GraphError, "block_size: given 8.0, expected an int"),
    "counts": ({"block_counts": torch.full((2, 2, 37), 9, dtype=torch.int32)}, BindError, r"block_counts\[0, 0, 0\]: given 9"),
    "no tensor": ({"block_indices": [[0]]}, TypeError, "block_indices: given list"),
    "engine": ({"engines": ["tritn"]}, ValueError, "did you mean 'triton'"),
    "engines": ({"engines": "triton"}, ValueError, "expected a list"),
    "an engine without the op": ({"engines": ["torch_sdpa"]}, NotSupportedError, "torch_sdpa has no nsa_selection"),
    "misspelt": ({"block_count": None}, TypeError, "did you mean 'block_counts'"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    change, error, says = BAD[what]
    q, k, v = inputs()
    given = {"block_indices": torch.zeros(2, 2, 37, 3, dtype=torch.int32), "block_size": 8, **change}
    with pytest.raises(error, match=says):
        nsa.selection_attn(q, k, v, **given)


# ---- the module ------------------------------------------------------------------------------------------------

MODULE: dict[str, Any] = {"block_size": 8, "n_blocks": 4, "window": 6, "compress_len": 8, "compress_stride": 4}


def gates(*shape: int) -> list[Tensor]:
    return [torch.sigmoid(randn(*shape, seed=10 + i)) for i in range(3)]


def test_the_module_is_the_sum_of_its_branches() -> None:
    q, k, v = inputs()
    g_cmp, g_slc, g_win = gates(2, 6, 37)
    k_cmp, v_cmp = (x.unfold(2, 8, 4).mean(-1) for x in (k, v))
    s = q.unflatten(1, (2, 3)) @ k_cmp[:, :, None].mT * 8 ** -0.5
    ends = torch.arange(k_cmp.shape[2]) * 4 + 7
    keep = ends <= torch.arange(37)[:, None]
    p = torch.nan_to_num(torch.softmax(s.masked_fill(~keep, -math.inf), -1))
    o_cmp = (p @ v_cmp[:, :, None]).flatten(1, 2)
    start = torch.arange(k_cmp.shape[2])[:, None] * 4
    m = torch.arange(5)
    overlap = ((start < (m + 1) * 8) & (start + 8 > m * 8)).to(F64)
    importance = p.sum(2) @ overlap
    _, _, got = nsa.compressed_attn(q, k_cmp, v_cmp, seqlen_kv=37, block_len=8, stride=4, block_size=8)
    assert torch.allclose(got, importance, atol=1e-12)
    indices = nsa.choose_blocks(importance, seqlen_kv=37, block_size=8, n_blocks=4)
    o_slc, _ = by_hand(q, k, v, indices, 8)
    o_win = frost.attention(q, k, v, causal=True, window=(5, None))
    want = g_cmp[..., None] * o_cmp + g_slc[..., None] * o_slc + g_win[..., None] * o_win
    assert torch.allclose(nsa.nsa(q, k, v, g_cmp, g_slc, g_win, **MODULE), want, atol=1e-12)


def test_the_module_has_gradients_everywhere() -> None:
    leaves = [x.requires_grad_() for x in (*inputs(t=29), *gates(2, 6, 29))]
    weights = [randn(8, 8, seed=20).requires_grad_(), randn(8, 6, 6, seed=21).requires_grad_()]
    o = nsa.nsa(*leaves, **MODULE, k_weights=weights[0], v_weights=weights[1])
    o.sum().backward()
    for x in (*leaves, *weights):
        assert x.grad is not None and torch.isfinite(x.grad).all() and x.grad.abs().max() > 0


def test_the_packed_module_is_each_sequence_alone() -> None:
    t, cu = 40, [0, 11, 11, 40]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in inputs(t=t))
    g = [x.transpose(0, 1) for x in gates(6, t)]
    for extra in ({}, {"max_seqlen": 29}):
        o = nsa.nsa(q, k, v, *g, cu_seqlens=torch.tensor(cu), **extra, **MODULE)
        for lo, hi in zip(cu[:-1], cu[1:]):
            part = [x[lo:hi].transpose(0, 1)[None] for x in (q, k, v, *g)]
            assert torch.allclose(o[lo:hi], nsa.nsa(*part, **MODULE)[0].transpose(0, 1), atol=1e-12)


@pytest.mark.parametrize("t", [0, 1, 7])
def test_a_module_shorter_than_a_block(t: int) -> None:
    q, k, v = inputs(t=t)
    o = nsa.nsa(q, k, v, *gates(2, 6, t), **MODULE)
    assert o.shape == (2, 6, t, 6) and torch.isfinite(o).all()


def test_a_gate_of_another_shape_is_named() -> None:
    with pytest.raises(GraphError, match="g_slc: given shape"):
        nsa.nsa(*inputs(), *(g if i != 1 else g[..., None] for i, g in enumerate(gates(2, 6, 37))), **MODULE)


def test_the_choice_forces_blocks_and_breaks_ties_by_number() -> None:
    importance = torch.zeros(1, 1, 40, 5)
    importance[..., 2] = 1.0
    chosen = nsa.choose_blocks(importance, seqlen_kv=40, block_size=8, n_blocks=4)[0, 0]
    assert chosen[0].tolist() == [0, -1, -1, -1] and chosen[15].tolist() == [0, 1, -1, -1]
    assert chosen[39].tolist() == [0, 2, 3, 4] and chosen.dtype is torch.int32
    flat = nsa.choose_blocks(torch.zeros(1, 1, 40, 5), seqlen_kv=40, block_size=8, n_blocks=3, n_init=0, n_local=1)
    assert flat[0, 0, 39].tolist() == [0, 1, 4]


# ---- other implementations, where they are installed -----------------------------------------------------------


def chosen_blocks(b: int, hk: int, t: int, block: int, slots: int) -> Tensor:
    from frost.gate_matrix_nsa import make_block_idx

    return make_block_idx(b, hk, t, block, slots)


def test_the_naive_selection_of_fla() -> None:
    """They agree on rows whose entries are different blocks or -1. Differences: fla counts a duplicate twice, in the
    softmax too; reads a clamped key for a number past the end (then masked); and a row without blocks is NaN there."""
    pytest.importorskip("fla")
    naive = pytest.importorskip("fla.ops.nsa.naive")
    q, k, v = inputs(b=2, hk=2, group=4, t=50, dv=8, dtype=torch.float32)
    indices = chosen_blocks(2, 2, 50, 8, 4)
    heads_last = [x.transpose(1, 2) for x in (q, k, v, indices.long())]
    want = naive.naive_nsa_selection(*heads_last, block_size=8)
    assert torch.allclose(nsa.selection_attn(q, k, v, indices, 8), want.transpose(1, 2), atol=1e-5)
    twice = torch.cat([indices, indices[..., :1]], -1)
    doubled = naive.naive_nsa_selection(*heads_last[:3], twice.transpose(1, 2).long(), block_size=8)
    assert not torch.allclose(doubled, want, atol=1e-3)
    assert torch.equal(nsa.selection_attn(q, k, v, twice, 8), nsa.selection_attn(q, k, v, indices, 8))


def test_the_naive_compression_of_fla() -> None:
    """They agree where block length and stride are one number, which is all that fla has."""
    pytest.importorskip("fla")
    naive = pytest.importorskip("fla.ops.nsa.naive")
    q, k, v = inputs(b=2, hk=2, group=4, t=50, dv=8, dtype=torch.float32)
    k_cmp, v_cmp = (nsa.compress(x, block_len=8, stride=8) for x in (k, v))
    want, lse = naive.naive_nsa_compression(*(x.transpose(1, 2) for x in (q, k_cmp, v_cmp)), 8, 8 ** -0.5)
    o, got, _ = nsa.compressed_attn(q, k_cmp, v_cmp, seqlen_kv=50, block_len=8, stride=8, block_size=8)
    assert torch.allclose(o, want.transpose(1, 2), atol=1e-5)
    assert torch.allclose(got.exp(), lse.transpose(1, 2).exp(), rtol=1e-5)


def test_the_fine_mask_of_native_sparse_attention_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They agree on rows that name their own block. Differences: there a row always sees its own block, named or not; only
    whole blocks and valid numbers are taken; and a compressed block is seen one token later than here."""
    module = pytest.importorskip("native_sparse_attention_pytorch.native_sparse_attention")
    monkeypatch.setattr(module, "create_block_mask", lambda mask, **_: mask)
    q, k, v = inputs(b=1, hk=2, group=2, t=48, dtype=torch.float32)
    indices = chosen_blocks(1, 2, 48, 8, 3).long()
    valid = torch.where(indices >= 0, indices, torch.arange(48)[:, None] // 8)
    seen = module.create_fine_mask(48, 8)(valid, 2)
    place = [torch.arange(n) for n in (1, 4, 48, 48)]
    keep = seen(place[0][:, None, None, None], place[1][:, None, None], place[2][:, None], place[3])
    want = torch.nn.functional.scaled_dot_product_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), attn_mask=keep)
    assert torch.allclose(nsa.selection_attn(q, k, v, indices, 8), want, atol=1e-5)


@pytest.mark.parametrize("told", [63, 16])
def test_a_sequence_longer_than_was_said_is_refused(told: int) -> None:
    """As in attention: importance and choices are sized by what was said."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(64, h, 16, generator=gen) for h in (2, 1, 1))
    gates = [torch.ones(64, 2) for _ in range(3)]
    how: dict[str, Any] = {"block_size": 8, "n_blocks": 3, "window": 5, "compress_len": 4, "compress_stride": 2,
                           "cu_seqlens": torch.tensor([0, 64], dtype=torch.int32)}
    assert torch.equal(nsa.nsa(q, k, v, *gates, **how, max_seqlen=64), nsa.nsa(q, k, v, *gates, **how))
    with pytest.raises(BindError, match=f"cu_seqlens.*seqlen_kv = {told}"):
        nsa.nsa(q, k, v, *gates, **how, max_seqlen=told)


@pytest.mark.parametrize("name, meant", [("block_len", "compress_len"), ("stride", "compress_stride")])
def test_the_names_of_the_branches_lead_to_those_of_the_module(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"it is called '{meant}' here"):
        nsa.nsa(*(torch.zeros(1, 1, 4, 8) for _ in range(3)), *(torch.zeros(1, 1, 4) for _ in range(3)), **{name: 16})
