"""Gradients of `frost.attention` for eager tensors, at the smallest host cost, and under functorch transforms.

torch.compile, fake tensors, dispatch modes and tensor subclasses go through the custom ops of `_custom_op.py`, which run
the same two functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._attention import GRADS, Extras, Options, run_backward, run_forward
from .errors import NotSupportedError

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_OPERANDS = ("q", "k", "v", *Extras._fields)
_AT = tuple(_OPERANDS.index(name) for name in GRADS)


def is_eager(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nobody wants to see an op in torch's dispatcher: no tracing, no modes, no subclasses."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    for t in tensors:
        if t is not None and not (type(t) in _PLAIN_TYPES and (t.is_cpu or t.is_cuda)):
            return False
    return True


def needed(flags: Sequence[bool]) -> tuple[bool, ...]:
    """Which of `GRADS` to compute, from a flag per operand (q, k, v, then the extras)."""
    return tuple(bool(flags[at]) for at in _AT)


def spread(grads: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of `GRADS` as one per operand, None for those that have none."""
    found = dict(zip(GRADS, grads))
    return tuple(found.get(name) for name in _OPERANDS)


def no_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    """The backward of the backward."""
    raise NotSupportedError(
        "attention: double backward (the gradient of a gradient taken with create_graph=True) is not supported; "
        "where second derivatives are needed, compute attention from torch's own differentiable ops")


def loop(call: Callable[..., Sequence[Tensor]], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> list[Tensor]:
    """A batching rule: `call` once per batch element, results stacked along dim 0. Exact, and as fast as a loop."""
    if info.batch_size == 0:
        raise NotSupportedError("attention: vmap over a dim of extent 0 is not supported; skip the call")
    rows = [call(*(a.select(dim, i) if isinstance(a, Tensor) and dim is not None else a
                   for a, dim in zip(args, in_dims))) for i in range(info.batch_size)]
    return [torch.stack(column) for column in zip(*rows)]


class AttentionFunction(torch.autograd.Function):
    """(q, k, v, *extras, options) -> (o, lse) outside of transforms.

    Host cost of a forward that is tracked, all of it, on one CPU core: 51 us this way; 75 us with `setup_context`, for
    which torch inspects a signature on every call; 183 us through the custom op (backward included: 172 and 379 us).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        output = run_forward(q, k, v, Extras(*rest[:-1]), rest[-1], True)
        _save(ctx, (q, k, v, *rest), output)
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, do, dlse)


class TransformedFunction(torch.autograd.Function):
    """The same under functorch transforms."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        return run_forward(q, k, v, Extras(*rest[:-1]), rest[-1], True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, do, dlse)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        return tuple(loop(TransformedFunction.apply, info, in_dims, args)), (0, 0)


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    # Saved, not kept: a change in place between forward and backward is then an error of autograd's.
    ctx.save_for_backward(*output, *inputs[:-1])
    ctx.set_materialize_grads(False)
    ctx.options = inputs[-1]


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None and dlse is None:
        return (None,) * (len(_OPERANDS) + 1)
    for grad in (do, dlse):
        if grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad):
            raise NotSupportedError(
                "attention: batched gradients (is_grads_batched=True, or a Jacobian with vectorize=True) are not "
                "supported; use torch.func (jacrev, vmap over vjp), or vectorize=False")
    o, lse, q, k, v, *rest = ctx.saved_tensors
    needs = needed(ctx.needs_input_grad)
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        grads = iter(_BackwardFunction.apply(do, dlse, q, k, v, o, lse, *rest, ctx.options, needs))
        return (*spread([next(grads) if need else None for need in needs]), None)
    return (*spread(run_backward(do, dlse, q, k, v, o, lse, Extras(*rest), ctx.options, needs)), None)


class _BackwardFunction(torch.autograd.Function):
    """The gradients that are needed, as results that say what is wrong when they are differentiated in turn."""

    @staticmethod
    def forward(do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                *rest: Any) -> Any:
        *extras, options, needs = rest
        grads = run_backward(do, dlse, q, k, v, o, lse, Extras(*extras), Options(*options), needs)
        return tuple(g for g in grads if g is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        pass

    backward = staticmethod(no_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        grads = tuple(loop(_BackwardFunction.apply, info, in_dims, args))
        return grads, (0,) * len(grads)
