"""Checks of values that live in tensors: sequence offsets and lengths. They read the tensors on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A packed bias or mask: its name, rows and columns.
PairExtent = tuple[str, int, int]

__all__ = ["check_values", "first_bad_value"]


def check_values(
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    seq_len_q: Tensor | None = None,
    seq_len_kv: Tensor | None = None,
    extent_q: int,
    extent_kv: int,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    pairs: Sequence[PairExtent] = (),
) -> None:
    """Raise ValueError for the first bad value; see `first_bad_value`."""
    bad = first_bad_value(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv,
        extent_q=extent_q, extent_kv=extent_kv, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, pairs=pairs)
    if bad is not None:
        raise ValueError(bad)


def first_bad_value(
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    seq_len_q: Tensor | None = None,
    seq_len_kv: Tensor | None = None,
    extent_q: int,
    extent_kv: int,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    pairs: Sequence[PairExtent] = (),
) -> str | None:
    """The first wrong offset or length as a sentence (tensor, position, given, expected), or None.

    Offsets [B + 1] must lie in 0..extent (the packed total) and never fall, and no sequence may be longer than
    `max_seqlen_*` where that is declared, nor than a packed bias or mask of `pairs` has rows (q) or columns (kv), an
    extent of 1 being broadcast; lengths [B] must lie in 0..extent (the padded seqlen).
    """
    sides = (
        ("q", cu_seqlens_q, seq_len_q, extent_q, max_seqlen_q, "rows"),
        ("kv", cu_seqlens_kv, seq_len_kv, extent_kv, max_seqlen_kv, "columns"),
    )
    for side, cu, lengths, extent, longest, axis in sides:
        bad = None
        if cu is not None:
            limits: list[tuple[int, str]] = [] if longest is None else [(longest, f"max_seqlen_{side} = {longest}")]
            for name, rows, columns in pairs:
                extent_there = rows if side == "q" else columns
                if extent_there != 1:
                    limits.append((extent_there, f"the {extent_there} {axis} of {name}"))
            bad = _bad_offset(f"cu_seqlens_{side}", cu, extent, limits)
        if bad is None and lengths is not None:
            bad = _outside(f"seq_len_{side}", lengths, extent)
        if bad is not None:
            return bad
    return None


def _outside(name: str, values: Tensor, limit: int) -> str | None:
    at = _first((values < 0) | (values > limit))
    if at is None:
        return None
    return f"{name}[{at}]: given {int(values[at])}, expected a value in 0..{limit}"


def _bad_offset(name: str, cu: Tensor, total: int, limits: Sequence[tuple[int, str]]) -> str | None:
    bad = _outside(name, cu, total)
    if bad is not None:
        return bad
    steps = torch.diff(cu)
    at = _first(steps < 0)
    if at is not None:
        return f"{name}[{at + 1}]: given {int(cu[at + 1])}, expected at least {name}[{at}] = {int(cu[at])}"
    for longest, what in limits:
        at = _first(steps > longest)
        if at is not None:
            return (f"{name}[{at + 1}]: given {int(cu[at + 1])}, a sequence of {int(steps[at])} tokens, "
                    f"expected at most {what}")
    return None


def _first(bad: Tensor) -> int | None:
    hits = bad.nonzero()
    return int(hits[0, 0]) if hits.numel() else None
