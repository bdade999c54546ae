"""Checks of block entries and counts. They read the tensors on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from .nsa import Places

__all__ = ["first_bad_entry"]


def first_bad_entry(block_indices: Tensor, block_counts: Tensor | None, cu_seqlens: Tensor | None, block_size: int,
                    seqlen_kv: int, *, indices: bool) -> str | None:
    """The first wrong count, or (`indices`) wrong block entry, as a sentence, or None.

    A count lies in 0..S. An entry is -1 (no block) or lies below the number of blocks of the row's sequence; entries
    past a row's count are not looked at. Shapes as in `frost.Graph.nsa_selection`; offsets have been checked before.
    """
    slots = block_indices.shape[-1]
    if block_counts is not None:
        at = _first((block_counts < 0) | (block_counts > slots))
        if at is not None:
            return f"block_counts{list(at)}: given {int(block_counts[at])}, expected a value in 0..{slots} (S)"
    if not indices:
        return None
    if cu_seqlens is None:
        blocks = torch.tensor(-(-seqlen_kv // block_size), device=block_indices.device)
    else:
        lengths = Places.packed(cu_seqlens, block_indices.shape[0]).length
        blocks = (-(-lengths // block_size))[:, None, None]
    bad = (block_indices < -1) | (block_indices >= blocks)
    if block_counts is not None:
        bad = bad & (torch.arange(slots, device=bad.device) < block_counts[..., None])
    if cu_seqlens is not None:
        bad = bad & (blocks > 0)  # tokens outside the offsets are padding
    at = _first(bad)
    if at is None:
        return None
    limit = int(blocks if blocks.dim() == 0 else blocks[at[0], 0, 0])
    return (f"block_indices{list(at)}: given {int(block_indices[at])}, expected -1 (no block) or a block number in "
            f"0..{limit - 1}")


def _first(bad: Tensor) -> tuple[int, ...] | None:
    hits = bad.nonzero()
    return tuple(hits[0].tolist()) if hits.numel() else None
