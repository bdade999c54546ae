"""TemplateParams and argument tables of the backward kernels.

A table names a kernel's arguments in order, as (name, kind) pairs for `params.resolve_args`. `KERNELS` says,
for each
kernel, where it lives, its table, its constexpr arguments,
and which facts do not reach it: these are set to one
value, so that graphs that differ only in such a fact share the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .params import Blocks, TemplateParams, main_strides, strides


@dataclass(frozen=True)
class BwdParams(TemplateParams):
    """What the backward kernels are specialised on beyond the shared facts."""

    fold: bool       # scores in the exp2 domain: no softcap, no bias, 16-bit inputs
    dlse: bool
    dsink: bool
    want_dk: bool
    want_dv: bool
    sum_rows: bool   # dBias: both sequence axes are broadcast; reduction: over rows
    blocks: Blocks

    def _rules(self) -> Iterable[tuple[str, bool]]:
        yield from super()._rules()
        b = self.blocks
        for name in ("block_m", "block_n"):
            value = getattr(b, name)
            yield (f"{name}: given {value}, expected a power of two in 16..1024",
                   16 <= value <= 1024 and not value & (value - 1))
        yield f"num_warps: given {b.num_warps}, expected 1, 2, 4 or 8", b.num_warps in (1, 2, 4, 8)
        yield f"num_stages: given {b.num_stages}, expected 1..6", 1 <= b.num_stages <= 6
        yield ("fold: expected neither softcap nor bias with it",
               not (self.fold and (self.softcap or self.bias is not None)))
        yield "dsink: expected a sink with it", not self.dsink or self.sink is not None

    def items(self) -> tuple[tuple[str, Any], ...]:
        b = self.blocks
        return (*(p for p in super().items() if p[0] != "blocks"),
                ("block_m", b.block_m), ("block_n", b.block_n), ("num_warps", b.num_warps),
                ("num_stages", b.num_stages))

    def flags(self) -> dict[str, bool | int]:
        b = self.blocks
        return {
            **super().flags(), "FOLD": self.fold, "HAS_DLSE": self.dlse, "HAS_DSINK": self.dsink,
            "WANT_DK": self.want_dk, "WANT_DV": self.want_dv, "SUM_ROWS": self.sum_rows,
            "BLOCK_M": b.block_m, "BLOCK_N": b.block_n, "BLOCK": b.block_m, "STAGES": b.num_stages,
        }


Table = tuple[tuple[str, str], ...]


def _ints(*names: str) -> Table:
    return tuple((n, "dim" if n in ("d", "dv") else "i32") for n in names)


_INPUTS: Table = (*((f"{n}_ptr", "io*") for n in ("q", "k", "v", "do")), ("stats_ptr", "fp32*"))
_OPTIONS: Table = (("bias_ptr", "bias*"), ("mask_ptr", "mask*"), ("len_q_ptr", "len_q*"), ("len_kv_ptr",
                                                                                           "len_kv*"),
                   ("cu_q_ptr", "cu_q*"), ("cu_kv_ptr", "cu_kv*"))
_INPUT_STRIDES: Table = tuple(pair for n in ("q", "k", "v", "do") for pair in main_strides(n))
_OPTION_STRIDES: Table = (*strides("bias_", "bhqk"), *strides("mask_", "bhqk"),
                          *((f"stride_{n}", "stride") for n in ("len_q", "len_kv", "cu_q", "cu_kv")))
_EXTENTS: Table = _ints("n_seqs", "heads_q", "group", "sq_max", "sk_max", "d", "dv", "window_left",
                        "window_right", "align_br", "bias_rows", "bias_cols", "mask_rows", "mask_cols")
_SCALARS: Table = (("scale", "fp32"), ("softcap", "fp32"))


def _main_table(outputs: Table, output_strides: Table, counts: Table) -> Table:
    return (*_INPUTS, *outputs, *_OPTIONS, *_INPUT_STRIDES, *output_strides, *_OPTION_STRIDES, *_EXTENTS,
            *counts, *_ints("n_programs"), *_SCALARS)


_SHARED_FLAGS = ("D_PAD", "DV_PAD", "EVEN_D", "EVEN_DV", "WIDE", "PACKED", "HAS_LEN_Q", "HAS_LEN_KV",
                 "HAS_LEFT", "HAS_RIGHT")
_BIAS_FLAGS = (*_SHARED_FLAGS, "HAS_MASK", "HAS_SOFTCAP", "DOT_FP32")
_LOOP_FLAGS = ("BLOCK_M", "BLOCK_N", "STAGES", *_SHARED_FLAGS, "HAS_BIAS", "HAS_MASK", "HAS_SOFTCAP", "FOLD")

# Facts that a kernel does not depend on, and the value that stands for all of theirs.
_NO_ROW_OPTIONS: dict[str, Any] = {"dlse": False, "dsink": False, "sink": None}
_NO_WANTS: dict[str, Any] = {"want_dk": False, "want_dv": False}
_NO_SCORES: dict[str, Any] = {
    "d_pad": 16, "even_d": True, "has_left": False, "has_right": False, "softcap": False, "mask": False,
    "bias": None, "len_kv": None, "sum_rows": False, "dot_fp32": False}
_BIAS_IGNORES = {**_NO_ROW_OPTIONS, **_NO_WANTS, "fold": False}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: `kernels/<module>.py`'s `name`, its arguments, its constexprs in order, what it ignores."""

    module: str
    name: str
    args: Table
    flags: tuple[str, ...]
    ignores: Mapping[str, Any]

    def params(self, shared: BwdParams, **own: Any) -> BwdParams:
        return replace(shared, **{**self.ignores, **own})

    def constexprs(self, params: BwdParams) -> dict[str, bool | int]:
        flags = params.flags()
        return {n: flags[n] for n in self.flags}


PRE = KernelSpec(
    "bwd_pre", "bwd_pre",
    (("o_ptr", "io*"), ("do_ptr", "io*"), ("lse_ptr", "fp32*"), ("dlse_ptr", "fp32*"), ("sink_ptr", "sink*"),
     ("out_stats_ptr", "fp32*"), ("out_sink_ptr", "fp32*"), ("len_q_ptr", "len_q*"),
     ("cu_q_ptr", "cu_q*"), *main_strides("o"), *main_strides("do"), *strides("lse_", "bhs"),
     *strides("dlse_", "bhs"), ("stride_sink", "stride"), ("stride_len_q", "stride"), ("stride_cu_q",
                                                                                       "stride"),
     *_ints("n_seqs", "heads_q", "sq_max", "dv", "n_tiles", "n_partials", "n_programs"), ("scale", "fp32")),
    ("BLOCK_M", "DV_PAD", "EVEN_DV", "WIDE", "PACKED", "HAS_LEN_Q", "HAS_DLSE", "HAS_DSINK", "FOLD"),
    {**_NO_SCORES, **_NO_WANTS})

DKDV = KernelSpec(
    "bwd_dkdv", "bwd_dkdv",
    _main_table((("dk_ptr", "io*"), ("dv_ptr", "io*")), (*main_strides("dk"), *main_strides("dv")),
                _ints("n_tiles")),
    (*_LOOP_FLAGS, "WANT_DK", "WANT_DV", "DOT_FP32"), {**_NO_ROW_OPTIONS, "sum_rows": False})

DQ = KernelSpec(
    "bwd_dq", "bwd_dq", _main_table((("dq_ptr", "io*"),), main_strides("dq"), _ints("n_tiles")),
    (*_LOOP_FLAGS, "DOT_FP32"), {**_NO_ROW_OPTIONS, **_NO_WANTS, "sum_rows": False})

BIAS_TILE = KernelSpec(
    "bwd_bias", "bwd_bias_tile",
    _main_table((("dbias_ptr", "bias*"),), strides("dbias_", "bhqk"), _ints("bias_heads", "sum_batches",
                                                                            "sum_heads")),
    ("BLOCK_M", "BLOCK_N", *_BIAS_FLAGS), {**_BIAS_IGNORES, "sum_rows": False})

BIAS_COLS = KernelSpec(
    "bwd_bias", "bwd_bias_cols", _main_table((("partial_ptr", "fp32*"),), (), ()),
    ("BLOCK_M", "BLOCK_N", *_BIAS_FLAGS), {**_BIAS_IGNORES, "sum_rows": False})

BIAS_ROWS = KernelSpec(
    "bwd_bias", "bwd_bias_rows", _main_table((("partial_ptr", "fp32*"),), (), _ints("n_chunks")),
    ("BLOCK_M", "BLOCK_N", "SUM_ROWS", *_BIAS_FLAGS), _BIAS_IGNORES)

# The output is dBias or dSink; params.bias carries its type for either.
REDUCE = KernelSpec(
    "bwd_bias", "bwd_reduce",
    (("partial_ptr", "fp32*"), ("out_ptr", "bias*"), *strides("out_", "bhr"),
     *_ints("heads", "rows", "out_heads", "out_rows", "sum_batches", "sum_heads", "n_programs")),
    ("BLOCK", "SUM_ROWS"),
    {**_BIAS_IGNORES, **_NO_SCORES, "dv_pad": 16, "even_dv": True, "aligned": False, "unit_d": True,
    "len_q": None,
     "cu_q": None, "cu_kv": None})

KERNELS = (PRE, DKDV, DQ, BIAS_TILE, BIAS_COLS, BIAS_ROWS, REDUCE)
