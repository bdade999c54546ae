"""Tile configurations of the backward kernels as data, on the rows of `configs`.

A tile is (warps, 16-position tiles per warp, warps that share them, positions per step, stages, blocks per SM).
Registers are ptxas's for bf16 on sm_90 (NVRTC 13.0); none of these tiles spills.
"""

from __future__ import annotations

from .configs import Row
from .params_bwd import BwdTile

# Statistics: 64 rows by 4 warps leave every thread four loads in flight.
PRE_ROWS, PRE_WARPS = 64, 4
# Partial sums per (batch, head) where both sequence axes of a bias are broadcast: enough blocks to fill a card from few
# heads, few enough that adding them is nothing.
BIAS_CHUNKS = 16

_NARROW = "shorter steps leave registers for the work on each score"
_BIAS = "one score-shaped accumulator; all of it fits every card"

# Keys are owned, query rows come in steps.
DKDV: tuple[Row[BwdTile], ...] = (
    Row("hopper", (64, 64), "plain", BwdTile(4, 2, 1, 32, 2, 2), "252 registers, two blocks per SM; 32 keys per warp halve the reads of q and dO"),
    Row("hopper", (96, 96), "plain", BwdTile(8, 1, 1, 64, 2, 1), "238 registers, 97 KB"),
    Row("hopper", (128, 128), "plain", BwdTile(8, 2, 2, 64, 2, 1), "pairs of warps share 32 keys: H200 s8192 full 6.39 ms, 16 keys per warp 6.76"),
    Row("hopper", (128, 128), "partial", BwdTile(8, 1, 1, 32, 2, 1), "pairs spill 16 bytes with a window"),
    Row("hopper", (192, 128), "plain", BwdTile(8, 1, 1, 32, 2, 1), "255 registers, 121 KB"),
    Row("hopper", (256, 256), "plain", BwdTile(8, 2, 4, 64, 2, 1), "four warps share 32 keys; accumulators of 256 columns do not fit one"),

    Row("ampere", (64, 64), "plain", BwdTile(4, 2, 1, 32, 2, 2), "as on hopper"),
    Row("ampere", (96, 96), "plain", BwdTile(8, 1, 1, 64, 2, 1), "97 KB"),
    Row("ampere", (128, 128), "plain", BwdTile(8, 1, 1, 32, 2, 1), "245 registers, 97 KB; steps of 64 rows spill 8 bytes"),
    Row("ampere", (192, 128), "plain", BwdTile(8, 1, 1, 32, 2, 1), "121 KB of 163"),
    Row("ampere", (256, 256), "plain", BwdTile(8, 1, 2, 32, 2, 1), "137 KB of 163"),

    Row("small", (64, 64), "plain", BwdTile(4, 2, 1, 32, 2, 2), "two blocks of 49 KB per SM"),
    Row("small", (96, 96), "plain", BwdTile(8, 1, 1, 64, 2, 1), "97 KB of 99"),
    Row("small", (128, 128), "plain", BwdTile(8, 1, 1, 32, 2, 1), "97 KB of 99"),
    Row("small", (192, 128), "plain", BwdTile(4, 1, 1, 32, 2, 1), "81 KB of 99"),
    Row("small", (256, 256), "plain", BwdTile(4, 1, 2, 32, 1, 1), "68 KB of 99; two stages need 100"),

    Row("blackwell", (192, 128), "rich", BwdTile(4, 1, 1, 16, 1, 1), "two stages spill 8 bytes with a mask"),
    Row("blackwell", (256, 256), "rich", BwdTile(4, 1, 4, 64, 1, 1), "pairs of warps spill 24 bytes with a mask; 85 KB of 99"),

    Row("small", (64, 64), "rich", BwdTile(8, 1, 1, 32, 2, 1), _NARROW),
    Row("small", (96, 96), "rich", BwdTile(8, 1, 1, 32, 2, 1), _NARROW),
    Row("small", (128, 128), "rich", BwdTile(8, 1, 1, 16, 2, 1), _NARROW),
    Row("small", (192, 128), "rich", BwdTile(4, 1, 1, 16, 2, 1), _NARROW),
    Row("small", (256, 256), "rich", BwdTile(4, 1, 2, 32, 1, 1), _NARROW),
)

# Query rows are owned, keys come in steps.
DQ: tuple[Row[BwdTile], ...] = (
    Row("hopper", (64, 64), "plain", BwdTile(4, 2, 1, 64, 2, 2), "255 registers, two blocks of 64 KB per SM"),
    Row("hopper", (96, 96), "plain", BwdTile(4, 2, 1, 32, 2, 2), "243 registers, two blocks of 72 KB per SM"),
    Row("hopper", (128, 128), "plain", BwdTile(8, 2, 1, 32, 2, 1), "32 rows per warp halve the reads of k and v; 160 KB"),
    Row("hopper", (128, 128), "partial", BwdTile(8, 1, 1, 64, 2, 1), "32 rows per warp spill 8 bytes with predicated columns"),
    Row("hopper", (192, 128), "plain", BwdTile(8, 1, 1, 64, 2, 1), "247 registers, 160 KB"),
    Row("hopper", (256, 256), "plain", BwdTile(8, 1, 1, 32, 2, 1), "254 registers, 192 KB"),

    Row("ampere", (64, 64), "plain", BwdTile(4, 2, 1, 32, 2, 2), "as on hopper"),
    Row("ampere", (96, 96), "plain", BwdTile(4, 2, 1, 32, 2, 2), "two blocks of 72 KB per SM"),
    Row("ampere", (128, 128), "plain", BwdTile(8, 1, 1, 64, 2, 1), "128 KB of 163"),
    Row("ampere", (192, 128), "plain", BwdTile(8, 1, 1, 32, 2, 1), "120 KB of 163"),
    Row("ampere", (256, 256), "plain", BwdTile(4, 1, 1, 32, 2, 1), "128 KB of 163"),

    Row("small", (64, 64), "plain", BwdTile(4, 2, 1, 32, 2, 2), "two blocks of 48 KB per SM"),
    Row("small", (96, 96), "plain", BwdTile(8, 1, 1, 64, 2, 1), "96 KB of 99"),
    Row("small", (128, 128), "plain", BwdTile(8, 1, 1, 32, 2, 1), "96 KB of 99"),
    Row("small", (192, 128), "plain", BwdTile(4, 1, 1, 32, 2, 1), "80 KB of 99"),
    Row("small", (256, 256), "plain", BwdTile(4, 1, 1, 32, 1, 1), "96 KB of 99"),

    Row("small", (64, 64), "rich", BwdTile(8, 1, 1, 64, 2, 1), _NARROW),
    Row("small", (96, 96), "rich", BwdTile(8, 1, 1, 32, 2, 1), _NARROW),
    Row("small", (128, 128), "rich", BwdTile(8, 1, 1, 32, 2, 1), _NARROW),
    Row("small", (192, 128), "rich", BwdTile(4, 1, 1, 32, 2, 1), _NARROW),
    Row("small", (256, 256), "rich", BwdTile(4, 1, 1, 16, 2, 1), _NARROW),
)

# Rows are owned, keys come in steps; a tile of dBias is own x block.
BIAS: tuple[Row[BwdTile], ...] = (
    Row("blackwell", (192, 128), "rich", BwdTile(4, 1, 1, 32, 1, 1), "64 keys spill 120 bytes"),
    Row("small", (64, 64), "rich", BwdTile(4, 1, 1, 64, 1, 1), _BIAS),
    Row("small", (96, 96), "rich", BwdTile(4, 1, 1, 64, 1, 1), _BIAS),
    Row("small", (128, 128), "rich", BwdTile(4, 1, 1, 64, 1, 1), _BIAS),
    Row("small", (192, 128), "rich", BwdTile(4, 1, 1, 64, 1, 1), _BIAS),
    Row("small", (256, 256), "rich", BwdTile(4, 1, 1, 32, 1, 1), _BIAS),
)

# Keys are owned and dQ is summed by atomic additions: plain scores, head dims whose columns warps can share. dS crosses
# shared memory. Every flavor here has a row in "small": whether a graph takes this path does not depend on the card.
DKDV_SUMS: tuple[Row[BwdTile], ...] = (
    Row("hopper", (64, 64), "plain", BwdTile(4, 2, 1, 32, 2, 2), "32 keys per warp halve the reads of q and dO; two blocks of 57 KB"),
    Row("hopper", (128, 128), "plain", BwdTile(8, 2, 2, 64, 2, 1), "pairs of warps share 32 keys: fewer reads of q and dO, 209 KB"),
    Row("hopper", (256, 256), "plain", BwdTile(8, 2, 4, 64, 2, 1), "four warps share 32 keys: 168 reads of fragments per step, pairs 192"),

    Row("ampere", (64, 64), "plain", BwdTile(8, 1, 1, 64, 2, 1), "as on hopper"),
    Row("ampere", (128, 128), "plain", BwdTile(8, 1, 1, 32, 2, 1), "105 KB of 163"),
    Row("ampere", (256, 256), "plain", BwdTile(8, 1, 2, 32, 2, 1), "137 KB of 163"),

    Row("small", (64, 64), "plain", BwdTile(8, 1, 1, 64, 2, 1), "81 KB of 99"),
    Row("small", (128, 128), "plain", BwdTile(4, 1, 1, 32, 2, 1), "69 KB of 99"),
    Row("small", (256, 256), "plain", BwdTile(4, 1, 2, 32, 1, 1), "68 KB of 99"),
)
