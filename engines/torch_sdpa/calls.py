"""The operators behind PyTorch's attention backends, called one level below `scaled_dot_product_attention`, where the
backend is the caller's choice and lse is a result. One forward and one backward function per backend.

q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv]; lse comes back as [B, Hq, Sq] and goes in like that; every
result is a fresh tensor. Dropout is always 0, so seeds and offsets are never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CALLS", "Calls"]

_EFFICIENT_LSE_ROWS = 32  # its lse rows are padded to a multiple of this

Forward = Callable[..., "tuple[Tensor, Tensor]"]
Backward = Callable[..., "tuple[Tensor, Tensor, Tensor]"]


class Calls(NamedTuple):
    """forward(q, k, v, causal, scale, want_lse) -> o, lse;
    backward(do, q, k, v, o, lse, causal, scale) -> dq, dk, dv."""

    forward: Forward
    backward: Backward


_aten = torch.ops.aten


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, want_lse: bool) -> tuple[Tensor, Tensor]:
    if q.dtype in (torch.float16, torch.bfloat16):
        # The 16-bit kernel's exp is an approximation: lse is off by up to 6e-5. In fp32 it is not.
        q, k, v = (x.float() for x in (q, k, v))
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool,
                  scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)


def _no_seed(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
                   want_lse: bool) -> tuple[Tensor, Tensor]:
    o, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return o, lse


def _flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, state, _no_seed(q),
        scale=scale)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
                   want_lse: bool) -> tuple[Tensor, Tensor]:
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, want_lse, 0.0, causal, False, scale=scale)
    return o, lse.squeeze(-1) if lse.dim() == 4 else lse


@cache
def _cudnn_lse_rank(device: torch.device) -> int:
    """Whether this PyTorch hands cuDNN's lse around as [B, H, S] or [B, H, S, 1]: its backward takes the same."""
    x = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=device)
    return _aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, False, False)[1].dim()


def _cudnn_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse.contiguous()
    lse = lse[..., None] if _cudnn_lse_rank(q.device) == 4 else lse
    return _aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse, _no_seed(q), _no_seed(q), None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
                       want_lse: bool) -> tuple[Tensor, Tensor]:
    o, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, want_lse, 0.0, causal, scale=scale)
    return o, lse[:, :, :q.shape[2]]


def _efficient_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool,
                        scale: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = -(-q.shape[2] // _EFFICIENT_LSE_ROWS) * _EFFICIENT_LSE_ROWS
    padded = torch.full((*lse.shape[:2], rows), math.inf, dtype=lse.dtype, device=lse.device)
    padded[:, :, :q.shape[2]] = lse
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, None, o, padded, _no_seed(q), _no_seed(q), 0.0, [True, True, True, False], causal, scale=scale)
    return grads[0], grads[1], grads[2]


def _positive_scale(calls: Calls) -> Calls:
    """The same operators, given positive scales only. They scale a row's maximum, or the -inf of a masked score, after
    it was taken: NaN or overflow for a scale that is 0 or negative. Negating q, or a q of zeros, says the same."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, want_lse: bool) -> tuple[Tensor, Tensor]:
        q, scale = _turned(q, scale)
        return calls.forward(q, k, v, causal, scale, want_lse)

    def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool,
                 scale: float) -> tuple[Tensor, Tensor, Tensor]:
        turned, positive = _turned(q, scale)
        dq, dk, dv = calls.backward(do, turned, k, v, o, lse, causal, positive)
        if scale == 0:
            return torch.zeros_like(dq), torch.zeros_like(dk), dv
        return (dq if scale > 0 else -dq), dk, dv

    return Calls(forward, backward)


def _turned(q: Tensor, scale: float) -> tuple[Tensor, float]:
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


# (device, backend) -> operators
CALLS: dict[tuple[str, str], Calls] = {
    ("cpu", "FLASH_ATTENTION"): _positive_scale(Calls(_cpu_forward, _cpu_backward)),
    ("cuda", "FLASH_ATTENTION"): _positive_scale(Calls(_flash_forward, _flash_backward)),
    ("cuda", "CUDNN_ATTENTION"): _positive_scale(Calls(_cudnn_forward, _cudnn_backward)),
    ("cuda", "EFFICIENT_ATTENTION"): _positive_scale(Calls(_efficient_forward, _efficient_backward)),
}
