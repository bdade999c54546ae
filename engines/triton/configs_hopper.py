"""Tiles of the Hopper kernels as data, one row per head dim and mask, each with its reason.

Tiles do not depend on sequence lengths or batch, so a new size compiles nothing, with one exception: a problem too small
to give every multiprocessor a large tile gets smaller ones (`few`). Speeds are TFLOP/s on the H200 (132 multiprocessors).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from .params_hopper import HopperBwdTile, HopperTile

T = TypeVar("T", HopperTile, HopperBwdTile)


@dataclass(frozen=True)
class HopperRow(Generic[T]):
    d: int
    causal: bool | None             # None: both
    tile: T
    reason: str
    few: T | None = None            # where `tile` makes fewer blocks than `few_below`
    few_below: int = 0


# Two small blocks share a multiprocessor only where each keeps to half of its registers.
_HALF = 128

FWD_HOPPER: tuple[HopperRow[HopperTile], ...] = (
    HopperRow(64, None, HopperTile(256, 64, 6, True),
              "s8192 513 full, 507 causal; s2048 492, 418; s512 394, 250; fastest of 8 below s8192 (192x128x3: 554 and 522, "
              "but 341 and 145 at s512)",
              HopperTile(64, 128, 2, False, _HALF), 110),
    HopperRow(128, None, HopperTile(128, 128, 2, True),
              "s8192 676 full, 672 causal; s2048 654, 547; s512 483, 276; fastest of 4 (192x64x3: 611 and 573)",
              HopperTile(64, 64, 3, False, _HALF), 110),
    HopperRow(256, None, HopperTile(128, 64, 2, True), "s8192 742 full, 725 causal; not persistent 723 and 673"),
)

BWD_HOPPER: tuple[HopperRow[HopperBwdTile], ...] = (
    HopperRow(64, None, HopperBwdTile(128, 128, 2), "s8192 476 full, 442 causal (64 rows 391 and 379)",
              HopperBwdTile(64, 64, 4), 66),
    HopperRow(128, None, HopperBwdTile(64, 128, 2), "s8192 526 to 542 full, 515 to 518 causal; larger tiles do not fit",
              HopperBwdTile(64, 64, 4), 66),
    HopperRow(256, None, HopperBwdTile(64, 64, 2),
              "s8192 407 full, 399 causal; the largest that fits: each warpgroup holds half of dK's and dV's columns"),
)


def head_dims(table: tuple[HopperRow[T], ...]) -> frozenset[int]:
    """The head dims that have kernels."""
    return frozenset(row.d for row in table)


def pick(table: tuple[HopperRow[T], ...], d: int, causal: bool, *, heads: int, extent: int) -> T:
    """The first row that serves the request. `heads` (batches included) times tiles of `extent` is the number of blocks:
    query heads and rows in the forward, K/V heads and keys in the backward. Raises LookupError."""
    for row in table:
        if row.d == d and row.causal in (None, causal):
            block = row.tile.block_m if isinstance(row.tile, HopperTile) else row.tile.block_n
            small = row.few is not None and heads * -(-extent // block) < row.few_below
            return row.few if small else row.tile  # type: ignore[return-value]
    raise LookupError(f"no Hopper tile for head dim {d}")
