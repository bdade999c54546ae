"""`frost::attention_fwd` and `frost::attention_bwd`: attention as torch.library ops.

They carry fake implementations whose strides are those of the real results, an autograd formula, and a batching rule, so
that torch.compile, torch.export, FakeTensorMode and functorch transforms see an ordinary op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._attention import Extras, Options, check_forward, output_shape, run_backward, run_forward
from ._autograd import loop, needed, no_second_derivative, spread
from ._layout import gradient_strides, laid_out_like
from .errors import NotSupportedError

_EXTRAS = ", ".join(f"Tensor? {name}" for name in Extras._fields)
_OPTION_TYPES = {
    "scale": "float?", "causal": "bool", "align": "str", "window_left": "SymInt?", "window_right": "SymInt?",
    "softcap": "float?", "max_seqlen_q": "SymInt?", "max_seqlen_kv": "SymInt?", "engines": "str[]?", "gates": "str?",
    "deterministic": "bool"}
_OPTIONS = ", ".join(f"{_OPTION_TYPES[name]} {name}" for name in Options._fields)
_N_EXTRAS, _N_OPTIONS = len(Extras._fields), len(Options._fields)

# Strides are part of what is asked for: an input must arrive laid out as it was when the fake result was made.
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))

FORWARD, BACKWARD = "frost::attention_fwd", "frost::attention_bwd"
torch.library.define(
    FORWARD, f"(Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_OPTIONS}, bool need_lse) -> (Tensor, Tensor)", tags=_TAGS)
torch.library.define(
    BACKWARD, f"(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_EXTRAS}, {_OPTIONS}, "
              f"bool[] needs) -> Tensor[]", tags=_TAGS)


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options,
            need_lse: bool) -> tuple[Tensor, Tensor]:
    """Through torch's dispatcher: (o, lse), lse of no elements unless it is needed."""
    return torch.ops.frost.attention_fwd(q, k, v, *extras, *options, need_lse)


def _split(rest: Sequence[Any]) -> tuple[Extras, Options, Any]:
    """The tail that both ops share: extras, options, and the last argument."""
    extras = Extras(*rest[:_N_EXTRAS])
    options = Options(*rest[_N_EXTRAS:_N_EXTRAS + _N_OPTIONS])
    if options.engines is not None:
        options = options._replace(engines=tuple(options.engines))
    return extras, options, rest[-1]


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


# ---- real ----------------------------------------------------------------------------------------------------


@torch.library.impl(FORWARD, "default")
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    extras, options, need_lse = _split(rest)
    o, lse = run_forward(q, k, v, extras, options, need_lse)
    return o, q.new_empty(0, dtype=_lse_dtype(q)) if lse is None else lse


@torch.library.impl(BACKWARD, "default")
def _backward(do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
              *rest: Any) -> list[Tensor]:
    extras, options, needs = _split(rest)
    grads = run_backward(do, dlse, q, k, v, o, lse, extras, options, needs)
    return [g for g in grads if g is not None]


# ---- fake ----------------------------------------------------------------------------------------------------


@torch.library.register_fake(FORWARD)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    extras, options, need_lse = _split(rest)
    check_forward(q, k, v, extras, options, need_lse)
    shape = output_shape(q, v)
    o = q.new_empty_strided(shape, laid_out_like(q.shape, q.stride(), shape))
    return o, q.new_empty(q.shape[:-1] if need_lse else (0,), dtype=_lse_dtype(q))


@torch.library.register_fake(BACKWARD)
def _backward_fake(do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                   *rest: Any) -> list[Tensor]:
    extras, _, needs = _split(rest)
    wanted = [t for t, need in zip((q, k, v, extras.bias, extras.sink), needs) if need and t is not None]
    return [t.new_empty_strided(t.shape, gradient_strides(t.shape, t.stride())) for t in wanted]


# ---- autograd and vmap ----------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *rest = inputs
    extras, ctx.options, need_lse = _split(rest)
    if not need_lse:
        raise NotSupportedError("frost::attention_fwd: given need_lse=False with an operand that requires a gradient, "
                                "expected need_lse=True; frost.attention(…) sees to it")
    ctx.save_for_backward(*output, q, k, v, *extras)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    o, lse, q, k, v, *extras = ctx.saved_tensors
    needs = list(needed(ctx.needs_input_grad))
    wanted = () if do is None and dlse is None else torch.ops.frost.attention_bwd(
        do, dlse, q, k, v, o, lse, *extras, *ctx.options, needs)
    grads = iter(wanted)
    return (*spread([next(grads, None) if need else None for need in needs]), *(None,) * (_N_OPTIONS + 1))


def _forward_vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return tuple(loop(torch.ops.frost.attention_fwd, info, in_dims, args)), (0, 0)


def _backward_vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    grads = loop(torch.ops.frost.attention_bwd, info, in_dims, args)
    return grads, [0] * len(grads)


torch.library.register_autograd(FORWARD, _differentiate, setup_context=_save)
torch.library.register_autograd(BACKWARD, no_second_derivative)
torch.library.register_vmap(FORWARD, _forward_vmap)
torch.library.register_vmap(BACKWARD, _backward_vmap)
