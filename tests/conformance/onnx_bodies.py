"""ONNX's function body of `Attention` as a FROST graph of primitives: one op for one op, in the body's own
order.

Whatever does not depend on Q, K or V (shapes, masks, scale factors: most of a body) is what ONNX's own
evaluator makes of it. Of the rest, layout changes before the first product are views of the buffers, as a
caller would make them, and arithmetic becomes primitives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_vectors as vectors
import torch
from cases.graphs import declare
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from frost.graph import Graph
from frost.graph import Tensor as Handle

KEYS_LAST = [0, 1, 3, 2]
DATA = ("Q", "K", "V", "past_key", "past_value")


class Untranslated(ValueError):
    """An op of a body, or a use of one, that has no primitive."""


@dataclass
class Body:
    """A body on its way into a graph. `known`: every value as ONNX's evaluator has it. `views`: what
    depends on Q, K or V and is still a buffer. `handles`: what the graph computes."""

    name: str
    known: dict[str, np.ndarray]
    graph: Graph
    views: dict[str, Tensor] = field(default_factory=dict)
    handles: dict[str, Handle] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def of_data(self, name: str) -> bool:
        return name in self.views or name in self.handles

    def handle(self, name: str) -> Handle:
        """A value as a tensor of the graph; a buffer is declared as it lies."""
        if name not in self.handles:
            buffer = self.views[name] if name in self.views else torch.from_numpy(self.known[name].copy())
            label = f"t{len(self.tensors)}"
            self.tensors[label] = buffer
            self.handles[name] = declare(self.graph, label, buffer)
        return self.handles[name]

    def number(self, name: str) -> float | None:
        """A constant of one element, None for anything else."""
        value = self.known[name]
        return None if self.of_data(name) or value.size != 1 else float(value.reshape(()))


def translate(
    name: str, dtype: torch.dtype | None = None
) -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    """(graph, tensors to execute it on, expected outputs by the graph's names). In `dtype` if given:
    everything of the vector's float type is cast.

    Raises Untranslated for an op that is no primitive here.
    """
    inputs, outputs = vectors.read_set(name)
    model = vectors.model(name)
    evaluator = ReferenceEvaluator(model)
    everything: Any = evaluator.run(None, inputs, intermediate=True)
    known = {n: x for n, x in everything.items() if x is not None}
    body = Body(name, known, Graph(name))
    if dtype is not None:
        io = inputs["Q"].dtype
        body.known = {
            n: torch.from_numpy(x.copy()).to(dtype).numpy() if x.dtype == io else x for n, x in known.items()
        }
    body.views = {n: torch.from_numpy(body.known[n].copy()) for n in DATA if n in inputs}
    for node in model.graph.node:
        if any(map(body.of_data, node.input)):
            _step(body, node)
    expected = {}
    for out, array in outputs.items():
        want = torch.from_numpy(array.copy())
        if out in body.views:  # present keys and values: joined outside
            torch.testing.assert_close(body.views[out].to(want.dtype), want, rtol=0, atol=0)
            continue
        handle, expected[out] = body.handle(out), want
        body.graph.output(handle, name=out)
        body.tensors[out] = torch.full(array.shape, math.nan, dtype=getattr(torch, handle.dtype.torch_name))
    return body.graph, body.tensors, expected


def _step(body: Body, node: onnx.NodeProto) -> None:
    if node.op_type == "Shape":
        return  # known, and no data
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    out = node.output[0]
    keys = node.op_type == "Transpose" and attrs["perm"] == KEYS_LAST
    if node.op_type in MOVES and not keys and all(n not in body.handles for n in node.input):
        body.views[out] = MOVES[node.op_type](body, node, attrs)
    elif node.op_type in OPS:
        body.handles[out] = OPS[node.op_type](body, node, attrs)
    else:
        raise Untranslated(f"{body.name}: {node.op_type}({', '.join(node.input)}) has no primitive")


# ---- layout changes of buffers -----------------------------------------------------------------------------------


def _ints(body: Body, name: str) -> list[int]:
    return [int(n) for n in np.atleast_1d(body.known[name])]


MOVES: dict[str, Callable[[Body, Any, dict[str, Any]], Tensor]] = {
    "Identity": lambda b, n, a: b.views[n.input[0]],
    "Reshape": lambda b, n, a: b.views[n.input[0]].reshape(b.known[n.output[0]].shape),
    "Transpose": lambda b, n, a: b.views[n.input[0]].permute(a["perm"]),
    "Unsqueeze": lambda b, n, a: b.views[n.input[0]].unsqueeze(*_ints(b, n.input[1])),
    "Expand": lambda b, n, a: b.views[n.input[0]].expand(_ints(b, n.input[1])),
    "Concat": lambda b, n, a: torch.cat([b.views[name] for name in n.input], dim=a["axis"]),
}


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def _times(b: Body, node: Any, invert: bool) -> Handle:
    """A product or quotient with a constant is `scale`; there is no other in a body."""
    x, factor = node.input[0], b.number(node.input[1])
    if factor is None:
        raise Untranslated(f"{b.name}: {node.op_type} of two tensors")
    return b.graph.scale(b.handle(x), 1 / factor if invert else factor)


def _cast(b: Body, node: Any, attrs: dict[str, Any]) -> Handle:
    """To the type that it has: nothing."""
    x = b.handle(node.input[0])
    wanted = onnx.helper.tensor_dtype_to_np_dtype(attrs["to"])
    if b.known[node.input[0]].dtype == b.known[node.output[0]].dtype:
        return x
    raise Untranslated(f"{b.name}: Cast to {wanted}, which changes the type")


OPS: dict[str, Callable[[Body, Any, dict[str, Any]], Handle]] = {
    "Identity": lambda b, n, a: b.handle(n.input[0]),
    "Cast": _cast,
    "Mul": lambda b, n, a: _times(b, n, invert=False),
    "Div": lambda b, n, a: _times(b, n, invert=True),
    "MatMul": lambda b, n, a: b.graph.matmul(b.handle(n.input[0]), b.handle(n.input[1])),
    "Add": lambda b, n, a: b.graph.add(b.handle(n.input[0]), b.handle(n.input[1])),
    "Tanh": lambda b, n, a: b.graph.tanh(b.handle(n.input[0])),
    "Softmax": lambda b, n, a: b.graph.softmax(b.handle(n.input[0]), axis=a.get("axis", -1)),
    "Transpose": lambda b, n, a: b.graph.transpose(b.handle(n.input[0]), a["perm"]),
    "Reshape": lambda b, n, a: b.graph.reshape(b.handle(n.input[0]), b.known[n.output[0]].shape),
}
