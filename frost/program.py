"""What lowering works on: a validated, fused graph as numbered slots and ordered steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from descriptors import OpDesc, TensorDesc


@dataclass(frozen=True)
class Slot:
    """A tensor of the program. `kind` is "input", "output" (written to a caller's buffer) or "intermediate"."""

    index: int
    name: str
    desc: TensorDesc
    kind: str


@dataclass(frozen=True)
class Step:
    """One op. `inputs` and `outputs` map the op record's tensor fields to slot indices (absent fields are left out)."""

    name: str
    desc: OpDesc
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]

    @cached_property
    def operands(self) -> tuple[tuple[str, int], ...]:
        """Inputs and outputs."""
        return (*self.inputs, *self.outputs)


@dataclass(frozen=True)
class Program:
    """Steps in execution order. `inputs`/`outputs`: user's name -> slot index, in declaration order."""

    name: str
    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
