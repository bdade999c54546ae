"""`frost.attention` where torch looks at it as an op: torch.compile, export, fake tensors, functorch."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import layouts
import pytest
import torch
from compare import assert_same
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, jacrev, vmap
from torch.library import opcheck

import frost
from frost._attention import Extras, Options

B, HQ, HK, SQ, SK, D, DV = 2, 4, 2, 5, 7, 8, 6
CU_Q, CU_KV = torch.tensor([0, 2, 2, 9]), torch.tensor([0, 3, 5, 11], dtype=torch.int32)

Args = tuple[Tensor, Tensor, Tensor, Extras, Options]


def dense() -> Args:
    """BSHD queries, everything optional in use."""
    made = torch.Generator().manual_seed(0)
    q = torch.randn(B, SQ, HQ, D, generator=made).transpose(1, 2)
    k, v = torch.randn(B, HK, SK, D, generator=made), torch.randn(B, HK, SK, DV, generator=made)
    extras = Extras(bias=torch.randn(HQ, SQ, SK, generator=made), sink=torch.randn(HQ, generator=made),
                    mask=torch.rand(SQ, SK, generator=made) > 0.2, seq_len_kv=torch.tensor([7, 3]))
    return q, k, v, extras, Options(causal=True, align="bottom_right", scale=0.4, softcap=3.0)


def packed() -> Args:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(t, h, d, generator=made) for t, h, d in ((9, HQ, D), (11, HK, D), (11, HK, DV)))
    extras = Extras(cu_seqlens_q=CU_Q.int(), cu_seqlens_kv=CU_KV)
    return q, k, v, extras, Options(window_left=2, window_right=1, max_seqlen_q=7, engines=("reference",))


PROBLEMS = {"dense": dense, "packed": packed}


def keywords(extras: Extras, options: Options) -> dict[str, Any]:
    """As keywords of `frost.attention`."""
    out = {**extras._asdict(), **options._asdict()}
    out["window"] = (out.pop("window_left"), out.pop("window_right"))
    return out


def tracked(args: Args) -> Args:
    q, k, v, extras, options = args
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    more = {n: x.detach().requires_grad_() for n in ("bias", "sink") if (x := getattr(extras, n)) is not None}
    return q, k, v, extras._replace(**more), options


def leaves_of(args: Args) -> list[Tensor]:
    return [x for x in (*args[:3], args[3].bias, args[3].sink) if x is not None]


# ---- the ops themselves


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_opcheck_forward(problem: Any) -> None:
    q, k, v, extras, options = tracked(problem())
    opcheck(torch.ops.frost.attention_fwd.default, (q, k, v, *extras, *options, True))
    opcheck(torch.ops.frost.attention_fwd.default,
            (q.detach(), k.detach(), v.detach(), *(None if x is None else x.detach() for x in extras), *options, False))


@pytest.mark.parametrize("needs", [[True] * 5, [False, True, False, True, False]])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_opcheck_backward(problem: Any, needs: list[bool]) -> None:
    q, k, v, extras, options = problem()
    o, lse = torch.ops.frost.attention_fwd(q, k, v, *extras, *options, True)
    rest = (q, k, v, o, lse, *extras, *options, needs)
    opcheck(torch.ops.frost.attention_bwd.default, (torch.randn_like(o), torch.randn_like(lse), *rest))
    opcheck(torch.ops.frost.attention_bwd.default, (None, torch.randn_like(lse), *rest))


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_op_gives_what_the_function_gives(problem: Any) -> None:
    args = tracked(problem())
    o, lse = frost.attention(*args[:3], return_lse=True, **keywords(*args[3:]))
    o2, lse2 = torch.ops.frost.attention_fwd(*args[:3], *args[3], *args[4], True)
    assert_same(o, o2)
    assert_same(lse, lse2)
    leaves = leaves_of(args)
    for a, b in zip(torch.autograd.grad(o.sum() + lse[lse.isfinite()].sum(), leaves),
                    torch.autograd.grad(o2.sum() + lse2[lse2.isfinite()].sum(), leaves)):
        assert_same(a, b)


def test_the_op_refuses_to_lose_its_statistics() -> None:
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    with pytest.raises(frost.NotSupportedError, match="need_lse"):
        torch.ops.frost.attention_fwd(q, q, q, *Extras(), *Options(), False)


def test_the_op_refuses_a_second_derivative() -> None:
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    o, _ = torch.ops.frost.attention_fwd(q, q, q, *Extras(), *Options(), True)
    (first,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(frost.NotSupportedError, match="double backward"):
        first.sum().backward()


# ---- fake tensors


@pytest.mark.parametrize("layout", [x.name for x in layouts.layouts_for((B, HQ, SQ, D))])
def test_fake_results_have_the_real_strides(layout: str) -> None:
    """pytorch#180445: o, lse and every gradient, for every layout of the operands."""
    made = torch.Generator().manual_seed(0)
    shapes = {"q": (B, HQ, SQ, D), "k": (B, HK, SK, D), "v": (B, HK, SK, DV), "bias": (B, HQ, SQ, SK)}
    real = {n: layouts.lay_out(torch.randn(s, generator=made), layout).requires_grad_() for n, s in shapes.items()}

    def results(x: dict[str, Tensor]) -> list[Tensor]:
        o, lse = frost.attention(x["q"], x["k"], x["v"], bias=x["bias"], return_lse=True)
        return [o, lse, *torch.autograd.grad(o.sum() + lse.sum(), list(x.values()))]

    with FakeTensorMode() as mode:
        fake = results({n: mode.from_tensor(x) for n, x in real.items()})
    for a, b in zip(results(real), fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_meta_tensors_give_meta_tensors() -> None:
    q, k, v, *_ = dense()
    o, lse = frost.attention(q.to("meta"), k.to("meta"), v.to("meta"), causal=True, return_lse=True)
    assert o.is_meta and lse.is_meta
    assert o.stride() == frost.attention(q, k, v, causal=True).stride() and lse.shape == (B, HQ, SQ)


INVALID: dict[str, dict[str, Any]] = {
    "lengths": {"v": torch.ones(B, HK, SK + 1, DV)}, "groups": {"q": torch.ones(B, 3, SQ, D)},
    "bias": {"bias": torch.ones(SQ + 1, SK)}, "mask": {"mask": torch.ones(SQ, SK)}, "integers": {"q": torch.ones(B, HQ, SQ, D).int()},
    "causal_window": {"causal": True, "window": (None, 3)}, "max_dense": {"max_seqlen_q": 5}, "align": {"align": "bottom"},
    "two": {"bias": torch.ones(7, 7), "scale": float("inf")}, "engine": {"engines": ["tritom"]}, "gates": {"gates": "maybe"},
    "one_offset": {"cu_seqlens_q": torch.tensor([0, 2])}, "fp8": {"q": torch.ones(B, HQ, SQ, D).to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("changes", INVALID.values(), ids=INVALID)
@pytest.mark.parametrize("tracked", [False, True])
def test_tensors_without_data_are_held_to_the_same_rules(changes: dict[str, Any], tracked: bool) -> None:
    """The same error in the same words for real, meta and fake tensors."""
    q, k, v, *_ = dense()
    given = {"q": q, "k": k, "v": v.requires_grad_(tracked), **changes}

    def refused(convert: Any) -> tuple[type, str]:
        with pytest.raises((ValueError, TypeError)) as caught:
            frost.attention(**{n: convert(x) if isinstance(x, Tensor) else x for n, x in given.items()})
        return caught.type, str(caught.value)

    real = refused(lambda x: x)
    assert refused(lambda x: x.to("meta")) == real
    with FakeTensorMode() as mode:
        assert refused(mode.from_tensor) == real


def test_valid_tensors_without_data_stay_valid() -> None:
    for problem in PROBLEMS.values():
        q, k, v, extras, options = problem()
        with FakeTensorMode() as mode:
            fake = [None if x is None else mode.from_tensor(x) for x in (q, k, v, *extras)]
            assert frost.attention(*fake[:3], **keywords(Extras(*fake[3:]), options)).shape == (*q.shape[:-1], DV)


# ---- torch.compile and export


def test_compiling_what_is_invalid_says_so_with_and_without_symbolic_extents() -> None:
    q, k, v, *_ = dense()
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: frost.attention(q, k, v), backend="eager", dynamic=dynamic)
        with pytest.raises(Exception, match=r"attention: v: given Sk = 6 .*, expected Sk = 7 as in k"):
            compiled(q, k, v[:, :, :6])


def test_an_extent_that_depends_on_data_compiles() -> None:
    """What nobody knows while it is traced is not judged then, and is judged when it runs."""
    torch._dynamo.reset()

    def f(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        kept = keep.nonzero().flatten()
        return frost.attention(q, k[:, :, kept], v[:, :, kept])

    q, k, v, *_ = dense()
    keep = torch.tensor([True, False, True, True, False, True, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(f, backend="eager", fullgraph=True)(q, k, v, keep)
    assert_same(got, f(q, k, v, keep))


def test_a_misspelt_option_is_all_that_compiling_reports() -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match="unknown option 'casual'; did you mean 'causal'"):
            torch.compile(lambda q: frost.attention(q, q, q, casual=True), backend="eager")(torch.ones(1, 1, 2, 4))


def step(args: Args) -> tuple[Tensor, ...]:
    q, k, v, extras, options = args
    o, lse = frost.attention(q * 1.5, k, v, return_lse=True, **keywords(extras, options))
    return o.sin(), lse.exp()


def compare_compiled(compiled: Any, args: Args) -> None:
    args = tracked(args)
    leaves = leaves_of(args)
    want, got = step(args), compiled(args)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    for a, b in zip(torch.autograd.grad(sum(x.sum() for x in want), leaves),
                    torch.autograd.grad(sum(x.sum() for x in got), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_compile_in_one_graph(problem: Any) -> None:
    torch._dynamo.reset()
    compare_compiled(torch.compile(step, fullgraph=True, backend="aot_eager"), problem())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler here")
def test_compile_with_the_default_backend() -> None:
    """Which lays out its own buffers: q comes out of a kernel of its making."""
    torch._dynamo.reset()
    compare_compiled(torch.compile(step, fullgraph=True), dense())


def test_compile_with_symbolic_extents_does_not_compile_again() -> None:
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(lambda q, k, v, n: frost.attention(q, k, v, window=(n, None)), fullgraph=True, dynamic=True,
                             backend=backend)
    for s in (5, 6, 9):
        q, k = torch.randn(B, s, HQ, D).transpose(1, 2), torch.randn(B, HK, s + 2, D)
        torch.testing.assert_close(compiled(q, k, k, s - 2), frost.attention(q, k, k, window=(s - 2, None)))
    assert graphs == 1


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_compile_with_symbolic_extents_and_gradients(problem: Any) -> None:
    torch._dynamo.reset()
    compare_compiled(torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True), problem())


def test_compile_inside_autocast() -> None:
    torch._dynamo.reset()
    q, k, v, *_ = tracked(dense())

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return frost.attention(q, k, v)

    o = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v)
    assert o.dtype == torch.bfloat16
    assert_same(o, f(q, k, v))
    assert [g.dtype for g in torch.autograd.grad(o.float().sum(), (q, k, v))] == [torch.float32] * 3


def test_export_keeps_the_op() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return frost.attention(q, k, v, causal=True)

    q, k, v, *_ = dense()
    program = torch.export.export(Attend(), (q, k, v))
    assert any("frost.attention_fwd" in str(n.target) for n in program.graph.nodes)
    assert_same(program.module()(q, k, v), frost.attention(q, k, v, causal=True))


# ---- functorch


def test_vmap_is_a_loop() -> None:
    """jax PR#36702, flash-attention PR#2352: in_dims other than 0, an operand that is not batched."""
    q, k, v = torch.randn(B, 3, HQ, SQ, D), torch.randn(B, 3, HK, SK, D), torch.randn(B, HK, SK, DV)
    bias = torch.randn(1, SQ, SK)

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return frost.attention(q, k, v, bias=bias, causal=True).square().sum()

    def each(f: Any) -> list[Any]:
        return [f(q[:, i], k[:, i], v, bias) for i in range(3)]

    assert_same(vmap(loss, in_dims=(1, 1, None, None))(q, k, v, bias), torch.stack(each(loss)))
    gradient = grad(loss, argnums=(0, 1, 2, 3))
    for got, want in zip(vmap(gradient, in_dims=(1, 1, None, None))(q, k, v, bias), zip(*each(gradient)), strict=True):
        assert_same(got, torch.stack(want))


def test_the_gradient_of_a_vmap() -> None:
    q, k = torch.randn(3, B, HQ, SQ, D), torch.randn(B, HK, SK, D)

    def total(q: Tensor, k: Tensor) -> Tensor:
        return vmap(lambda q: frost.attention(q, k, k, return_lse=True)[1].sum())(q).sum()

    def plain(q: Tensor, k: Tensor) -> Tensor:
        return torch.stack([frost.attention(x, k, k, return_lse=True)[1].sum() for x in q]).sum()

    for got, want in zip(grad(total, (0, 1))(q, k), grad(plain, (0, 1))(q, k), strict=True):
        torch.testing.assert_close(got, want)


def test_jacobian_by_reverse_mode() -> None:
    q, k, v, *_ = dense()
    got = jacrev(lambda x: frost.attention(x, k, v).sum((1, 3)))(q)
    want = torch.autograd.functional.jacobian(lambda x: frost.attention(x, k, v).sum((1, 3)), q)
    torch.testing.assert_close(got, want)


def test_per_sample_gradients_of_a_module() -> None:
    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
            return frost.attention(q, k, v, causal=True)

    model, x = Attend(), torch.randn(4, 5, 8)
    params = dict(model.named_parameters())
    per_sample = vmap(grad(lambda p, x: functional_call(model, p, (x,)).square().sum()), in_dims=(None, 0))(
        {n: p.detach() for n, p in params.items()}, x)
    for i in range(4):
        want = torch.autograd.grad(model(x[i]).square().sum(), list(params.values()))
        for name, expected in zip(params, want):
            torch.testing.assert_close(per_sample[name][i], expected)


def test_vmap_over_nothing_is_refused_by_name() -> None:
    with pytest.raises(frost.NotSupportedError, match="extent 0"):
        vmap(lambda q: frost.attention(q, q, q))(torch.empty(0, 1, 1, 2, 4))


# ---- subclasses


def test_a_tensor_subclass_passes_through() -> None:
    class Marked(Tensor):
        pass

    q, k, v, *_ = dense()
    o = frost.attention(q.as_subclass(Marked).requires_grad_(), k, v)
    assert isinstance(o, Marked)
    assert_same(o.as_subclass(Tensor), frost.attention(q, k, v))
