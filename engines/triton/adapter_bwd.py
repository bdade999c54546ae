"""Attention backward on the engine contract: a chain of kernels, each launched only if it is wanted.

    bwd_pre -> bwd_dkdv, bwd_dq, bwd_bias_* -> bwd_reduce (dBias, dSink)

No kernel of this chain uses atomics and every sum has a fixed order: its results are deterministic whether or not
that was asked for. Where it was not, Hopper cards have a chain that adds dQ up in arrival order (hopper.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from descriptors import OpDesc, SdpaBwdDesc
from descriptors.dims import bind_dim
from engines.base import Executable, Region, SdpaBwdDsl, Support, Target

from . import arguments, capabilities, configs, configs_bwd, hopper, limits
from .arguments import cdiv, tiles
from .launching import ChainExecutable, FrozenChain, FrozenKernel, Kernel, Operand, Pointer, Scratch, operand
from .params import Blocks, shared_facts
from .params_bwd import (
    BIAS_COLS,
    BIAS_ROWS,
    BIAS_TILE,
    DKDV,
    DQ,
    PRE,
    REDUCE,
    BwdParams,
    KernelSpec,
)

_MAIN = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
_STRIDED = ("lse", "dlse", "bias", "mask", "dbias")
_FP32 = 4

# The workspace: row statistics, and partial sums of gradients that are sums over rows, keys, heads, batches.
STATS, SINK_SUMS, BIAS_SUMS = "row_stats", "sink_sums", "bias_sums"


def backward_params(desc: SdpaBwdDesc, target: Target) -> BwdParams:
    """Which specialisation serves the descriptor, from plan-time facts only. Tiles come per kernel."""
    facts = shared_facts(desc, _MAIN, _STRIDED, interpreted=target.cc is None)
    fold = desc.q.dtype.itemsize == 2 and desc.softcap is None and desc.bias is None
    return BwdParams(**facts, fold=fold, dlse=desc.dlse is not None, dsink=desc.dsink is not None,
                     want_dk=desc.dk is not None, want_dv=desc.dv is not None, sum_rows=False,
                     blocks=configs_bwd.PRE)


def bias_extents(desc: SdpaBwdDesc) -> tuple[int, int, int, int]:
    """The bias's shape, seen as four axes."""
    assert desc.bias is not None  # a dbias without a bias does not pass validation
    shape = arguments.extents(desc.bias)
    batches, heads, rows, cols = (*(1,) * (4 - len(shape)), *shape)
    return batches, heads, rows, cols


def bias_kernel(desc: SdpaBwdDesc) -> KernelSpec:
    """Which of the dBias kernels fits the way the bias is broadcast."""
    _, _, rows, cols = bias_extents(desc)
    return BIAS_ROWS if cols == 1 else BIAS_COLS if rows == 1 else BIAS_TILE


def regions(desc: SdpaBwdDesc, sums: KernelSpec | None, *, all_rows: bool = False) -> tuple[Region, ...]:
    """The workspace, in bytes, from the bound extents; R = B * Sq rows per head, packed: the token total. `sums`: the dBias
    kernel that leaves partial sums, if any, and whether it sums over all rows. A symbolic axis of a bias may be bound to 1, so
    which kernel that is cannot be told from a bound descriptor.

    row_stats   8 * Hq * R: (lse, delta) pairs
    sink_sums   4 * Hq * tiles of rows, where dSink is wanted
    bias_sums   4 * B * Hq * (Sk | Sq | BIAS_CHUNKS), where dBias is wanted and a sequence axis is broadcast
    """
    heads, rows = bind_dim(desc.heads_q, None), _statistics_rows(desc)
    out = [Region(STATS, _bytes(2 * heads * rows))]
    if desc.dsink is not None:
        out.append(Region(SINK_SUMS, _bytes(heads * _row_tiles(desc))))
    if sums is not None:
        _, _, bias_rows, bias_cols = bias_extents(desc)
        line = bias_cols if sums is BIAS_COLS else configs_bwd.BIAS_CHUNKS if all_rows else bias_rows
        out.append(Region(BIAS_SUMS, _bytes(bind_dim(desc.batch, None) * heads * line)))
    return tuple(out)


def _bytes(numbers: int) -> int:
    # Never empty: a kernel that has nothing to read still gets an address it can do arithmetic on.
    return _FP32 * max(numbers, 1)


def _statistics_rows(desc: SdpaBwdDesc) -> int:
    rows = bind_dim(desc.seqlen_q, None)
    return rows if desc.packed else rows * bind_dim(desc.batch, None)


def _row_tiles(desc: SdpaBwdDesc) -> int:
    """Tiles of bwd_pre over one head, all batches: the partial sums of dSink per head."""
    per_batch = arguments.row_tiles(desc, configs_bwd.PRE.block_m)
    return per_batch if desc.packed else per_batch * bind_dim(desc.batch, None)


class SdpaBwdExecutable(ChainExecutable):
    """The kernels of one specialisation; serves every shape that shares it."""

    def __init__(self, desc: SdpaBwdDesc, target: Target) -> None:
        super().__init__()
        self.target = target
        self.shared = backward_params(desc, target)
        self.kernels: dict[str, Kernel] = {}
        self._add(PRE, configs_bwd.PRE)
        if desc.dk is not None or desc.dv is not None:
            self._add(DKDV, self._pick(configs_bwd.DKDV, desc))
        if desc.dq is not None:
            self._add(DQ, self._pick(configs_bwd.DQ, desc))
        if desc.dbias is not None:
            spec = bias_kernel(desc)
            sum_all = bias_extents(desc)[2:] == (1, 1)
            own: dict[str, Any] = {"sum_rows": sum_all} if spec is BIAS_ROWS else {}
            self._add(spec, self._pick(configs_bwd.BIAS, desc), **own)
            if spec is not BIAS_TILE:
                self._add(REDUCE, configs_bwd.REDUCE, key="reduce_bias", sum_rows=sum_all,
                          bias=self.shared.bias)
        if desc.dsink is not None:
            self._add(REDUCE, configs_bwd.REDUCE, key="reduce_sink", sum_rows=True, bias=self.shared.sink)

    def _pick(self, table: tuple[configs.Row, ...], desc: SdpaBwdDesc) -> Blocks:
        return configs.pick(table, self.target.cc, desc.q.dtype.itemsize,
                            max(self.shared.d_pad, self.shared.dv_pad),
                            tiled=desc.bias is not None or desc.mask is not None,
                            band=self.shared.has_left or self.shared.has_right)

    def _add(self, spec: KernelSpec, blocks: Blocks, *, key: str | None = None, **own: Any) -> None:
        if spec is PRE and not self.shared.dsink:
            own["sink"] = None
        params = spec.params(self.shared, blocks=blocks, **own)
        self.kernels[key or spec.name] = Kernel(
            spec.module, spec.name, spec.args, params, spec.constexprs(params), blocks.num_warps,
            blocks.num_stages, self.target)

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        rows = self.kernels.get(BIAS_ROWS.name)
        sums = BIAS_COLS if BIAS_COLS.name in self.kernels else BIAS_ROWS if rows is not None else None
        all_rows = rows is not None and rows.params.sum_rows  # type: ignore[attr-defined]
        return regions(cast(SdpaBwdDesc, desc), sums, all_rows=all_rows)

    def freeze(self, desc: SdpaBwdDesc) -> FrozenChain:
        return FrozenChain(_Chain(self.kernels, desc).freeze())

    def describe(self) -> Mapping[str, Any]:
        return {name: kernel.describe() for name, kernel in self.kernels.items()}


class _Chain:
    """Freezes each kernel of the chain for one bound descriptor."""

    def __init__(self, kernels: Mapping[str, Kernel], desc: SdpaBwdDesc) -> None:
        self.kernels, self.desc = kernels, desc
        self.space = {name: Scratch(name) for name in (STATS, SINK_SUMS, BIAS_SUMS)}
        self.values = self._values()
        fields = {f"{n}_ptr": n for n in (*_MAIN, "dlse", "dbias")} | arguments.option_operands()
        self.pointers: dict[str, Pointer] = {
            argument: operand(desc, field) for argument, field in fields.items()}

    def _values(self) -> dict[str, Any]:
        desc, packed = self.desc, self.desc.packed
        values = arguments.option_values(desc)
        for name in _MAIN:
            values |= arguments.main_values(name, getattr(desc, name), packed)
        for name in ("lse", "dlse"):
            values |= arguments.row_values(name, getattr(desc, name), packed)
        return values | arguments.score_values("dbias", desc.dbias)

    def freeze(self) -> list[FrozenKernel]:
        steps: dict[str, Callable[[], FrozenKernel]] = {
            PRE.name: self._pre, DKDV.name: self._dkdv, DQ.name: self._dq, BIAS_TILE.name: self._bias_tile,
            BIAS_COLS.name: self._bias_cols, BIAS_ROWS.name: self._bias_rows,
            "reduce_bias": self._reduce_bias, "reduce_sink": self._reduce_sink,
        }
        return [step() for name, step in steps.items() if name in self.kernels]

    def _bind(self, key: str, programs: int, values: Mapping[str, Any], pointers: Mapping[str, Pointer]
              ) -> FrozenKernel:
        return self.kernels[key].freeze(programs, {**self.values, **values}, {**self.pointers, **pointers})

    def _blocks(self, key: str) -> Blocks:
        return self.kernels[key].params.blocks  # type: ignore[attr-defined]

    @property
    def _statistics(self) -> dict[str, Any]:
        return {"stats_ptr": self.space[STATS]}

    def _tiles(self, extent: int, block: int) -> int:
        return tiles(extent, self.values["n_seqs"], self.desc.packed, block)

    @property
    def _batches(self) -> int:
        """How often a side's tiles are laid out: packed slots cover all sequences at once."""
        return 1 if self.desc.packed else self.values["n_seqs"]

    def _pre(self) -> FrozenKernel:
        n_tiles = self._tiles(self.values["sq_max"], self._blocks(PRE.name).block_m)
        return self._bind(
            PRE.name, n_tiles * self.values["heads_q"] * self._batches,
            {"n_tiles": n_tiles, "n_partials": _row_tiles(self.desc)},
            {"lse_ptr": Operand("lse"), "out_stats_ptr": self.space[STATS],
             "out_sink_ptr": None if self.desc.dsink is None else self.space[SINK_SUMS]})

    def _dkdv(self) -> FrozenKernel:
        n_tiles = self._tiles(self.values["sk_max"], self._blocks(DKDV.name).block_n)
        heads_kv = self.values["heads_q"] // self.values["group"]
        return self._bind(DKDV.name, n_tiles * heads_kv * self._batches, {"n_tiles": n_tiles},
                          self._statistics)

    def _dq(self) -> FrozenKernel:
        n_tiles = self._tiles(self.values["sq_max"], self._blocks(DQ.name).block_m)
        return self._bind(DQ.name, n_tiles * self.values["heads_q"] * self._batches, {"n_tiles": n_tiles},
                          self._statistics)

    def _shares(self, extent: int, whole: int) -> int:
        """Along how many entries of an axis one entry of the bias is shared."""
        return whole if extent == 1 else 1

    # A symbolic axis of a bias may be bound to 1. Which kernel runs was settled at its declared maximum,
    # so what follows asks the kernels, not the bound shape, along which axes the bias is kept.

    def _bias_tile(self) -> FrozenKernel:
        batches, heads, rows, cols = bias_extents(self.desc)
        blocks = self._blocks(BIAS_TILE.name)
        return self._bind(
            BIAS_TILE.name, batches * heads * cdiv(rows, blocks.block_m) * cdiv(cols, blocks.block_n),
            {"bias_rows": rows, "bias_cols": cols, "bias_heads": heads,
             "sum_batches": self._shares(batches, self.values["n_seqs"]),
             "sum_heads": self._shares(heads, self.values["heads_q"])}, self._statistics)

    def _bias_cols(self) -> FrozenKernel:
        cols = bias_extents(self.desc)[3]
        lines = self.values["n_seqs"] * self.values["heads_q"]
        return self._bind(BIAS_COLS.name, lines * cdiv(cols, self._blocks(BIAS_COLS.name).block_n),
                          {"bias_cols": cols}, {**self._statistics, "partial_ptr": self.space[BIAS_SUMS]})

    def _bias_rows(self) -> FrozenKernel:
        rows = bias_extents(self.desc)[2]
        values = {"n_chunks": configs_bwd.BIAS_CHUNKS}
        if not self._sums_rows(BIAS_ROWS.name):
            values = {"n_chunks": cdiv(rows, self._blocks(BIAS_ROWS.name).block_m), "bias_rows": rows}
        lines = self.values["n_seqs"] * self.values["heads_q"]
        return self._bind(BIAS_ROWS.name, lines * values["n_chunks"], values,
                          {**self._statistics, "partial_ptr": self.space[BIAS_SUMS]})

    def _sums_rows(self, key: str) -> bool:
        return self.kernels[key].params.sum_rows  # type: ignore[attr-defined]

    def _reduce_bias(self) -> FrozenKernel:
        batches, heads, rows, cols = bias_extents(self.desc)
        along, line = ("k", cols) if BIAS_COLS.name in self.kernels else ("q", rows)
        partials = configs_bwd.BIAS_CHUNKS if self._sums_rows("reduce_bias") else line
        return self._reduce(
            "reduce_bias", self.space[BIAS_SUMS], self.pointers["dbias_ptr"],
            [self.values[f"stride_dbias_{a}"] for a in ("b", "h", along)], batches, heads, line, partials,
            self._shares(batches, self.values["n_seqs"]), self._shares(heads, self.values["heads_q"]))

    def _reduce_sink(self) -> FrozenKernel:
        assert self.desc.dsink is not None  # the kernel exists only then
        stride = arguments.used_strides(self.desc.dsink)[0]
        return self._reduce("reduce_sink", self.space[SINK_SUMS], Operand("dsink"), [0, stride, 0], 1,
                            self.values["heads_q"], 1, _row_tiles(self.desc), 1, 1)

    def _reduce(self, key: str, partial: Any, out: Any, strides: list[int], out_batches: int, out_heads: int,
                out_rows: int, rows: int, sum_batches: int, sum_heads: int) -> FrozenKernel:
        b, h, r = strides
        return self._bind(
            key, out_batches * out_heads * cdiv(out_rows, self._blocks(key).block_m),
            {"stride_out_b": b, "stride_out_h": h, "stride_out_r": r, "heads": self.values["heads_q"],
             "rows": rows, "out_heads": out_heads, "out_rows": out_rows, "sum_batches": sum_batches,
             "sum_heads": sum_heads},
            {"partial_ptr": partial, "out_ptr": out})


class SdpaBwdDslTriton(SdpaBwdDsl):
    """Backward cell of the Triton engine."""

    engine: ClassVar[str] = capabilities.ENGINE
    capabilities = capabilities.BACKWARD

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        own = limits.reasons(cast(SdpaBwdDesc, desc))
        return Support((*super().check_support(desc, target).reasons, *own))

    def label(self, desc: OpDesc, target: Target) -> str:
        return self.engine if target.cc is not None else f"{self.engine}[interpreter]"

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        desc = cast(SdpaBwdDesc, desc)
        spec = None if desc.dbias is None else bias_kernel(desc)
        all_rows = desc.dbias is not None and bias_extents(desc)[2:] == (1, 1)
        return regions(desc, None if spec is BIAS_TILE else spec, all_rows=all_rows)

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        desc = cast(SdpaBwdDesc, desc)
        if hopper.serves_backward(desc, target):
            return hopper.HopperBwdExecutable(desc, target)
        return SdpaBwdExecutable(desc, target)
