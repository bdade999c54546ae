"""An engine that is the reference except for one fault: what a judge of engines has to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engines import registry
from engines.base import Capabilities, Decline, Engine, Executable, Launch, SdpaBwdDsl, SdpaFwdDsl

NAME = "spoilt"
Fault = Callable[[Mapping[str, Tensor]], None]


class _After(Executable):
    """The reference's call, and then the fault."""

    def __init__(self, inner: Executable, fault: Fault) -> None:
        self.inner, self.fault = inner, fault

    def prepare(self, launch: Launch, workspace: Any) -> Callable[[int], None]:
        call = self.inner.prepare(launch, workspace)

        def both(stream: int) -> None:
            call(stream)
            self.fault(launch.operands)

        return both


def spoilt(fault: Fault, *, declines: bool = False) -> Engine:
    """The reference with `fault`, called with the operands after every execution; with `declines`, nothing is served and no
    reason given."""
    def cell(api_type: Any) -> Any:
        reference = registry.get("reference").adapter(api_type)
        assert reference is not None
        rows = tuple(Capabilities(NAME, r.op, r.devices, r.dtypes, r.features) for r in reference.capabilities)

        class Cell(api_type):
            engine = NAME
            capabilities = rows

            def compile(self, desc: Any, target: Any) -> Executable:
                if declines:
                    raise Decline()
                return _After(reference.compile(desc, target), fault)

        return Cell()

    class Spoilt(Engine):
        name = NAME

        def adapters(self) -> Any:
            return cell(SdpaFwdDsl), cell(SdpaBwdDsl)

    return Spoilt()


def result(operands: Mapping[str, Tensor]) -> Tensor:
    """o in a forward, dq in a backward."""
    return operands["dq"] if "dq" in operands else operands["o"]


def nudge(operands: Mapping[str, Tensor]) -> None:
    """One element by a hundredth."""
    result(operands)[(0,) * result(operands).dim()] += 0.01


def unwritten(operands: Mapping[str, Tensor]) -> None:
    """The last element as it was beforehand."""
    result(operands)[(-1,) * result(operands).dim()] = torch.nan


def behind(operands: Mapping[str, Tensor]) -> None:
    """A write one element past the end."""
    t = result(operands)
    end = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1
    t.as_strided((1,), (1,), t.storage_offset() + end).fill_(3.0)


def far_behind(operands: Mapping[str, Tensor]) -> None:
    """A write far past the end, in another buffer or between two."""
    t = result(operands)
    end = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 700
    t.as_strided((1,), (1,), t.storage_offset() + end).fill_(3.0)


def operand(operands: Mapping[str, Tensor]) -> None:
    """A change of k."""
    operands["k"][(0,) * operands["k"].dim()] += 1


def drifting(operands: Mapping[str, Tensor]) -> None:
    """Another last bit in every run of a backward."""
    if "dq" in operands:
        drifting.runs += 1  # type: ignore[attr-defined]
        operands["dq"][(0,) * operands["dq"].dim()] *= 1 + 2.0**-22 * drifting.runs  # type: ignore[attr-defined]


drifting.runs = 0  # type: ignore[attr-defined]
