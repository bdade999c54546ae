"""TemplateParams of the Hopper kernels (kernels/hopper/) and their argument tables.

These kernels serve dense 16-bit attention without options: no mask or a square causal one, head dims that are a tile's
width, operands that a tensor map can describe. That leaves little to specialise on. Everything else is `params`'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .params import HINT_BYTES, Arg, resolve_args, strides

HEAD_DIMS = (64, 128, 256)
_HALVES = {"fp16": "fp16", "bf16": "bf16"}
def _layout(swizzle: int, bits: int, rank: int) -> str:
    """How a copied tile lies in shared memory. Rows of 128 bytes, swizzled, are what the matrix instructions read."""
    return (f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={rank}, transposed=False, "
            "fp4_padded=False, cga_layout=[])")


def _tile_map(dtype: str, rows: int, d: int) -> str:
    """A tensor map over (batch, head, sequence, head_dim) whose copies are [1, 1, rows, d]."""
    return f"tensordesc<{dtype}[1, 1, {rows}, {d}],{_layout(128, 16, 4)}>"


def _matrix_map(rows: int, cols: int, *, swizzle: int) -> str:
    """A tensor map over a contiguous fp32 matrix whose copies are [rows, cols]."""
    return f"tensordesc<fp32[{rows}, {cols}],{_layout(swizzle, 32, 2)}>"


@dataclass(frozen=True)
class HopperTile:
    """BLOCK_M query rows per block (64 per warpgroup), BLOCK_N keys per step, STAGES buffers for keys and values each.
    persistent: the grid is one block per multiprocessor and each walks many tiles. max_registers: a cap that lets several
    blocks share a multiprocessor."""

    block_m: int
    block_n: int
    stages: int
    persistent: bool
    max_registers: int | None = None


@dataclass(frozen=True)
class HopperBwdTile:
    """BLOCK_M query rows per step, BLOCK_N keys per block, STAGES buffers of queries and dO."""

    block_m: int
    block_n: int
    stages: int


@dataclass(frozen=True)
class HopperParams:
    """What every Hopper kernel is specialised on. Raises ValueError where a field makes no sense."""

    dtype: str
    d: int
    causal: bool

    def __post_init__(self) -> None:
        wrong = [text for text, ok in self._rules() if not ok]
        if wrong:
            raise ValueError(f"{type(self).__name__}: {'; '.join(wrong)}")

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield f"dtype: given {self.dtype}, expected one of {tuple(_HALVES)}", self.dtype in _HALVES
        yield f"d: given {self.d}, expected one of {HEAD_DIMS}", self.d in HEAD_DIMS

    # What `resolve_args` asks of params; none of it varies here.
    wide = False
    aligned = True
    unit_d = True
    hint = HINT_BYTES // 2

    def items(self) -> tuple[tuple[str, Any], ...]:
        """(field, value) pairs for a kernel key."""
        out: list[tuple[str, Any]] = []
        for f in fields(self):
            value = getattr(self, f.name)
            out += [(g.name, getattr(value, g.name)) for g in fields(value)] if f.name == "tile" else [(f.name, value)]
        return tuple(out)


@dataclass(frozen=True)
class HopperFwdParams(HopperParams):
    """The forward kernel."""

    stats: bool
    tile: HopperTile

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield from super()._rules()
        t = self.tile
        yield f"block_m: given {t.block_m}, expected 64, 128 or 256", t.block_m in (64, 128, 256)
        yield f"block_n: given {t.block_n}, expected 64 or 128", t.block_n in (64, 128)
        yield f"stages: given {t.stages}, expected 2..6", 2 <= t.stages <= 6

    def constexprs(self) -> dict[str, bool | int]:
        t = self.tile
        return {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "D": self.d, "CAUSAL": self.causal, "HAS_LSE": self.stats,
                "STAGES": t.stages, "PERSISTENT": t.persistent}

    def map_types(self) -> dict[str, str]:
        rows = {"q_desc": 64, "k_desc": self.tile.block_n, "v_desc": self.tile.block_n}
        return {n: _tile_map(self.dtype, r, self.d) for n, r in rows.items()}


@dataclass(frozen=True)
class HopperBwdParams(HopperParams):
    """The backward's main kernel; the two around it depend on fewer fields."""

    tile: HopperBwdTile

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield from super()._rules()
        t = self.tile
        yield f"block_m: given {t.block_m}, expected 64 or 128", t.block_m in (64, 128)
        yield f"block_n: given {t.block_n}, expected 64 or 128", t.block_n in (64, 128)
        yield f"stages: given {t.stages}, expected 2..6", 2 <= t.stages <= 6

    def constexprs(self) -> dict[str, bool | int]:
        t = self.tile
        return {"BM": t.block_m, "BN": t.block_n, "D": self.d, "STAGES": t.stages, "CAUSAL": self.causal}

    def map_types(self) -> dict[str, str]:
        t = self.tile
        tiles = dict.fromkeys(("q_desc", "do_desc"), t.block_m) | dict.fromkeys(("k_desc", "v_desc"), t.block_n)
        return {n: _tile_map(self.dtype, rows, self.d) for n, rows in tiles.items()} | {
            "stat_desc": _matrix_map(2, t.block_m, swizzle=0), "dq_desc": _matrix_map(64, 64, swizzle=128)}


@dataclass(frozen=True)
class HopperPreParams(HopperParams):
    """Row statistics and the zeroed accumulator."""

    dlse: bool
    block_m: int

    def constexprs(self) -> dict[str, bool | int]:
        return {"BLOCK_M": self.block_m, "D": self.d, "HAS_DLSE": self.dlse}


@dataclass(frozen=True)
class HopperCastParams(HopperParams):
    """The accumulator into dq."""

    block_m: int

    def constexprs(self) -> dict[str, bool | int]:
        return {"BLOCK_M": self.block_m, "D": self.d}


FWD_HOPPER_ARGS: tuple[tuple[str, str], ...] = (
    *((f"{n}_desc", "map") for n in "qkv"), ("o_ptr", "io*"), ("lse_ptr", "fp32*"),
    *strides("o", "bhs", "pitch"), *strides("lse_", "bhs"),
    *((n, "i32") for n in ("n_programs", "n_tiles", "heads_q", "group", "sq", "sk")), ("scale", "fp32"),
)

_DKDV_STRIDES = (*strides("dk", "bhs", "pitch"), *strides("dv", "bhs", "pitch"))
BWD_HOPPER_ARGS: tuple[tuple[str, str], ...] = (
    *((f"{n}_desc", "map") for n in ("q", "k", "v", "do", "stat", "dq")), ("dk_ptr", "io*"), ("dv_ptr", "io*"),
    *_DKDV_STRIDES, *((n, "i32") for n in ("n_tiles", "tiles_q", "heads_k", "group", "sk")), ("scale", "fp32"),
)
PRE_HOPPER_ARGS: tuple[tuple[str, str], ...] = (
    ("o_ptr", "io*"), ("do_ptr", "io*"), *((f"{n}_ptr", "fp32*") for n in ("lse", "dlse", "stats", "dq_acc")),
    *strides("o", "bhs", "pitch"), *strides("do", "bhs", "pitch"), *strides("lse_", "bhs"), *strides("dlse_", "bhs"),
    *((n, "i32") for n in ("heads_q", "sq", "tiles_q")), ("scale", "fp32"),
)
CAST_HOPPER_ARGS: tuple[tuple[str, str], ...] = (
    ("acc_ptr", "fp32*"), ("dq_ptr", "io*"), *((f"stride_{a}", "pitch") for a in "bhs"),
    *((n, "i32") for n in ("heads_q", "sq", "tiles_q", "rows_pad")), ("scale", "fp32"),
)


def resolve(table: Sequence[tuple[str, str]], params: Any) -> tuple[Arg, ...]:
    """`resolve_args`, and "map": a tensor map as `params.map_types()` describes it."""
    out: list[Arg] = []
    for name, kind in table:
        out += [Arg(name, params.map_types()[name], "tmap")] if kind == "map" else resolve_args([(name, kind)], params)
    return tuple(out)
