"""Attention forward on the engine contract: one kernel, specialised by `FwdParams`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from descriptors import OpDesc, SdpaDesc
from engines.base import BoundCall, Executable, Launch, SdpaFwdDsl, Support, Target, Workspace

from . import arguments, capabilities, configs, limits
from .launching import Kernel
from .params import FWD_ARGS, FwdParams, shared_facts, vector_bytes

_MAIN = ("q", "k", "v", "o")


def forward_params(desc: SdpaDesc, target: Target) -> FwdParams:
    """Which specialisation serves the descriptor; a function of plan-time facts only."""
    assert target.cc is not None  # the engine is unavailable elsewhere
    facts = shared_facts(desc, ("q", "k", "v"))
    return FwdParams(**facts, tile=configs.pick(configs.FWD, target.cc, facts))


def forward_arguments(params: FwdParams, desc: SdpaDesc, l2_bytes: int) -> tuple[int, dict[str, Any]]:
    """(programs, every number by name) of one launch."""
    packed, block = desc.packed, params.tile.block_m
    values = arguments.option_values(desc)
    for name in _MAIN:
        values |= arguments.main_values(name, getattr(desc, name), packed)
    values |= arguments.row_values("lse", desc.lse, packed)
    pack = arguments.head_pack(desc, block)
    values["pack"] = pack
    values["n_tiles"] = arguments.tiles(values["sq_max"] * pack, values["n_seqs"], packed, block)
    # Stores have no narrower tail: a row has to end on the vector too.
    values["o_vec"] = math.gcd(vector_bytes(desc.o, packed), desc.head_dim_v * desc.o.dtype.itemsize)
    heads = values["heads"] // pack * (1 if packed else values["n_seqs"])
    of_one = values["sk_max"] * (desc.head_dim + desc.head_dim_v) * desc.q.dtype.itemsize
    values["section"] = arguments.head_section(heads, of_one, values["group"] // pack, l2_bytes, params.has_right)
    return values["n_tiles"] * heads, values


class SdpaFwdExecutable(Executable):
    """The forward kernel of one specialisation; serves every shape that shares it."""

    def __init__(self, params: FwdParams, target: Target) -> None:
        assert target.cc is not None
        self.params = params
        self.l2_bytes = configs.L2_BUDGET[configs.arch_class(target.cc)]
        self.kernel = Kernel("fwd", "sdpa_fwd", "FwdArgs", FWD_ARGS, params, threads=params.tile.threads,
                             shared=params.shared_bytes, target=target)

    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        desc = cast(SdpaDesc, launch.desc)
        programs, values = forward_arguments(self.params, desc, self.l2_bytes)
        fields = {n: n for n in (*_MAIN, "lse", "bias", "mask", "sink")} | arguments.INDEX_OPERANDS
        values |= {argument: launch.ptr(field) for argument, field in fields.items()}
        return self.kernel.bind(programs, values, launch.operands["q"].device.index)

    def describe(self) -> Mapping[str, Any]:
        return self.kernel.describe()


class SdpaFwdDslSm80(SdpaFwdDsl):
    """Forward cell of the SM80 engine."""

    engine: ClassVar[str] = capabilities.ENGINE
    capabilities = capabilities.FORWARD

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        return Support((*super().check_support(desc, target).reasons, *limits.reasons(cast(SdpaDesc, desc))))

    def compile(self, desc: OpDesc, target: Target) -> SdpaFwdExecutable:
        return SdpaFwdExecutable(forward_params(cast(SdpaDesc, desc), target), target)
