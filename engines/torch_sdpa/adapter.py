"""PyTorch's attention behind the adapter contract: the first backend that does a descriptor exactly serves it.

The backend is chosen at plan time, from the descriptor alone, and named in the route: `torch_sdpa[CUDNN_ATTENTION]`.
The operators allocate their results, which are then copied into the buffers of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from descriptors import OpDesc, SdpaBwdDesc, SdpaDesc
from engines.base import (
    Adapter,
    BoundCall,
    Decline,
    Engine,
    Executable,
    Launch,
    Reason,
    SdpaBwdDsl,
    SdpaFwdDsl,
    Support,
    Target,
    Workspace,
)

from .calls import CALLS, Calls
from .cells import BACKWARD, FORWARD, NAME, Cell

__all__ = ["ENGINE", "SdpaBwdDslTorch", "SdpaFwdDslTorch", "TorchSdpaEngine"]


def choose(cells: tuple[Cell, ...], desc: OpDesc, target: Target) -> tuple[Cell | None, tuple[Reason, ...]]:
    """The first cell that serves, or None with the reasons of the one for this device that came closest."""
    declined: list[tuple[Reason, ...]] = []
    for cell in cells:
        reasons = cell.judge(desc, target)
        if not reasons:
            return cell, ()
        declined.append(tuple(replace(r, text=f"{cell.backend}: {r}") for r in reasons))
    return None, min(declined, key=lambda reasons: (any(r.field == "device" for r in reasons), len(reasons)))


def _tamed(x: Tensor) -> Tensor:
    """The same view with row-major strides in place of those of size-1 dims, which mean nothing but get checked."""
    strides, acc = list(x.stride()), 1
    for axis in reversed(range(x.dim())):
        if x.shape[axis] == 1:
            strides[axis] = acc
        acc = max(acc, strides[axis] * x.shape[axis])
    return x if tuple(strides) == x.stride() else x.as_strided(x.shape, strides)


class TorchSdpaCall(Executable):
    """One backend's operator for one direction."""

    def __init__(self, cell: Cell, device: str) -> None:
        self._cell, self._calls = cell, CALLS[device, cell.backend]

    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        desc = launch.desc
        if desc.band.has_left or desc.band.has_right != desc.band.causal:  # type: ignore[attr-defined]
            # Only a plan reused for a mask that this cell was never asked about gets here: wrong numbers otherwise.
            raise ValueError(f"{NAME}: given the mask {desc.band}, expected "  # type: ignore[attr-defined]
                             "the one that the plan was compiled for: none, or causal")
        x = {name: _tamed(t) for name, t in launch.operands.items()}
        if isinstance(desc, SdpaBwdDesc):
            call = _backward(self._calls, desc, x, launch.operands)
        else:
            assert isinstance(desc, SdpaDesc)
            call = _forward(self._calls, desc, x, launch.operands)
        device = launch.operands["q"].device
        if device.type != "cuda":
            return lambda stream: call()

        def on_stream(stream: int) -> None:
            with torch.cuda.device(device):
                if torch.cuda.current_stream(device).cuda_stream == stream:
                    call()
                    return
                with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
                    call()

        return on_stream

    def describe(self) -> Mapping[str, Any]:
        return {"kernels": [f"aten {self._cell.backend.lower()}"]}


def _forward(calls: Calls, desc: SdpaDesc, x: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> Callable[[], None]:
    q, k, v = x["q"], x["k"], x["v"]
    scale, causal, lse_out = desc.scale_value, desc.band.causal, out.get("lse")

    def call() -> None:
        with torch.no_grad():
            o, lse = calls.forward(q, k, v, causal, scale, lse_out is not None)
            out["o"].copy_(o)
            if lse_out is not None:
                lse_out.copy_(lse)

    return call


def _backward(calls: Calls, desc: SdpaBwdDesc, x: Mapping[str, Tensor],
              out: Mapping[str, Tensor]) -> Callable[[], None]:
    q, k, v, o, lse = (x[name] for name in ("q", "k", "v", "o", "lse"))
    scale, causal = desc.scale_value, desc.band.causal
    wanted = [(i, out[name]) for i, name in enumerate(("dq", "dk", "dv")) if name in out]

    def call() -> None:
        with torch.no_grad():
            # dO is rarely laid out as the kernels want it (all strides are 0 after sum().backward()).
            do = x["do"].contiguous()
            grads = calls.backward(do, q, k, v, o, lse, causal, scale)
            for i, buffer in wanted:
                buffer.copy_(grads[i])

    return call


class _TorchSdpaDsl(Adapter):
    """What both directions share: the choice among cells."""

    engine = NAME
    cells: tuple[Cell, ...]

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        return Support(choose(self.cells, desc, target)[1])

    def label(self, desc: OpDesc, target: Target) -> str:
        cell, _ = choose(self.cells, desc, target)
        return self.engine if cell is None else f"{self.engine}[{cell.backend}]"

    def compile(self, desc: OpDesc, target: Target) -> Executable:
        cell, reasons = choose(self.cells, desc, target)
        if cell is None:
            raise Decline(*reasons)
        return TorchSdpaCall(cell, target.device)


class SdpaFwdDslTorch(_TorchSdpaDsl, SdpaFwdDsl):
    cells = FORWARD
    capabilities = tuple(cell.row for cell in FORWARD)


class SdpaBwdDslTorch(_TorchSdpaDsl, SdpaBwdDsl):
    cells = BACKWARD
    capabilities = tuple(cell.row for cell in BACKWARD)


class TorchSdpaEngine(Engine):
    """PyTorch's own attention, where it is exact."""

    name = NAME
    _ADAPTERS: tuple[Adapter, ...] = (SdpaFwdDslTorch(), SdpaBwdDslTorch())

    def adapters(self) -> tuple[Adapter, ...]:
        return self._ADAPTERS

    def unavailable(self, target: Target) -> Reason | None:
        if target.device == "cuda" and not torch.backends.cuda.is_built():
            return Reason("torch", torch.__version__, "a build with CUDA",
                          f"unavailable: torch {torch.__version__} is built without CUDA")
        return None


ENGINE = TorchSdpaEngine()
