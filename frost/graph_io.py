"""A graph as msgpack: tensors, ops and outputs as recorded.

Reading trusts nothing and judges nothing: what the bytes say is a graph, and whether it means something is for
`frost.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import networkx as nx

from descriptors import LIMITS, DType, Sym, SymProduct, TensorDesc, WireError, pack, unpack
from descriptors.limits import check_count, shown, shown_names
from descriptors.wire import dim_from_wire, dim_to_wire, expect
from frost.errors import GraphError
from frost.graph import Graph, OpNode, Output, Tensor
from frost.opset import OPS

SCHEMA = 1
_LIMITS = LIMITS["graph"]
_GRAPH_FIELDS = {"schema", "name", "tensors", "ops", "outputs"}
_INPUT, _OP, _OUTPUT = {"name", "desc"}, {"name", "op", "inputs", "outputs", "attrs"}, {
    "name", "tensor", "stride", "alignment"}


def graph_to_bytes(graph: Graph) -> bytes:
    """Raises GraphError for a graph that cannot be written: tensors of other graphs, options that are no plain data."""
    number = {t: i for i, t in enumerate(_tensors(graph))}

    def ref(t: Tensor) -> int:
        if t not in number:
            raise GraphError(f"graph {graph.name!r}: given a tensor {t.name!r} of graph {t.graph.name!r}, "
                             "expected one of its own")
        return number[t]

    return pack({
        "schema": SCHEMA,
        "name": str(graph.name),
        "tensors": [{"name": _text(t.name, "input"), "desc": t.desc.to_wire()} for t in graph.inputs],
        "ops": [{
            "name": n.name, "op": n.op,
            "inputs": {f: ref(t) for f, t in n.inputs.items()},
            "outputs": {f: [number[t], t.name] for f, t in n.outputs.items()},
            "attrs": {a: _attr_to_wire(value, f"{n.op} (node {n.name!r}): {a}") for a, value in n.attrs.items()},
        } for n in graph.ops],
        "outputs": [{
            "name": _text(out.name, "output"), "tensor": ref(out.tensor),
            "stride": None if out.stride is None else [dim_to_wire(s) for s in out.stride],
            "alignment": _attr_to_wire(out.alignment, f"output {out.name!r}: alignment"),
        } for out in graph.outputs],
    })


def _tensors(graph: Graph) -> list[Tensor]:
    """Inputs, then results in the order they were recorded."""
    return [*graph.inputs, *(t for n in graph.ops for t in n.outputs.values())]


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise GraphError(f"{what} {value!r}: given a name of type {type(value).__name__}, expected a string")
    return value


def _attr_to_wire(value: Any, what: str) -> Any:
    if isinstance(value, tuple):
        return [_attr_to_wire(v, what) for v in value]
    if isinstance(value, (Sym, SymProduct)):
        return dim_to_wire(value)
    if isinstance(value, DType):
        return {"dtype": value.value}
    if value is None or isinstance(value, (str, float)) or isinstance(value, int) and abs(value) < 2**63:
        return value
    raise GraphError(f"{what}: given {value!r}, expected plain data; g.validate() says what is wrong with the graph")


def _attr_from_wire(value: Any, what: str, depth: int = 0) -> Any:
    if isinstance(value, list):
        if depth > 1:
            raise WireError(f"{what}: nested too deeply")
        return tuple(_attr_from_wire(v, what, depth + 1) for v in value)
    if isinstance(value, dict):
        if set(value) == {"dtype"}:
            return _dtype(value["dtype"], what)
        return dim_from_wire(value, what)
    return expect(value, (str, bool, int, float, type(None)), what)


def _dtype(value: Any, what: str) -> DType:
    try:
        return DType(value)
    except (ValueError, TypeError) as e:
        raise WireError(f"{what}: given dtype {shown(value)}, expected one of {[d.value for d in DType]}") from e


# ---- reading


def graph_from_bytes(data: bytes) -> Graph:
    """The graph that `graph_to_bytes` wrote. Raises WireError or GraphError for anything else."""
    record = _fields(unpack(data, _LIMITS), _GRAPH_FIELDS, "graph")
    if record["schema"] != SCHEMA:
        raise WireError(f"graph: given schema {shown(record['schema'])}, expected {SCHEMA}; it was written by another "
                        "version")
    graph = Graph(expect(record["name"], str, "graph name"))
    try:
        return _Reader(graph).read(record)
    except (WireError, GraphError):
        raise
    except (ValueError, TypeError, OverflowError) as e:
        # A descriptor's own complaint about values that no graph can have.
        raise WireError(f"graph {graph.name!r}: {shown(str(e))}") from e


def _fields(value: Any, known: set[str], what: str) -> dict[str, Any]:
    expect(value, dict, what)
    if set(value) != known:
        raise WireError(f"{what}: given fields {shown_names(value)}, expected {sorted(known)}")
    return value


class _Reader:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors: dict[int, Tensor] = {}

    def read(self, record: Mapping[str, Any]) -> Graph:
        g = self.graph
        tensors, ops, outputs = (expect(record[f], list, f"graph {f}") for f in ("tensors", "ops", "outputs"))
        check_count("nodes", len(tensors) + len(ops) + len(outputs), _LIMITS)
        for i, row in enumerate(tensors):
            row = _fields(row, _INPUT, "input")
            name = expect(row["name"], str, "input name")
            self.tensors[i] = g._declare(name, TensorDesc.from_wire(row["desc"], f"input {name!r}"))
        rows = [self.op(row) for row in ops]
        for node, refs in rows:  # an op may name results of later ones: a cycle is a graph, if not a valid one
            g._attach(node, {f: self.tensor(i, node.name) for f, i in refs.items()})
        for row in outputs:
            self.output(_fields(row, _OUTPUT, "output"))
        self.infer()
        return g

    def op(self, value: Any) -> tuple[OpNode, dict[str, Any]]:
        row = _fields(value, _OP, "op")
        name, op = expect(row["name"], str, "op name"), expect(row["op"], str, "op")
        if op not in OPS:
            raise WireError(f"op {name!r}: given {shown(op)}, expected one of {sorted(OPS)}")
        spec, what = OPS[op], f"{op} (node {name!r})"
        inputs, results = (expect(row[f], dict, f"{what}: {f}") for f in ("inputs", "outputs"))
        attrs = _fields(row["attrs"], set(spec.attrs), f"{what}: options")
        if not set(spec.required) <= set(inputs) <= set(spec.operands):
            raise WireError(f"{what}: given operands {shown_names(inputs)}, expected {list(spec.operands)}")
        node = OpNode(name, op, len(self.graph.ops), {}, {
            a: _attr_from_wire(v, f"{what}: {a}") for a, v in attrs.items()})
        _check_attrs(node)
        for f, pair in results.items():
            if f not in spec.results or not isinstance(pair, list) or len(pair) != 2:
                raise WireError(f"{what}: given result {shown(f)}, expected some of {list(spec.results)}")
            number, result = expect(pair[0], int, f"{what}: {f}"), expect(pair[1], str, f"{what}: {f}")
            if number in self.tensors:
                raise WireError(f"{what}: given result {f!r} as tensor {number}, which is there already")
            self.tensors[number] = node.outputs[f] = Tensor(self.graph, result, TensorDesc((), DType.F32), node, f)
        self.graph._append(node)
        return node, inputs

    def tensor(self, number: Any, where: str) -> Tensor:
        found = self.tensors.get(expect(number, int, f"{where}: tensor"))
        if found is None:
            raise WireError(f"{where}: given tensor {number}, expected one of the graph's {len(self.tensors)}")
        return found

    def output(self, row: Mapping[str, Any]) -> None:
        name = expect(row["name"], str, "output name")
        stride = row["stride"]
        if stride is not None:
            stride = tuple(dim_from_wire(s, f"output {name!r}") for s in expect(stride, list, f"output {name!r}"))
        alignment = expect(row["alignment"], int, f"output {name!r}: alignment")
        self.graph.outputs.append(Output(name, self.tensor(row["tensor"], f"output {name!r}"), stride, alignment))

    def infer(self) -> None:
        """Result descriptors are never read: they follow from the inputs."""
        dag = self.graph.dag
        acyclic = nx.is_directed_acyclic_graph(dag)
        order = nx.topological_sort(dag) if acyclic else self.graph.ops
        for node in [n for n in order if isinstance(n, OpNode)]:
            made = node.infer()
            if set(made) != set(node.outputs):
                raise WireError(f"{node.op} (node {node.name!r}): given results {sorted(node.outputs)}, "
                                f"expected {sorted(made)}")
            for f, desc in made.items():
                node.outputs[f].desc = desc


# Attributes whose type inference relies on; the values of all are judged by validation.
_SHAPES = {"shape": (int, Sym, SymProduct), "perm": (int,), "grads": (str,)}


def _check_attrs(node: OpNode) -> None:
    for name, kinds in _SHAPES.items():
        value = node.attrs.get(name, ())
        if not isinstance(value, tuple) or not all(isinstance(v, kinds) and not isinstance(v, bool) for v in value):
            raise WireError(f"{node.op} (node {node.name!r}): given {name} {shown(value)}, expected a list")
    if not isinstance(node.attrs.get("dtype", DType.F32), DType):
        given = node.attrs["dtype"]
        raise WireError(f"{node.op} (node {node.name!r}): given dtype {shown(given)}, expected an element type")
