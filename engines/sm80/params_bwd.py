"""TemplateParams and argument tables of the backward kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .params import (
    OPTION_INTS,
    OPTION_POINTERS,
    OPTION_STRIDES,
    SCALARS,
    STASH_BYTES,
    Table,
    TemplateParams,
    ints,
    pointers,
    strides,
)

PAIR_BYTES = 8  # kPairBytes in kernels/bwd.cuh: the statistics of a row
_SEEN_BYTES = 16  # per warp, where pairs of warps share keys


@dataclass(frozen=True)
class BwdTile:
    """A tile configuration. Warps own row_tiles * 16 positions of the stationary side (a group of `d_split` warps shares
    them); the other side comes `block` positions at a time, `stages` tiles deep."""

    warps: int
    row_tiles: int
    d_split: int
    block: int
    stages: int
    min_blocks: int            # blocks per SM that registers are budgeted for

    @property
    def own(self) -> int:
        """Positions that one block owns."""
        return self.warps // self.d_split * self.row_tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    def rules(self) -> Iterable[tuple[str, bool]]:
        yield f"warps: given {self.warps}, expected 2, 4 or 8", self.warps in (2, 4, 8)
        yield f"row_tiles: given {self.row_tiles}, expected 1 or 2", self.row_tiles in (1, 2)
        yield f"d_split: given {self.d_split}, expected 1, 2 or 4, at most warps", self.d_split in (1, 2, 4) and self.d_split <= self.warps
        yield f"block: given {self.block}, expected 16, 32, 64 or 128", self.block in (16, 32, 64, 128)
        yield f"block: given {self.block}, expected 16 for each of d_split", self.block >= 16 * self.d_split
        yield f"stages: given {self.stages}, expected 1 or 2", self.stages in (1, 2)
        yield f"min_blocks: given {self.min_blocks}, expected 1..8", 1 <= self.min_blocks <= 8


@dataclass(frozen=True)
class BwdParams(TemplateParams):
    """What the backward's matrix kernels share."""

    tile: BwdTile

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield from super()._rules()
        yield from self.tile.rules()
        part = 64 * self.tile.d_split
        yield "d_split: expected parts of both head dims to be multiples of 64 columns", self.tile.d_split == 1 or (
            self.head_dim % part == 0 and self.head_dim_v % part == 0)

    def macros(self) -> dict[str, int]:
        t = self.tile
        return {**super().macros(), "WARPS": t.warps, "ROWS_M": t.row_tiles, "D_SPLIT": t.d_split, "STEP": t.block,
                "STAGES": t.stages, "MIN_BLOCKS": t.min_blocks, "SHARED_BYTES": self.shared_bytes}

    @property
    def _columns(self) -> int:
        return self.head_dim + self.head_dim_v

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block."""
        raise NotImplementedError


@dataclass(frozen=True)
class DkdvParams(BwdParams):
    """The keys-stationary kernel. `sum_dq`: it also adds to sums of dQ in memory."""

    sum_dq: bool = False

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield from super()._rules()
        yield "has_right: expected True with sum_dq", self.has_right or not self.sum_dq
        yield "sum_dq: expected neither bias nor mask", not self.sum_dq or not (self.mask or self.bias)
        yield ("sum_dq: expected warps that share q's columns in powers of two, 16 or more each",
               not self.sum_dq or sums_dq(self.head_dim, self.tile))

    def macros(self) -> dict[str, int]:
        return {**super().macros(), "SUM_DQ": int(self.sum_dq)}

    @property
    def shared_bytes(self) -> int:
        """k and v, `stages` tiles of q, dO and statistics, P and dS that warps exchange, what does not change."""
        t = self.tile
        moving = t.stages * t.block * (2 * self._columns + PAIR_BYTES)
        scores = 2 * t.own * t.block
        exchange = 2 * scores + t.warps * _SEEN_BYTES if t.d_split > 1 else scores if self.sum_dq else 0
        return 2 * t.own * self._columns + moving + exchange + STASH_BYTES


def sums_dq(head_dim: int, tile: BwdTile) -> bool:
    """Whether a tile's warps can share the product dS K: 32 rows each, columns in a power of two."""
    row_warps = tile.block // 32
    columns = head_dim * row_warps // tile.warps
    return tile.block % 32 == 0 and tile.warps >= row_warps and columns >= 16 and columns & (columns - 1) == 0


@dataclass(frozen=True)
class DqParams(BwdParams):
    """The rows-stationary kernel."""

    @property
    def shared_bytes(self) -> int:
        """q and dO, `stages` tiles of k and v, what does not change."""
        t = self.tile
        return 2 * self._columns * (t.own + t.stages * t.block) + STASH_BYTES


@dataclass(frozen=True)
class BiasParams(BwdParams):
    """The dBias kernel: which sequence axes the bias has."""

    keep_rows: bool
    keep_columns: bool

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield from super()._rules()
        yield "bias: expected one", self.bias is not None

    def macros(self) -> dict[str, int]:
        return {**super().macros(), "KEEP_ROWS": int(self.keep_rows), "KEEP_COLUMNS": int(self.keep_columns)}

    @property
    def shared_bytes(self) -> int:
        """One tile each of q, dO, k and v."""
        return 2 * self._columns * (self.tile.own + self.tile.block)


@dataclass(frozen=True)
class VectorParams(TemplateParams):
    """The kernels without matrix products: statistics and reductions."""

    warps: int
    block_m: int               # rows of one block of statistics; 0 for reductions

    def macros(self) -> dict[str, int]:
        return {**super().macros(), "WARPS": self.warps, "BLOCK_M": self.block_m, "SHARED_BYTES": self.shared_bytes}

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def shared_bytes(self) -> int:
        """A number per thread."""
        return 4 * self.threads


# What does not reach the kernels without products, and the value that stands for all of it.
_NO_PRODUCTS: dict[str, Any] = {
    "head_dim": 64, "head_dim_v": 64, "exact": False, "has_left": False, "has_right": False, "mask": False}


def statistics_params(facts: dict[str, Any], vec: int, warps: int, rows: int) -> VectorParams:
    """Statistics depend on the type, the copy width, and whether scores stay in the exp2 domain."""
    fold = not facts["softcap"] and facts["bias"] is None
    return VectorParams(**{**facts, **_NO_PRODUCTS, "vec": vec, "softcap": not fold, "bias": None}, warps=warps, block_m=rows)


REDUCE = VectorParams(dtype="bf16", vec=16, softcap=False, bias=None, warps=8, block_m=0, **_NO_PRODUCTS)


def bias_params(facts: dict[str, Any], tile: BwdTile, keep_rows: bool, keep_columns: bool) -> BiasParams:
    return BiasParams(**facts, tile=tile, keep_rows=keep_rows, keep_columns=keep_columns)


def with_tile(params: BwdParams, tile: BwdTile) -> BwdParams:
    """The same specialisation with another tile."""
    return replace(params, tile=tile)


# Argument name -> descriptor field of main operands: `do` is a word of C++, and `dv` a head dim.
MAIN_FIELDS = {"q": "q", "k": "k", "v": "v", "o": "o", "go": "do", "gq": "dq", "gk": "dk", "gv": "dv"}

# One struct for all kernels that work on rows and keys: what a kernel does not need it does not read.
BWD_ARGS: Table = (
    *pointers(*MAIN_FIELDS, "gbias", "lse", "dlse", "stats", "partial", "sums"), *OPTION_POINTERS,
    *(pair for n in MAIN_FIELDS for pair in strides(n, "bhs")),
    *(pair for n in ("lse", "dlse") for pair in strides(n, "bhs")), *strides("gbias", "bhqk"), *OPTION_STRIDES,
    *ints("n_programs", "n_tiles", "section", "gq_vec", "gk_vec", "gv_vec", "kept_heads", "kept_rows", "kept_columns",
          "sum_batches", "sum_heads", "n_chunks", "sum_blocks", "sum_columns"),
    *OPTION_INTS, *SCALARS,
)

REDUCE_ARGS: Table = (
    *pointers("partial", "out"), *(("out_" + axis, "i64") for axis in "bhr"),
    *ints("n_programs", "heads", "rows", "out_heads", "out_rows", "sum_batches", "sum_heads", "sum_rows", "out_type"),
)
