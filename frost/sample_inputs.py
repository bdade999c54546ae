"""Operands for a graph that comes without any: seeded values that mean something to the ops that read them.

Floats are normal, masks mostly True, offsets cut a packed total evenly, lengths are whole, block numbers
are in range. What a forward saved (lse) is random too: a backward graph gets numbers to run and compare on,
gradients of nothing in particular.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from . import binding

if TYPE_CHECKING:
    from descriptors import TensorDesc

    from .graph import Graph

# Where each kind of index ends: the operand and axis that it counts.
_OFFSETS = {"cu_seqlens_q": "q", "cu_seqlens_kv": "k", "cu_seqlens": "q"}
_LENGTHS = {"seq_len_q": ("q", 2), "seq_len_kv": ("k", 2)}
DEFAULT_SYMBOL = 64


def symbols(graph: Graph) -> dict[str, int]:
    """The graph's symbols and their maxima."""
    return {s.name: s.max for t in graph.inputs for s in t.desc.syms}


def choose_symbols(graph: Graph, given: Mapping[str, int]) -> dict[str, int]:
    """A value for every symbol: the given one, else its maximum or 64, whichever is smaller. Raises
    ValueError for a name that the graph lacks or a value outside [0, max].
    """
    known = symbols(graph)
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"symbol: given {name!r}, expected one of {sorted(known) or 'none: the graph has no symbols'}"
            )
        if not 0 <= value <= known[name]:
            raise ValueError(f"symbol {name}: given {value}, expected 0..{known[name]}")
    return {name: given.get(name, min(bound, DEFAULT_SYMBOL)) for name, bound in known.items()}


def make_inputs(
    graph: Graph, bindings: Mapping[str, int], device: torch.device, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A tensor for every input of the graph, laid out as declared."""
    gen = torch.Generator().manual_seed(seed)
    roles: dict[Any, tuple[str, Mapping[str, Any], Any]] = {}
    for node in graph.ops:
        for field, tensor in node.inputs.items():
            roles.setdefault(tensor, (field, node.inputs, node.attrs))
    made = {}
    for tensor in graph.inputs:
        desc = tensor.desc.bound(bindings)
        field, siblings, attrs = roles.get(tensor, ("", {}, {}))
        shapes = {n: t.desc.bound(bindings).shape for n, t in siblings.items()}
        values = _values(field, desc, shapes, attrs, gen)
        buffer = binding.allocate(desc, device)
        if buffer.numel():
            buffer.copy_(values)
        made[str(tensor.name)] = buffer
    return made


def _values(
    field: str, desc: TensorDesc, shapes: Mapping[str, Any], attrs: Mapping[str, Any], gen: torch.Generator
) -> torch.Tensor:
    shape = tuple(int(n) for n in desc.shape)  # type: ignore[arg-type]
    dtype = binding.TORCH_DTYPE[desc.dtype]
    if dtype is torch.bool:
        return torch.rand(shape, generator=gen) < 0.8
    if dtype.is_floating_point:
        values = torch.randn(shape, generator=gen)
        # exp(score - lse) stays below 1, as a forward's would.
        return values.abs() + 6 if field == "lse" else values
    if field in _OFFSETS:
        total = int(shapes[_OFFSETS[field]][0])
        return torch.linspace(0, total, shape[0]).round()
    if field in _LENGTHS:
        name, axis = _LENGTHS[field]
        return torch.full(shape, int(shapes[name][axis]))
    if field == "block_indices":
        tokens = int(shapes["k"][0 if len(shapes["k"]) == 3 else 2])
        blocks = max(1, -(-tokens // int(attrs.get("block_size", 1))))
        return torch.randint(0, blocks, shape, generator=gen)
    if field == "block_counts":
        return torch.full(shape, int(shapes["block_indices"][-1]))
    return torch.zeros(shape)
