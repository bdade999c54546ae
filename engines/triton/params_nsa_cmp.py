"""TemplateParams and argument tables of compressed attention and of the choice of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from descriptors import NsaCompressedBwdDesc, NsaCompressedDesc, NsaTopkDesc

from .params import DTYPES, FLOATS, HINT_BYTES, INDEXES, Blocks, is_aligned, pad_head_dim
from .params_nsa import KernelSpec, Table, _ints, _main, _spec, _strides, pad_to_power

MAX_GROUP = 64
MAX_SCORES = 16384
_MAIN = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
# Scores that one program of the choice holds; 2048 are 16 a thread.
_SCORES_HELD = 2048
OUTS = 16  # selection blocks that the importance kernel sums at a time: with 4 keys a block, about one tile of keys


@dataclass(frozen=True)
class CmpParams:
    """What these kernels are specialised on. Raises ValueError where fields make no sense."""

    dtype: str
    d_pad: int
    dv_pad: int
    even_d: bool
    even_dv: bool
    aligned: bool
    unit_d: bool
    group: int
    block_size: int            # selection blocks: importance and choice
    slots_pad: int
    scores_pad: int            # selection blocks of a row, padded to a power of two
    cu: str | None
    fold: bool
    dlse: bool
    want_dk: bool
    want_dv: bool
    dot_fp32: bool
    blocks: Blocks

    def __post_init__(self) -> None:
        wrong = [text for text, ok in self._rules() if not ok]
        if wrong:
            raise ValueError(f"{type(self).__name__}: {'; '.join(wrong)}")

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield f"dtype: given {self.dtype}, expected one of {FLOATS}", self.dtype in FLOATS
        yield f"group: given {self.group}, expected 1..{MAX_GROUP}", 1 <= self.group <= MAX_GROUP
        yield f"cu: given {self.cu}, expected None or one of {INDEXES}", self.cu is None or self.cu in INDEXES
        yield "aligned: expected unit_d with it", self.unit_d or not self.aligned

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "fp32" else 2

    @property
    def hint(self) -> int:
        """Elements that `aligned` promises strides and head dims to be multiples of."""
        return HINT_BYTES // self.itemsize

    @property
    def tokens(self) -> int:
        """Query tokens of a tile of rows."""
        return max(1, self.blocks.block_m // self.group)

    def flags(self) -> dict[str, bool | int]:
        b = self.blocks
        return {
            "GROUP": self.group, "TOKENS": self.tokens, "TOKENS_PAD": pad_to_power(self.tokens), "BLOCK_M": b.block_m,
            "BLOCK_N": b.block_n, "BS": self.block_size, "OUTS": OUTS, "D_PAD": self.d_pad, "DV_PAD": self.dv_pad,
            "EVEN_D": self.even_d, "EVEN_DV": self.even_dv, "PACKED": self.cu is not None, "FOLD": self.fold,
            "HAS_DLSE": self.dlse, "WANT_DK": self.want_dk, "WANT_DV": self.want_dv, "STAGES": b.num_stages,
            "DOT_FP32": self.dot_fp32, "SLOTS": self.slots_pad, "SCORES": self.scores_pad,
            "ROWS": max(1, _SCORES_HELD // self.scores_pad),
        }


def compressed_params(desc: NsaCompressedDesc | NsaCompressedBwdDesc, *, interpreted: bool) -> CmpParams:
    """Which specialisation serves the descriptor, from plan-time facts only."""
    main = [t for n in _MAIN if (t := getattr(desc, n, None)) is not None]
    d, dv, itemsize = desc.head_dim, desc.head_dim_v, desc.q.dtype.itemsize
    unit_d = all(t.unit_last_stride for t in main)
    aligned = (unit_d and d * itemsize % HINT_BYTES == 0 and dv * itemsize % HINT_BYTES == 0
               and all(is_aligned(t, desc.packed) for t in main))
    cu = desc.cu_seqlens
    return CmpParams(
        DTYPES[desc.q.dtype], pad_head_dim(d), pad_head_dim(dv), d == pad_head_dim(d), dv == pad_head_dim(dv), aligned,
        unit_d, desc.group, desc.block_size, 16, 16, None if cu is None else str(cu.dtype), itemsize == 2,
        getattr(desc, "dlse", None) is not None, getattr(desc, "dk", None) is not None,
        getattr(desc, "dv", None) is not None, interpreted, Blocks(16, 16, 4, 1))


def topk_params(desc: NsaTopkDesc) -> CmpParams:
    cu, scores, slots = desc.cu_seqlens, int(desc.importance.shape[-1]), int(desc.block_indices.shape[-1])  # type: ignore[arg-type]
    return CmpParams("fp32", 16, 16, True, True, False, False, 1, desc.block_size, pad_to_power(slots),
                     pad_to_power(scores), None if cu is None else str(cu.dtype), False, False, False, False, False,
                     Blocks(16, 16, 4, 1))


_SHAPE: tuple[str, ...] = ("dtype", "d_pad", "dv_pad", "even_d", "even_dv", "aligned", "unit_d", "group", "cu", "dot_fp32")
_ROW_INTS = ("n_programs", "n_tiles", "heads_kv", "n_seqs", "tq", "sk", "off", "length", "stride")
_TILE = ("GROUP", "TOKENS", "BLOCK_M", "BLOCK_N", "D_PAD", "DV_PAD", "EVEN_D", "EVEN_DV", "PACKED")


def _table(*parts: Any) -> Table:
    return tuple(pair for part in parts for pair in part)


def _io(*names: str) -> Table:
    return tuple((f"{n}_ptr", "io*") for n in names)


CMP_FWD = _spec(
    "cmp", "nsa_cmp_fwd",
    _table(_io("q", "k", "v", "o"), (("lse_ptr", "fp32*"), ("cu_ptr", "cu*")), _main("q", "k", "v", "o"),
           _strides("lse", "bhs"), (("stride_cu", "stride"),), _ints(*_ROW_INTS, "d", "dv"), (("scale", "fp32"),)),
    (*_TILE, "STAGES", "DOT_FP32"), _SHAPE)

CMP_IMPORTANCE = _spec(
    "cmp", "nsa_cmp_importance",
    _table(_io("q", "k"), (("lse_ptr", "fp32*"), ("out_ptr", "fp32*"), ("cu_ptr", "cu*")), _main("q", "k"),
           _strides("lse", "bhs"), _strides("imp", "bhtm"), (("stride_cu", "stride"),), _ints(*_ROW_INTS, "n_out", "d"),
           (("scale", "fp32"),)),
    ("GROUP", "TOKENS", "TOKENS_PAD", "BLOCK_M", "BLOCK_N", "BS", "OUTS", "D_PAD", "EVEN_D", "PACKED", "DOT_FP32"),
    (*_SHAPE, "block_size"))

CMP_DQ = _spec(
    "cmp", "nsa_cmp_dq",
    _table(_io("q", "k", "v", "do"), (("stats_ptr", "fp32*"),), _io("dq"), (("cu_ptr", "cu*"),),
           _main("q", "k", "v", "do", "dq"), (("stride_cu", "stride"),), _ints(*_ROW_INTS, "d", "dv"),
           (("scale", "fp32"),)),
    (*_TILE, "FOLD", "STAGES", "DOT_FP32"), (*_SHAPE, "fold"))

CMP_DKDV = _spec(
    "cmp", "nsa_cmp_dkdv",
    _table(_io("q", "k", "v", "do"),
           (("stats_ptr", "fp32*"), ("part_dk_ptr", "fp32*"), ("part_dv_ptr", "fp32*"), ("cu_ptr", "cu*")),
           _main("q", "k", "v", "do"), (("stride_cu", "stride"),),
           _ints("n_programs", "n_tiles", "splits", "n_rows_kv", "heads_kv", "n_seqs", "tq", "sk", "off", "length",
                 "stride", "d", "dv", "pitch_k", "pitch_v"), (("scale", "fp32"),)),
    ("GROUP", "BLOCK_M", "BLOCK_N", "D_PAD", "DV_PAD", "EVEN_D", "EVEN_DV", "PACKED", "FOLD", "WANT_DK", "WANT_DV",
     "STAGES", "DOT_FP32"), (*_SHAPE, "fold", "want_dk", "want_dv"))

CMP_SUM = _spec(
    "cmp", "nsa_cmp_sum",
    _table((("part_ptr", "fp32*"),), (("out_ptr", "io*"),), _main("out"),
           _ints("n_programs", "n_tiles", "splits", "n_rows_kv", "heads_kv", "d"), (("pitch", "row32"),)),
    ("BLOCK_M", "D_PAD", "EVEN_D"), ("dtype", "d_pad", "even_d", "aligned", "unit_d"))

TOPK: KernelSpec = _spec(
    "topk", "nsa_topk",
    _table((("score_ptr", "fp32*"), ("out_ptr", "int32*"), ("cu_ptr", "cu*")), _strides("score", "bhtm"),
           _strides("out", "bhts"), (("stride_cu", "stride"),),
           _ints("n_programs", "n_tiles", "heads_kv", "n_tokens", "n_scores", "slots", "n_init", "n_local", "n_seqs",
                 "off", "n_steps")),
    ("BS", "ROWS", "SCORES", "SLOTS", "PACKED"), ("block_size", "slots_pad", "scores_pad", "cu"))
