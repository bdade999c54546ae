"""TemplateParams: which specialisation of a kernel, and nothing about sizes, pointers or totals.

What a kernel can decide per block at no cost (packed or padded sequences, the corner, a sink, statistics, the type of
offsets) is a run-time argument and no field here: fewer kernels to compile, and none when it changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from descriptors import DType, SdpaBwdDesc, SdpaDesc, TensorDesc
from descriptors.dims import Dim, SymProduct, is_symbolic

DTYPES = {DType.F16: "fp16", DType.BF16: "bf16"}
# Head dims (q/k, v) that kernels are compiled for. A request takes the exact one, else the smallest that covers it;
# missing columns are predicated, never padded.
FLAVORS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
VECTORS = (16, 8, 4, 2)  # bytes of one copy from global memory
STASH_BYTES = 256        # kStashBytes in kernels/fwd.cu
BIAS_CODES = {None: 0, "io": 1, "fp32": 2}


@dataclass(frozen=True)
class Tile:
    """A tile configuration. Each of `warps` owns row_tiles * 16 rows (a pair of them shares these where d_split is 2); keys come
    block_n at a time, `stages` tiles deep."""

    warps: int
    row_tiles: int
    block_n: int
    stages: int
    q_in_registers: bool
    min_blocks: int            # blocks per SM that registers are budgeted for
    d_split: int = 1           # warps that share rows: each makes scores of a part of the keys, o of a part of the columns

    @property
    def block_m(self) -> int:
        return self.warps // self.d_split * self.row_tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    def rules(self) -> Iterable[tuple[str, bool]]:
        yield f"warps: given {self.warps}, expected 1, 2, 4 or 8", self.warps in (1, 2, 4, 8)
        yield f"row_tiles: given {self.row_tiles}, expected 1 or 2", self.row_tiles in (1, 2)
        yield f"block_n: given {self.block_n}, expected 16, 32, 64 or 128", self.block_n in (16, 32, 64, 128)
        yield f"stages: given {self.stages}, expected 1 or 2", self.stages in (1, 2)
        yield f"min_blocks: given {self.min_blocks}, expected 1..8", 1 <= self.min_blocks <= 8
        yield f"d_split: given {self.d_split}, expected 1 or 2", self.d_split in (1, 2)
        yield "d_split 2: expected q in shared memory, 32 keys or more and 2 warps or more", self.d_split == 1 or (
            not self.q_in_registers and self.block_n >= 32 and self.warps >= 2)


@dataclass(frozen=True)
class TemplateParams:
    """What every attention kernel is specialised on. Raises ValueError where fields make no sense."""

    dtype: str                 # of q, k, v, o and their gradients
    head_dim: int              # the flavor's
    head_dim_v: int
    exact: bool                # both are the tensors' own: no column predicate
    vec: int                   # bytes of one copy
    has_left: bool
    has_right: bool
    softcap: bool
    mask: bool
    bias: str | None           # "io", "fp32"

    def __post_init__(self) -> None:
        wrong = [text for text, ok in self._rules() if not ok]
        if wrong:
            raise ValueError(f"{type(self).__name__}: {'; '.join(wrong)}")

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield f"dtype: given {self.dtype}, expected one of {tuple(DTYPES.values())}", self.dtype in DTYPES.values()
        flavor = (self.head_dim, self.head_dim_v)
        yield f"head dims: given {flavor}, expected one of {FLAVORS}", flavor in FLAVORS
        yield f"vec: given {self.vec}, expected one of {VECTORS}", self.vec in VECTORS
        yield "exact: expected vec 16 with it", self.vec == 16 or not self.exact
        yield "has_right: expected True with has_left", self.has_right or not self.has_left
        yield f"bias: given {self.bias}, expected one of {tuple(BIAS_CODES)}", self.bias in BIAS_CODES

    def items(self) -> tuple[tuple[str, Any], ...]:
        """(field, value) pairs of host scalars, for a kernel key."""
        return tuple(_flat((f.name, getattr(self, f.name)) for f in fields(self)))

    def macros(self) -> dict[str, int]:
        """What the kernel sources are compiled with."""
        return {
            "BF16": int(self.dtype == "bf16"), "HEAD_DIM": self.head_dim, "HEAD_DIM_V": self.head_dim_v,
            "EXACT": int(self.exact), "VEC": self.vec, "HAS_LEFT": int(self.has_left),
            "HAS_RIGHT": int(self.has_right), "HAS_SOFTCAP": int(self.softcap), "HAS_MASK": int(self.mask),
            "BIAS": BIAS_CODES[self.bias],
        }


def _flat(pairs: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    for name, value in pairs:
        if is_dataclass(value):
            yield from ((f.name, getattr(value, f.name)) for f in fields(value))
        else:
            yield name, value


@dataclass(frozen=True)
class FwdParams(TemplateParams):
    """The forward kernel."""

    tile: Tile

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield from super()._rules()
        yield from self.tile.rules()
        yield "d_split 2: expected neither mask nor bias, and halves of o in multiples of 64 columns", self.tile.d_split == 1 or (
            not self.mask and self.bias is None and self.head_dim_v % 128 == 0)

    def macros(self) -> dict[str, int]:
        t = self.tile
        return {**super().macros(), "WARPS": t.warps, "ROWS_M": t.row_tiles, "D_SPLIT": t.d_split, "BLOCK_N": t.block_n,
                "STAGES": t.stages, "Q_IN_REGISTERS": int(t.q_in_registers), "MIN_BLOCKS": t.min_blocks,
                "SHARED_BYTES": self.shared_bytes}

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block: q's tile, `stages` tiles of k and v, what warps that share rows exchange (p, and a number
        per row), and what does not change along the walk."""
        t = self.tile
        tiles = t.block_m * self.head_dim + t.stages * t.block_n * (self.head_dim + self.head_dim_v)
        exchange = 0 if t.d_split == 1 else 2 * t.block_m * t.block_n + 4 * t.warps * t.row_tiles * 16
        return 2 * tiles + exchange + STASH_BYTES


def flavor_for(d: int, dv: int) -> tuple[int, int] | None:
    """The exact flavor, else the smallest that covers the head dims; None where none does."""
    return next((f for f in FLAVORS if d <= f[0] and dv <= f[1]), None)


def shared_facts(desc: SdpaDesc | SdpaBwdDesc, loaded: Iterable[str]) -> dict[str, Any]:
    """The fields of `TemplateParams` for a descriptor; `loaded` names the operands that tiles are filled from."""
    flavor = flavor_for(desc.head_dim, desc.head_dim_v)
    if flavor is None:
        raise ValueError(f"head dims: given {(desc.head_dim, desc.head_dim_v)}, expected at most {FLAVORS[-1]}")
    vec = min(vector_bytes(getattr(desc, n), desc.packed) for n in loaded)
    bias = None if desc.bias is None else "io" if desc.bias.dtype is desc.q.dtype else "fp32"
    return {
        "dtype": DTYPES[desc.q.dtype], "head_dim": flavor[0], "head_dim_v": flavor[1],
        "exact": vec == 16 and flavor == (desc.head_dim, desc.head_dim_v), "vec": vec,
        # A window open to the right is one that ends past every key: a kernel less, and that one spilled.
        "has_left": desc.band.has_left, "has_right": desc.band.has_right or desc.band.has_left, "softcap": desc.softcap is not None,
        "mask": desc.mask is not None, "bias": bias,
    }


def vector_bytes(t: TensorDesc, packed: bool) -> int:
    """The widest access that every row of a tensor with last stride 1 allows: 16, 8, 4 or 2 bytes."""
    size = t.dtype.itemsize
    whole = math.gcd(16, t.alignment)
    for axis, (dim, stride) in enumerate(zip(t.shape[:-1], t.strides[:-1], strict=True)):
        if dim != 1 or (packed and axis == 0):  # a packed total is a run-time fact: it never counts as 1
            whole = math.gcd(whole, _factor(t, stride, packed) * size)
    return whole


def _factor(t: TensorDesc, stride: Dim, packed: bool) -> int:
    """A number that the stride is certain to be a multiple of, whatever symbols and packed totals are bound to."""
    if is_symbolic(stride):
        return stride.coef if isinstance(stride, SymProduct) else 1
    # A stride that spans the packed total (heads outermost) changes with it.
    if packed and stride == t.shape[0] * t.strides[0]:  # type: ignore[operator]
        return _factor(t, t.strides[0], False)
    return int(stride)  # type: ignore[arg-type]


Table = tuple[tuple[str, str], ...]


def strides(operand: str, axes: str) -> Table:
    """64-bit stride arguments of one operand, in elements: ("q", "bhs") -> q_b, q_h, q_s."""
    return tuple((f"{operand}_{axis}", "i64") for axis in axes)


def ints(*names: str) -> Table:
    return tuple((n, "i32") for n in names)


def pointers(*names: str) -> Table:
    return tuple((n, "ptr") for n in names)


OPTION_POINTERS = pointers("bias", "mask", "sink", "len_q", "len_kv", "cu_q", "cu_kv")
OPTION_STRIDES: Table = (*strides("bias", "bhqk"), *strides("mask", "bhqk"),
                         *(pair for n in ("sink", "len_q", "len_kv", "cu_q", "cu_kv") for pair in strides(n, "s")))
OPTION_INTS = ints("n_seqs", "heads", "group", "sq_max", "sk_max", "d", "dv", "left", "right", "align_br", "bias_rows",
                   "bias_columns", "mask_rows", "mask_columns", "sink_type", "int64_mask")
SCALARS: Table = (("scale", "fp32"), ("softcap", "fp32"))

# A kernel's argument struct, in order. The C++ struct is written from the same table (compiler.py).
FWD_ARGS: Table = (
    *pointers("q", "k", "v", "o", "lse"), *OPTION_POINTERS,
    *(pair for n in "qkvo" for pair in strides(n, "bhs")), *strides("lse", "bhs"), *OPTION_STRIDES,
    *ints("n_programs", "n_tiles", "section", "pack", "o_vec"), *OPTION_INTS, *SCALARS,
)
