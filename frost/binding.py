"""Checking operands against a program before anything is launched, and resolving symbolic extents from them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from descriptors import DType, Sym, TensorDesc, may_share_memory

from .errors import BindError
from .program import Program

TORCH_DTYPE: dict[DType, torch.dtype] = {d: getattr(torch, d.torch_name) for d in DType}
_DTYPE_NAME = {t: d.value for d, t in TORCH_DTYPE.items()}


@dataclass(frozen=True)
class Expected:
    """What a buffer must look like: plain tuples, compared on every bind."""

    name: str
    slot: int
    desc: TensorDesc
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    alignment: int
    span: int  # bytes from the base to one past the last element

    def fits(self, tensor: torch.Tensor, device_index: int) -> bool:
        """The quick answer; `check_tensor` has the slow one, with the reason. -1 is the CPU."""
        try:
            return (tensor.shape == self.shape and tensor.stride() == self.stride and tensor.dtype is self.dtype
                    and tensor.get_device() == device_index and not tensor.data_ptr() % self.alignment
                    and not tensor.is_neg() and (device_index >= 0 or tensor.is_cpu))
        except RuntimeError:  # a layout without strides, a device without addresses
            return False


def expect(name: str, slot: int, desc: TensorDesc) -> Expected:
    """The expectation for a descriptor without symbols."""
    return Expected(name, slot, desc, tuple(desc.shape), tuple(desc.strides),  # type: ignore[arg-type]
                    TORCH_DTYPE[desc.dtype], desc.alignment, desc.nbytes)


def resolve_symbols(program: Program, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Values of the program's symbols, read off the shapes of the buffers that were given."""
    found: dict[str, tuple[int, str]] = {}
    for name, index in (*program.inputs.items(), *program.outputs.items()):
        tensor = tensors.get(name)
        desc = program.slots[index].desc
        if tensor is None or tensor.dim() != desc.rank:
            continue
        for axis, dim in enumerate(desc.shape):
            if not isinstance(dim, Sym):
                continue
            size = tensor.shape[axis]
            if size > dim.max:
                raise BindError(f"tensor {name!r}: given {dim.name}={size} in dim {axis}, expected at most the "
                                f"declared maximum {dim.max}; declare a larger frost.sym({dim.name!r}, max=…)")
            value, where = found.setdefault(dim.name, (size, name))
            if value != size:
                raise BindError(f"tensor {name!r}: given {dim.name}={size} in dim {axis}, expected {value} "
                                f"as in tensor {where!r}")
    missing = {s.name for slot in program.slots for s in slot.desc.syms} - set(found)
    if missing:
        raise BindError(f"symbols {sorted(missing)}: no given tensor has them as an extent, so their value is unknown")
    return {n: v for n, (v, _) in found.items()}


def check_names(program: Program, tensors: Mapping[str, Any]) -> None:
    """Every input is there and nothing else but outputs is."""
    if not isinstance(tensors, Mapping):
        raise BindError(f"tensors: given {type(tensors).__name__}, expected a mapping from name to torch.Tensor")
    for name, tensor in tensors.items():
        if name not in program.inputs and name not in program.outputs:
            known = [*program.inputs, *program.outputs]
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BindError(f"tensor {name!r}: not a tensor of this plan, expected one of {known}{hint}")
        if not isinstance(tensor, torch.Tensor):
            raise BindError(f"tensor {name!r}: given {type(tensor).__name__}, expected torch.Tensor")
    for name in program.inputs:
        if name not in tensors:
            raise BindError(f"tensor {name!r}: not given, expected {program.slots[program.inputs[name]].desc}")


def check_tensor(want: Expected, tensor: torch.Tensor, device: torch.device) -> None:
    """Shape, stride, dtype, device and alignment of one buffer; raises BindError naming the first that differs."""
    if tensor.dtype is not want.dtype:
        given = _DTYPE_NAME.get(tensor.dtype, str(tensor.dtype))
        raise BindError(f"tensor {want.name!r}: given dtype {given}, expected {want.desc.dtype}")
    if tensor.device != device:
        raise BindError(f"tensor {want.name!r}: given device {tensor.device}, expected {device}; a plan's operands "
                        f"live on one device of the architecture it was compiled for")
    if tensor.layout is not torch.strided:
        raise BindError(f"tensor {want.name!r}: given layout {tensor.layout}, expected a strided tensor")
    if tensor.shape != want.shape:
        raise BindError(f"tensor {want.name!r}: given shape {tuple(tensor.shape)}, expected {want.shape}")
    stride = tensor.stride()
    if stride != want.stride and 0 not in want.shape and any(
            a != b for d, a, b in zip(want.shape, stride, want.stride) if d != 1):
        raise BindError(f"tensor {want.name!r}: given stride {stride}, expected {want.stride}; declare the stride of "
                        f"this buffer in the graph (stride=…), or pass a tensor laid out like that")
    if tensor.data_ptr() % want.alignment and 0 not in want.shape:
        raise BindError(f"tensor {want.name!r}: given an address that is not {want.alignment}-byte aligned, expected "
                        f"alignment {want.alignment}; declare it with alignment={_alignment_of(tensor)} in the graph")
    if tensor.is_conj() or tensor.is_neg():
        raise BindError(f"tensor {want.name!r}: given a lazily negated tensor, expected plain values (resolve_neg())")


def _alignment_of(tensor: torch.Tensor) -> int:
    address = tensor.data_ptr()
    return min(16, address & -address) if address else 16


Operand = tuple[Expected, torch.Tensor]


def check_overlap(written: Sequence[Operand], read: Sequence[Operand]) -> None:
    """No written buffer may share memory with another operand; interleaved but disjoint layouts are fine."""
    spans = []
    for want, tensor in (*written, *read):
        start = tensor.data_ptr()
        spans.append((start, start + want.span, want, tensor))
    for i in range(len(written)):
        start, end, want, tensor = spans[i]
        for start2, end2, want2, tensor2 in spans[i + 1:]:
            if start < end2 and start2 < end and may_share_memory(_layout(tensor), _layout(tensor2)):
                raise BindError(f"tensor {want.name!r}: given an output that overlaps tensor {want2.name!r} in memory, "
                                f"expected buffers of their own (a slice per output of one buffer is fine)")


def check_workspace_overlap(workspace: torch.Tensor, operands: Sequence[Operand]) -> None:
    """The workspace may not lie under an operand."""
    start, end = workspace.data_ptr(), workspace.data_ptr() + workspace.numel()
    for want, tensor in operands:
        at = tensor.data_ptr()
        if at < end and start < at + want.span and may_share_memory(_layout(workspace), _layout(tensor)):
            raise BindError(f"workspace: given a buffer that overlaps tensor {want.name!r} in memory, expected one of "
                            f"its own")


def _layout(t: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    return t.data_ptr(), tuple(t.shape), t.stride(), t.element_size()


def allocate(desc: TensorDesc, device: torch.device) -> torch.Tensor:
    """A fresh buffer with the declared strides."""
    return torch.empty_strided(desc.shape, desc.strides, dtype=TORCH_DTYPE[desc.dtype],  # type: ignore[arg-type]
                               device=device)
