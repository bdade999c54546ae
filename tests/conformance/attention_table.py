"""Attention calls that other implementations can express too: one table for every peer.

Extents stay around and below the interpreted kernels' tile (32), with a few that pass it; Sq and Sk, D and
Dv, and the head counts differ wherever a row isn't about their being equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from oracle import Problem
from torch import Tensor

BR = "bottom_right"


@dataclass(frozen=True)
class Row:
    """One call. `bias` and `mask` are shapes; `empty` rows are shut out by the mask altogether."""

    name: str
    seqlens: tuple[int, int] = (9, 13)
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (8, 8)
    batch: int = 2
    scale: float | None = None
    causal: bool = False
    align: str = "top_left"
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    empty: tuple[int, ...] = ()
    sink: bool = False
    len_kv: tuple[int, ...] | None = None
    q_scale: float = 1.0

    def with_(self, name: str, **changes: Any) -> Row:
        return replace(self, name=name, **changes)

    @property
    def options(self) -> dict[str, Any]:
        """Host options in the graph's words."""
        return {
            "scale": self.scale,
            "causal": self.causal,
            "align": self.align,
            "window": self.window,
            "softcap": self.softcap,
        }

    def __str__(self) -> str:
        return self.name


def _rows() -> Iterator[Row]:
    base = Row("plain")
    yield base
    yield base.with_("square", seqlens=(11, 11))
    yield base.with_("beyond a tile", seqlens=(40, 70), batch=1)
    yield base.with_("one query", seqlens=(1, 33))
    for scale in (0.3, 0.0, -0.7):
        yield base.with_(f"scale {scale}", scale=scale)
    for sq, sk in ((9, 13), (13, 9)):
        for align in ("top_left", BR):
            yield base.with_(f"causal {align} {sq}x{sk}", seqlens=(sq, sk), causal=True, align=align)
            yield base.with_(f"window 3,2 {align} {sq}x{sk}", seqlens=(sq, sk), window=(3, 2), align=align)
    yield base.with_("causal window 4", seqlens=(36, 40), causal=True, window=(4, None), align=BR, batch=1)
    yield base.with_("window right only", window=(None, 4))
    yield base.with_("window of one key", seqlens=(12, 12), window=(0, 0))
    for hq, hk in ((4, 2), (6, 2), (3, 1)):
        yield base.with_(f"heads {hq}/{hk}", heads=(hq, hk), causal=True)
    yield base.with_("dims 16/5", dims=(16, 5))
    yield base.with_("dims 5/16 causal", dims=(5, 16), causal=True, align=BR)
    yield base.with_("dims 192/128", dims=(192, 128), seqlens=(5, 7), batch=1, causal=True, align=BR)
    yield base.with_("softcap", softcap=1.5, q_scale=3.0)
    yield base.with_("softcap causal grouped", softcap=1.5, q_scale=3.0, causal=True, heads=(4, 2), align=BR)
    for shape in ((1, 1, 9, 13), (1, 2, 1, 13), (2, 1, 9, 1), (2, 2, 9, 13), (9, 13)):
        yield base.with_(f"bias {list(shape)}", bias=shape)
    yield base.with_(
        "bias softcap window", bias=(1, 2, 9, 13), softcap=2.0, q_scale=3.0, window=(5, 3), align=BR
    )
    yield base.with_("mask", mask=(2, 1, 9, 13))
    yield base.with_("mask with empty rows", mask=(1, 2, 9, 13), empty=(0, 5), bias=(1, 2, 9, 13))
    yield base.with_("lengths", len_kv=(4, 13))
    yield base.with_("lengths with none", len_kv=(0, 6), causal=True)
    yield base.with_("sink", sink=True)
    yield base.with_("sink window grouped", sink=True, heads=(4, 2), causal=True, window=(4, None), align=BR)
    yield base.with_("sink and empty rows", sink=True, seqlens=(13, 9), causal=True, align=BR)
    yield base.with_(
        "sink softcap bias mask", sink=True, softcap=2.0, bias=(1, 2, 1, 13), mask=(9, 13), empty=(3,)
    )


ROWS: tuple[Row, ...] = tuple(_rows())


def problem(row: Row, dtype: torch.dtype) -> Problem:
    """Its operands, do and dlse, in `dtype`. The values are fp32's in every wider type, so that fp64
    answers the same question; sinks stay fp32 beside 16 bits."""
    gen = torch.Generator().manual_seed(len(row.name) + 7 * sum(row.seqlens))
    (sq, sk), (hq, hk), (d, dv), b = row.seqlens, row.heads, row.dims, row.batch

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=gen) * scale).to(dtype)

    q, k, v = normal(b, hq, sq, d, scale=row.q_scale), normal(b, hk, sk, d), normal(b, hk, sk, dv)
    do, dlse = normal(b, hq, sq, dv), torch.randn(b, hq, sq, generator=gen)
    options: dict[str, Any] = dict(row.options)
    if row.bias is not None:
        options["bias"] = normal(*row.bias)
    if row.mask is not None:
        mask = torch.rand(*row.mask, generator=gen) < 0.7
        mask[..., list(row.empty), :] = False
        options["mask"] = mask
    if row.sink:
        options["sink"] = torch.randn(hq, generator=gen).to(torch.promote_types(dtype, torch.float32))
    if row.len_kv is not None:
        options["seq_len_kv"] = torch.tensor(row.len_kv, dtype=torch.int32)
    return Problem(q, k, v, do, dlse.to(torch.promote_types(dtype, torch.float32)), options)


def visible(row: Row, given: Problem) -> Tensor:
    """[B, 1 | Hq, Sq, Sk]: which keys a row sees, by every mask that the call has. Written out from the
    definition; its only use is to tell peers that take a whole mask."""
    sq, sk = row.seqlens
    lengths = torch.tensor(row.len_kv or (sk,) * row.batch)[:, None, None, None]
    offset = lengths - sq if row.align == BR else torch.zeros_like(lengths)
    i, j = torch.arange(sq)[:, None] + offset, torch.arange(sk)
    left, right = row.window
    keep = (j < lengths).expand(row.batch, 1, sq, sk)
    if left is not None:
        keep = keep & (j >= i - left)
    if row.causal or right is not None:
        keep = keep & (j <= i + (0 if row.causal else right or 0))
    mask = given.options.get("mask")
    return keep if mask is None else keep & mask
