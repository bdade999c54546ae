"""The reference against an independent formulation, its gradients against finite differences, and its edge cases."""

from __future__ import annotations

import math
import random
from typing import Any

import oracle
import pytest
import torch
from oracle import Problem
from torch import Tensor

import engines.reference.case as reference_case
from engines.reference.sdpa import sdpa_backward, sdpa_forward
from engines.reference.values import check_values, first_bad_value

F64 = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def random_problem(seed: int) -> Problem:
    """A small dense or packed problem with a random choice of options, in fp64."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    hk, group, d, dv = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([1, 4, 8]), rng.choice([1, 4, 5])
    hq, batch = hk * group, rng.choice([1, 2, 4])
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        lens_q, lens_kv = ([rng.choice([0, 1, 3, 5]) for _ in range(batch)] for _ in range(2))
        for side, lens in (("q", lens_q), ("kv", lens_kv)):
            starts = torch.tensor([rng.choice([0, 2]), *lens]).cumsum(0)
            options[f"cu_seqlens_{side}"] = starts.to(rng.choice([torch.int32, torch.int64]))
        t_q, t_kv = (int(options[f"cu_seqlens_{side}"][-1]) + rng.choice([0, 2]) for side in ("q", "kv"))
        q, k, v, rows = randn(t_q, hq, d), randn(t_kv, hk, d), randn(t_kv, hk, dv), (t_q, hq)
        full = (batch, hq, max(lens_q), max(lens_kv))
    else:
        sq, sk = rng.choice([0, 1, 3, 6]), rng.choice([0, 1, 4, 7])
        q, k, v, rows = randn(batch, hq, sq, d), randn(batch, hk, sk, d), randn(batch, hk, sk, dv), (batch, hq, sq)
        full = (batch, hq, sq, sk)
        for name, extent in (("seq_len_q", sq), ("seq_len_kv", sk)):
            if rng.random() < 0.3:
                options[name] = torch.tensor([rng.randint(0, extent) for _ in range(batch)], dtype=torch.int32)
    if rng.random() < 0.5:
        causal = rng.random() < 0.5
        right = None if causal else rng.choice([None, 0, 1, 3, 10**6])
        options.update(causal=causal, align_bottom_right=rng.random() < 0.5,
                       window=(rng.choice([None, 0, 1, 2, 10**6]), right))
    for name in ("bias", "mask"):
        if rng.random() < 0.4:
            shape = [extent if rng.random() < 0.5 else 1 for extent in full][-rng.choice([2, 3, 4]):]
            options[name] = randn(*shape) if name == "bias" else torch.rand(shape) < 0.6
    if "bias" in options and rng.random() < 0.3:
        options["bias"][torch.rand(options["bias"].shape) < 0.3] = -math.inf
    if rng.random() < 0.4:
        options["sink"] = randn(hq)
        options["sink"][0] = rng.choice([0.5, -math.inf])
    options["softcap"] = rng.choice([None, None, 0.7, 3.0])
    options["scale"] = rng.choice([None, None, 0.0, -0.4, 1.3])
    return Problem(q, k, v, randn(*rows, dv), randn(*rows) if rng.random() < 0.6 else None, options)


def assert_equal_answers(got: oracle.Answer, want: oracle.Answer, context: str, tol: float = 1e-10) -> None:
    for name, expected in want.items():
        torch.testing.assert_close(getattr(got, name).double(), expected, rtol=tol, atol=tol,
                                   msg=lambda text, name=name: f"{context}, {name}: {text}")


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("host_reads", [True, False], ids=["by_sequence", "on_device"])
def test_reference_equals_the_naive_formulation(seed: int, host_reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of finding sequences, and score tiles so small that rows, heads and batches are all cut."""
    problem = random_problem(seed)
    monkeypatch.setitem(reference_case.SCORE_TILE_BYTES, "cpu", [56, 240, 4 << 20][seed % 3])
    got = oracle.reference(problem, host_reads=host_reads)
    assert_equal_answers(got, oracle.naive(problem), f"python -m pytest {__file__} -k '{seed}'")


@pytest.mark.parametrize("seed", range(30))
def test_plain_composition_in_fp32_equals_the_naive_formulation(seed: int) -> None:
    problem = random_problem(seed)
    assert_equal_answers(oracle.plain_composition(problem.cast(torch.float32)), oracle.naive(problem), str(seed), 2e-4)


class ReferenceAttention(torch.autograd.Function):
    """The reference's forward and explicit backward as one differentiable function, for gradcheck."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None,
                options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        o, lse = sdpa_forward(q, k, v, bias=bias, sink=sink, **options)
        ctx.save_for_backward(q, k, v, o, lse, *(x for x in (bias, sink) if x is not None))
        ctx.given, ctx.options = (bias is not None, sink is not None), options
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse, *rest = ctx.saved_tensors
        bias = rest.pop(0) if ctx.given[0] else None
        sink = rest.pop(0) if ctx.given[1] else None
        want = ("dq", "dk", "dv", *(("dbias",) if bias is not None else ()), *(("dsink",) if sink is not None else ()))
        return *sdpa_backward(q, k, v, o, do, lse, dlse=dlse, bias=bias, sink=sink, want=want, **ctx.options), None


GRADCHECKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal_bottom_right": {"causal": True, "align_bottom_right": True},
    "window": {"window": (1, 2)},
    "softcap": {"softcap": 0.8, "scale": 1.1},
    "mask": {"mask": torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 0, 1], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]]).bool()},
    "lengths": {"seq_len_q": torch.tensor([4, 3]), "seq_len_kv": torch.tensor([2, 5])},
    "everything": {"causal": True, "window": (2, None), "softcap": 1.5, "scale": -0.7, "seq_len_kv": torch.tensor([5, 4])},
}


@pytest.mark.parametrize("name", GRADCHECKS)
@pytest.mark.parametrize("with_extras", [False, True], ids=["qkv", "bias_sink"])
def test_gradcheck(name: str, with_extras: bool) -> None:
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in (randn(2, 4, 4, 3), randn(2, 2, 5, 3), randn(2, 2, 5, 2))]
    extras = [randn(2, 1, 4, 5).requires_grad_(), randn(4).requires_grad_()] if with_extras else [None, None]
    options = GRADCHECKS[name]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        bias, sink = tensors[3:] if with_extras else (None, None)
        o, lse = ReferenceAttention.apply(*tensors[:3], bias, sink, options)
        return o, torch.where(torch.isfinite(lse), lse, 0.0)

    assert torch.autograd.gradcheck(run, [*inputs, *(x for x in extras if x is not None)])


# ---- bad values where nothing is seen ----------------------------------------------------------------------


def _padded(packed: bool, poison: float, dtype: torch.dtype) -> Problem:
    torch.manual_seed(3)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    sink = torch.randn(4)
    if packed:
        q, k, v, do, dlse = make(14, 4, 8), make(16, 2, 8), make(16, 2, 8), make(14, 4, 8), torch.randn(14, 4)
        for x in (q, do, dlse):
            x[[0, 1, 11, 12, 13]] = poison
        for x in (k, v):
            x[[0, 4, 5, 6, 7, 13, 14, 15]] = poison  # sequence 1 has keys but no query
        options = {"cu_seqlens_q": torch.tensor([2, 5, 5, 11]), "cu_seqlens_kv": torch.tensor([1, 4, 8, 13])}
    else:
        q, k, v, do, dlse = make(2, 4, 6, 8), make(2, 2, 7, 8), make(2, 2, 7, 8), make(2, 4, 6, 8), torch.randn(2, 4, 6)
        for x in (q, do, dlse):
            x[0, :, 3:] = poison
        for x in (k, v):
            x[0, :, 4:] = poison
            x[1] = poison
        options = {"seq_len_q": torch.tensor([3, 6]), "seq_len_kv": torch.tensor([4, 0])}
    return Problem(q, k, v, do, dlse, {**options, "sink": sink, "align_bottom_right": True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("host_reads", [True, False], ids=["by_sequence", "on_device"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("extra", [{}, {"causal": True}, {"softcap": 2.0}], ids=["full", "causal", "softcap"])
def test_what_is_in_padding_changes_no_bit(packed: bool, host_reads: bool, dtype: torch.dtype, extra: dict) -> None:
    """flash-attention#1745, pytorch#101967: uninitialised tails leak through 0 * NaN."""
    runs = []
    for poison in (0.0, 3e4, math.inf, -math.inf, math.nan):
        p = _padded(packed, poison, dtype)
        options = {**p.options, **extra}
        o, lse = sdpa_forward(p.q, p.k, p.v, host_reads=host_reads, **options)
        grads = sdpa_backward(p.q, p.k, p.v, o, p.do, lse, dlse=p.dlse, want=("dq", "dk", "dv", "dsink"),
                              host_reads=host_reads, **options)
        runs.append([o, lse, *grads[:3], grads.dsink])
    for run in runs[1:]:
        for name, got, want in zip(("o", "lse", "dq", "dk", "dv", "dsink"), run, runs[0]):
            assert torch.equal(got, want), name


@pytest.mark.parametrize("host_reads", [True, False], ids=["by_sequence", "on_device"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_reaches_exactly_the_rows_and_keys_that_see_it(host_reads: bool, bad: float) -> None:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 5, 4) for _ in range(4))
    how = {"causal": True, "host_reads": host_reads}
    o, lse = sdpa_forward(q, k, v, **how)
    clean = sdpa_backward(q, k, v, o, do, lse, **how)

    spoilt_v = v.clone()
    spoilt_v[:, :, 3] = bad
    o_bad, lse_bad = sdpa_forward(q, k, spoilt_v, **how)
    assert torch.equal(o_bad[:, :, :3], o[:, :, :3]) and torch.equal(lse_bad, lse)
    assert not torch.isfinite(o_bad[:, :, 3:]).any()

    spoilt_do = do.clone()
    spoilt_do[:, :, 1] = bad
    grads = sdpa_backward(q, k, v, o, spoilt_do, lse, **how)
    for got, want in ((grads.dk, clean.dk), (grads.dv, clean.dv)):
        assert torch.equal(got[:, :, 2:], want[:, :, 2:]) and not torch.isfinite(got[:, :, :2]).any()
    others = [0, 2, 3, 4]
    assert torch.equal(grads.dq[:, :, others], clean.dq[:, :, others])


# ---- sinks, empty rows, extremes ---------------------------------------------------------------------------


def test_infinite_sinks() -> None:
    """flash-attention PR#2706: +inf takes all the weight, -inf none, and neither makes NaN."""
    q, k, v, do, dlse = *(randn(1, 2, 5, 4) for _ in range(4)), torch.ones(1, 2, 5, dtype=F64)
    sink = torch.tensor([math.inf, -math.inf], dtype=F64)
    o, lse = sdpa_forward(q, k, v, sink=sink)
    bare_o, bare_lse = sdpa_forward(q, k, v)
    assert not o[:, 0].any() and bool((lse[:, 0] == math.inf).all())
    assert torch.equal(o[:, 1], bare_o[:, 1]) and torch.equal(lse[:, 1], bare_lse[:, 1])
    grads = sdpa_backward(q, k, v, o, do, lse, dlse=dlse, sink=sink, want=("dq", "dk", "dv", "dsink"))
    assert grads.dsink.tolist() == [5.0, 0.0]
    assert all(bool(torch.isfinite(g).all()) for g in grads if g is not None)


def test_empty_rows_have_zero_output_and_gradients() -> None:
    """pytorch#41508, flashinfer#4452: one fully masked row must not spoil the others, whatever its dO and dLSE."""
    q, k, v, do = (randn(1, 1, 2, 4) for _ in range(4))
    mask = torch.tensor([[False, False], [True, True]])
    do[:, :, 0], dlse = 1e4, torch.full((1, 1, 2), 7.0, dtype=F64)
    o, lse = sdpa_forward(q, k, v, mask=mask)
    grads = sdpa_backward(q, k, v, o, do, lse, dlse=dlse, mask=mask)
    assert not o[:, :, 0].any() and lse[0, 0, 0] == -math.inf and not grads.dq[:, :, 0].any()
    alone = sdpa_backward(q[:, :, 1:], k, v, o[:, :, 1:], do[:, :, 1:], lse[:, :, 1:], dlse=dlse[:, :, 1:])
    torch.testing.assert_close(grads.dk, alone.dk)
    torch.testing.assert_close(grads.dv, alone.dv)


@pytest.mark.parametrize("offset", [-1e4, -1e3, 1e5])
@pytest.mark.parametrize("keys", [127, 128, 129])
def test_backward_is_finite_under_extreme_lse(offset: float, keys: int) -> None:
    """cudnn-frontend#1072."""
    torch.manual_seed(0)
    q = torch.ones(1, 2, 1, 64, dtype=torch.bfloat16)
    k = (offset / 8 + torch.randn(1, 2, keys, 64)).to(torch.bfloat16)
    v, do = torch.randn(1, 2, keys, 64).to(torch.bfloat16), torch.randn(1, 2, 1, 64).to(torch.bfloat16)
    o, lse = sdpa_forward(q, k, v)
    assert all(bool(torch.isfinite(g).all()) for g in sdpa_backward(q, k, v, o, do, lse) if g is not None)


def test_softcap_of_huge_scores_is_the_cap() -> None:
    """vllm#56578."""
    k = torch.tensor([4400.0, 5000.0, -10000.0]).reshape(1, 1, 3, 1)
    o, lse = sdpa_forward(torch.ones(1, 1, 1, 1), k, torch.eye(3)[None, None], softcap=50.0, scale=1.0)
    torch.testing.assert_close(o.flatten(), torch.tensor([0.5, 0.5, 0.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([50 + math.log(2)]))


def test_lse_is_a_natural_logarithm() -> None:
    """pytorch#181645."""
    _, lse = sdpa_forward(torch.zeros(1, 1, 1, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4))
    assert lse.item() == pytest.approx(math.log(5))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_lowered_matmul_precision_does_not_lower_the_reference(precision: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 64) for _ in range(3))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o, _ = sdpa_forward(q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    want, _ = sdpa_forward(q.double(), k.double(), v.double())
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=2e-6)


def test_delta_comes_from_the_given_o_where_that_is_a_merged_result() -> None:
    """Partial keys with the o and lse of all of them (as when keys are spread over devices): gradients add up."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 6, 8).to(torch.bfloat16) for _ in range(4))
    o, lse = sdpa_forward(q, k, v)
    whole = sdpa_backward(q, k, v, o, do, lse)
    halves = [sdpa_backward(q, k[:, :, s], v[:, :, s], o, do, lse) for s in (slice(0, 3), slice(3, 6))]
    torch.testing.assert_close(halves[0].dq.float() + halves[1].dq.float(), whole.dq.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(torch.cat([h.dk for h in halves], 2).float(), whole.dk.float(), rtol=2e-2, atol=2e-2)


# ---- values on the device ----------------------------------------------------------------------------------


BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"cu_seqlens_q": [0, -1, 4]}, "cu_seqlens_q[1]: given -1, expected a value in 0..4"),
    "beyond": ({"cu_seqlens_kv": [0, 3, 9]}, "cu_seqlens_kv[2]: given 9, expected a value in 0..6"),
    "falling": ({"cu_seqlens_q": [0, 3, 2]}, "cu_seqlens_q[2]: given 2, expected at least cu_seqlens_q[1] = 3"),
    "long": ({"cu_seqlens_kv": [0, 1, 6], "max_seqlen_kv": 4},
             "cu_seqlens_kv[2]: given 6, a sequence of 5 tokens, expected at most max_seqlen_kv = 4"),
    "length": ({"seq_len_q": [4, 5]}, "seq_len_q[1]: given 5, expected a value in 0..4"),
    "negative_length": ({"seq_len_kv": [-2, 5]}, "seq_len_kv[0]: given -2, expected a value in 0..6"),
    "good": ({"cu_seqlens_q": [1, 1, 4], "cu_seqlens_kv": [0, 6, 6]}, ""),
}


@pytest.mark.parametrize("name", BAD_VALUES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_first_bad_value_is_named(name: str, dtype: torch.dtype) -> None:
    given, text = BAD_VALUES[name]
    tensors = {key: torch.tensor(x, dtype=dtype) if isinstance(x, list) else x for key, x in given.items()}
    assert (first_bad_value(extent_q=4, extent_kv=6, **tensors) or "") == text
    if text:
        with pytest.raises(ValueError, match=r"expected"):
            check_values(extent_q=4, extent_kv=6, **tensors)


@pytest.mark.parametrize("cu", [[0, 99, 4], [-5, 2, 3], [3, 1, 0], [7, 7, 7], [2**31 - 1, -(2**31), 4]])
def test_wrong_offsets_never_reach_outside_a_buffer(cu: list[int]) -> None:
    """With values unread, as on a GPU: finite numbers out of finite numbers, nothing indexed beyond an operand."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(4, 2, 8) for _ in range(4))
    offsets = torch.tensor(cu, dtype=torch.int32)
    how = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets.clone(), "bias": torch.randn(2, 1, 4, 4),
           "host_reads": False}
    o, lse = sdpa_forward(q, k, v, **how)
    grads = sdpa_backward(q, k, v, o, do, lse, want=("dq", "dk", "dv", "dbias"), **how)
    assert all(bool(torch.isfinite(x).all()) for x in (o, *grads[:4]))


def test_a_long_case_never_holds_its_score_matrix() -> None:
    """32k x 32k scores would be 4 GiB in fp32; the tiles of one row block are what is allocated."""
    q = torch.randn(1, 1, 64, 8)
    k, v = torch.randn(1, 1, 1 << 20, 8), torch.randn(1, 1, 1 << 20, 8)
    part = next(reference_case.AttentionCase.make(q, k, v, {
        **dict.fromkeys(("bias", "mask", "sink", "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv", "scale",
                         "softcap", "host_reads")),
        "causal": False, "align_bottom_right": False, "window": (None, None)}).parts())
    sizes = [(at.i.stop - at.i.start) * (at.j.stop - at.j.start) * 4
             for at in reference_case.tiles(part, torch.float32)]
    assert sum(sizes) == 64 * (1 << 20) * 4 and max(sizes) <= reference_case.SCORE_TILE_BYTES["cpu"]
