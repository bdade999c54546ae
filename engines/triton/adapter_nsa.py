"""Selection attention on the engine contract, forward and backward.

    forward     map -> nsa_fwd_blocks -> nsa_combine                               per range of tokens
    backward    nsa_bwd_pre, then map -> nsa_bwd_blocks -> nsa_bwd_keys, nsa_bwd_queries   per range of tokens

Ranges bound the partial results (`configs_nsa.PARTIAL_BYTES`). No kernel uses atomics and every sum has a fixed order:
results are deterministic whether or not that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from descriptors import DType, NsaSelectionBwdDesc, NsaSelectionDesc, OpDesc
from descriptors.dims import dim_max
from engines.base import (
    Adapter,
    Capabilities,
    Executable,
    NsaSelectionBwdDsl,
    NsaSelectionFwdDsl,
    Reason,
    Region,
    Support,
    Target,
)

from . import configs_nsa as configs
from . import nsa_map
from .arguments import MAX_POSITIONS, cdiv
from .capabilities import ENGINE, MIN_CC
from .launching import ChainExecutable, FrozenChain, FrozenKernel, Operand, Scratch
from .nsa_map import Chain, Geometry, NsaKernel, Selection
from .params_nsa import (
    BWD_BLOCKS,
    COMBINE,
    FWD_BLOCKS,
    KEYS,
    PRE,
    QUERIES,
    NsaParams,
    nsa_params,
    pad_to_power,
)

_DTYPES = (DType.F16, DType.BF16, DType.F32)
_NOTE = f"up to {configs.MAX_SLOTS} entries a row, blocks of up to {configs.MAX_BLOCK_SIZE}; any strides, any group size"


def _row(op: str, features: set[str]) -> tuple[Capabilities, ...]:
    return (Capabilities(ENGINE, op, ("cuda", "cpu"), _DTYPES, frozenset(features), min_cc=MIN_CC, head_dim=(1, 256),
                         head_dim_v=(1, 256), note=_NOTE),)


def limits(desc: Selection) -> Iterable[Reason]:
    """What a capability row cannot say."""
    if desc.slots > configs.MAX_SLOTS:
        yield Reason("block_indices.shape", f"{desc.slots} entries a row", f"at most {configs.MAX_SLOTS}")
    if desc.block_size > configs.MAX_BLOCK_SIZE:
        yield Reason("block_size", str(desc.block_size), f"at most {configs.MAX_BLOCK_SIZE}")
    for name, extent in (("q", desc.seqlen_q), ("k", desc.seqlen_kv)):
        if dim_max(extent) > MAX_POSITIONS:
            yield Reason(f"{name}.shape", f"sequence extent {dim_max(extent)}", f"at most {MAX_POSITIONS}")
    if dim_max(desc.seqlen_q) * desc.group >= 2**31:
        yield Reason("q.shape", f"{dim_max(desc.seqlen_q)} tokens of {desc.group} heads a group", "fewer than 2**31 rows")
    elif desc.slots <= configs.MAX_SLOTS:
        g = forward_geometry(desc.bound(None))
        programs = max(g.held_items, g.problems * max(cdiv(g.rows * g.group, configs.PRE.block_m), g.n_blocks))
        if programs >= 2**31:
            yield Reason("q.shape", f"{programs} programs", "fewer than 2**31; split the batch")
    for name in ("lse", "dlse"):
        stats = getattr(desc, name, None)
        if stats is not None and stats.dtype is not DType.F32:
            yield Reason(f"{name}.dtype", str(stats.dtype), "fp32")


class _Shared(ChainExecutable):
    """The kernels of one specialisation; serves every shape that shares it."""

    def __init__(self, desc: Selection, target: Target) -> None:
        super().__init__()
        self.target = target
        self.shared: NsaParams = nsa_params(desc, interpreted=target.cc is None)
        self.kernels: dict[str, NsaKernel] = nsa_map.map_kernels(self.shared, target)

    def _pick(self, table: tuple[configs.Row, ...]) -> configs.Row:
        s = self.shared
        return configs.pick(table, self.target.cc, s.itemsize, max(s.d_pad, s.dv_pad), pad_to_power(s.block_size))

    def describe(self) -> Mapping[str, Any]:
        return {name: kernel.describe() for name, kernel in self.kernels.items()}


class _Cell(Adapter):
    """What both directions share."""

    engine: ClassVar[str] = ENGINE

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        return Support((*super().check_support(desc, target).reasons, *limits(cast(Selection, desc))))

    def label(self, desc: OpDesc, target: Target) -> str:
        return ENGINE if target.cc is not None else f"{ENGINE}[interpreter]"


# ---- forward


def forward_geometry(desc: Selection, most: int | None = None) -> Geometry:
    return Geometry.make(desc, desc.head_dim_v, desc.head_dim, configs.FORWARD_ROWS, most)


def forward_regions(desc: Selection, most: int | None = None) -> tuple[Region, ...]:
    """Bytes: the map, and partial results of one launch."""
    g = forward_geometry(desc, most)
    sizes = {name: 4 * n for name, n in g.map_regions().items()}
    return nsa_map.regions({**sizes, "part_lse": 4 * g.held_rows, "part_o": g.held_rows * g.pitch * g.itemsize})


class NsaFwdExecutable(_Shared):
    def __init__(self, desc: NsaSelectionDesc, target: Target) -> None:
        super().__init__(desc, target)
        self.kernels[FWD_BLOCKS.name] = NsaKernel(FWD_BLOCKS, self.shared, self._pick(configs.FWD).blocks, target)
        self.kernels[COMBINE.name] = NsaKernel(COMBINE, self.shared, configs.COMBINE, target)
        self.most = forward_geometry(desc).most

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        return forward_regions(cast(NsaSelectionDesc, desc), self.most)

    def freeze(self, desc: Any) -> FrozenChain:
        g = forward_geometry(desc, self.most)
        chain = Chain(self.kernels, desc, g, {"part_lse": "float32", "part_o": desc.q.dtype.torch_name})
        calls: list[FrozenKernel] = []
        for t0, tokens in g.launches():
            here = {**chain.place(t0, tokens), "pitch": g.pitch}
            calls += chain.map(t0, tokens)
            programs = g.items * here["parts"] * g.problems if g.n_blocks and tokens else 0
            calls.append(chain.freeze(FWD_BLOCKS.name, programs, here))
            tiles = cdiv(tokens * g.group, configs.COMBINE.block_m)
            calls.append(chain.freeze(COMBINE.name, tiles * g.problems, {**here, "n_tiles": tiles}))
        return FrozenChain(calls)


class NsaSelectionFwdDslTriton(_Cell, NsaSelectionFwdDsl):
    """Selection forward of the Triton engine."""

    capabilities = _row(NsaSelectionDesc.OP, {"lse", "block_counts", "cu_seqlens"})

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        return forward_regions(cast(NsaSelectionDesc, desc))

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        return NsaFwdExecutable(cast(NsaSelectionDesc, desc), target)


# ---- backward


def backward_geometry(desc: Selection, most: int | None = None) -> Geometry:
    return Geometry.make(desc, desc.head_dim, desc.head_dim + desc.head_dim_v, configs.BACKWARD_ROWS, most)


def _pitch(width: int) -> int:
    """Of a row of fp32 sums, in elements: a multiple of 16 bytes."""
    return cdiv(width, 4) * 4


def backward_regions(desc: NsaSelectionBwdDesc, most: int | None = None) -> tuple[Region, ...]:
    """Bytes: the map, row statistics, shares of dQ, sums of dK and dV per work item, and over earlier launches."""
    g = backward_geometry(desc, most)
    blocks = g.problems * g.n_blocks
    many = len(g.launches()) > 1
    out = {name: 4 * n for name, n in g.map_regions().items()}
    out["stats"] = 8 * g.problems * g.rows * g.group
    out["part_dq"] = g.held_rows * g.pitch * g.itemsize if desc.dq is not None else 0
    for name, wanted, width in (("dk", desc.dk, desc.head_dim), ("dv", desc.dv, desc.head_dim_v)):
        size = 4 * desc.block_size * _pitch(width) if wanted is not None else 0
        out[f"part_{name}"] = g.held_items * size
        out[f"sums_{name}"] = blocks * size if many else 0
    return nsa_map.regions(out)


class NsaBwdExecutable(_Shared):
    def __init__(self, desc: NsaSelectionBwdDesc, target: Target) -> None:
        super().__init__(desc, target)
        add = self._add
        add(PRE, configs.PRE)
        row = self._pick(configs.BWD)
        add(BWD_BLOCKS, row.blocks, rows_first=row.rows_first)
        if desc.dk is not None:
            add(KEYS, configs.KEYS, key="keys_dk")
        if desc.dv is not None:
            add(KEYS, configs.KEYS, key="keys_dv", d_pad=self.shared.dv_pad, even_d=self.shared.even_dv)
        if desc.dq is not None:
            add(QUERIES, configs.QUERIES)
        self.most = backward_geometry(desc).most

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        return backward_regions(cast(NsaSelectionBwdDesc, desc), self.most)

    def _add(self, spec: Any, blocks: Any, *, key: str | None = None, **own: Any) -> None:
        self.kernels[key or spec.name] = NsaKernel(spec, replace(self.shared, **own), blocks, self.target)

    def freeze(self, desc: Any) -> FrozenChain:
        g = backward_geometry(desc, self.most)
        sums = ("stats", "part_dk", "part_dv", "sums_dk", "sums_dv")
        chain = Chain(self.kernels, desc, g, {"part_dq": desc.q.dtype.torch_name, **dict.fromkeys(sums, "float32")})
        n_rows = g.rows * g.group
        tiles = cdiv(n_rows, configs.PRE.block_m)
        calls = [chain.freeze(PRE.name, tiles * g.problems, {"n_tiles": tiles, "n_rows": n_rows})]
        launches = g.launches()
        for i, (t0, tokens) in enumerate(launches):
            here = {**chain.place(t0, tokens), "tq": g.rows}
            calls += chain.map(t0, tokens)
            # Shares of dQ have the io type's pitch, sums of dK and dV fp32's: rows of 16 bytes either way.
            pitches = {"pitch": g.pitch, "pitch_k": _pitch(desc.head_dim), "pitch_v": _pitch(desc.head_dim_v)}
            programs = g.items * here["parts"] * g.problems if g.n_blocks and tokens else 0
            calls.append(chain.freeze(BWD_BLOCKS.name, programs, {**here, **pitches}))
            calls += self._sums(chain, desc, here, earlier=i > 0, later=i + 1 < len(launches))
        return FrozenChain(calls)

    def _sums(self, chain: Chain, desc: NsaSelectionBwdDesc, here: dict[str, int], *, earlier: bool,
              later: bool) -> list[FrozenKernel]:
        g, calls = chain.g, []
        for name, grad, width in (("dk", desc.dk, desc.head_dim), ("dv", desc.dv, desc.head_dim_v)):
            if grad is not None:
                calls.append(chain.freeze(
                    f"keys_{name}", g.n_blocks * g.problems,
                    {**here, "d": width, "pitch": _pitch(width), "earlier": int(earlier), "later": int(later),
                     **chain.main("out", grad)},
                    {"part_ptr": Scratch(f"part_{name}"), "sums_ptr": Scratch(f"sums_{name}"),
                     "out_ptr": Operand(name)}))
        if desc.dq is not None:
            tiles = cdiv(here["n_tokens"] * g.group, configs.QUERIES.block_m)
            calls.append(chain.freeze(
                QUERIES.name, tiles * g.problems,
                {**here, "n_tiles": tiles, "pitch": g.pitch, **chain.main("out", desc.dq)},
                {"part_ptr": Scratch("part_dq", desc.q.dtype.torch_name), "out_ptr": Operand("dq")}))
        return calls


class NsaSelectionBwdDslTriton(_Cell, NsaSelectionBwdDsl):
    """Selection backward of the Triton engine."""

    capabilities = _row(NsaSelectionBwdDesc.OP, {"block_counts", "cu_seqlens", "dlse", "deterministic"})

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        return backward_regions(cast(NsaSelectionBwdDesc, desc))

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        return NsaBwdExecutable(cast(NsaSelectionBwdDesc, desc), target)
