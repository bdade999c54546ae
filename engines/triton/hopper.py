"""Which descriptors the Hopper kernels serve, and their executables.

A kernel here is one more specialisation of the Triton engine: the same cell, the same gate. What it does not serve goes
to the kernels that serve everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from descriptors import DType, OpDesc, SdpaBwdDesc, SdpaDesc, TensorDesc
from descriptors.dims import bind_dim, is_symbolic
from engines.base import Region, Target

from . import arguments, configs_hopper, runtime
from .arguments import cdiv
from .launching import (
    FLAT,
    FOLDED,
    PERSISTENT,
    ChainExecutable,
    FrozenChain,
    FrozenKernel,
    Kernel,
    Pointer,
    Scratch,
    operand,
)
from .params import DTYPES, HINT_BYTES, Arg, is_aligned, needs_wide
from .params_hopper import (
    BWD_HOPPER_ARGS,
    CAST_HOPPER_ARGS,
    FWD_HOPPER_ARGS,
    PRE_HOPPER_ARGS,
    HopperBwdParams,
    HopperCastParams,
    HopperFwdParams,
    HopperPreParams,
    resolve,
)

_CC = (9, 0)
# Gluon is marked experimental: its language and how its kernels take tensor maps may change with every release, so only
# releases that these kernels ran on count. Others use the other kernels.
_RELEASES = ("3.6",)
# A tensor map's limit: strides below 2**40 bytes.
_MAX_STRIDE_BYTES = 2**40
_OPTIONS = ("bias", "mask", "sink", "softcap", "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv")
_MOST_PADDING = 2
# The kernels are compiled for four warps; those of the other roles are added inside.
_WARPS = 4


@cache
def _compiles() -> bool:
    return runtime.toolchain().get("triton") in _RELEASES


def serves(desc: SdpaDesc | SdpaBwdDesc, target: Target, main: Sequence[str], rows: Sequence[str],
           head_dims: frozenset[int]) -> bool:
    """Whether the Hopper kernels are right and faster for the descriptor, from plan-time facts alone. `main`: the
    operands laid out like q; `rows`: those with a number per query row; `head_dims`: the ones with kernels."""
    if target.cc != _CC or not _compiles():
        return False
    tensors = {n: t for n in main if (t := getattr(desc, n)) is not None}
    return (desc.q.dtype in (DType.F16, DType.BF16)
            and all(getattr(desc, name) is None for name in _OPTIONS)
            and desc.head_dim == desc.head_dim_v and desc.head_dim in head_dims
            and not any(is_symbolic(d) for t in tensors.values() for d in (*t.shape, *t.strides))
            and all(d > 0 for t in tensors.values() for d in t.shape)
            and _band_is_simple(desc)
            and all(is_aligned(t) and not needs_wide(n, t, False) and _mappable(t) for n, t in tensors.items())
            and not any(needs_wide(n, t, False) for n in rows if (t := getattr(desc, n)) is not None))


def _band_is_simple(desc: SdpaDesc | SdpaBwdDesc) -> bool:
    """No mask, or a causal one over a square: there the diagonal crosses one key block per 64 rows. A right edge given as
    a width is a run-time value, so it does not count as causal even where it is 0."""
    band = desc.band
    if band.has_left:
        return False
    return not band.has_right or (band.causal and desc.seqlen_q == desc.seqlen_kv)


def _mappable(t: TensorDesc) -> bool:
    """Rows that share memory (broadcast axes, views that unfold) are left to the other kernels."""
    pitches = [s for d, s in zip(t.shape[:-1], t.strides[:-1]) if d != 1]
    return t.nests and all(0 < s and s * t.dtype.itemsize < _MAX_STRIDE_BYTES for s in pitches)  # type: ignore[operator]


def serves_forward(desc: SdpaDesc, target: Target) -> bool:
    return serves(desc, target, ("q", "k", "v", "o"), ("lse",), configs_hopper.head_dims(configs_hopper.FWD_HOPPER))


_BWD_MAIN = ("q", "k", "v", "o", "do", "dq", "dk", "dv")


def serves_backward(desc: SdpaBwdDesc, target: Target) -> bool:
    """dQ is a sum in arrival order here, so a deterministic backward is left to the kernels that fix every order; so is
    one that wants only some of the three gradients, and one whose rows are few: they are padded to whole tiles here, in fp32."""
    return (not desc.deterministic and None not in (desc.dq, desc.dk, desc.dv)
            and serves(desc, target, _BWD_MAIN, ("lse", "dlse"), configs_hopper.head_dims(configs_hopper.BWD_HOPPER))
            and _padded_rows(desc) <= _MOST_PADDING * bind_dim(desc.seqlen_q, None))


def _padded_rows(desc: SdpaBwdDesc) -> int:
    """Rows of a head in the sums of dQ."""
    block = backward_params(desc).tile.block_m
    return cdiv(bind_dim(desc.seqlen_q, None), block) * block


def extents(t: TensorDesc) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides for a tensor map. The stride of an extent of 1 is never used and may be any number, but the map
    wants a positive multiple of 16 bytes there too."""
    shape = arguments.extents(t)
    unit = HINT_BYTES // t.dtype.itemsize
    return shape, tuple(s or max(unit, shape[-1]) for s in arguments.used_strides(t)[:-1]) + (1,)


class HopperKernel(Kernel):
    """A kernel whose argument table may hold tensor maps."""

    def __init__(self, module: str, name: str, table: Sequence[tuple[str, str]], params: Any, target: Target) -> None:
        cap = getattr(getattr(params, "tile", None), "max_registers", None)
        super().__init__(module, name, table, params, params.constexprs(), _WARPS, 1, target, max_registers=cap)

    def _resolve(self, table: Sequence[tuple[str, str]], params: Any) -> tuple[Arg, ...]:
        return resolve(table, params)


def forward_params(desc: SdpaDesc) -> HopperFwdParams:
    causal = desc.band.has_right
    batch, heads, rows, _ = arguments.extents(desc.q)
    tile = configs_hopper.pick(configs_hopper.FWD_HOPPER, desc.head_dim, causal, heads=batch * heads, extent=rows)
    return HopperFwdParams(DTYPES[desc.q.dtype], desc.head_dim, causal, stats=desc.lse is not None, tile=tile)


class HopperFwdExecutable(ChainExecutable):
    """The forward kernel of one specialisation; serves every shape that shares it."""

    def __init__(self, params: HopperFwdParams, target: Target) -> None:
        super().__init__()
        self.params = params
        self.kernel = HopperKernel("hopper.fwd", "sdpa_fwd_hopper", FWD_HOPPER_ARGS, params, target)

    def freeze(self, desc: SdpaDesc) -> FrozenChain:
        shared = arguments.option_values(desc)
        values: dict[str, Any] = {n: shared[n] for n in ("heads_q", "group", "scale")}
        values |= {"sq": shared["sq_max"], "sk": shared["sk_max"]}
        values |= arguments.main_values("o", desc.o, False) | arguments.row_values("lse", desc.lse, False)
        values |= {f"{n}_desc": extents(getattr(desc, n)) for n in "qkv"}
        values["n_tiles"] = arguments.row_tiles(desc, self.params.tile.block_m)
        pointers = {f"{n}_desc": operand(desc, n) for n in "qkv"}
        pointers |= {f"{n}_ptr": operand(desc, n) for n in ("o", "lse")}
        programs = values["n_tiles"] * values["heads_q"] * shared["n_seqs"]
        grid = PERSISTENT if self.params.tile.persistent else FOLDED
        return FrozenChain([self.kernel.freeze(programs, values, pointers, grid=grid)])

    def describe(self) -> Mapping[str, Any]:
        return self.kernel.describe()


# The backward's workspace: (lse, delta) per row, and dQ as it is summed, both in whole tiles of rows.
STATS, ACCUMULATOR = "row_stats", "dq_sums"
_FP32 = 4
_CAST_ROWS = 64


def backward_params(desc: SdpaBwdDesc) -> HopperBwdParams:
    causal = desc.band.has_right
    batch, heads, keys, _ = arguments.extents(desc.k)
    tile = configs_hopper.pick(configs_hopper.BWD_HOPPER, desc.head_dim, causal, heads=batch * heads, extent=keys)
    return HopperBwdParams(DTYPES[desc.q.dtype], desc.head_dim, causal, tile=tile)


class HopperBwdExecutable(ChainExecutable):
    """bwd_pre_hopper -> sdpa_bwd_hopper -> dq_cast_hopper: five matrix products in one kernel, dQ added up in fp32 by the
    memory system."""

    def __init__(self, desc: SdpaBwdDesc, target: Target) -> None:
        super().__init__()
        self.params = main = backward_params(desc)
        # The kernels around the main one are the same under every mask.
        about = (main.dtype, main.d, False)
        pre = HopperPreParams(*about, dlse=desc.dlse is not None, block_m=main.tile.block_m)
        cast = HopperCastParams(*about, block_m=_CAST_ROWS)
        module = "hopper.bwd"
        self.pre = HopperKernel(module, "bwd_pre_hopper", PRE_HOPPER_ARGS, pre, target)
        self.main = HopperKernel(module, "sdpa_bwd_hopper", BWD_HOPPER_ARGS, main, target)
        self.cast = HopperKernel(module, "dq_cast_hopper", CAST_HOPPER_ARGS, cast, target)

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        """In bytes, with R = B * Hq * Sq rounded up to whole tiles: row_stats 8 * R, dq_sums 4 * R * D."""
        desc = cast(SdpaBwdDesc, desc)
        block = self.params.tile.block_m
        b, h, s = (bind_dim(d, None) for d in desc.q.shape[:3])
        rows = b * h * cdiv(s, block) * block
        return Region(STATS, 2 * _FP32 * rows), Region(ACCUMULATOR, _FP32 * rows * self.params.d)

    def freeze(self, desc: SdpaBwdDesc) -> FrozenChain:
        tile = self.params.tile
        shared = arguments.option_values(desc)
        batch, heads_q, group = shared["n_seqs"], shared["heads_q"], shared["group"]
        sq, sk, d = shared["sq_max"], shared["sk_max"], shared["d"]
        tiles_q, tiles_k, tiles_c = cdiv(sq, tile.block_m), cdiv(sk, tile.block_n), cdiv(sq, _CAST_ROWS)
        rows = batch * heads_q * tiles_q * tile.block_m
        values: dict[str, Any] = {
            "heads_q": heads_q, "heads_k": heads_q // group, "group": group, "scale": shared["scale"], "sq": sq, "sk": sk,
            "tiles_q": tiles_q, "n_tiles": tiles_k, "rows_pad": tiles_q * tile.block_m,
            "stat_desc": ((2 * rows // tile.block_m, tile.block_m), (tile.block_m, 1)), "dq_desc": ((rows, d), (d, 1)),
        }
        for name in ("o", "do", "dk", "dv"):
            values |= arguments.main_values(name, getattr(desc, name), False)
        for name in ("lse", "dlse"):
            values |= arguments.row_values(name, getattr(desc, name), False)
        values |= {f"{n}_desc": extents(getattr(desc, n)) for n in ("q", "k", "v", "do")}
        pointers: dict[str, Pointer] = {f"{n}_ptr": operand(desc, n) for n in (*_BWD_MAIN, "lse", "dlse")}
        pointers |= {f"{n}_desc": operand(desc, n) for n in ("q", "k", "v", "do")}
        pointers |= {"stats_ptr": Scratch(STATS), "stat_desc": Scratch(STATS), "dq_acc_ptr": Scratch(ACCUMULATOR),
                     "dq_desc": Scratch(ACCUMULATOR), "acc_ptr": Scratch(ACCUMULATOR)}
        dq = arguments.main_values("", desc.dq, False)
        heads = batch * heads_q

        def frozen(kernel: HopperKernel, programs: int, **own: int) -> FrozenKernel:
            return kernel.freeze(programs, {**values, **own}, pointers, grid=FLAT)

        return FrozenChain([
            frozen(self.pre, heads * tiles_q), frozen(self.main, batch * (heads_q // group) * tiles_k),
            frozen(self.cast, heads * tiles_c, tiles_q=tiles_c, **dq)])

    def describe(self) -> Mapping[str, Any]:
        return {kernel.name: kernel.describe() for kernel in (self.pre, self.main, self.cast)}
