"""The reference engine behind the adapter contract: nothing to compile, every call is the functions of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from descriptors import OpDesc, PointwiseDesc, SdpaBwdDesc, SdpaDesc
from engines.base import (
    Adapter,
    Engine,
    Executable,
    Launch,
    PointwiseDsl,
    Reason,
    SdpaBwdDsl,
    SdpaFwdDsl,
    Support,
    Target,
)

from .capabilities import BACKWARD, FORWARD, POINTWISE
from .nsa_adapter import NSA_ADAPTERS
from .primitives import PRIMITIVES, run_primitive
from .sdpa import SdpaGrads, sdpa_backward, sdpa_forward
from .torch_call import TorchCall

__all__ = ["ENGINE", "PointwiseDslReference", "ReferenceEngine", "SdpaBwdDslReference", "SdpaFwdDslReference"]

_TENSOR_OPTIONS = ("bias", "mask", "sink", "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv")


def attention_options(desc: SdpaDesc | SdpaBwdDesc, operands: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keyword options that `sdpa_forward` and `sdpa_backward` share, from a bound record and its operands."""
    options: dict[str, Any] = {name: operands.get(name) for name in _TENSOR_OPTIONS}
    band = desc.band
    options.update(scale=desc.scale_value, softcap=desc.softcap, window=(band.left, band.band_right),
                   align_bottom_right=band.align == "bottom_right")
    return options


def _forward(launch: Launch) -> Callable[[], Any]:
    x = launch.operands
    options = attention_options(launch.desc, x)  # type: ignore[arg-type]
    return lambda: sdpa_forward(x["q"], x["k"], x["v"], out=(x["o"], x.get("lse")), **options)


def _backward(launch: Launch) -> Callable[[], Any]:
    x = launch.operands
    options = attention_options(launch.desc, x)  # type: ignore[arg-type]
    out = {name: x[name] for name in SdpaGrads._fields if name in x}
    return lambda: sdpa_backward(x["q"], x["k"], x["v"], x["o"], x["do"], x["lse"], dlse=x.get("dlse"),
                                 want=tuple(out), out=out, **options)


def _pointwise(launch: Launch) -> Callable[[], Any]:
    desc, x = launch.desc, launch.operands
    assert isinstance(desc, PointwiseDesc)
    inputs = tuple(x[name] for name in desc.INPUTS if name in x)
    return lambda: run_primitive(desc, inputs, x["out"])


class SdpaFwdDslReference(SdpaFwdDsl):
    engine = "reference"
    capabilities = FORWARD

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        return TorchCall("sdpa_forward", _forward)


class SdpaBwdDslReference(SdpaBwdDsl):
    engine = "reference"
    capabilities = BACKWARD

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        return TorchCall("sdpa_backward", _backward)


class PointwiseDslReference(PointwiseDsl):
    engine = "reference"
    capabilities = POINTWISE

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        if desc.op not in PRIMITIVES:
            return Support((Reason("op", desc.op, f"one of {', '.join(sorted(PRIMITIVES))}"),))
        return super().check_support(desc, target)

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        return TorchCall(desc.op, _pointwise)


class ReferenceEngine(Engine):
    """The oracle, and the engine of last resort: every op, every option, every device."""

    name = "reference"
    _ADAPTERS: tuple[Adapter, ...] = (
        SdpaFwdDslReference(), SdpaBwdDslReference(), PointwiseDslReference(), *NSA_ADAPTERS)

    def adapters(self) -> tuple[Adapter, ...]:
        return self._ADAPTERS


ENGINE = ReferenceEngine()
