"""Compressed attention and the choice of blocks on the engine contract.

    forward     nsa_cmp_fwd (-> nsa_cmp_importance)
    backward    nsa_bwd_pre -> nsa_cmp_dq, nsa_cmp_dkdv -> nsa_cmp_sum
    choice      nsa_topk

No kernel uses atomics and every sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from descriptors import DType, NsaCompressedBwdDesc, NsaCompressedDesc, NsaTopkDesc, OpDesc
from descriptors.dims import bind_dim, dim_max
from engines.base import (
    Adapter,
    Capabilities,
    Executable,
    NsaCompressedBwdDsl,
    NsaCompressedFwdDsl,
    NsaTopkDsl,
    Reason,
    Region,
    Support,
    Target,
)

from . import configs_nsa as configs
from .arguments import MAX_POSITIONS, cdiv, main_values, row_values, tiles, used_strides
from .capabilities import ENGINE, MIN_CC
from .launching import ChainExecutable, FrozenChain, FrozenKernel, Operand, Scratch, operand
from .nsa_map import NsaKernel, regions
from .params_nsa import PRE
from .params_nsa_cmp import (
    CMP_DKDV,
    CMP_DQ,
    CMP_FWD,
    CMP_IMPORTANCE,
    CMP_SUM,
    MAX_GROUP,
    MAX_SCORES,
    TOPK,
    CmpParams,
    compressed_params,
    topk_params,
)

_DTYPES = (DType.F16, DType.BF16, DType.F32)
Compressed = NsaCompressedDesc | NsaCompressedBwdDesc


class _Cell(Adapter):
    engine: ClassVar[str] = ENGINE

    def label(self, desc: OpDesc, target: Target) -> str:
        return ENGINE if target.cc is not None else f"{ENGINE}[interpreter]"


def _row(op: str, features: set[str], note: str, **limits: Any) -> tuple[Capabilities, ...]:
    return (Capabilities(ENGINE, op, ("cuda", "cpu"), _DTYPES, frozenset(features), min_cc=MIN_CC, note=note, **limits),)


def _limits(desc: Compressed) -> Iterable[Reason]:
    if desc.group > MAX_GROUP:
        yield Reason("group", str(desc.group), f"at most {MAX_GROUP}")
    if dim_max(desc.seqlen_q) * desc.group > MAX_POSITIONS or desc.seqlen_kv > MAX_POSITIONS:
        yield Reason("q.shape", f"{dim_max(desc.seqlen_q)} tokens of {desc.group} heads a group", f"at most {MAX_POSITIONS} rows")
    for name in ("lse", "dlse", "importance"):
        stats = getattr(desc, name, None)
        if stats is not None and stats.dtype is not DType.F32:
            yield Reason(f"{name}.dtype", str(stats.dtype), "fp32")


# Head dims up to which rows of the gate have run on a card, by op; wider kernels are left to the reference there. Beside the
# reason of principle there is one of experience: compiled for sm_90, dQ of 192/128 heads in fp32 came out wrong (its row showed
# it), though it is right in the interpreter and the cause is unknown.
_PROVEN_HEAD_DIM = {(NsaCompressedDesc.OP, DType.F32): 256, (NsaCompressedDesc.OP, DType.F16): 128,
                    (NsaCompressedDesc.OP, DType.BF16): 128, **{(NsaCompressedBwdDesc.OP, t): 128 for t in (DType.F32, DType.F16, DType.BF16)}}


def _unproven(desc: Compressed, target: Target) -> Iterable[Reason]:
    most, widest = _PROVEN_HEAD_DIM.get((desc.OP, desc.q.dtype), 256), max(desc.head_dim, desc.head_dim_v)
    if target.device == "cuda" and widest > most:
        yield Reason("q.shape", f"{desc.q.dtype} with head dims {desc.head_dim} and {desc.head_dim_v}",
                     f"at most {most} in {desc.q.dtype} on a GPU, as far as the gate's rows go")


class _Sizes:
    """Extents of a bound descriptor, and the arguments that every kernel here shares."""

    def __init__(self, desc: Compressed) -> None:
        self.desc, self.packed = desc, desc.packed
        self.n_seqs = max(bind_dim(desc.batch, None), 0)
        self.problems = (1 if desc.packed else self.n_seqs) * bind_dim(desc.heads_kv, None)
        self.tq, self.rows_kv = bind_dim(desc.seqlen_q, None), bind_dim(desc.rows_kv, None)
        self.values: dict[str, Any] = {
            "heads_kv": bind_dim(desc.heads_kv, None), "group": desc.group, "n_seqs": self.n_seqs, "tq": self.tq,
            "sk": desc.seqlen_kv, "off": 0 if self.packed else desc.seqlen_kv - self.tq, "length": desc.block_len,
            "stride": desc.stride, "d": desc.head_dim, "dv": desc.head_dim_v, "scale": desc.scale_value,
            "n_rows_kv": self.rows_kv,
            "stride_cu": 0 if desc.cu_seqlens is None else used_strides(desc.cu_seqlens)[0]}
        for name in ("q", "k", "v", "o", "do", "dq"):
            self.values |= main_values(name, getattr(desc, name, None), self.packed)
        for name in ("lse", "dlse"):
            self.values |= row_values(name, getattr(desc, name, None), self.packed)
        names = ("q", "k", "v", "o", "do", "dq", "lse", "dlse")
        self.pointers: dict[str, Any] = {f"{n}_ptr": operand(desc, n) if hasattr(desc, n) else None for n in names}
        self.pointers["cu_ptr"] = operand(desc, "cu_seqlens")

    def freeze(self, kernel: NsaKernel, programs: int, values: Mapping[str, Any] | None = None,
               pointers: Mapping[str, Any] | None = None) -> FrozenKernel:
        return kernel.freeze(programs, {**self.values, **(values or {})}, {**self.pointers, **(pointers or {})})

    def row_tiles(self, kernel: NsaKernel) -> int:
        params: Any = kernel.params
        return tiles(self.tq, self.n_seqs, self.packed, params.all.tokens)


class _Shared(ChainExecutable):
    def __init__(self, desc: Compressed, target: Target) -> None:
        super().__init__()
        self.target = target
        self.shared: CmpParams = compressed_params(desc, interpreted=target.cc is None)
        self.kernels: dict[str, NsaKernel] = {}

    def _pick(self, table: tuple[configs.Row, ...]) -> Any:
        s = self.shared
        blocks = configs.pick(table, self.target.cc, s.itemsize, max(s.d_pad, s.dv_pad)).blocks
        # A tile of rows holds whole tokens.
        return replace(blocks, block_m=max(blocks.block_m, 1 << (s.group - 1).bit_length()))

    def _add(self, spec: Any, blocks: Any, *, key: str | None = None, **own: Any) -> None:
        self.kernels[key or spec.name] = NsaKernel(spec, cast(Any, replace(self.shared, **own)), blocks, self.target)

    def describe(self) -> Mapping[str, Any]:
        return {name: kernel.describe() for name, kernel in self.kernels.items()}


# ---- forward


class NsaCompressedFwdExecutable(_Shared):
    def __init__(self, desc: NsaCompressedDesc, target: Target) -> None:
        super().__init__(desc, target)
        blocks = self._pick(configs.CMP_FWD)
        self._add(CMP_FWD, blocks)
        if desc.importance is not None:
            self._add(CMP_IMPORTANCE, blocks)

    def freeze(self, desc: Any) -> FrozenChain:
        s = _Sizes(desc)
        lse: dict[str, Any] = {}
        if desc.lse is None:
            heads = bind_dim(desc.heads_q, None)
            lse = {"stride_lse_b": heads * s.tq, "stride_lse_h": s.tq, "stride_lse_s": 1}
            s.pointers["lse_ptr"] = Scratch("lse")
        kernel = self.kernels[CMP_FWD.name]
        n_tiles = s.row_tiles(kernel)
        calls = [s.freeze(kernel, n_tiles * s.problems, {**lse, "n_tiles": n_tiles})]
        if desc.importance is not None:
            kernel, n_tiles = self.kernels[CMP_IMPORTANCE.name], s.row_tiles(self.kernels[CMP_IMPORTANCE.name])
            n_out = bind_dim(desc.importance.shape[-1], None)
            b, h, t, m = _four(used_strides(desc.importance), desc.packed)
            strides = {"stride_imp_b": b, "stride_imp_h": h, "stride_imp_t": t, "stride_imp_m": m}
            calls.append(s.freeze(kernel, n_tiles * s.problems if n_out else 0,
                                  {**lse, **strides, "n_tiles": n_tiles, "n_out": n_out},
                                  {"out_ptr": Operand("importance")}))
        return FrozenChain(calls)


def _four(strides: tuple[int, ...], packed: bool) -> tuple[int, int, int, int]:
    """(batch, head, token, last) of [B, H, T, n] or [T, H, n]."""
    if packed:
        t, h, last = strides
        return 0, h, t, last
    b, h, t, last = strides
    return b, h, t, last


class NsaCompressedFwdDslTriton(_Cell, NsaCompressedFwdDsl):
    """Compressed attention of the Triton engine."""

    capabilities = _row(NsaCompressedDesc.OP, {"lse", "importance", "cu_seqlens"}, f"groups up to {MAX_GROUP}; any strides; on a GPU head dims as far as gate rows go",
                        head_dim=(1, 256), head_dim_v=(1, 256))

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        d = cast(NsaCompressedDesc, desc)
        return Support((*super().check_support(desc, target).reasons, *_limits(d), *_unproven(d, target)))

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        d = cast(NsaCompressedDesc, desc)
        rows = bind_dim(d.seqlen_q, None) * bind_dim(d.heads_q, None) * (1 if d.packed else bind_dim(d.batch, None))
        return regions({"lse": 4 * rows}) if d.lse is None else ()

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        return NsaCompressedFwdExecutable(cast(NsaCompressedDesc, desc), target)


# ---- backward


def _pitch(width: int) -> int:
    return cdiv(width, 4) * 4


class NsaCompressedBwdExecutable(_Shared):
    def __init__(self, desc: NsaCompressedBwdDesc, target: Target) -> None:
        super().__init__(desc, target)
        self._add(PRE, configs.PRE)
        blocks = self._pick(configs.CMP_BWD)
        if desc.dq is not None:
            self._add(CMP_DQ, blocks)
        if desc.dk is not None or desc.dv is not None:
            self._add(CMP_DKDV, blocks)
        if desc.dk is not None:
            self._add(CMP_SUM, configs.KEYS, key="sum_dk")
        if desc.dv is not None:
            self._add(CMP_SUM, configs.KEYS, key="sum_dv", d_pad=self.shared.dv_pad, even_d=self.shared.even_dv)

    def freeze(self, desc: Any) -> FrozenChain:
        s = _Sizes(desc)
        s.pointers |= {f"{n}_ptr": Scratch(n) for n in ("stats", "part_dk", "part_dv")}
        n_rows = s.tq * desc.group
        n_tiles = cdiv(n_rows, configs.PRE.block_m)
        calls = [s.freeze(self.kernels[PRE.name], n_tiles * s.problems, {"n_tiles": n_tiles, "n_rows": n_rows})]
        if desc.dq is not None:
            kernel = self.kernels[CMP_DQ.name]
            n_tiles = s.row_tiles(kernel)
            calls.append(s.freeze(kernel, n_tiles * s.problems, {"n_tiles": n_tiles}))
        if CMP_DKDV.name in self.kernels:
            kernel = self.kernels[CMP_DKDV.name]
            params: Any = kernel.params
            n_tiles = cdiv(s.rows_kv, params.all.blocks.block_n)
            here = {"n_tiles": n_tiles, "splits": configs.CMP_SPLITS, "pitch_k": _pitch(desc.head_dim),
                    "pitch_v": _pitch(desc.head_dim_v)}
            calls.append(s.freeze(kernel, n_tiles * s.problems * configs.CMP_SPLITS, here))
        for name, grad, width in (("dk", desc.dk, desc.head_dim), ("dv", desc.dv, desc.head_dim_v)):
            if grad is not None:
                n_tiles = cdiv(s.rows_kv, configs.KEYS.block_m)
                calls.append(s.freeze(
                    self.kernels[f"sum_{name}"], n_tiles * s.problems,
                    {"n_tiles": n_tiles, "splits": configs.CMP_SPLITS, "d": width, "pitch": _pitch(width),
                     **main_values("out", grad, desc.packed)},
                    {"part_ptr": Scratch(f"part_{name}"), "out_ptr": Operand(name)}))
        return FrozenChain(calls)


class NsaCompressedBwdDslTriton(_Cell, NsaCompressedBwdDsl):
    """Gradients of compressed attention of the Triton engine."""

    capabilities = _row(NsaCompressedBwdDesc.OP, {"cu_seqlens", "dlse", "deterministic"},
                        f"groups up to {MAX_GROUP}; any strides; on a GPU head dims as far as gate rows go", head_dim=(1, 256), head_dim_v=(1, 256))

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        d = cast(NsaCompressedBwdDesc, desc)
        return Support((*super().check_support(desc, target).reasons, *_limits(d), *_unproven(d, target)))

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        d = cast(NsaCompressedBwdDesc, desc)
        s = _Sizes(d)
        rows = s.problems * s.rows_kv * configs.CMP_SPLITS
        return regions({
            "stats": 8 * s.problems * s.tq * d.group,
            "part_dk": 0 if d.dk is None else 4 * rows * _pitch(d.head_dim),
            "part_dv": 0 if d.dv is None else 4 * rows * _pitch(d.head_dim_v)})

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        return NsaCompressedBwdExecutable(cast(NsaCompressedBwdDesc, desc), target)


# ---- the choice


class NsaTopkExecutable(ChainExecutable):
    def __init__(self, desc: NsaTopkDesc, target: Target) -> None:
        super().__init__()
        self.kernel = NsaKernel(TOPK, cast(Any, topk_params(desc)), configs.TOPK, target)

    def freeze(self, desc: Any) -> FrozenChain:
        packed = desc.cu_seqlens is not None
        shape = [bind_dim(x, None) for x in desc.importance.shape]
        n_tokens, heads_kv = (shape[0], shape[1]) if packed else (shape[2], shape[1])
        n_seqs = max(bind_dim(desc.cu_seqlens.shape[0], None) - 1, 0) if packed else shape[0]
        rows = self.kernel.constexprs["ROWS"]
        n_tiles = cdiv(n_tokens, rows)
        values: dict[str, Any] = {
            "n_tiles": n_tiles, "heads_kv": heads_kv, "n_tokens": n_tokens, "n_scores": shape[-1],
            "slots": bind_dim(desc.block_indices.shape[-1], None), "n_init": desc.n_init, "n_local": desc.n_local,
            "n_seqs": n_seqs, "off": 0 if packed else desc.seqlen_kv - n_tokens, "n_steps": (n_seqs + 2).bit_length() + 1,
            "stride_cu": used_strides(desc.cu_seqlens)[0] if packed else 0}
        for name, tensor, axes in (("score", desc.importance, "bhtm"), ("out", desc.block_indices, "bhts")):
            values |= {f"stride_{name}_{a}": x for a, x in zip(axes, _four(used_strides(tensor), packed))}
        problems = heads_kv * (1 if packed else shape[0])
        pointers = {"score_ptr": Operand("importance"), "out_ptr": Operand("block_indices"),
                    "cu_ptr": operand(desc, "cu_seqlens")}
        return FrozenChain([self.kernel.freeze(n_tiles * problems, values, pointers)])

    def describe(self) -> Mapping[str, Any]:
        return self.kernel.describe()


class NsaTopkDslTriton(_Cell, NsaTopkDsl):
    """The choice of blocks of the Triton engine."""

    capabilities = _row(NsaTopkDesc.OP, {"cu_seqlens"}, f"fp32 scores of up to {MAX_SCORES} blocks")

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        d = cast(NsaTopkDesc, desc)
        reasons = list(super().check_support(desc, target).reasons)
        if d.importance.dtype is not DType.F32:
            reasons.append(Reason("importance.dtype", str(d.importance.dtype), "fp32"))
        if dim_max(d.importance.shape[-1]) > MAX_SCORES:
            reasons.append(Reason("importance.shape", f"{dim_max(d.importance.shape[-1])} blocks", f"at most {MAX_SCORES}"))
        return Support(tuple(reasons))

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        return NsaTopkExecutable(cast(NsaTopkDesc, desc), target)
