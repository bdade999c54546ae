"""PyTorch's own attention, asked the same question in fp64: the MATH backend, and FlexAttention without a
compiler.

A peer returns what it can say, as an `Answer` whose other fields are None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
from attention_table import Row, visible
from oracle import Answer, Problem
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS: dict[str, Callable[[Row], bool]] = {
    "math": lambda row: row.softcap is None,
    "flex block mask": lambda row: True,
    "flex score mod": lambda row: True,
}
"""Peer -> whether it has a word for everything in a row."""


def answer(peer: str, row: Row, given: Problem) -> Answer:
    """o, gradients, and lse where the peer has one, in fp64."""
    wide = given.cast(torch.float64)
    leaves = {
        "q": wide.q,
        "k": wide.k,
        "v": wide.v,
        **{n: wide.options[n] for n in ("bias", "sink") if n in wide.options},
    }
    leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
    keep = visible(row, wide)
    o, lse = math(row, keep, **leaves) if peer == "math" else flexible(row, keep, "block" in peer, **leaves)
    loss = (o * wide.do).sum()
    if lse is not None:
        loss = loss + torch.where(torch.isfinite(lse), lse * wide.dlse, 0.0).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    named: dict[str, Any] = {"d" + n: g for n, g in zip(leaves, grads)}
    return Answer(o.detach(), None if lse is None else lse.detach(), **named)  # type: ignore[arg-type]


def math(
    row: Row,
    keep: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, None]:
    """All masks and the bias as one float mask. A sink is one more key of score sink and value 0: its row
    of k is 0."""
    shape = (*q.shape[:3], k.shape[2])
    mask = torch.where(
        keep, torch.zeros(shape, dtype=q.dtype) if bias is None else bias.expand(shape), -torch.inf
    )
    if sink is not None:
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
        mask = torch.cat([mask, sink[:, None, None].expand(*shape[:3], 1)], dim=-1)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=row.scale, enable_gqa=True
        ), None


def flexible(
    row: Row,
    keep: Tensor,
    block: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softcap and bias as score_mod; the masks as a block mask, or as -inf from the score_mod. A sink takes
    its share afterwards: exp(sink) joins the sum, so o shrinks by sigmoid(lse - sink)."""
    shape = (*q.shape[:3], k.shape[2])
    whole = torch.zeros(shape, dtype=q.dtype) if bias is None else bias.expand(shape)
    seen = keep.expand(shape)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s if row.softcap is None else row.softcap * torch.tanh(s / row.softcap)
        s = s + whole[b, h, i, j]
        return s if block else torch.where(seen[b, h, i, j], s, -torch.inf)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[b, h, i, j]

    mask = flex.create_block_mask(mask_mod, *shape, device="cpu") if block else None
    # FlexAttention traces its own operator even where nothing is compiled: anew for each call, with plain extents.
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        o, aux = flex.flex_attention(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=mask,
            scale=row.scale,
            enable_gqa=True,
            return_aux=flex.AuxRequest(lse=True),
        )
    lse = aux.lse
    assert lse is not None  # it was asked for
    if sink is not None:
        share = sink[:, None].expand(lse.shape)
        o, lse = o * torch.sigmoid(lse - share)[..., None], torch.logaddexp(lse, share)
    return o, lse
