"""`frost.attention`: values against the oracle, the layout of results, plans found again, bad arguments."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest
import torch
from compare import assert_answer, assert_same
from oracle import Problem
from torch import Tensor

import frost
from descriptors import DType
from engines import registry
from engines.base import Adapter, Capabilities, Engine, Executable, SdpaFwdDsl
from frost import _attention
from frost._layout import gradient_strides, laid_out_like

B, HQ, HK, SQ, SK, D, DV = 2, 4, 2, 5, 7, 8, 6


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    made = rand(B, HQ, SQ, D, dtype=dtype), rand(B, HK, SK, D, seed=1, dtype=dtype), rand(B, HK, SK, DV, seed=2, dtype=dtype)
    return tuple(x.requires_grad_(requires_grad) for x in made)  # type: ignore[return-value]


def for_oracle(options: dict[str, Any]) -> dict[str, Any]:
    """The reference's option names."""
    out = {n: x for n, x in options.items() if n not in ("align", "max_seqlen_q", "max_seqlen_kv")}
    if options.get("align") == "bottom_right":
        out["align_bottom_right"] = True
    return out


def against_oracle(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """o, lse and every gradient, with a loss on both results."""
    leaves = {"q": q, "k": k, "v": v, **{n: options[n] for n in ("bias", "sink") if options.get(n) is not None}}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    given = {**options, **{n: x for n, x in leaves.items() if n in options}}
    o, lse = frost.attention(leaves["q"], leaves["k"], leaves["v"], return_lse=True, **given)
    do, dlse = rand(*o.shape, seed=3, dtype=o.dtype), rand(*lse.shape, seed=4, dtype=lse.dtype)
    grads = torch.autograd.grad((o, lse), tuple(leaves.values()), (do, dlse))
    got = {"o": o, "lse": lse, **{"d" + n: g for n, g in zip(leaves, grads)}}
    assert_answer(got, Problem(q, k, v, do, dlse, for_oracle(options)))
    for (name, leaf), grad in zip(leaves.items(), grads):
        assert grad.dtype == leaf.dtype, name


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "scale": {"scale": 0.3}, "negative_scale": {"scale": -0.5}, "integer_scale": {"scale": 2},
    "causal": {"causal": True}, "causal_bottom_right": {"causal": True, "align": "bottom_right"},
    "window": {"window": (2, 1)}, "causal_left": {"causal": True, "window": [3, None]}, "softcap": {"softcap": 1.5},
    "softcap_off": {"softcap": 0.0}, "bias_2d": {"bias": rand(SQ, SK, seed=5)}, "bias_3d": {"bias": rand(HQ, 1, SK, seed=5)},
    "bias_4d": {"bias": rand(B, 1, SQ, SK, seed=5)}, "bias_bf16": {"bias": rand(1, HQ, SQ, SK, dtype=torch.bfloat16)},
    "mask": {"mask": rand(B, 1, SQ, SK, seed=6) > 0}, "sink": {"sink": rand(HQ, seed=7)},
    "lengths": {"seq_len_q": torch.tensor([3, 0]), "seq_len_kv": torch.tensor([7, 2], dtype=torch.int32)},
    "key_lengths": {"seq_len_kv": torch.tensor([0, 4])},
    "together": {"causal": True, "softcap": 2.0, "bias": rand(SQ, SK, seed=5), "sink": rand(HQ, seed=7),
                 "mask": rand(SQ, SK, seed=6) > -1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_dense_matches_the_oracle(options: dict[str, Any]) -> None:
    against_oracle(*qkv(), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_matches_the_oracle(dtype: torch.dtype) -> None:
    against_oracle(*qkv(dtype), causal=True, sink=rand(HQ, dtype=dtype))


PACKED: dict[str, tuple[list[int], list[int]]] = {
    "full": ([0, 3, 9], [0, 4, 11]), "empty_segments": ([0, 0, 3, 5, 9], [0, 4, 6, 7, 11]),
    "gaps": ([2, 4, 8], [1, 5, 9]), "nothing": ([0], [0]), "all_empty": ([0, 0, 0], [0, 0, 0]),
}


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", PACKED.values(), ids=PACKED)
def test_packed_matches_the_oracle(offsets: tuple[list[int], list[int]], index: torch.dtype) -> None:
    """pytorch and flash-attention#2562: zero-length sequences are ordinary, tokens outside the offsets are padding."""
    cu_q, cu_kv = (torch.tensor(x, dtype=index) for x in offsets)
    against_oracle(rand(9, HQ, D), rand(11, HK, D), rand(11, HK, DV), cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv,
                   causal=True, align="bottom_right", sink=rand(HQ))


def test_packed_bias_by_sequence_and_position() -> None:
    against_oracle(rand(9, HQ, D), rand(11, HK, D), rand(11, HK, DV), cu_seqlens_q=torch.tensor([0, 3, 9]),
                   cu_seqlens_kv=torch.tensor([0, 4, 11]), max_seqlen_q=6, max_seqlen_kv=7, bias=rand(2, 1, 6, 7))


@pytest.mark.parametrize(("shape_q", "shape_k"), [((0, 2, 3, 4), (0, 2, 5, 4)), ((1, 2, 0, 4), (1, 2, 5, 4)),
                                                  ((1, 2, 3, 4), (1, 2, 0, 4))])
def test_zero_extents_are_ordinary(shape_q: tuple[int, ...], shape_k: tuple[int, ...]) -> None:
    q, k = rand(*shape_q).requires_grad_(), rand(*shape_k).requires_grad_()
    o, lse = frost.attention(q, k, k, return_lse=True)
    assert o.shape == shape_q and bool((o == 0).all()) and bool((lse == -math.inf).all())
    o.sum().backward()
    assert bool((q.grad == 0).all()) and bool((k.grad == 0).all())


def test_results_come_alone_or_as_a_pair() -> None:
    q, k, v = qkv()
    o = frost.attention(q, k, v)
    pair = frost.attention(q, k, v, return_lse=True)
    assert isinstance(o, Tensor) and isinstance(pair, tuple)
    assert_same(pair[0], o)
    assert pair[1].shape == (B, HQ, SQ) and pair[1].dtype == torch.float32


# ---- layouts


@pytest.mark.parametrize("layout", [x.name for x in layouts.layouts_for((B, HQ, SQ, D))])
def test_layout_changes_no_value(layout: str) -> None:
    """Any layout of any operand gives what its contiguous copy gives; what lies between the rows is never read."""
    q, k, v = (layouts.lay_out(x, layout).requires_grad_() for x in qkv())
    bias = layouts.lay_out(rand(B, HQ, SQ, SK), layout).requires_grad_()
    leaves = (q, k, v, bias)
    o, lse = frost.attention(q, k, v, bias=bias, return_lse=True)
    grads = torch.autograd.grad(o.square().sum() + lse.sum(), leaves)
    plain = tuple(x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in leaves)
    o2, lse2 = frost.attention(*plain[:3], bias=plain[3], return_lse=True)
    want = torch.autograd.grad(o2.square().sum() + lse2.sum(), plain)
    torch.testing.assert_close(o, o2)
    torch.testing.assert_close(lse, lse2)
    for a, b in zip(grads, want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
def test_output_and_gradients_lie_like_their_operand(order: tuple[int, ...]) -> None:
    """pytorch#180445: a BSHD view gives a BSHD output, dense even where Dv differs."""
    q, k, v = qkv()
    def stored(x: Tensor) -> Tensor:
        return x.permute(order).contiguous().permute([order.index(i) for i in range(4)]).requires_grad_()
    q, k, v = stored(q), stored(k), stored(v)
    o = frost.attention(q, k, v)
    assert o.permute(order).is_contiguous()
    for x, g in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v))):
        assert g.stride() == x.stride()


def test_gradient_of_an_operand_with_gaps_is_row_major() -> None:
    q, k, v = qkv()
    wide = layouts.lay_out(q, "padded_pitch").requires_grad_()
    shared = k[:1].expand(B, -1, -1, -1).requires_grad_()
    for g in torch.autograd.grad(frost.attention(wide, shared, v).sum(), (wide, shared)):
        assert g.is_contiguous()


@pytest.mark.parametrize(("shape", "stride", "new_shape", "expected"), [
    ((2, 3, 5, 8), (120, 40, 8, 1), (2, 3, 5, 4), (60, 20, 4, 1)),
    ((2, 3, 5, 8), (120, 8, 24, 1), (2, 3, 5, 4), (60, 4, 12, 1)),         # BSHD
    ((2, 3, 5, 8), (360, 8, 72, 1), (2, 3, 5, 8), (120, 8, 24, 1)),        # a slice of a packed qkv
    ((1, 3, 5, 8), (7, 8, 24, 1), (1, 3, 5, 8), (120, 8, 24, 1)),          # stride of an extent of 1 is nonsense
    ((2, 3, 5, 8), (0, 40, 8, 1), (2, 3, 5, 8), (120, 40, 8, 1)),          # expanded
    ((2, 3, 5, 1), (15, 5, 1, 1), (2, 3, 5, 4), (60, 20, 4, 1)),           # the last dim stays innermost
    ((2, 3, 5, 8), (120, 40, 1, 5), (2, 3, 5, 4), (60, 20, 1, 5)),
    ((0, 3, 5, 8), (120, 40, 8, 1), (0, 3, 5, 8), (120, 40, 8, 1)),
])
def test_memory_order_is_kept_without_gaps(shape: tuple, stride: tuple, new_shape: tuple, expected: tuple) -> None:
    assert laid_out_like(shape, stride, new_shape) == expected


@pytest.mark.parametrize(("shape", "stride", "expected"), [
    ((2, 3), (3, 1), (3, 1)), ((2, 3), (1, 2), (1, 2)), ((2, 3), (4, 1), (3, 1)), ((2, 3), (0, 1), (3, 1)),
    ((1, 3), (99, 1), (99, 1)), ((2, 3), (1, 1), (3, 1)), ((), (), ()),
])
def test_gradient_strides(shape: tuple, stride: tuple, expected: tuple) -> None:
    assert gradient_strides(shape, stride) == expected


@pytest.mark.parametrize("offset", range(9))
def test_any_alignment_after_any_other(offset: int) -> None:
    """pytorch#112577: an address known when a plan was made is not taken for granted for the next tensor."""
    q, k, v = qkv(torch.float16)
    want = frost.attention(q, k, v)
    moved = [torch.cat([x.new_full((offset,), math.nan), x.flatten()])[offset:].view(x.shape) for x in (q, k, v)]
    assert moved[0].data_ptr() % 16 == 2 * offset % 16
    assert_same(frost.attention(*moved), want)
    assert_same(frost.attention(q, k, v), want)


# ---- plans are found again


@pytest.fixture
def graphs_built(fresh_cache: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that calls had to build, beside an empty cache."""
    built: list[str] = []

    def build(name: str) -> frost.Graph:
        built.append(name)
        return frost.Graph(name)

    monkeypatch.setattr(_attention, "Graph", build)
    return built


def test_packed_totals_and_counts_share_one_plan(graphs_built: list[str]) -> None:
    """cudnn-frontend#604: 20 packed calls with other totals, lengths and counts build one forward and one backward."""
    made = torch.Generator().manual_seed(0)
    built = []
    for _ in range(20):
        lengths = torch.randint(0, 6, (int(torch.randint(1, 5, (1,), generator=made)),), generator=made)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
        total = int(cu[-1])
        q, k = rand(total, HQ, D).requires_grad_(), rand(total, HK, D).requires_grad_()
        options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "causal": True}
        o = frost.attention(q, k, k, **options)
        o.square().sum().backward()
        assert_answer({"o": o}, Problem(q.detach(), k.detach(), k.detach(), options=for_oracle(options)))
        built.append(frost.cache.info().plans_built)
    assert built == [2] * 20 and graphs_built == ["attention", "attention_backward"]
    assert frost.cache.info().hits == 38


@pytest.mark.parametrize("head_major", [False, True])
def test_no_packed_total_is_left_in_what_a_plan_is_looked_up_by(head_major: bool, graphs_built: list[str]) -> None:
    """cudnn-frontend#604: derived strides smuggle no total in either."""
    for total in (5, 8, 13):
        x = rand(HQ, total, D).transpose(0, 1) if head_major else rand(total, HQ, D)
        cu = torch.tensor([0, 2, total])
        o = frost.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        assert o.stride() == x.stride()
        assert_answer({"o": o}, Problem(x, x, x, options={"cu_seqlens_q": cu, "cu_seqlens_kv": cu}))
    assert frost.cache.info().plans_built == 1 and graphs_built == ["attention"]


def test_a_repeated_call_builds_no_graph(graphs_built: list[str]) -> None:
    q, k, v = qkv()
    want = frost.attention(q, k, v)
    assert_same(frost.attention(q.clone(), k.clone(), v.clone()), want)
    assert graphs_built == ["attention"]


def test_values_of_options_share_compiled_plans_and_are_not_mixed_up(fresh_cache: Any) -> None:
    q, k, v = qkv()
    for scale in (0.1, 0.5, 0.1):
        got = frost.attention(q, k, v, scale=scale, window=(int(scale * 10), None))
        options = {"scale": scale, "window": (int(scale * 10), None)}
        assert_answer({"o": got}, Problem(q, k, v, options=options))
    assert frost.cache.info().plans_built == 1


def test_clearing_the_cache_is_heard(graphs_built: list[str]) -> None:
    q, k, v = qkv()
    frost.attention(q, k, v)
    frost.cache.clear()
    frost.attention(q, k, v)
    assert frost.cache.info().plans_built == 2 and len(graphs_built) == 2


def test_plans_are_bounded(fresh_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROST_PLAN_CACHE_SIZE", "3")
    for n in range(1, 7):
        frost.attention(rand(1, 1, n, 4), rand(1, 1, n, 4), rand(1, 1, n, 4))
    assert len(_attention._plans) <= 3 and frost.cache.info().plans <= 3


def test_many_threads_build_one_plan(fresh_cache: Any) -> None:
    q, k, v = qkv()
    want = frost.attention(q, k, v)
    frost.cache.clear()
    frost.cache.reset_counters()
    start, wrong = threading.Barrier(6), []

    def work() -> None:
        start.wait()
        for _ in range(10):
            if not torch.equal(frost.attention(q, k, v), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong and frost.cache.info().plans_built == 1


# ---- routes


class _Zeros(Executable):
    def prepare(self, launch: Any, workspace: Any) -> Callable[[int], None]:
        def call(stream: int) -> None:
            launch.operands["o"].zero_()

        return call


class _Always(SdpaFwdDsl):
    engine = "zeros"
    capabilities = (Capabilities("zeros", "sdpa", ("cpu",), (DType.F32,), frozenset()),)

    def compile(self, desc: Any, target: Any) -> Executable:
        return _Zeros()


class ZerosEngine(Engine):
    name = "zeros"

    def adapters(self) -> tuple[Adapter, ...]:
        return (_Always(),)


def test_what_served_is_on_record(fresh_cache: Any, fresh_routing: None) -> None:
    """transformers PR#46960: where every other engine declines, the reference serves and the record says why."""
    q, k, v = qkv()
    frost.attention(q, k, v, softcap=2.0)
    frost.attention(q, k, v, softcap=2.0)
    stats = frost.routing.stats()
    assert stats["reference:sdpa"] == 1 and stats.cache_hits == {"reference:sdpa": 1}
    declined = {d.engine for d in frost.routing.routes()[-1].declined}
    assert declined == set(registry.names()) - {"reference"}


def test_named_engines_never_fall_back() -> None:
    q, k, v = qkv()
    with pytest.raises(frost.NotSupportedError) as e:
        frost.attention(q, k, v, softcap=1.0, engines=["torch_sdpa"])
    assert list(e.value.reasons) == ["torch_sdpa"] and any("softcap" in r for r in e.value.reasons["torch_sdpa"])


def test_an_engine_registered_later_is_asked(register: Callable[..., Engine]) -> None:
    """cudnn-frontend PR#1145: a change of what may serve is not hidden by a remembered choice."""
    q, k, v = qkv()
    assert bool(frost.attention(q, k, v).any())
    register(ZerosEngine(), priority=1)
    assert not bool(frost.attention(q, k, v).any())


def test_gate_policy_comes_from_the_environment_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    frost.attention(q, k, v)
    monkeypatch.setenv("FROST_GATES", "perhaps")
    with pytest.raises(ValueError, match="FROST_GATES.*perhaps"):
        frost.attention(q, k, v)
    frost.attention(q, k, v, gates="off")
    with pytest.raises(ValueError, match="gates.*maybe"):
        frost.attention(q, k, v, gates="maybe")


def test_a_gate_that_comes_or_changes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, what may serve depends on gates: a plan is not looked up past a new one, or another source."""
    monkeypatch.setenv("FROST_GATE_DIR", str(tmp_path / "gates"))
    states = [_attention._gate_state()]
    frost.gates.write_equivalence_gate(tolerances=1.0, shapes_covered=["all"])
    states.append(_attention._gate_state())
    monkeypatch.setattr(frost.gates, "kernel_source_hash", lambda: "0" * 64)
    states.append(_attention._gate_state())
    monkeypatch.setenv("FROST_GATE_DIR", str(tmp_path / "elsewhere"))
    states.append(_attention._gate_state())
    assert len(set(states)) == 4
    assert _attention._gate_state() == states[-1]


# ---- autocast


def test_autocast_casts_q_k_v_and_gradients_come_back_in_their_dtype() -> None:
    """flash-linear-attention#70: mixed inputs under autocast."""
    q, k, v = qkv(requires_grad=True)
    low = v.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = frost.attention(q, k, low, bias=rand(SQ, SK), return_lse=True)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    grads = torch.autograd.grad(o.float().sum(), (q, k, low))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32, torch.bfloat16]
    want = frost.attention(q.bfloat16(), k.bfloat16(), low, bias=rand(SQ, SK))
    assert_same(o, want)


def test_autocast_off_and_fp64_are_left_alone() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", enabled=False):
        assert frost.attention(q, k, v).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert frost.attention(q.double(), k.double(), v.double()).dtype == torch.float64


# ---- bad arguments


def wrong(**changes: Any) -> dict[str, Any]:
    q, k, v = qkv()
    return {"q": q, "k": k, "v": v, **changes}


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "misspelt": (wrong(casual=True), TypeError, "unknown option 'casual'; did you mean 'causal'"),
    "unknown": (wrong(colour="red"), TypeError, "unknown option 'colour'; known: q, k, v, scale"),
    "stats": (wrong(return_lsee=True), TypeError, "did you mean 'return_lse'"),
    "no_tensor": (wrong(k=[1.0]), TypeError, "k: given list, expected torch.Tensor"),
    "array": (wrong(bias=np.zeros((5, 7))), TypeError, "bias: given ndarray"),
    "sparse": (wrong(mask=torch.ones(SQ, SK, dtype=torch.bool).to_sparse()), TypeError, "mask: given layout torch.sparse"),
    "rank": (wrong(q=rand(SQ, D)), frost.GraphError, r"q: given shape \[5, 8\], expected \[B, H, S, D\]"),
    "kv_lengths": (wrong(v=rand(B, HK, SK + 1, DV)), frost.GraphError, "(?s)v.*8.*k"),
    "head_dims": (wrong(k=rand(B, HK, SK, D + 1)), frost.GraphError, "k.*D = 9"),
    "groups": (wrong(q=rand(B, 3, SQ, D)), frost.GraphError, "Hq = 3"),
    "dtypes": (wrong(k=rand(B, HK, SK, D).half()), frost.GraphError, "k.*fp16.*fp32"),
    "integers": (wrong(q=torch.ones(B, HQ, SQ, D, dtype=torch.int32)), frost.GraphError, "q.*int32"),
    "complex": (wrong(q=rand(B, HQ, SQ, D) * 1j), TypeError, "attention: q: .*complex64"),
    "fp8": (wrong(q=rand(B, HQ, SQ, D).to(torch.float8_e4m3fn)), TypeError, "attention: q: .*float8_e4m3fn.*known: fp64, fp32"),
    "window": (wrong(window=3), frost.GraphError, r"window: given 3, expected a pair \(left, right\) such as \(3, None\)"),
    "window_minus_one": (wrong(window=(-1, 0)), frost.GraphError, "window left.*-1.*None means unbounded"),
    "window_huge": (wrong(window=(2**31, 0)), frost.GraphError, "window left"),
    "window_causal": (wrong(causal=True, window=(None, 2)), frost.GraphError, "window right"),
    "causal_number": (wrong(causal=1), frost.GraphError, "causal: given 1"),
    "align": (wrong(align="bottom"), frost.GraphError, "align: given 'bottom'"),
    "scale_tensor": (wrong(scale=torch.tensor(0.1)), frost.GraphError, "scale: given tensor"),
    "scale_nan": (wrong(scale=math.nan), frost.GraphError, "scale.*nan"),
    "scale_bool": (wrong(scale=True), frost.GraphError, "scale: given True"),
    "softcap": (wrong(softcap=-1.0), frost.GraphError, "softcap"),
    "mask_dtype": (wrong(mask=torch.zeros(SQ, SK)), frost.GraphError, "mask.*bool"),
    "bias_shape": (wrong(bias=rand(SQ, SK + 1)), frost.GraphError, "bias"),
    "sink_shape": (wrong(sink=rand(HK)), frost.GraphError, "sink"),
    "one_offset": (wrong(cu_seqlens_q=torch.tensor([0, 2])), frost.GraphError, "cu_seqlens_kv"),
    "max_dense": (wrong(max_seqlen_q=5), frost.GraphError, "max_seqlen_q"),
    "max_tensor": (wrong(max_seqlen_q=torch.tensor(5)), frost.GraphError, "max_seqlen_q.*item"),
    "length_value": (wrong(seq_len_q=torch.tensor([1, 6])), frost.BindError, r"seq_len_q\[1\]: given 6"),
    "length_dtype": (wrong(seq_len_q=torch.tensor([1.0, 2.0])), frost.GraphError, "seq_len_q"),
    "engine": (wrong(engines=["tritom"]), ValueError, "'tritom'.*did you mean 'triton'"),
    "return_lse": (wrong(return_lse="yes"), frost.GraphError, "attention: return_lse: given 'yes', expected True or False"),
    "engine_string": (wrong(engines="triton"), ValueError, "expected a list"),
    "no_engine": (wrong(engines=[]), ValueError, "empty list"),
}


@pytest.mark.parametrize(("arguments", "error", "text"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("grad", [False, True])
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], text: str, grad: bool) -> None:
    """pytorch#193728: the same typed error on every engine, before anything runs; and again on the second call."""
    for _ in range(2):
        given = dict(arguments)
        q, k, v = (given.pop(name) for name in "qkv")
        with pytest.raises(error, match=text):
            frost.attention(q, k, v.clone().requires_grad_(grad), **given)


@pytest.mark.parametrize(("arguments", "error", "text"), BAD.values(), ids=BAD)
def test_errors_speak_of_the_function(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """Whoever called it has seen no graph and no node."""
    with pytest.raises(error) as caught:
        frost.attention(**arguments)
    lines = str(caught.value).splitlines()
    assert all(line.startswith("attention: ") for line in lines) and "node" not in str(caught.value)
    assert tuple(lines) == getattr(caught.value, "violations", tuple(lines))


def test_what_no_engine_serves_is_said_of_the_function() -> None:
    q, k, v = qkv(requires_grad=True)
    with pytest.raises(frost.NotSupportedError) as caught:
        frost.attention(q, k, v, softcap=1.0, engines=["torch_sdpa"])
    assert str(caught.value).startswith("attention: no engine serves sdpa on cpu\n  torch_sdpa: ")


def test_the_backward_is_told_from_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(requires_grad=True)
    o = frost.attention(q, k, v)
    monkeypatch.setenv("FROST_GATES", "perhaps")
    with pytest.raises(ValueError, match=r"\Aattention: backward: FROST_GATES"):
        o.sum().backward()


ELSEWHERE = {
    "softmax_scale": "'scale'", "is_causal": "'causal'", "attn_mask": "'mask'.*a bias", "window_size": "'window'.*None, not -1",
    "return_softmax_lse": "'return_lse'", "return_attn_probs": "'return_lse'", "stats": "'return_lse'",
    "dropout_p": "dropout is not supported", "enable_gqa": "grouped heads are implied by the shapes",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_other_libraries_lead_to_ours(name: str) -> None:
    with pytest.raises(TypeError, match=f"attention: unknown option '{name}'; .*{ELSEWHERE[name]}"):
        frost.attention(*qkv(), **{name: True})


def test_names_of_the_function_lead_to_those_of_a_graph() -> None:
    g = frost.Graph()
    q = g.tensor("q", (1, 1, 2, 4), dtype="fp32")
    for name in ("return_lse", "return_softmax_lse"):
        with pytest.raises(TypeError, match=f"sdpa: unknown option '{name}'; it is called 'stats' here"):
            g.sdpa(q, q, q, **{name: True})
    with pytest.raises(TypeError, match="tensor: unknown option 'dropout_p'; known: name, shape"):
        g.tensor("k", (1,), dtype="fp32", dropout_p=0.1)


@pytest.mark.parametrize(("value", "asks_the_host"), [(5.0, False), ("5", False), (torch.tensor(5), True)])
def test_only_a_tensor_is_told_to_be_read_by_the_host(value: Any, asks_the_host: bool) -> None:
    with pytest.raises(frost.GraphError, match="window left: given .*, expected None or an int >= 0") as caught:
        frost.attention(*qkv(), window=(value, None))
    assert (".item()" in str(caught.value)) == asks_the_host


OPERANDS = {"bias": rand(SQ, SK), "mask": rand(SQ, SK) > 0, "sink": rand(HQ), "seq_len_kv": torch.tensor([3, 4])}


@pytest.mark.parametrize("name", ["k", "v", *OPERANDS])
def test_operands_on_two_devices_are_refused(name: str) -> None:
    """No result of mixed devices, meta included, is ever computed: it would be memory that nobody wrote."""
    for moved, kept in (("meta", "cpu"), ("cpu", "meta")):
        given = {n: x.to(kept) for n, x in {**dict(zip("qkv", qkv())), **OPERANDS}.items()}
        given[name] = torch.empty_like(given[name], device=moved)
        with pytest.raises(frost.BindError, match=f"attention: {name}: given device {moved}, expected {kept} as q"):
            frost.attention(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v", *OPERANDS])
def test_operands_on_cpu_and_gpu_are_refused(name: str) -> None:
    given = {n: x.cuda() for n, x in {**dict(zip("qkv", qkv())), **OPERANDS}.items()}
    given[name] = given[name].cpu()
    with pytest.raises(frost.BindError, match="attention: [kv]: given device|attention: [a-z_]+: given device cpu"):
        frost.attention(**given)


def test_look_alikes_of_remembered_options_are_refused_all_the_same() -> None:
    """1 == True and hash alike, and so do 1.0 and True."""
    q, k, v = qkv()
    frost.attention(q, k, v, causal=True, scale=1.0, window=(1, None))
    for look_alike in ({"causal": 1}, {"scale": True}, {"window": (True, None)}, {"deterministic": 0}):
        with pytest.raises(frost.GraphError):
            frost.attention(q, k, v, **{"causal": True, "scale": 1.0, "window": (1, None), **look_alike})


def test_packed_contradictions() -> None:
    x, cu = rand(5, HQ, D), torch.tensor([0, 5])
    with pytest.raises(frost.GraphError, match="v.*Sk = 4"):
        frost.attention(x, x, x[:4], cu_seqlens_q=cu, cu_seqlens_kv=cu)
    with pytest.raises(frost.GraphError, match="cu_seqlens_kv"):
        frost.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_kv=torch.tensor([0, 2, 5]))
    with pytest.raises(frost.GraphError, match="cu_seqlens_q"):
        frost.attention(x, x, x, cu_seqlens_q=cu[:0], cu_seqlens_kv=cu[:0])
    with pytest.raises(frost.GraphError, match="seq_len_q"):
        frost.attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_kv=cu, seq_len_q=torch.tensor([3]))
    with pytest.raises(frost.BindError, match=r"cu_seqlens_q\[1\]: given 6"):
        frost.attention(x, x, x, cu_seqlens_q=cu + torch.tensor([0, 1]), cu_seqlens_kv=cu)


def test_numpy_numbers_are_numbers() -> None:
    q, k, v = qkv()
    want = frost.attention(q, k, v, scale=0.5, window=(1, 2))
    assert_same(frost.attention(q, k, v, scale=np.float64(0.5), window=(np.int64(1), np.int32(2))), want)


def test_an_engine_that_was_replaced_under_its_name_is_asked_anew() -> None:
    """The loop of somebody who writes an engine: unregister, mend, register."""
    from engines import registry
    from engines.reference import ENGINE as reference

    asked: list[str] = []

    def version(tag: str) -> Engine:
        class Mended(type(reference)):  # type: ignore[misc]
            name = "mended"

            def adapter(self, api_type: Any) -> Adapter | None:
                asked.append(tag)
                return super().adapter(api_type)

        return Mended()

    q = torch.randn(1, 1, 5, 24)
    try:
        for tag in ("first", "second"):
            asked.clear()
            registry.register(version(tag), priority=0)
            frost.attention(q, q, q)
            assert set(asked) == {tag}
            registry.unregister("mended")
    finally:
        if "mended" in registry.names():
            registry.unregister("mended")
