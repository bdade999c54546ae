"""Tile configurations of the selection kernels as data, each with its reason, and the sizes that bound their workspace."""

from __future__ import annotations

from dataclasses import dataclass

from .params import Blocks

# Partial results of one launch take at most about this many bytes; longer inputs are done in several launches over
# ranges of tokens. At 64 heads of 128 in 16 bits with 16 blocks a row that is 8192 tokens.
PARTIAL_BYTES = 2 << 30
MIN_TOKENS = 128       # of one launch
MAX_TOKENS = 1 << 23   # times 128 slots is inside int32
# Most rows of one work item, a multiple of every BLOCK_M. Forward: K and V (32 KB at 64 x 128 in 16 bits) are read once
# for rows that move 512 bytes each. Backward: more, since an item also leaves fp32 sums of dK and dV (64 KB).
FORWARD_ROWS = 2048
BACKWARD_ROWS = 4096

# The tokens of a launch are dealt out to parts whose operands stay in the L2 cache while every block's rows of the part
# gather them, a row once for each of its slots: 8 of 50 MB. But a block should have this many rows in a part, so that it
# pays to bring its keys in.
PART_BYTES = 8 << 20
PART_ROWS = 512

# The inverse map.
MAP_TILE = 32          # tokens to a mark of 32 bits
MAP_BLOCKS = 32
MAP_TILES = 64
MAP_SCAN = 1024
MAP_ITEMS = 128
MAP_WARPS = 4
MAX_SLOTS = 128
MAX_BLOCK_SIZE = 128

# Rows per program of the kernels that only stream rows. Four slots at a time ("stages") of 16 rows of 128 numbers of 16
# bits are 16 KB on their way for each program; the shares of dQ, which need no weights, are read faster two at a time.
COMBINE = Blocks(16, 16, 4, 4)
QUERIES = Blocks(16, 16, 4, 2)
PRE = Blocks(32, 16, 4, 1)
KEYS = Blocks(16, 16, 8, 1)

_CLASSES: dict[str, tuple[tuple[int, int], ...]] = {
    "hopper": ((9, 0), (10, 0), (10, 3)), "ampere": ((8, 0), (8, 7))}


@dataclass(frozen=True)
class Row:
    """Serves padded head dims up to `d_pad` and elements up to `itemsize` bytes on an arch class."""

    arch: str
    itemsize: int
    d_pad: int
    blocks: Blocks
    reason: str
    least_d: int = 0             # and padded head dims from here
    keys: int | None = None      # one padded block size alone
    rows_first: bool = False     # backward: score tiles with queries as rows


_TESTS = "several tiles at small test sizes"
_FP32 = "fp32 products run on the plain cores: small tiles"

FWD: tuple[Row, ...] = (
    Row("interpreter", 4, 256, Blocks(32, 16, 1, 1), _TESTS),
    Row("hopper", 2, 128, Blocks(64, 16, 4, 3), "one warp group per tile of 64 rows; three 16 KB tiles of Q in flight"),
    Row("hopper", 2, 256, Blocks(64, 16, 4, 2), "64 KB of K and V beside two 32 KB tiles of Q"),
    Row("ampere", 2, 128, Blocks(64, 16, 4, 3), "as on Hopper: 80 KB of 163"),
    Row("ampere", 2, 256, Blocks(32, 16, 4, 2), "two 16 KB tiles of Q beside K and V"),
    Row("small", 2, 128, Blocks(64, 16, 4, 2), "64 KB of 99"),
    Row("small", 2, 256, Blocks(16, 16, 4, 1), "K and V alone take 64 KB"),
    Row("small", 4, 64, Blocks(32, 16, 4, 2), _FP32),
    Row("small", 4, 128, Blocks(16, 16, 8, 1), "75 registers; four warps spill 400 bytes"),
    Row("small", 4, 256, Blocks(16, 16, 8, 1), _FP32),
)

BWD: tuple[Row, ...] = (
    Row("interpreter", 4, 256, Blocks(32, 16, 1, 1), _TESTS),
    Row("hopper", 2, 128, Blocks(128, 16, 8, 2), "2.23 ms at T8192 64/4; two warp groups with keys as rows repeat each "
        "other: 64 x 8 x 3 takes 2.88; one group, 32 rows in three stages 2.34, 64 rows 2.69", 128, 64, True),
    Row("hopper", 2, 64, Blocks(64, 16, 4, 3), "one warp group, 64 registers of dK and dV a thread; several programs an SM",
        64, 64),
    Row("hopper", 2, 128, Blocks(64, 16, 8, 2), "any block size: 128 keys of 128 leave no room for more rows"),
    Row("hopper", 2, 256, Blocks(32, 16, 8, 2), "8 bytes spilled at 192/128, where one stage spills 320; 136 KB"),
    Row("ampere", 2, 64, Blocks(32, 16, 8, 2), "192 registers; 64 rows spill 448 bytes"),
    Row("ampere", 2, 128, Blocks(64, 16, 8, 1), "no spill; two stages spill 48 bytes"),
    Row("ampere", 2, 256, Blocks(32, 16, 8, 1), "no spill; 82 KB of 163"),
    Row("small", 2, 64, Blocks(32, 16, 8, 2), "201 registers; 64 rows spill 540 bytes"),
    Row("small", 2, 128, Blocks(32, 16, 8, 2), "72 KB of 99"),
    Row("small", 2, 256, Blocks(16, 16, 8, 1), "K and V alone take 64 KB"),
    Row("small", 4, 64, Blocks(16, 16, 8, 1), _FP32),
    Row("small", 4, 128, Blocks(16, 16, 8, 1), _FP32),
    Row("small", 4, 256, Blocks(16, 16, 8, 1), _FP32),
)


def arch_class(cc: tuple[int, int] | None) -> str:
    """ "interpreter" for the CPU."""
    if cc is None:
        return "interpreter"
    return next((name for name, members in _CLASSES.items() if cc in members), "small")


def pick(table: tuple[Row, ...], cc: tuple[int, int] | None, itemsize: int, d_pad: int, keys: int = 0) -> Row:
    """The first row that serves; an arch without one uses "small"'s. `keys`: padded block size. Raises LookupError."""
    for arch in dict.fromkeys((arch_class(cc), "small")):
        for row in table:
            if (row.arch == arch and itemsize <= row.itemsize and row.least_d <= d_pad <= row.d_pad
                    and row.keys in (None, keys)):
                return row
    raise LookupError(f"no tile configuration for {itemsize}-byte elements at padded head dim {d_pad}")


# Attention over compressed keys: BLOCK_M (token, head) rows, BLOCK_N keys. The importance kernel takes the forward's tiles.
CMP_FWD: tuple[Row, ...] = (
    Row("interpreter", 4, 256, Blocks(32, 16, 1, 1), _TESTS),
    Row("hopper", 2, 128, Blocks(64, 64, 4, 3), "the dense forward's tile"),
    Row("hopper", 2, 256, Blocks(64, 32, 4, 2), "Q and the accumulator take 64 KB and 128 registers a thread"),
    Row("ampere", 2, 128, Blocks(64, 64, 4, 2), "48 KB of 163"),
    Row("small", 2, 128, Blocks(64, 32, 4, 2), "48 KB of 99"),
    Row("small", 2, 256, Blocks(64, 16, 8, 1), "Q alone takes 32 KB"),
    Row("small", 4, 64, Blocks(64, 16, 8, 1), _FP32),
    Row("small", 4, 128, Blocks(64, 16, 8, 1), _FP32),
    Row("small", 4, 256, Blocks(64, 16, 8, 1), _FP32),
)
CMP_BWD: tuple[Row, ...] = (
    Row("interpreter", 4, 256, Blocks(32, 16, 1, 1), _TESTS),
    Row("hopper", 2, 128, Blocks(64, 64, 8, 2), "the selection backward's tile"),
    Row("hopper", 2, 256, Blocks(64, 32, 8, 1), "dK and dV take 64 registers a thread"),
    Row("ampere", 2, 128, Blocks(64, 32, 8, 2), "72 KB of 163"),
    Row("small", 2, 128, Blocks(64, 32, 8, 1), "48 KB of 99"),
    Row("small", 2, 256, Blocks(64, 16, 8, 1), "Q and dO take 64 KB"),
    Row("small", 4, 64, Blocks(64, 16, 8, 1), _FP32),
    Row("small", 4, 128, Blocks(64, 16, 8, 1), _FP32),
    Row("small", 4, 256, Blocks(64, 16, 8, 1), _FP32),
)
# Shares into which the rows that see a tile of compressed keys are dealt.
CMP_SPLITS = 8
TOPK = Blocks(16, 16, 4, 1)
