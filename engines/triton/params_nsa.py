"""TemplateParams and argument tables of the selection kernels.

One record holds every fact; a kernel's spec names those that reach it, and only these are in its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from descriptors import NsaSelectionBwdDesc, NsaSelectionDesc

from .params import (
    DTYPES,
    FLOATS,
    HINT_BYTES,
    INDEXES,
    Arg,
    Blocks,
    is_aligned,
    pad_head_dim,
)

_TRITON_TYPES = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "int32": "i32", "int64": "i64"}
_MAIN = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
# Words of 32 blocks that a program of the map marks at a time: [tokens, slots, words] numbers in registers, 16 a thread.
WORDS_TIMES_SLOTS = 64


def pad_to_power(n: int, least: int = 16) -> int:
    return max(least, 1 << (max(n, 1) - 1).bit_length())


@dataclass(frozen=True)
class NsaParams:
    """What the selection kernels are specialised on. Raises ValueError where fields make no sense."""

    dtype: str                 # of q, k, v, o, their gradients and the partial results
    d_pad: int
    dv_pad: int
    even_d: bool
    even_dv: bool
    aligned: bool              # bases, pitches and head dims are multiples of 16 bytes, last strides 1
    unit_d: bool
    block_size: int
    group: int                 # query heads per K/V head
    slots_pad: int             # entries of a row, padded to a power of two
    index: str                 # dtypes of entries, counts and offsets
    counts: str | None
    cu: str | None
    stats: bool
    fold: bool                 # scores in the exp2 domain: 16-bit inputs
    dlse: bool
    want_dq: bool
    want_dk: bool
    want_dv: bool
    dot_fp32: bool             # interpreter only: it multiplies the raw bits of bf16
    blocks: Blocks
    rows_first: bool = False   # backward: score tiles with queries as rows, else keys

    def __post_init__(self) -> None:
        wrong = [text for text, ok in self._rules() if not ok]
        if wrong:
            raise ValueError(f"{type(self).__name__}: {'; '.join(wrong)}")

    def _rules(self) -> Iterable[tuple[str, bool]]:
        for name in ("d_pad", "dv_pad", "slots_pad"):
            value = getattr(self, name)
            yield f"{name}: given {value}, expected a power of two, at least 16", value >= 16 and not value & (value - 1)
        yield f"dtype: given {self.dtype}, expected one of {FLOATS}", self.dtype in FLOATS
        yield f"index: given {self.index}, expected one of {INDEXES}", self.index in INDEXES
        for name in ("counts", "cu"):
            value = getattr(self, name)
            yield f"{name}: given {value}, expected None or one of {INDEXES}", value is None or value in INDEXES
        yield "aligned: expected unit_d with it", self.unit_d or not self.aligned
        yield f"group: given {self.group}, expected at least 1", self.group >= 1
        yield f"block_size: given {self.block_size}, expected at least 1", self.block_size >= 1

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def hint(self) -> int:
        """Elements that `aligned` promises strides and head dims to be multiples of."""
        return HINT_BYTES // self.itemsize

    def flags(self) -> dict[str, bool | int]:
        b = self.blocks
        return {
            "BS": self.block_size, "BS_PAD": pad_to_power(self.block_size), "GROUP": self.group, "SLOTS": self.slots_pad,
            "WORDS": max(1, WORDS_TIMES_SLOTS // self.slots_pad),
            "D_PAD": self.d_pad, "DV_PAD": self.dv_pad, "EVEN_D": self.even_d, "EVEN_DV": self.even_dv,
            "PACKED": self.cu is not None, "HAS_COUNTS": self.counts is not None, "HAS_LSE": self.stats,
            "HAS_DLSE": self.dlse, "FOLD": self.fold, "WANT_DQ": self.want_dq, "WANT_DK": self.want_dk,
            "WANT_DV": self.want_dv, "DOT_FP32": self.dot_fp32, "BLOCK_M": b.block_m, "STAGES": b.num_stages,
            "UNROLL": b.num_stages, "ROWS_FIRST": self.rows_first,
        }


def nsa_params(desc: NsaSelectionDesc | NsaSelectionBwdDesc, *, interpreted: bool) -> NsaParams:
    """Which specialisation serves the descriptor, from plan-time facts only. Tiles come per kernel."""
    main = [t for n in _MAIN if (t := getattr(desc, n, None)) is not None]
    d, dv, itemsize = desc.head_dim, desc.head_dim_v, desc.q.dtype.itemsize
    unit_d = all(t.unit_last_stride for t in main)
    aligned = (unit_d and d * itemsize % HINT_BYTES == 0 and dv * itemsize % HINT_BYTES == 0
               and all(is_aligned(t, desc.packed) for t in main))

    def dtype(name: str) -> str | None:
        tensor = getattr(desc, name)
        return None if tensor is None else str(tensor.dtype)

    return NsaParams(
        dtype=DTYPES[desc.q.dtype], d_pad=pad_head_dim(d), dv_pad=pad_head_dim(dv), even_d=d == pad_head_dim(d),
        even_dv=dv == pad_head_dim(dv), aligned=aligned, unit_d=unit_d, block_size=desc.block_size,
        group=max(desc.group, 1), slots_pad=pad_to_power(desc.slots), index=str(desc.block_indices.dtype), counts=dtype("block_counts"),
        cu=dtype("cu_seqlens"), stats=desc.lse is not None, fold=itemsize == 2,
        dlse=getattr(desc, "dlse", None) is not None, want_dq=getattr(desc, "dq", None) is not None,
        want_dk=getattr(desc, "dk", None) is not None, want_dv=getattr(desc, "dv", None) is not None,
        dot_fp32=interpreted, blocks=Blocks(16, 16, 4, 1))


# ---- argument tables: (name, kind) in order. Kinds: `io*` q, k, v, o and gradients; `part*` partial results in their type;
# `fp32*` `int32*`; `index*` `counts*` `cu*` the type in the field of that name; `pitch` a main operand's stride, `unit`
# its last one, `stride` any other: all 64-bit; `dim` a head dim, `row` and `row32` the pitch of partial results in the io type and in fp32; `i32`; `fp32`.

Table = tuple[tuple[str, str], ...]


def resolve(table: Table, params: NsaParams) -> tuple[Arg, ...]:
    """Types and hints of a kernel's arguments. Workspace regions always start at multiples of 16 bytes."""
    hint = params.hint if params.aligned else 0
    out = []
    for name, kind in table:
        if kind.endswith("*"):
            field = kind[:-1]
            element = params.dtype if field in ("io", "part") else (
                field if field in _TRITON_TYPES else getattr(params, field) or "int32")
            given = field in ("index", "counts", "cu") or field == "io" and not params.aligned or name in _UNPROMISED
            out.append(Arg(name, "*" + _TRITON_TYPES[element], "ptr", 0 if given else HINT_BYTES))
        elif kind == "unit" and params.unit_d:
            out.append(Arg(name, "constexpr", "i64", constant=1))
        elif kind in ("pitch", "unit", "stride"):
            out.append(Arg(name, "i64", "i64", hint if kind == "pitch" else 0))
        elif kind == "dim":
            out.append(Arg(name, "i32", "i32", hint))
        elif kind in _ROW_HINTS:
            out.append(Arg(name, "i32", "i32", HINT_BYTES // (_ROW_HINTS[kind] or params.itemsize)))
        else:
            out.append(Arg(name, kind, kind))
    return tuple(out)


_ROW_HINTS = {"row": 0, "row32": 4}  # bytes per element; 0: the io type's
_UNPROMISED = ("lse_ptr", "dlse_ptr")  # the caller's, in any alignment


def _main(*operands: str) -> Table:
    return tuple(pair for n in operands
                 for pair in (*((f"stride_{n}{a}", "pitch") for a in "bhs"), (f"stride_{n}d", "unit")))


def _strides(operand: str, axes: str) -> Table:
    return tuple((f"stride_{operand}_{a}", "stride") for a in axes)


def _ints(*names: str) -> Table:
    special = {"d": "dim", "dv": "dim", "pitch": "row", "pitch_k": "row32", "pitch_v": "row32"}
    return tuple((n, special.get(n, "i32")) for n in names)


@dataclass(frozen=True)
class KernelSpec:
    """`kernels/nsa/<module>.py`'s `name`: its arguments, its constexprs (a name with "=" is a constant of the config
    table), and the fields of `NsaParams` that reach it."""

    module: str
    name: str
    args: Table
    flags: tuple[str, ...]
    uses: tuple[str, ...]
    constants: Mapping[str, int]

    def params(self, shared: NsaParams, blocks: Blocks) -> SpecParams:
        return SpecParams(self.uses, replace(shared, blocks=blocks), tuple(self.constants.items()))

    def constexprs(self, params: SpecParams) -> dict[str, bool | int]:
        flags = {**params.all.flags(), **self.constants}
        return {n: flags[n] for n in self.flags}


@dataclass(frozen=True)
class SpecParams:
    """What one kernel is specialised on."""

    uses: tuple[str, ...]
    all: NsaParams
    constants: tuple[tuple[str, int], ...]

    @property
    def blocks(self) -> Blocks:
        return self.all.blocks

    def items(self) -> tuple[tuple[str, Any], ...]:
        """(field, value) pairs for a kernel key."""
        b = self.all.blocks
        own = tuple((f.name, getattr(self.all, f.name)) for f in fields(self.all) if f.name in self.uses)
        return (*own, *self.constants, ("block_m", b.block_m), ("num_warps", b.num_warps), ("num_stages", b.num_stages))


def _spec(module: str, name: str, args: Table, flags: tuple[str, ...], uses: tuple[str, ...],
          **constants: int) -> KernelSpec:
    return KernelSpec(f"nsa.{module}", name, args, flags, uses, constants)


def map_specs() -> dict[str, KernelSpec]:
    """The kernels of the inverse map, with their constants from the config table."""
    from . import configs_nsa as c

    specs = (
        _spec("map", "nsa_clean",
              (("index_ptr", "index*"), ("counts_ptr", "counts*"), ("cu_ptr", "cu*"), ("place_ptr", "int32*"),
               ("marks_ptr", "int32*"), *_strides("index", "bhts"), *_strides("counts", "bht"), ("stride_cu", "stride"),
               *_ints("n_programs", "n_tiles", "heads_kv", "t0", "n_tokens", "n_blocks", "slots", "n_seqs", "sk", "off",
                      "n_steps")),
              ("BS", "TILE", "SLOTS", "WORDS", "PACKED", "HAS_COUNTS"),
              ("block_size", "slots_pad", "index", "counts", "cu"), TILE=c.MAP_TILE),
        _spec("map", "nsa_scan",
              (("marks_ptr", "int32*"), ("tile_sums_ptr", "int32*"), ("totals_ptr", "int32*"),
               *_ints("n_programs", "n_groups", "n_tiles", "n_blocks")),
              ("TILES", "BLOCKS"), (), TILES=c.MAP_TILES, BLOCKS=c.MAP_BLOCKS),
        _spec("map", "nsa_offsets",
              (("totals_ptr", "int32*"), ("offsets_ptr", "int32*"), *_ints("n_programs", "n_blocks")),
              ("BLOCKS",), (), BLOCKS=c.MAP_SCAN),
        _spec("map", "nsa_scatter",
              (("place_ptr", "int32*"), ("marks_ptr", "int32*"), ("tile_sums_ptr", "int32*"), ("offsets_ptr", "int32*"),
               ("rows_ptr", "int32*"), *_ints("n_programs", "n_tiles", "n_entries", "n_blocks", "slots", "parts")),
              ("TILE", "SLOTS"), ("slots_pad",), TILE=c.MAP_TILE),
        _spec("map", "nsa_slots",
              (("offsets_ptr", "int32*"), ("items_ptr", "int32*"),
               *_ints("n_programs", "n_tiles", "n_items", "n_blocks", "group", "chunk_rows", "n_steps")),
              ("SLOTS",), (), SLOTS=c.MAP_ITEMS),
    )
    return {s.name: s for s in specs}


_MAP_POINTERS: Table = (("rows_ptr", "int32*"), ("offsets_ptr", "int32*"), ("items_ptr", "int32*"), ("cu_ptr", "cu*"))
_SHAPE_USES = ("dtype", "d_pad", "dv_pad", "even_d", "even_dv", "aligned", "unit_d")
_LOOP_FLAGS = ("GROUP", "BS", "BS_PAD", "BLOCK_M", "D_PAD", "DV_PAD", "EVEN_D", "EVEN_DV", "PACKED")
_LOOP_INTS = ("n_programs", "n_items", "n_entries", "n_blocks", "heads_kv", "parts", "span", "t0", "n_seqs", "sk", "off",
              "chunk_rows")

FWD_BLOCKS = _spec(
    "fwd", "nsa_fwd_blocks",
    (*((f"{n}_ptr", "io*") for n in "qkv"), ("part_o_ptr", "part*"), ("part_lse_ptr", "fp32*"), *_MAP_POINTERS,
     *_main("q", "k", "v"), ("stride_cu", "stride"), *_ints(*_LOOP_INTS, "d", "dv", "pitch"), ("scale", "fp32")),
    (*_LOOP_FLAGS, "STAGES", "DOT_FP32"), (*_SHAPE_USES, "block_size", "group", "cu", "dot_fp32"))

COMBINE = _spec(
    "fwd", "nsa_combine",
    (("part_o_ptr", "part*"), ("part_lse_ptr", "fp32*"), ("place_ptr", "int32*"), ("o_ptr", "io*"), ("lse_ptr", "fp32*"),
     *_main("o"), *_strides("lse", "bhs"),
     *_ints("n_programs", "n_tiles", "heads_kv", "group", "slots", "parts", "span", "t0", "n_tokens", "dv", "pitch")),
    ("BLOCK_M", "UNROLL", "DV_PAD", "EVEN_DV", "HAS_LSE"), ("dtype", "dv_pad", "even_dv", "aligned", "unit_d", "stats"))

PRE = _spec(
    "bwd", "nsa_bwd_pre",
    (("o_ptr", "io*"), ("do_ptr", "io*"), ("lse_ptr", "fp32*"), ("dlse_ptr", "fp32*"), ("stats_ptr", "fp32*"),
     *_main("o", "do"), *_strides("lse", "bhs"), *_strides("dlse", "bhs"),
     *_ints("n_programs", "n_tiles", "heads_kv", "group", "n_rows", "dv"), ("scale", "fp32")),
    ("BLOCK_M", "DV_PAD", "EVEN_DV", "HAS_DLSE", "FOLD"),
    ("dtype", "dv_pad", "even_dv", "aligned", "unit_d", "dlse", "fold"))

BWD_BLOCKS = _spec(
    "bwd", "nsa_bwd_blocks",
    (*((f"{n}_ptr", "io*") for n in ("q", "k", "v", "do")), ("stats_ptr", "fp32*"), ("part_dq_ptr", "part*"),
     ("part_dk_ptr", "fp32*"), ("part_dv_ptr", "fp32*"), *_MAP_POINTERS, *_main("q", "k", "v", "do"),
     ("stride_cu", "stride"), *_ints(*_LOOP_INTS, "tq", "d", "dv", "pitch", "pitch_k", "pitch_v"), ("scale", "fp32")),
    (*_LOOP_FLAGS, "FOLD", "WANT_DQ", "WANT_DK", "WANT_DV", "ROWS_FIRST", "STAGES", "DOT_FP32"),
    (*_SHAPE_USES, "block_size", "group", "cu", "dot_fp32", "fold", "want_dq", "want_dk", "want_dv",
     "rows_first"))

KEYS = _spec(
    "bwd", "nsa_bwd_keys",
    (("part_ptr", "fp32*"), ("sums_ptr", "fp32*"), ("offsets_ptr", "int32*"), ("cu_ptr", "cu*"), ("out_ptr", "io*"),
     *_main("out"), ("stride_cu", "stride"),
     *_ints("n_programs", "n_items", "n_blocks", "heads_kv", "group", "parts", "n_seqs", "sk", "chunk_rows", "d"),
     ("pitch", "row32"), *_ints("earlier", "later")),
    ("BS", "BS_PAD", "D_PAD", "EVEN_D", "PACKED"), ("dtype", "d_pad", "even_d", "aligned", "unit_d", "block_size", "cu"))

QUERIES = _spec(
    "bwd", "nsa_bwd_queries",
    (("part_ptr", "part*"), ("place_ptr", "int32*"), ("out_ptr", "io*"), *_main("out"),
     *_ints("n_programs", "n_tiles", "heads_kv", "group", "slots", "parts", "span", "t0", "n_tokens", "d", "pitch")),
    ("BLOCK_M", "UNROLL", "D_PAD", "EVEN_D"), ("dtype", "d_pad", "even_d", "aligned", "unit_d"))
