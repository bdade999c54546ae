"""Tile configurations of the backward kernels as data, on the rows of `configs`.

Registers and spills quoted are ptxas's for bf16, causal, aligned operands (`runtime.resource_usage`); spills
of a few dozen bytes lie outside the inner loops (read in the machine code).
"""

from __future__ import annotations

from .configs import Row
from .params import Blocks

# Row statistics: one program reads 32 rows of o and dO, 16 KB each at head dim 256 in 16 bits.
PRE = Blocks(32, 32, 4, 1)
# Reductions: one program adds lines of 256 numbers; 30 registers.
REDUCE = Blocks(256, 256, 4, 1)
# Partial sums per (batch, head) where both sequence axes of a bias are broadcast: enough programs to fill a
# card from few heads, few enough that adding them is nothing.
BIAS_CHUNKS = 16

_TESTS = "several tiles at small test sizes"
_FP32 = "fp32 products run on the plain cores, operands whole in registers: the largest tile without spills"
_INTERPRETED = (
    Row("interpreter", 4, 256, "plain", None, Blocks(32, 32, 1, 1), _TESTS),
    Row("interpreter", 4, 256, "tiled", None, Blocks(32, 32, 1, 1), _TESTS),
)


def _both(arch: str, itemsize: int, d_pad: int, blocks: Blocks, reason: str) -> tuple[Row, Row]:
    """One row for both kinds of scores."""
    return (Row(arch, itemsize, d_pad, "plain", None, blocks, reason),
            Row(arch, itemsize, d_pad, "tiled", None, blocks, reason))


# BLOCK_M query rows are looped over, BLOCK_N keys are owned. Masked tiles are half as high above head dim 64.
DKDV: tuple[Row, ...] = (
    *_INTERPRETED,
    Row("hopper", 2, 64, "plain", None, Blocks(64, 64, 4, 2),
        "H200 s8192: 4.96 ms full, 2.59 causal (32x128x4x3 4.83 and 2.72, 64x128x8x3 5.42 and 2.91); at most 48 "
        "bytes spilled, per head"),
    Row("hopper", 2, 128, "plain", None, Blocks(64, 128, 8, 3),
        "H200 s8192: 3.84 ms full, 2.08 causal, fastest of 15 (two stages 4.43 and 2.24, 64x64x4x2 4.06 and 2.21); "
        "40 bytes spilled per head, none per tile"),
    Row("hopper", 2, 256, "plain", None, Blocks(64, 64, 8, 2),
        "H200 s8192: 8.12 ms full, 3.83 causal, fastest of 9 although it spills 232 bytes (32x64x8x2 11.3 and 5.2)"),
    Row("hopper", 2, 64, "tiled", None, Blocks(32, 64, 8, 1), "238 registers, no spill beside a score tile"),
    Row("hopper", 2, 128, "tiled", None, Blocks(64, 64, 8, 2), "104 bytes spilled; 64 x 128 spills 408"),
    Row("hopper", 2, 256, "tiled", None, Blocks(32, 32, 8, 1), "8 bytes spilled; 32 x 64 spills 464"),

    Row("ampere", 2, 64, "plain", None, Blocks(32, 64, 4, 2), "8 bytes spilled; 64 x 64 spills 232"),
    Row("ampere", 2, 128, "plain", None, Blocks(64, 64, 8, 2), "8 bytes spilled; 73 KB: two blocks per SM"),
    Row("ampere", 2, 64, "tiled", None, Blocks(32, 32, 4, 1), "255 registers, no spill; 32 x 64 spills 56"),
    Row("ampere", 2, 128, "tiled", None, Blocks(32, 64, 8, 1), "40 bytes spilled; 48 KB"),
    *_both("ampere", 2, 256, Blocks(32, 32, 8, 1), "no spill; 80 KB; 32 x 64 spills 56, tiled 704"),

    Row("small", 2, 64, "plain", None, Blocks(32, 64, 4, 2), "16 bytes spilled on sm_120; 25 KB"),
    Row("small", 2, 128, "plain", None, Blocks(32, 64, 8, 2), "16 bytes spilled; 53 KB"),
    Row("small", 2, 64, "tiled", None, Blocks(32, 32, 4, 1), "as on sm_80"),
    Row("small", 2, 128, "tiled", None, Blocks(32, 64, 8, 1), "16 bytes spilled; 48 KB"),
    *_both("small", 2, 256, Blocks(16, 32, 8, 1), "172 and 180 registers, no spill; 57 KB"),

    *_both("small", 4, 64, Blocks(32, 32, 8, 1), _FP32),
    *_both("small", 4, 128, Blocks(16, 32, 8, 1), _FP32),
    *_both("small", 4, 256, Blocks(16, 16, 8, 1), _FP32),
)

# BLOCK_M query rows are owned, BLOCK_N keys are looped over.
DQ: tuple[Row, ...] = (
    *_INTERPRETED,
    Row("hopper", 2, 64, "plain", None, Blocks(64, 128, 4, 2),
        "H200 s8192: 2.79 ms full, 1.52 causal, fastest of 15 (128x64x4x2 2.85 and 1.55); at most 16 bytes spilled"),
    Row("hopper", 2, 128, "plain", None, Blocks(128, 64, 8, 3),
        "H200 s8192: 2.60 ms full, 1.44 causal (64x64x4x2 2.60 and 1.40, but it spills); 248 registers, 160 KB"),
    Row("hopper", 2, 256, "plain", None, Blocks(128, 32, 8, 2),
        "H200 s8192: 3.82 ms full, 1.89 causal, fastest of 8 (128x64x8x1 4.80 and 2.48); 249 registers, no spill"),
    Row("hopper", 2, 64, "tiled", None, Blocks(64, 64, 8, 2), "232 registers, no spill"),
    Row("hopper", 2, 128, "tiled", None, Blocks(64, 32, 8, 2), "215 registers, no spill; 64 x 64 spills 40"),
    Row("hopper", 2, 256, "tiled", None, Blocks(32, 64, 8, 1), "188 registers, no spill; 96 KB"),

    Row("ampere", 2, 64, "plain", None, Blocks(64, 64, 4, 2), "255 registers, no spill; 32 KB"),
    Row("ampere", 2, 128, "plain", None, Blocks(64, 64, 8, 2), "182 registers, no spill; 72 KB"),
    Row("ampere", 2, 256, "plain", None, Blocks(64, 32, 8, 2), "224 registers, no spill; 100 KB"),
    Row("ampere", 2, 64, "tiled", None, Blocks(32, 64, 4, 1), "248 registers, no spill"),
    Row("ampere", 2, 128, "tiled", None, Blocks(64, 64, 8, 1), "255 registers, no spill; 48 KB"),
    Row("ampere", 2, 256, "tiled", None, Blocks(32, 64, 8, 1), "255 registers, no spill; 96 KB"),

    Row("small", 2, 64, "plain", None, Blocks(128, 32, 8, 2), "186 registers, no spill; 40 KB"),
    Row("small", 2, 128, "plain", None, Blocks(64, 64, 8, 1), "169 registers, no spill; 64 KB"),
    Row("small", 2, 64, "tiled", None, Blocks(32, 64, 4, 1), "as on sm_80"),
    Row("small", 2, 128, "tiled", None, Blocks(64, 32, 8, 1), "255 registers, no spill; 40 KB"),
    *_both("small", 2, 256, Blocks(32, 32, 8, 1), "139 and 180 registers, no spill; 64 KB"),

    *_both("small", 4, 64, Blocks(32, 32, 8, 1), _FP32),
    *_both("small", 4, 128, Blocks(16, 16, 8, 1), _FP32),
    *_both("small", 4, 256, Blocks(16, 16, 8, 1), "176 bytes spilled, the least of the tiles that fit"),
)

# The three dBias kernels: two products per tile, one score-shaped accumulator. Always "tiled".
BIAS: tuple[Row, ...] = (
    *_INTERPRETED,
    Row("hopper", 2, 64, "tiled", None, Blocks(32, 64, 4, 1), "234 registers with a mask, no spill"),
    Row("hopper", 2, 128, "tiled", None, Blocks(64, 64, 8, 1), "223 registers, no spill; 64 KB"),
    Row("small", 2, 64, "tiled", None, Blocks(32, 64, 4, 1), "222 registers on sm_80, no spill"),
    Row("small", 2, 128, "tiled", None, Blocks(32, 64, 8, 1), "227 registers on sm_80; 64 x 64 spills 750"),
    Row("small", 2, 256, "tiled", None, Blocks(32, 64, 8, 1), "254 registers on sm_80, no spill; 64 KB"),
    Row("small", 4, 64, "tiled", None, Blocks(32, 32, 4, 1), _FP32),
    Row("small", 4, 128, "tiled", None, Blocks(32, 32, 8, 1), _FP32),
    Row("small", 4, 256, "tiled", None, Blocks(16, 16, 4, 1), "24 bytes spilled; 64 KB"),
)
