"""From a validated graph to the program that lowering works on.

Dead ops are dropped, attention written with primitives becomes one `sdpa` step, tensors become numbered slots. A tensor
that is handed out lives in the caller's buffer from the start: ops that read it too read it there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import networkx as nx

from descriptors import OpDesc, TensorDesc
from descriptors.ops import PACKED_KV, PACKED_Q
from frost.graph import Graph, OpNode, Tensor
from frost.nodes import attention_desc, pointwise_desc
from frost.nsa_opset import NSA_OPS, nsa_desc
from frost.opset import ATTENTION
from frost.patterns import Unit, fuse_attention
from frost.program import Program, Slot, Step

# Results that an op's record always has, wanted or not.
_ALWAYS = {"sdpa": ("o",), "nsa_selection": ("o",), "nsa_compressed_attention": ("o",)}


def fuse(graph: Graph) -> Program:
    """The program of a validated graph."""
    order = [n for n in _in_order(graph) if isinstance(n, OpNode)]
    handed_out = [out.tensor for out in graph.outputs]
    units = _live([Unit(n.name, n.op, n.inputs, n.outputs, n.attrs) for n in order], handed_out)
    units = _live(fuse_attention(units, handed_out), handed_out)
    return _program(graph, units)


def _in_order(graph: Graph) -> Iterable[Any]:
    """Topological, and otherwise as recorded."""
    rank = {node: i for i, node in enumerate(graph.dag)}
    return nx.lexicographical_topological_sort(graph.dag, key=rank.__getitem__)


def _live(units: list[Unit], wanted: Iterable[Tensor]) -> list[Unit]:
    """The units that an output depends on, each with only the results that somebody reads."""
    needed = set(wanted)
    kept = []
    for unit in reversed(units):
        results = {f: t for f, t in unit.outputs.items() if t in needed}
        if not results:
            continue
        always = {f: unit.outputs[f] for f in _ALWAYS.get(unit.op, ())}
        kept.append(Unit(unit.name, unit.op, unit.inputs, {**always, **results}, unit.attrs))
        needed.update(unit.inputs.values())
    return kept[::-1]


def _packed_totals(units: Iterable[Unit]) -> tuple[tuple[int, str], ...]:
    """Token totals of the packed attention ops, so that no primitive beside them carries one into its key."""
    found: dict[int, str] = {}
    for unit in units:
        pairs: tuple[tuple[str, str], ...] = ()
        if unit.op in ATTENTION and "cu_seqlens_q" in unit.inputs:
            pairs = (("q", PACKED_Q), ("k", PACKED_KV))
        elif unit.op in NSA_OPS and "cu_seqlens" in unit.inputs:
            pairs = (("q", PACKED_Q), ("x", PACKED_Q), ("importance", PACKED_Q))
        for name, tag in pairs:
            total = unit.inputs[name].shape[0] if name in unit.inputs else None
            if isinstance(total, int):
                found.setdefault(total, tag)
    return tuple(sorted(found.items()))


def _program(graph: Graph, units: list[Unit]) -> Program:
    slots: list[Slot] = []
    index: dict[Tensor, int] = {}

    def place(t: Tensor, name: str, desc: TensorDesc, kind: str) -> int:
        index[t] = len(slots)
        slots.append(Slot(len(slots), name, desc, kind))
        return index[t]

    inputs = {t.name: place(t, t.name, t.desc, "input") for t in graph.inputs}
    outputs = {out.name: place(out.tensor, out.name, out.desc, "output") for out in graph.outputs}
    for unit in units:
        for t in unit.outputs.values():
            if t not in index:
                place(t, t.name, t.desc, "intermediate")
    totals = _packed_totals(units)
    descs = {t: slots[i].desc for t, i in index.items()}
    steps = tuple(
        Step(unit.name, _desc_of(unit, descs, totals),
             tuple((f, index[t]) for f, t in unit.inputs.items()),
             tuple((f, index[t]) for f, t in unit.outputs.items()))
        for unit in units)
    return Program(graph.name, tuple(slots), steps, inputs, outputs)


def _desc_of(unit: Unit, descs: dict[Tensor, TensorDesc], totals: tuple[tuple[int, str], ...]) -> OpDesc:
    tensors = {f: descs[t] for f, t in (*unit.inputs.items(), *unit.outputs.items())}
    if unit.op in ATTENTION:
        return attention_desc(unit.op, tensors, unit.attrs)
    if unit.op in NSA_OPS:
        return nsa_desc(unit.op, tensors, unit.attrs)
    return pointwise_desc(unit.op, tensors, unit.attrs, totals)
