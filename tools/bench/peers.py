"""The peers: PyTorch's attention backends and FlexAttention, each as its users would call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .candidates import Candidate, Unavailable
from .cases import Case
from .operands import Operands, poison_free_memory

PEERS = ("flex", "cudnn", "flash", "efficient")
_BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def make(peer: str, case: Case, operands: Operands, direction: str) -> Candidate:
    """A candidate for one direction. Forward runs without autograd; the backward is autograd's over a forward
    that ran once, so only the backward is timed. Raises Unavailable where the peer has no such option."""
    start = time.perf_counter()
    if peer == "flex":
        attention, route = _flex(case, operands)
    else:
        attention, route = _sdpa(peer, case)
    if direction == "fwd":

        def run() -> Mapping[str, Tensor]:
            with torch.no_grad():
                return {"o": attention(operands.q, operands.k, operands.v)}

        made = Candidate(peer, route, run, lambda: poison_free_memory(operands.do))
    else:
        leaves = operands.leaves()
        o = attention(*leaves)

        def run() -> Mapping[str, Tensor]:
            return dict(
                zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, operands.do, retain_graph=True))
            )

        made = Candidate(peer, route, run, lambda: poison_free_memory(operands.q, operands.k, operands.v))
    if peer == "flex":
        made.run()
        torch.cuda.synchronize()
        made.compile_s = time.perf_counter() - start
    return made


def sdpa_call(peer: str, case: Case) -> Attention:
    """PyTorch's SDPA for a case, inside no backend context: the caller enters one."""
    gqa: dict[str, Any] = {"enable_gqa": True} if case.group > 1 else {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, **gqa)

    return attention


def sdpa_backend(peer: str) -> Any:
    """A context in which only this peer's backend may serve SDPA."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([getattr(SDPBackend, _BACKENDS[peer])])


def _sdpa(peer: str, case: Case) -> tuple[Attention, str]:
    if not case.plain or case.window_left is not None:
        raise Unavailable(f"scaled_dot_product_attention has no {case.options}")
    if peer == "efficient" and case.group > 1:
        raise Unavailable("the memory-efficient backend has no kernel for grouped heads")
    inner = sdpa_call(peer, case)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend(peer):
            return inner(q, k, v)

    return attention, f"torch SDPA {_BACKENDS[peer]}"


def _flex(case: Case, operands: Operands) -> tuple[Attention, str]:
    """FlexAttention compiled for this very shape: nothing of an earlier shape is left, so its recompile limit
    is not what is measured."""
    if case.sink or case.bias or case.mask or case.seq_lens or case.packed:
        raise Unavailable(f"FlexAttention is not set up here for {case.options}")
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    config.donated_buffer = False  # a backward that gives its buffers away cannot run twice
    compiled = torch.compile(flex_attention, dynamic=False)
    # The block mask is the same however it is made; it is made once and not timed.
    keep = _mask_mod(case)
    block_mask = (
        None
        if keep is None
        else create_block_mask(keep, None, None, case.s, case.s, device=operands.q.device)
    )
    score = _score_mod(case)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=case.group > 1)

    return attention, "torch.compile(flex_attention)"


def _mask_mod(case: Case) -> Callable[..., Tensor] | None:
    left = case.window_left
    if left is not None and case.causal:
        return lambda b, h, i, j: (j <= i) & (i - j <= left)
    if left is not None:
        return lambda b, h, i, j: i - j <= left
    return (lambda b, h, i, j: j <= i) if case.causal else None


def _score_mod(case: Case) -> Callable[..., Tensor] | None:
    cap = case.softcap
    if not cap:
        return None
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap)
