"""Gradients of the native-sparse-attention ops for eager tensors: each function runs one plan per direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._nsa_plans import Call, gradient_of, like, run
from .errors import NotSupportedError


class _Once(torch.autograd.Function):
    """Gradients that say what is wrong when they are differentiated in turn."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotSupportedError(
            "frost.nsa: double backward (the gradient of a gradient taken with create_graph=True) is not supported; "
            "frost.nsa.selection_forward_reference is differentiable any number of times")


def _handed_back(grads: dict[str, Tensor], names: Sequence[str], sources: Sequence[Tensor | None]) -> list[Tensor | None]:
    made = [grads[n] for n in names if n in grads]
    if made and torch.is_grad_enabled():
        made = list(_Once.apply(len(made), *made, *(t for t in sources if t is not None)))
    found = iter(made)
    return [next(found) if n in grads else None for n in names]


def _call(call: Call) -> Call:
    if torch.are_deterministic_algorithms_enabled():
        return call._replace(deterministic=True)
    return call


def _attend(op: str, tensors: dict[str, Tensor], call: Call, stats: bool, extra: Sequence[str] = ()) -> dict[str, Tensor]:
    q, v = tensors["q"], tensors["v"]
    outputs: dict[str, tuple[int, ...] | None] = {"o": like(q, (*q.shape[:-1], v.shape[-1]))}
    outputs.update(dict.fromkeys((*(("lse",) if stats else ()), *extra)))
    return run(op, tensors, outputs, call)


def _differentiate(ctx: Any, op: str, do: Tensor | None, dlse: Tensor | None) -> list[Tensor | None]:
    """dq, dk, dv of an attention op whose ctx holds (o, lse, q, k, v, *options)."""
    if do is None and dlse is None:
        return [None] * 3
    o, lse, q, k, v, *rest = ctx.saved_tensors
    if do is None:
        do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape)
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do.to(o.dtype), "lse": lse}
    tensors.update((n, t) for n, t in zip(ctx.names, rest) if t is not None)
    if dlse is not None:
        tensors["dlse"] = dlse.to(lse.dtype)
    outputs: dict[str, tuple[int, ...] | None] = {
        "d" + n: gradient_of(tensors[n]) for n, need in zip("qkv", ctx.needs_input_grad) if need}
    if not outputs:
        return [None] * 3
    made = run(op, tensors, outputs, _call(ctx.call))
    return _handed_back(made, ("dq", "dk", "dv"), (do, dlse, q, k, v))


def _keep(ctx: Any, call: Call, names: Sequence[str], made: Sequence[Tensor], operands: Sequence[Tensor | None]) -> None:
    # Saved, not kept: a change in place between forward and backward is then an error of autograd's.
    ctx.save_for_backward(*made, *operands)
    ctx.set_materialize_grads(False)
    ctx.call, ctx.names = call, tuple(names)


_SELECTION = ("block_indices", "block_counts", "cu_seqlens")


class Selection(torch.autograd.Function):
    """(q, k, v, block_indices, block_counts, cu_seqlens, call) -> (o, lse)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor | None, cu: Tensor | None,
                call: Call) -> Any:
        given = {n: t for n, t in zip(_SELECTION, (indices, counts, cu)) if t is not None}
        made = _attend("nsa_selection", {"q": q, "k": k, "v": v, **given}, call, True)
        _keep(ctx, call, _SELECTION, (made["o"], made["lse"]), (q, k, v, indices, counts, cu))
        return made["o"], made["lse"]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        return (*_differentiate(ctx, "nsa_selection_backward", do, dlse), None, None, None, None)


class Compressed(torch.autograd.Function):
    """(q, k, v, cu_seqlens, call, importance) -> (o, lse, importance)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, call: Call) -> Any:
        given = {} if cu is None else {"cu_seqlens": cu}
        made = _attend("nsa_compressed_attention", {"q": q, "k": k, "v": v, **given}, call, True, ("importance",))
        _keep(ctx, call, ("cu_seqlens",), (made["o"], made["lse"]), (q, k, v, cu))
        ctx.mark_non_differentiable(made["importance"])
        return made["o"], made["lse"], made["importance"]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Any) -> Any:
        return (*_differentiate(ctx, "nsa_compressed_attention_backward", do, dlse), None, None)


class Compress(torch.autograd.Function):
    """(x, weights, cu_seqlens, call) -> compressed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, cu: Tensor | None, call: Call) -> Tensor:
        given = {n: t for n, t in (("weights", weights), ("cu_seqlens", cu)) if t is not None}
        made = run("nsa_compress", {"x": x, **given}, {"compressed": None}, call)
        ctx.save_for_backward(x, weights, cu)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return made["compressed"]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        x, weights, cu = ctx.saved_tensors
        wanted = [(n, t) for n, t, need in zip(("x", "weights"), (x, weights), ctx.needs_input_grad) if need]
        if grad is None or not wanted:
            return None, None, None, None
        given = {n: t for n, t in (("weights", weights), ("cu_seqlens", cu)) if t is not None}
        made = run("nsa_compress_backward", {"x": x, "dcompressed": grad.to(x.dtype), **given},
                   {"d" + n: gradient_of(t) for n, t in wanted}, ctx.call)
        return (*_handed_back(made, ("dx", "dweights"), (grad, x, weights)), None, None)
