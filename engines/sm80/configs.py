"""Tile configurations as data: one row per (arch class, flavor, kind of scores), each with its reason.

Tiles do not depend on sequence lengths or batch: a new size compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .params import Tile

KIB = 1024
# Shared memory that one block may use; it decides which rows an arch may take.
SHARED_LIMIT = {"hopper": 227 * KIB, "ampere": 163 * KIB, "blackwell": 99 * KIB, "small": 99 * KIB}
# Keys and values that stay in the L2 cache while the heads that need them are walked: about half of it.
L2_BUDGET = {"hopper": 24 << 20, "ampere": 20 << 20, "blackwell": 24 << 20, "small": 4 << 20}

# Compute capabilities by arch class; anything that is not listed is "small", which fits every card.
_CLASSES: dict[str, tuple[tuple[int, int], ...]] = {
    "hopper": ((9, 0), (10, 0), (10, 3)),
    "ampere": ((8, 0), (8, 7)),
    "blackwell": ((12, 0), (12, 1)),  # "small" but for a few kernels that need more registers there
}


def arch_class(cc: tuple[int, int]) -> str:
    return next((name for name, members in _CLASSES.items() if cc in members), "small")


TileT = TypeVar("TileT")


@dataclass(frozen=True)
class Row(Generic[TileT]):
    """`scores`: "plain", "partial" (plain, but columns are predicated or there is a window on the left: only where "plain" would
    spill), or "rich" (a softcap, bias or boolean mask: more work and addresses per score)."""

    arch: str
    flavor: tuple[int, int]
    scores: str
    tile: TileT
    reason: str


_NARROW = "16 rows per warp leave registers for the work on each score; 32 spill"
# Registers are ptxas's for bf16, exact head dims, causal (NVRTC 13.0); none of these tiles spills.
FWD: tuple[Row[Tile], ...] = (
    Row("hopper", (64, 64), "plain", Tile(4, 2, 64, 2, True, 2),
        "H200 s8192: 351 TFLOP/s full, 338 causal; three blocks with q in shared memory 328 and 313, steps of 32 keys 332, 313"),
    Row("hopper", (96, 96), "plain", Tile(4, 2, 64, 2, False, 2), "243 registers, two blocks of 72 KB per SM"),
    Row("hopper", (128, 128), "plain", Tile(4, 2, 64, 2, False, 2), "255 registers, two blocks of 96 KB per SM"),
    Row("hopper", (192, 128), "plain", Tile(8, 2, 64, 2, False, 1), "255 registers; 176 KB, each tile of keys read by 256 rows"),
    Row("hopper", (256, 256), "plain", Tile(4, 2, 64, 1, False, 2, 2),
        "pairs of warps share 32 rows: H200 s8192 349 TFLOP/s full, 350 causal; 16 rows per warp 339, 335; 8 warps, two stages 350, 330"),

    Row("ampere", (64, 64), "plain", Tile(4, 2, 64, 2, True, 2), "220 registers, two blocks per SM"),
    Row("ampere", (96, 96), "plain", Tile(4, 2, 64, 2, False, 2), "two blocks of 72 KB per SM"),
    Row("ampere", (128, 128), "plain", Tile(8, 2, 64, 2, False, 1), "128 KB of 163; two blocks of 96 KB do not fit"),
    Row("ampere", (128, 128), "partial", Tile(8, 2, 32, 2, False, 1), "64 keys per step spill 8 bytes with a window or narrow copies"),
    Row("ampere", (192, 128), "plain", Tile(8, 2, 32, 2, False, 1), "226 registers, 136 KB of 163"),
    Row("ampere", (256, 256), "plain", Tile(8, 1, 64, 1, False, 1), "236 registers, 128 KB; two stages need 192"),

    Row("small", (64, 64), "plain", Tile(4, 2, 64, 2, True, 2), "two blocks of 48 KB per SM"),
    Row("small", (96, 96), "plain", Tile(4, 2, 64, 1, False, 2), "two blocks of 48 KB per SM; two stages leave one"),
    Row("small", (128, 128), "plain", Tile(8, 2, 32, 2, False, 1), "226 registers, 96 KB of 99: eight warps of 32 rows"),
    Row("small", (192, 128), "plain", Tile(8, 1, 32, 2, False, 1), "140 registers, 88 KB of 99"),
    Row("small", (256, 256), "plain", Tile(4, 1, 64, 1, False, 1), "228 registers, 96 KB of 99"),

    Row("small", (64, 64), "rich", Tile(8, 1, 64, 2, False, 1), _NARROW),
    Row("small", (96, 96), "rich", Tile(8, 1, 64, 1, False, 1), _NARROW),
    Row("small", (128, 128), "rich", Tile(8, 1, 32, 2, False, 1), _NARROW),
    Row("small", (192, 128), "rich", Tile(8, 1, 32, 2, False, 1), _NARROW),
    Row("small", (256, 256), "rich", Tile(4, 1, 32, 1, False, 1), _NARROW),
)


def pick(table: tuple[Row[TileT], ...], cc: tuple[int, int], facts: Mapping[str, Any]) -> TileT:
    """The tile for a specialisation's facts (`params.shared_facts`): the arch's own row, else "small"'s, which fits every
    card. Raises LookupError."""
    flavor = (facts["head_dim"], facts["head_dim_v"])
    rich = facts["softcap"] or facts["mask"] or facts["bias"] is not None
    kinds = ("rich",) if rich else ("plain",) if facts["exact"] and not facts["has_left"] else ("partial", "plain")
    for arch in dict.fromkeys((arch_class(cc), "small")):
        for kind in kinds:
            for row in table:
                if (row.arch, row.flavor, row.scores) == (arch, flavor, kind):
                    return row.tile
    raise LookupError(f"no tile configuration for head dims {flavor}, {kinds[-1]} scores")
