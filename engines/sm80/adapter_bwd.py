"""Attention backward on the engine contract: a chain of kernels, each launched only if it is wanted.

    statistics -> dK/dV, dQ, dBias -> reductions (dBias, dSink)          deterministic: every sum has a fixed order
    statistics -> dK/dV with sums of dQ -> cast to dQ, reductions       where that is not asked for and scores are plain

The second chain makes 5 products per tile instead of 7, and adds to fp32 dQ in the workspace in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, cast

from descriptors import OpDesc, SdpaBwdDesc, TensorDesc
from descriptors.dims import bind_dim, dim_max
from engines.base import BoundCall, Executable, Launch, Region, SdpaBwdDsl, Support, Target, Workspace

from . import arguments, capabilities, configs, configs_bwd, limits
from .arguments import FLOAT_CODES, cdiv
from .launching import Kernel, compile_chain
from .params import Table, TemplateParams, flavor_for, shared_facts, vector_bytes
from .params_bwd import (
    BWD_ARGS,
    MAIN_FIELDS,
    REDUCE,
    REDUCE_ARGS,
    BiasParams,
    BwdTile,
    DkdvParams,
    DqParams,
    VectorParams,
    bias_params,
    statistics_params,
)

_LOADED = ("q", "k", "v", "do")
_FP32 = 4

# The workspace: row statistics, and partial sums of gradients that are sums over rows, keys, heads, batches.
STATS, SINK_SUMS, BIAS_SUMS, DQ_SUMS = "row_stats", "sink_sums", "bias_sums", "dq_sums"
_SUMS_FLAVORS = frozenset(row.flavor for row in configs_bwd.DKDV_SUMS if row.arch == "small")
_SMALL_CARD = Target.cuda((8, 6))


def _tile(table: tuple[configs.Row[BwdTile], ...], target: Target, facts: Mapping[str, Any]) -> BwdTile:
    assert target.cc is not None  # the engine is unavailable elsewhere
    return configs.pick(table, target.cc, facts)


def kept_axes(desc: SdpaBwdDesc) -> tuple[bool, bool]:
    """Which sequence axes the bias has; a symbolic one counts, whatever it is bound to later."""
    assert desc.bias is not None  # a dbias without a bias does not pass validation
    rows, columns = desc.bias.shape[-2:] if len(desc.bias.shape) > 1 else (1, desc.bias.shape[-1])
    return dim_max(rows) != 1, dim_max(columns) != 1


def bias_extents(desc: SdpaBwdDesc) -> tuple[int, int, int, int]:
    """The bias's shape, seen as four axes."""
    assert desc.bias is not None
    shape = arguments.extents(desc.bias)
    batches, heads, rows, columns = (*(1,) * (4 - len(shape)), *shape)
    return batches, heads, rows, columns


def sums_dq(desc: SdpaBwdDesc) -> bool:
    """Whether dQ is summed by atomic additions; a function of declared facts that no binding changes."""
    plain = desc.softcap is None and desc.mask is None and desc.bias is None
    wanted = desc.dq is not None and (desc.dk is not None or desc.dv is not None)
    return plain and wanted and not desc.deterministic and flavor_for(desc.head_dim, desc.head_dim_v) in _SUMS_FLAVORS


def _sum_blocks(desc: SdpaBwdDesc) -> int:
    """Blocks of 16 rows per head that sums of dQ take (dq_sums in kernels/bwd.cuh)."""
    rows = bind_dim(desc.seqlen_q, None)
    return rows // 16 + bind_dim(desc.batch, None) + 1 if desc.packed else cdiv(rows, 16)


def keys_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that the keys-stationary kernel is specialised on. With plain scores no band is one that ends past every key:
    tiles without a mask run the same code, and kernels of their own spilled."""
    plain = not facts["softcap"] and not facts["mask"] and facts["bias"] is None
    return {**facts, "has_right": facts["has_right"] or plain}


def backward_params(desc: SdpaBwdDesc, target: Target) -> dict[str, TemplateParams]:
    """Which specialisations serve the descriptor, by kernel; a function of plan-time facts only."""
    facts = shared_facts(desc, _LOADED)
    assert desc.do is not None  # a graph without it does not pass validation
    vec = min(vector_bytes(t, desc.packed) for t in (desc.o, desc.do))
    out: dict[str, TemplateParams] = {
        "pre": statistics_params(facts, vec, configs_bwd.PRE_WARPS, configs_bwd.PRE_ROWS)}
    if sums_dq(desc):
        # Narrow copies need registers for their addresses: they take the tile of small cards, which has some left.
        tile = _tile(configs_bwd.DKDV_SUMS, target if facts["vec"] == 16 else _SMALL_CARD, facts)
        out["dkdv"] = DkdvParams(**keys_facts(facts), tile=tile, sum_dq=True)
        out["cast"] = statistics_params(facts, 16, configs_bwd.PRE_WARPS, configs_bwd.PRE_ROWS)
    elif desc.dk is not None or desc.dv is not None:
        out["dkdv"] = DkdvParams(**keys_facts(facts), tile=_tile(configs_bwd.DKDV, target, facts))
    if desc.dq is not None and not sums_dq(desc):
        out["dq"] = DqParams(**facts, tile=_tile(configs_bwd.DQ, target, facts))
    if desc.dbias is not None:
        out["bias"] = bias_params(facts, _tile(configs_bwd.BIAS, target, facts), *kept_axes(desc))
    if desc.dsink is not None or (desc.dbias is not None and not all(kept_axes(desc))):
        out["reduce"] = REDUCE
    return out


def regions(desc: SdpaBwdDesc, kept: tuple[bool, bool] | None) -> tuple[Region, ...]:
    """The workspace, in bytes, from the bound extents; `kept`: which sequence axes of the bias the dBias kernel keeps, None
    where there is none. R = B * Sq rows per head, packed: the token total.

    row_stats   8 * Hq * R: (lse, delta) pairs
    sink_sums   4 * Hq * tiles of rows, where dSink is wanted
    dq_sums     4 * Hq * R * (D of the flavor), rounded up to 16 rows per sequence, where dQ is summed by atomic additions
    bias_sums   4 * B * Hq * (Sk | Sq | BIAS_CHUNKS), where dBias is wanted and a sequence axis is broadcast
    """
    heads, rows, batch = bind_dim(desc.heads_q, None), bind_dim(desc.seqlen_q, None), bind_dim(desc.batch, None)
    out = [Region(STATS, _bytes(2 * heads * rows * (1 if desc.packed else batch)))]
    if desc.dsink is not None:
        out.append(Region(SINK_SUMS, _bytes(heads * _row_tiles(desc))))
    if sums_dq(desc):
        out.append(Region(DQ_SUMS, _bytes(heads * (1 if desc.packed else batch) * _sum_blocks(desc) * 16 * _sum_columns(desc))))
    if kept is not None and not all(kept):
        out.append(Region(BIAS_SUMS, _bytes(batch * heads * _bias_line(desc, kept))))
    return tuple(out)


def _bytes(numbers: int) -> int:
    # Never empty: a kernel that has nothing to read still gets an address it can do arithmetic on.
    return _FP32 * max(numbers, 1)


def _row_tiles(desc: SdpaBwdDesc) -> int:
    """Blocks of statistics per head, all batches: the partial sums of dSink."""
    per_batch = arguments.tiles(bind_dim(desc.seqlen_q, None), bind_dim(desc.batch, None), desc.packed,
                                configs_bwd.PRE_ROWS)
    return per_batch * (1 if desc.packed else bind_dim(desc.batch, None))


def _sum_columns(desc: SdpaBwdDesc) -> int:
    flavor = flavor_for(desc.head_dim, desc.head_dim_v)
    assert flavor is not None  # check_support has seen to it
    return flavor[0]


def _bias_line(desc: SdpaBwdDesc, kept: tuple[bool, bool]) -> int:
    """Partial sums of dBias per (batch, head). `kept`: the axes that the compiled kernel keeps; a symbolic one may be bound
    to 1, and no bound descriptor tells that from a broadcast one."""
    _, _, rows, columns = bias_extents(desc)
    return columns if kept[1] else rows if kept[0] else configs_bwd.BIAS_CHUNKS


def _store_vector(t: TensorDesc | None, packed: bool) -> int:
    """Bytes of one store: rows have to end on it too, there is no narrower tail."""
    if t is None:
        return 16
    return math.gcd(vector_bytes(t, packed), arguments.extents(t)[-1] * t.dtype.itemsize)


def backward_values(desc: SdpaBwdDesc) -> dict[str, Any]:
    """Every number that the kernels share."""
    packed = desc.packed
    values = arguments.option_values(desc)
    for name, field in MAIN_FIELDS.items():
        values |= arguments.main_values(name, getattr(desc, field), packed)
    for name in ("lse", "dlse"):
        values |= arguments.row_values(name, getattr(desc, name), packed)
    values |= arguments.score_values("gbias", desc.dbias)
    values |= {f"g{n}_vec": _store_vector(getattr(desc, f"d{n}"), packed) for n in "qkv"}
    return values | dict.fromkeys(("n_tiles", "section", "kept_heads", "kept_rows", "kept_columns", "n_chunks"), 0) | {
        "sum_batches": 1, "sum_heads": 1, "sum_blocks": _sum_blocks(desc), "sum_columns": _sum_columns(desc)}


def _section(desc: SdpaBwdDesc, rows: int, heads_per_share: int, heads: int, l2: int) -> int:
    """How many heads are walked side by side: those whose shared operands, of `rows` rows, fit the L2 cache."""
    of_one = rows * (desc.head_dim + desc.head_dim_v) * desc.q.dtype.itemsize
    return arguments.head_section(heads, of_one, heads_per_share, l2, desc.band.has_right)


def launches(params: Mapping[str, TemplateParams], desc: SdpaBwdDesc, l2: int) -> list[tuple[str, int, dict[str, Any]]]:
    """(kernel, programs, the numbers that are its own) of each launch, in order. A `region` and an `out` name the
    workspace and the operand that a launch's partial sums go to or come from."""
    values = backward_values(desc)
    n_seqs, heads, group, packed = values["n_seqs"], values["heads"], values["group"], desc.packed
    copies = 1 if packed else n_seqs
    n_tiles = arguments.tiles(values["sq_max"], n_seqs, packed, configs_bwd.PRE_ROWS)
    out: list[tuple[str, int, dict[str, Any]]] = [
        ("pre", n_tiles * heads * copies, {"n_tiles": n_tiles, "region": None if desc.dsink is None else SINK_SUMS})]
    if "dkdv" in params:
        own = cast(DkdvParams, params["dkdv"]).tile.own
        n_tiles = arguments.tiles(values["sk_max"], n_seqs, packed, own)
        section = _section(desc, values["sq_max"] * group, 1, heads // group * copies, l2)
        out.append(("dkdv", n_tiles * (heads // group) * copies, {"n_tiles": n_tiles, "section": section}))
    if "cast" in params:
        out.append(("cast", out[0][1], {"n_tiles": out[0][2]["n_tiles"]}))
    if "dq" in params:
        own = cast(DqParams, params["dq"]).tile.own
        n_tiles = arguments.tiles(values["sq_max"], n_seqs, packed, own)
        section = _section(desc, values["sk_max"], group, heads * copies, l2)
        out.append(("dq", n_tiles * heads * copies, {"n_tiles": n_tiles, "section": section}))
    if "bias" in params:
        out += _bias_launches(cast(BiasParams, params["bias"]), desc, n_seqs, heads)
    if desc.dsink is not None:
        assert desc.sink is not None  # a dsink without a sink does not pass validation
        own_values = {"out_b": 0, "out_h": arguments.used_strides(desc.dsink)[0], "out_r": 0, "rows": _row_tiles(desc),
                      "out_heads": heads, "out_rows": 1, "sum_batches": 1, "sum_heads": 1, "sum_rows": 1,
                      "out_type": FLOAT_CODES[desc.dsink.dtype], "heads": heads, "region": SINK_SUMS, "out": "dsink"}
        out.append(("reduce", heads, own_values))
    return out


def _bias_launches(params: BiasParams, desc: SdpaBwdDesc, n_seqs: int, heads: int) -> list[tuple[str, int, dict[str, Any]]]:
    assert desc.dbias is not None
    batches, bias_heads, rows, columns = bias_extents(desc)
    tile, keep_rows, keep_columns = params.tile, params.keep_rows, params.keep_columns
    shares = {"sum_batches": n_seqs if batches == 1 else 1, "sum_heads": heads if bias_heads == 1 else 1}
    kept = {"kept_rows": rows, "kept_columns": columns, "n_chunks": configs_bwd.BIAS_CHUNKS}
    if keep_rows and keep_columns:
        blocks = batches * bias_heads * cdiv(rows, tile.own) * cdiv(columns, tile.block)
        return [("bias", blocks, {**kept, **shares, "kept_heads": bias_heads})]
    across = cdiv(columns, tile.block) if keep_columns else cdiv(rows, tile.own) if keep_rows else kept["n_chunks"]
    first = ("bias", n_seqs * heads * across, {**kept, "kept_heads": heads, "region": BIAS_SUMS})
    line, along = (columns, "k") if keep_columns else (rows, "q")
    sum_rows = not keep_rows and not keep_columns
    strides = arguments.score_values("gbias", desc.dbias)
    return [first, ("reduce", batches * bias_heads * cdiv(1 if sum_rows else line, REDUCE.threads), {
        "out_b": strides["gbias_b"], "out_h": strides["gbias_h"], "out_r": strides[f"gbias_{along}"], "heads": heads,
        "rows": _bias_line(desc, (keep_rows, keep_columns)), "out_heads": bias_heads, "out_rows": 1 if sum_rows else line, **shares,
        "sum_rows": int(sum_rows), "out_type": FLOAT_CODES[desc.dbias.dtype], "region": BIAS_SUMS, "out": "dbias"})]


# kernel -> (source, function, argument struct, its table)
_KERNELS: dict[str, tuple[str, str, str, Table]] = {
    **{n: (f"bwd_{n}", f"sdpa_bwd_{n}", "BwdArgs", BWD_ARGS) for n in ("pre", "dkdv", "dq", "bias", "cast")},
    "reduce": ("bwd_reduce", "sdpa_bwd_reduce", "ReduceArgs", REDUCE_ARGS),
}


def _kernel(name: str, params: TemplateParams, target: Target) -> Kernel:
    module, function, struct, table = _KERNELS[name]
    threads = params.threads if isinstance(params, VectorParams) else cast(DqParams, params).tile.threads
    return Kernel(module, function, struct, table, params, threads=threads,
                  shared=cast(DqParams, params).shared_bytes, target=target)


class SdpaBwdExecutable(Executable):
    """The kernels of one specialisation; serves every shape that shares it."""

    def __init__(self, params: Mapping[str, TemplateParams], target: Target) -> None:
        assert target.cc is not None
        self.params = dict(params)
        self.l2_bytes = configs.L2_BUDGET[configs.arch_class(target.cc)]
        self.kernels = compile_chain({name: partial(_kernel, name, p, target) for name, p in params.items()})

    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        desc, device = cast(SdpaBwdDesc, launch.desc), launch.operands["q"].device.index
        fields = {**MAIN_FIELDS, "gbias": "dbias", "lse": "lse", "dlse": "dlse", "bias": "bias", "mask": "mask",
                  "sink": "sink"} | arguments.INDEX_OPERANDS
        shared = backward_values(desc) | {argument: launch.ptr(field) for argument, field in fields.items()}
        shared["stats"] = workspace.ptr(STATS)
        shared["sums"] = workspace.ptr(DQ_SUMS) if "cast" in self.kernels else 0
        calls = []
        for name, programs, own in launches(self.params, desc, self.l2_bytes):
            region, out = own.pop("region", None), own.pop("out", None)
            addresses = {"partial": 0 if region is None else workspace.ptr(region), "out": launch.ptr(out) if out else 0}
            calls.append(self.kernels[name].bind(programs, {**shared, **own, **addresses}, device))

        def run(stream: int) -> None:
            for call in calls:
                call(stream)

        return run

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        bias = self.params.get("bias")
        return regions(cast(SdpaBwdDesc, desc), (bias.keep_rows, bias.keep_columns) if isinstance(bias, BiasParams) else None)

    def describe(self) -> Mapping[str, Any]:
        return {name: kernel.describe() for name, kernel in self.kernels.items()}


class SdpaBwdDslSm80(SdpaBwdDsl):
    """Backward cell of the SM80 engine."""

    engine: ClassVar[str] = capabilities.ENGINE
    capabilities = capabilities.BACKWARD

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        return Support((*super().check_support(desc, target).reasons, *limits.reasons(cast(SdpaBwdDesc, desc))))

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        desc = cast(SdpaBwdDesc, desc)
        return regions(desc, kept_axes(desc) if desc.dbias is not None else None)

    def compile(self, desc: OpDesc, target: Target) -> SdpaBwdExecutable:
        return SdpaBwdExecutable(backward_params(cast(SdpaBwdDesc, desc), target), target)
