"""Tile configurations as data: one row per (arch class, element size, padded head dim, kind of mask), each
with its reason.

Tiles do not depend on sequence lengths or batch: a new size compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from .params import Blocks

# Shared memory that one block may use, in bytes; it decides which rows an arch may take.
SHARED_LIMIT = {"hopper": 227 * 1024, "ampere": 163 * 1024, "small": 99 * 1024}

# Compute capabilities by arch class; anything newer that is not listed is "small", which fits every card.
_CLASSES: dict[str, tuple[tuple[int, int], ...]] = {
    "hopper": ((9, 0), (10, 0), (10, 3)),
    "ampere": ((8, 0), (8, 7)),
}


def arch_class(cc: tuple[int, int] | None) -> str:
    """ "interpreter" for the CPU."""
    if cc is None:
        return "interpreter"
    return next((name for name, members in _CLASSES.items() if cc in members), "small")


@dataclass(frozen=True)
class Row:
    """`scores`: "plain" (no bias or boolean mask) or "tiled" (a score-shaped operand is read per tile).
    `band`: whether the mask family cuts tiles; None matches both."""

    arch: str
    itemsize: int
    d_pad: int          # the larger of the padded head dims; the row serves up to this
    scores: str
    band: bool | None
    blocks: Blocks
    reason: str


_FP32_NOTE = "fp32 products run on the plain cores: small tiles keep spills below 32 bytes"
_TILED_NOTE = "a score tile is loaded beside K and V; larger tiles spill"

# Registers and spills quoted here are ptxas's for bf16 with aligned operands (`runtime.resource_usage`).
FWD: tuple[Row, ...] = (
    # The interpreter's cost is per operation, not per element; 32 x 32 still makes several tiles of a small
    # test.
    Row("interpreter", 4, 256, "plain", None, Blocks(32, 32, 1, 1), "several tiles at small test sizes"),
    Row("interpreter", 4, 256, "tiled", None, Blocks(32, 32, 1, 1), "several tiles at small test sizes"),

    Row("hopper", 2, 32, "plain", None, Blocks(128, 64, 4, 3), "183 registers, no spill; 128 x 128 spills"),
    Row("hopper", 2, 64, "plain", False, Blocks(64, 64, 4, 2),
        "H200 s8192: 2.44 ms, fastest of 14 (64x128x4x3 2.56, 128x64x8x2 2.68); 127 registers, 4 blocks per SM"),
    Row("hopper", 2, 64, "plain", True, Blocks(128, 64, 8, 3),
        "H200 s8192 causal: 1.29 ms, fastest of 14 (64x64x4x3 1.34); 126 registers"),
    Row("hopper", 2, 128, "plain", None, Blocks(64, 64, 4, 3),
        "H200 s8192: 2.11 ms full, 1.12 ms causal, fastest of 14 (128x64x8x3 2.27 and 1.21; 128x128x8x3 2.11 and "
        "1.17, but it spills 24 bytes); 254 registers, 2 blocks per SM"),
    Row("hopper", 2, 256, "plain", None, Blocks(128, 64, 8, 2),
        "H200 s8192: 2.13 ms full, 1.12 causal, fastest of 8 (128x32x8x3 2.24 and 1.25); 192 KB"),

    Row("hopper", 2, 64, "tiled", None, Blocks(128, 64, 8, 2),
        "249 registers, no spill; 64 x 64 with 4 warps spills"),
    Row("hopper", 2, 128, "tiled", None, Blocks(64, 64, 8, 2),
        "254 registers, no spill; 128 x 64 spills 136 bytes"),
    Row("hopper", 2, 256, "tiled", None, Blocks(64, 32, 8, 2), "255 registers, no spill"),

    Row("ampere", 2, 128, "plain", None, Blocks(128, 64, 8, 3),
        "219 registers, no spill, 96 KB of 163; 4 warps spill 184 bytes"),
    Row("ampere", 2, 256, "plain", None, Blocks(64, 64, 8, 2),
        "255 registers, no spill, 104 KB; 128 rows spill"),
    Row("ampere", 2, 128, "tiled", None, Blocks(64, 64, 8, 2),
        "255 registers, no spill; 128 x 64 spills 200 bytes"),

    Row("small", 2, 64, "plain", None, Blocks(128, 64, 8, 2), "4 warps spill on sm_89 and sm_120"),
    Row("small", 2, 128, "plain", None, Blocks(128, 64, 8, 2), "64 KB of 99; 224 registers, no spill"),
    Row("small", 2, 256, "plain", None, Blocks(64, 32, 8, 2),
        "68 KB of 99; 64 x 64 with two stages needs 104 KB"),
    Row("small", 2, 64, "tiled", None, Blocks(128, 32, 8, 2), _TILED_NOTE),
    Row("small", 2, 128, "tiled", None, Blocks(64, 32, 4, 2), _TILED_NOTE),
    Row("small", 2, 256, "tiled", None, Blocks(64, 32, 8, 2), _TILED_NOTE),

    Row("small", 4, 64, "plain", None, Blocks(64, 32, 8, 2), _FP32_NOTE),
    Row("small", 4, 128, "plain", None, Blocks(32, 16, 8, 2), _FP32_NOTE),
    Row("small", 4, 256, "plain", None, Blocks(16, 16, 8, 2), _FP32_NOTE),
    Row("small", 4, 64, "tiled", None, Blocks(32, 32, 8, 1), _FP32_NOTE),
    Row("small", 4, 128, "tiled", None, Blocks(32, 16, 8, 1), _FP32_NOTE),
    Row("small", 4, 256, "tiled", None, Blocks(16, 16, 8, 1), _FP32_NOTE),
)


def pick(table: tuple[Row, ...], cc: tuple[int, int] | None, itemsize: int, d_pad: int, *, tiled: bool,
         band: bool) -> Blocks:
    """The first row that serves the request: `tiled` with a bias or boolean mask, `band` with a causal mask
    or window. An arch without a row for it uses "small"'s, which fit every card. Raises LookupError."""
    scores = "tiled" if tiled else "plain"
    for arch in dict.fromkeys((arch_class(cc), "small")):
        for row in table:
            if (row.arch == arch and row.scores == scores and itemsize <= row.itemsize and d_pad <= row.d_pad
                    and row.band in (None, band)):
                return row.blocks
    raise LookupError(f"no tile configuration for {itemsize}-byte elements at padded head dim {d_pad}")
