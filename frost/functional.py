"""`frost.attention`: attention as a function of torch tensors, with gradients, over plans that are made once."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _custom_op
from ._attention import Extras, Options, run_forward
from ._autograd import AttentionFunction, TransformedFunction, is_eager
from .errors import BindError, GraphError
from .options import check_names

Window = tuple["int | None", "int | None"]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False, align: str = "top_left",
    window: Window = (None, None), bias: Tensor | None = None, mask: Tensor | None = None, sink: Tensor | None = None,
    softcap: float | None = None, seq_len_q: Tensor | None = None, seq_len_kv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None, return_lse: bool = False, engines: Sequence[str] | None = None,
    gates: str | None = None, deterministic: bool = False, **unknown: Any,
) -> Any:
    """Attention of q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv], in any strides, on a CPU or a CUDA device.

    Packed: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] with `cu_seqlens_q` and `cu_seqlens_kv` [B + 1] (int32 or int64).
    Head h reads K/V head h // (Hq / Hk).

    scale: factor of q·k, None means D ** -0.5.
    causal, window (left, right), align: which keys a row sees, counted from the "top_left" or "bottom_right" corner; both
        ends of a window are inclusive, None is unbounded.
    bias (added to the scores in fp32) and boolean mask (True keeps): 2 to 4 dims, broadcastable to [B, Hq, Sq, Sk]; packed
        [1|B, 1|Hq, 1|max_seqlen_q, 1|max_seqlen_kv].
    sink [Hq]: a logit that takes part in the softmax and has no value. softcap c: c * tanh(score / c); 0 is off.
    seq_len_q, seq_len_kv [B]: rows and keys past these lengths are padding (o = 0, gradients 0).
    max_seqlen_q, max_seqlen_kv: packed only; no sequence is longer.
    engines: None asks every engine in order of preference; a list asks these only, in this order.
    gates: "require", "auto" or "off"; None means FROST_GATES or "require".
    deterministic: a backward that is bit-equal from run to run (implied by torch.use_deterministic_algorithms).

    Returns o [B, Hq, Sq, Dv] or [Tq, Hq, Dv], in q's dtype and memory order; with `return_lse` the pair (o, lse), lse
    [B, Hq, Sq] or [Tq, Hq], natural log, fp32 (fp64 for fp64 inputs). q, k, v, bias and sink get gradients, through lse
    too, and only those that ask for one are computed. Under autocast q, k and v are cast. Works in torch.compile and under
    vmap (as a loop); a second derivative is refused.

    Raises TypeError (a misspelt option, an operand that is no tensor), GraphError (operands or options that mean nothing),
    NotSupportedError (no engine that may serve does, with every engine's reasons), BindError (mixed devices, bad lengths
    or offsets on the CPU) and ValueError (unknown engine or gate policy). Meta and fake tensors are held to the same rules; while
    torch.compile traces, torch reports such an error as its own, with this text in it.
    """
    if unknown:
        check_names("attention", unknown, _NAMES)
    return_lse = _flag("return_lse", return_lse)
    extras = Extras(bias, mask, sink, seq_len_q, seq_len_kv, cu_seqlens_q, cu_seqlens_kv)
    _check_tensors(q, k, v, extras)
    left, right = _window(window)
    options = Options(
        _number("scale", scale), _flag("causal", causal), align, left, right, _number("softcap", softcap),
        _count("max_seqlen_q", max_seqlen_q), _count("max_seqlen_kv", max_seqlen_kv), _engines(engines), gates,
        _flag("deterministic", deterministic))
    device = q.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = _lowered(q, dtype), _lowered(k, dtype), _lowered(v, dtype)
    tracked = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad))
    inside_transform = torch._C._are_functorch_transforms_active()
    result: Any
    if not is_eager((q, k, v, *extras)):
        result = _custom_op.forward(q, k, v, extras, options, return_lse or tracked or inside_transform)
    elif tracked or inside_transform:  # a transform may hide that an operand is tracked one level down
        function = TransformedFunction if inside_transform else AttentionFunction
        result = function.apply(q, k, v, *extras, options)
    else:
        result = run_forward(q, k, v, extras, options, return_lse)
    return tuple(result) if return_lse else result[0]


def _lowered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts: floating types but fp64."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


# ---- arguments -----------------------------------------------------------------------------------------------
# Types only: what the values mean is judged by validation, in the same words for a graph.


_NAMES = tuple(n for n, p in inspect.signature(attention).parameters.items() if p.kind is not p.VAR_KEYWORD)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, q.device if name != "q" else None)
        if tensor.dim() not in (3, 4):
            raise GraphError(f"attention: {name}: given shape {list(tensor.shape)}, expected [B, H, S, D], or packed "
                             f"[T, H, D] with cu_seqlens_q and cu_seqlens_kv")
    for name, option in zip(Extras._fields, extras):
        if option is not None:
            _check_tensor(name, option, q.device)


def _check_tensor(name: str, tensor: Any, device: torch.device | None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"attention: {name}: given {type(tensor).__name__}, expected torch.Tensor")
    if tensor.layout is not torch.strided:
        raise TypeError(f"attention: {name}: given layout {tensor.layout}, expected a strided tensor")
    if device is not None and tensor.device != device:
        raise BindError(f"attention: {name}: given device {tensor.device}, expected {device} as q; all operands live on one "
                        f"device")


def _flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    raise GraphError(f"attention: {name}: given {value!r}, expected True or False")


def _number(name: str, value: Any) -> float | None:
    if value is None or isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int past the largest float
            return None if value is None else float(value)
    raise GraphError(f"attention: {name}: given {value!r}, expected None or a finite number")


def _count(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value
    if not isinstance(value, (bool, float, Tensor)) and hasattr(value, "__index__"):  # numpy's integers
        return value.__index__()
    hint = "; a number on the device would have to be read by the host (.item())" if isinstance(value, Tensor) else ""
    raise GraphError(f"attention: {name}: given {value!r}, expected None or an int >= 0{hint}")


def _window(window: Any) -> Window:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        example = window if type(window) is int and window >= 0 else 5
        raise GraphError(f"attention: window: given {window!r}, expected a pair (left, right) such as ({example}, None)")
    return _count("window left", window[0]), _count("window right", window[1])


def _engines(engines: Any) -> tuple[str, ...] | None:
    if engines is None:
        return None
    if isinstance(engines, str):
        raise ValueError(
            f"attention: engines: given the string {engines!r}, expected a list of names such as [{engines!r}]")
    return tuple(engines)
