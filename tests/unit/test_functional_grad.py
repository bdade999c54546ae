"""Gradients of `frost.attention` as autograd sees them: which are computed, from what, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import assert_same
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import frost
from frost import _attention

NAMES = ("q", "k", "v", "bias", "sink")
SHAPES = {"q": (2, 4, 5, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, 8), "bias": (4, 5, 6), "sink": (4,)}


def operands(asked: tuple[str, ...] = NAMES, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {n: torch.randn(SHAPES[n], generator=made).to(dtype).requires_grad_(n in asked) for n in NAMES}


def attend(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return frost.attention(x["q"], x["k"], x["v"], bias=x["bias"], sink=x["sink"], causal=True, align="bottom_right",
                           return_lse=True, **options)


def loss_of(o: Tensor, lse: Tensor) -> Tensor:
    w = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
    u = torch.linspace(1, 2, lse.numel(), dtype=lse.dtype).view(lse.shape)
    return (o * w).sum() + (lse * u).sum()


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """What was run: (kind, names of the results)."""
    seen: list[tuple[str, tuple[str, ...]]] = []
    run: Callable[..., Any] = _attention._execute

    def spy(kind: str, tensors: Any, outputs: Any, options: Any) -> Any:
        seen.append((kind, tuple(outputs)))
        return run(kind, tensors, outputs, options)

    monkeypatch.setattr(_attention, "_execute", spy)
    yield seen


SUBSETS = [s for n in range(len(NAMES) + 1) for s in itertools.combinations(NAMES, n)]


@pytest.mark.parametrize("asked", SUBSETS, ids="+".join)
def test_only_what_is_asked_for_is_computed_and_equals_the_full_run(
        asked: tuple[str, ...], executed: list[tuple[str, tuple[str, ...]]]) -> None:
    full = operands()
    want = dict(zip(NAMES, torch.autograd.grad(loss_of(*attend(full)), list(full.values()))))
    executed.clear()
    x = operands(asked)
    loss = loss_of(*attend(x))
    assert loss.requires_grad == bool(asked)
    if asked:
        loss.backward()
    for name in NAMES:
        if name in asked:
            assert_same(x[name].grad, want[name], name)
        else:
            assert x[name].grad is None, name
    wanted = [("attention_backward", tuple("d" + n for n in NAMES if n in asked))] if asked else []
    assert executed == [("attention", ("o", "lse")), *wanted]


def test_statistics_are_only_made_where_they_are_needed(executed: list[tuple[str, tuple[str, ...]]]) -> None:
    x = operands()
    frost.attention(x["q"].detach(), x["k"].detach(), x["v"].detach())
    with torch.no_grad():
        frost.attention(x["q"], x["k"], x["v"])
    assert executed == [("attention", ("o",))] * 2
    assert not frost.attention(x["q"].detach(), x["k"].detach(), x["v"].detach(), return_lse=True)[1].requires_grad


def test_gradients_flow_through_the_statistics_alone() -> None:
    """flash-attention#1137, #889: a loss on lse, where nothing depends on o."""
    x = operands()
    _, lse = attend(x)
    grads = torch.autograd.grad(lse.sum(), list(x.values()))
    y = operands()
    scores = y["q"] @ y["k"].repeat_interleave(2, 1).mT * 8 ** -0.5 + y["bias"]
    keep = torch.ones(5, 6, dtype=torch.bool).tril(1)
    rows = torch.cat([scores.masked_fill(~keep, -torch.inf), y["sink"].view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
    want = torch.autograd.grad(rows.logsumexp(-1).sum(), [y[n] for n in ("q", "k", "bias", "sink")])
    got = dict(zip(NAMES, grads))
    for name, expected in zip(("q", "k", "bias", "sink"), want):
        torch.testing.assert_close(got[name], expected)
    assert not bool(got["v"].any())


def test_only_the_sink_is_trained() -> None:
    """flash-attention PR#2706: nothing else requires a gradient, an empty row is among the rows."""
    q, k, v = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    sink = torch.randn(4, requires_grad=True)
    o, lse = frost.attention(q, k, v, sink=sink, causal=True, align="bottom_right", return_lse=True)
    assert not bool(o[:, :, :2].any())
    (grad,) = torch.autograd.grad(o.sum() + lse.sum(), sink)
    p = (sink.detach().view(1, 4, 1) - lse.detach()).exp()
    torch.testing.assert_close(grad, (p * (1 - o.detach().sum(-1))).sum((0, 2)))


SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda o: o.sum(), "mean": lambda o: o.mean(), "every_other": lambda o: o[..., ::2].sum(),
    "rows": lambda o: o[:, :, 1:].sum(), "transposed": lambda o: (o.transpose(1, 2) * torch.arange(8.0)).sum(),
    "one": lambda o: o[1, 2, 3, 4], "expanded": lambda o: (o * torch.arange(5.0).view(5, 1)).sum(),
}


@pytest.mark.parametrize("shaped", SHAPED.values(), ids=SHAPED)
def test_any_layout_of_the_incoming_gradient(shaped: Callable[[Tensor], Tensor]) -> None:
    """flash-attention#355, xformers PR#282: sum() hands over strides of 0."""
    x = operands()
    o, _ = attend(x)
    grads = torch.autograd.grad(shaped(o), list(x.values()), retain_graph=True)
    probe = o.detach().clone().requires_grad_()
    (do,) = torch.autograd.grad(shaped(probe), probe)
    want = torch.autograd.grad(o, list(x.values()), do.contiguous())
    for name, got, expected in zip(NAMES, grads, want):
        torch.testing.assert_close(got, expected, msg=name)


def test_incoming_gradient_of_strides_zero_is_not_copied(executed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    find = _attention._find
    monkeypatch.setattr(_attention, "_find", lambda kind, tensors, *rest: (
        seen.append(tensors["do"].stride()) if "do" in tensors else None, find(kind, tensors, *rest))[1])
    attend(operands())[0].sum().backward()
    assert seen == [(0, 0, 0, 0)]


def test_incoming_gradient_of_another_dtype() -> None:
    x = operands(dtype=torch.bfloat16)
    o, lse = (t.detach() for t in attend(x))
    raw = [t.detach() for t in x.values()]
    do = torch.randn(o.shape)
    def run(grad: Tensor) -> tuple[Tensor | None, ...]:
        extras = _attention.Extras(bias=raw[3], sink=raw[4])
        options = _attention.Options(causal=True, align="bottom_right")
        return _attention.run_backward(grad, None, *raw[:3], o, lse, extras, options, [True] * 5)
    for name, got, want in zip(NAMES, run(do), run(do.bfloat16())):
        assert got is not None and want is not None and got.dtype == torch.bfloat16
        assert_same(got, want, name)


def test_backward_twice_gives_equal_gradients() -> None:
    x = operands()
    loss = loss_of(*attend(x))
    first = torch.autograd.grad(loss, list(x.values()), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, list(x.values()))):
        assert_same(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_a_change_in_place_before_backward_is_an_error(name: str) -> None:
    x = operands()
    loss = loss_of(*attend(x))
    with torch.no_grad():
        x[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_offsets_changed_before_backward_are_an_error() -> None:
    q, cu = torch.randn(5, 2, 8, requires_grad=True), torch.tensor([0, 2, 5])
    o = frost.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    cu[1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_is_refused_by_name(name: str) -> None:
    """pytorch#116350: not an internal op's name, and not a gradient that silently lacks a part."""
    x = operands()
    (first,) = torch.autograd.grad(attend(x)[0].sum(), x[name], create_graph=True)
    assert first.requires_grad
    with pytest.raises(frost.NotSupportedError, match="double backward"):
        first.sum().backward()


def test_create_graph_alone_is_fine() -> None:
    x = operands()
    grads = torch.autograd.grad(loss_of(*attend(x)), list(x.values()), create_graph=True)
    y = operands()
    for a, b in zip(grads, torch.autograd.grad(loss_of(*attend(y)), list(y.values()))):
        assert_same(a.detach(), b)


def test_batched_gradients_are_refused_by_name() -> None:
    x = operands()
    o, _ = attend(x)
    with pytest.raises(frost.NotSupportedError, match="is_grads_batched"):
        torch.autograd.grad(o, x["q"], torch.randn(3, *o.shape), is_grads_batched=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    x, y = operands(), operands()
    loss_of(*attend(x)).backward()
    loss_of(*checkpoint(lambda *a: attend(dict(zip(NAMES, a))), *y.values(), use_reentrant=reentrant)).backward()
    for name in NAMES:
        assert_same(y[name].grad, x[name].grad, name)


@pytest.mark.parametrize("how", ["option", "torch"])
def test_deterministic_reaches_the_backward(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attention#746: a flag that is accepted is also wired."""
    seen = []
    find = _attention._find
    monkeypatch.setattr(_attention, "_find", lambda kind, tensors, outputs, options: (
        seen.append((kind, options.deterministic)), find(kind, tensors, outputs, options))[1])
    try:
        torch.use_deterministic_algorithms(how == "torch")
        loss_of(*attend(operands(), deterministic=how == "option")).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert ("attention_backward", True) in seen


def test_gradcheck() -> None:
    x = operands(dtype=torch.float64)

    def f(*args: Tensor) -> tuple[Tensor, Tensor]:
        return attend(dict(zip(NAMES, args)), softcap=2.0)

    assert torch.autograd.gradcheck(f, tuple(x.values()), fast_mode=True)


@pytest.mark.parametrize("pitch", [0, 7, 2**40, 52])
def test_the_stride_of_a_single_packed_token_may_be_any_number(pitch: int) -> None:
    """It is never used, but the plan of one token serves other totals too."""
    cu = torch.tensor([0, 1], dtype=torch.int32)
    q = torch.randn(64).as_strided((1, 2, 16), (pitch, 16, 1)).requires_grad_()
    o = frost.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    torch.testing.assert_close(o, q)  # one key: o is its value
    (grad,) = torch.autograd.grad(o.sum(), q)
    torch.testing.assert_close(grad, torch.ones_like(q))


@pytest.mark.parametrize("value", [10**400, 1e39, float("nan"), float("inf")])
@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_a_number_outside_fp32_is_refused(option: str, value: float) -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(frost.GraphError, match=f"{option}: given .*, expected None or a finite number"):
        frost.attention(x, x, x, **{option: value})
