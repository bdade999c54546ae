"""Attention forward on the engine contract: one kernel, specialised by `FwdParams`, bound through
`launching.Kernel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from descriptors import OpDesc, SdpaDesc
from engines.base import Executable, SdpaFwdDsl, Support, Target

from . import arguments, capabilities, configs, hopper, limits
from .launching import ChainExecutable, FrozenChain, Kernel, operand
from .params import FWD_ARGS, FwdParams, shared_facts

_MAIN = ("q", "k", "v", "o")
_STRIDED = ("lse", "bias", "mask")


def forward_params(desc: SdpaDesc, target: Target) -> FwdParams:
    """Which specialisation serves the descriptor; a function of plan-time facts only."""
    facts = shared_facts(desc, _MAIN, _STRIDED, interpreted=target.cc is None)
    blocks = configs.pick(configs.FWD, target.cc, desc.q.dtype.itemsize, max(facts["d_pad"], facts["dv_pad"]),
                          tiled=desc.bias is not None or desc.mask is not None,
                          band=desc.band.has_left or desc.band.has_right)
    return FwdParams(**facts, stats=desc.lse is not None, blocks=blocks)


class SdpaFwdExecutable(ChainExecutable):
    """The forward kernel of one specialisation; serves every shape that shares it."""

    def __init__(self, params: FwdParams, target: Target) -> None:
        super().__init__()
        self.params = params
        blocks = params.blocks
        self.kernel = Kernel("fwd", "sdpa_fwd", FWD_ARGS, params, params.constexprs(), blocks.num_warps,
                             blocks.num_stages, target)

    def freeze(self, desc: SdpaDesc) -> FrozenChain:
        packed = desc.packed
        values = arguments.option_values(desc)
        for name in _MAIN:
            values |= arguments.main_values(name, getattr(desc, name), packed)
        values |= arguments.row_values("lse", desc.lse, packed)
        values["n_tiles"] = arguments.row_tiles(desc, self.params.blocks.block_m)
        programs = values["n_tiles"] * values["heads_q"] * (1 if packed else values["n_seqs"])
        fields = {f"{n}_ptr": n for n in (*_MAIN, "lse")} | arguments.option_operands()
        pointers = {argument: operand(desc, field) for argument, field in fields.items()}
        return FrozenChain([self.kernel.freeze(programs, values, pointers)])

    def describe(self) -> Mapping[str, Any]:
        return self.kernel.describe()


class SdpaFwdDslTriton(SdpaFwdDsl):
    """Forward cell of the Triton engine."""

    engine: ClassVar[str] = capabilities.ENGINE
    capabilities = capabilities.FORWARD

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        return Support((*super().check_support(desc, target).reasons, *limits.reasons(cast(SdpaDesc, desc))))

    def label(self, desc: OpDesc, target: Target) -> str:
        return self.engine if target.cc is not None else f"{self.engine}[interpreter]"

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        desc = cast(SdpaDesc, desc)
        if hopper.serves_forward(desc, target):
            return hopper.HopperFwdExecutable(hopper.forward_params(desc), target)
        return SdpaFwdExecutable(forward_params(desc, target), target)
