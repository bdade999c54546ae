"""The `Attention` vectors of the ONNX wheel, read from disk.

A vector is a folder: a model of one node (or, in `…_expanded`, the operator's function body), and sets of
inputs and of the outputs that any implementation must give. Nothing here knows how many there are or what
they are called.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

PATTERN = "test_attention_*"
BODY = "_expanded"


@dataclass(frozen=True)
class Vector:
    """One folder. `inputs` and `outputs` by the node's formal names (Q, attn_mask, Y, …), only those it
    has."""

    name: str
    attributes: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    def tensor(self, name: str) -> torch.Tensor | None:
        """An input as a torch tensor of its own memory, None where the node has none of that name."""
        array = self.inputs.get(name)
        return None if array is None else torch.from_numpy(array.copy())

    def expected(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.outputs[name].copy())

    def __str__(self) -> str:
        return self.name


def root() -> Path:
    """Where the wheel keeps the vectors of single nodes."""
    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "node"


@lru_cache(maxsize=1)
def folders() -> tuple[Path, ...]:
    """Every vector of the operator, function bodies too, in alphabetical order."""
    return tuple(sorted(p for p in root().glob(PATTERN) if p.is_dir()))


def nodes() -> tuple[str, ...]:
    return tuple(p.name for p in folders() if not p.name.endswith(BODY))


def bodies() -> tuple[str, ...]:
    return tuple(p.name for p in folders() if p.name.endswith(BODY))


def model(name: str) -> onnx.ModelProto:
    return onnx.load(root() / name / "model.onnx")


def data_sets(name: str) -> list[Path]:
    return sorted((root() / name).glob("test_data_set_*"))


@lru_cache(maxsize=256)
def load(name: str) -> Vector:
    """A vector of one node, with its data set. Raises ValueError for a folder that is anything else: one
    that a reader would have to look at before it is run."""
    graph, sets = model(name).graph, data_sets(name)
    if [n.op_type for n in graph.node] != ["Attention"] or len(sets) != 1:
        raise ValueError(
            f"{name}: given {[n.op_type for n in graph.node]} and {len(sets)} data sets, expected one "
            f"Attention node and one set"
        )
    node, schema = graph.node[0], onnx.defs.get_schema("Attention", model(name).opset_import[0].version)
    read = {
        "input": _arrays(sets[0], "input", graph.input),
        "output": _arrays(sets[0], "output", graph.output),
    }
    formal = {
        kind: {spec.name: read[kind][actual] for spec, actual in zip(specs, actuals) if actual}
        for kind, specs, actuals in (
            ("input", schema.inputs, node.input),
            ("output", schema.outputs, node.output),
        )
    }
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return Vector(name, attributes, formal["input"], formal["output"])


def read_set(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(inputs, outputs) of a vector's only data set, by the names that its model gives them."""
    (folder,), graph = data_sets(name), model(name).graph
    return _arrays(folder, "input", graph.input), _arrays(folder, "output", graph.output)


def _arrays(folder: Path, kind: str, values: Any) -> dict[str, np.ndarray]:
    found = len(list(folder.glob(f"{kind}_*.pb")))
    if found != len(values):
        raise ValueError(f"{folder}: {found} files {kind}_*.pb for {len(values)} {kind}s of the model")
    return {
        v.name: numpy_helper.to_array(onnx.load_tensor(folder / f"{kind}_{i}.pb"))
        for i, v in enumerate(values)
    }


def digest(name: str) -> str:
    """Of a vector's data alone: what goes in and what must come out, not the model."""
    files = sorted(p for folder in data_sets(name) for p in folder.glob("*.pb"))
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in files)).hexdigest()


def made(name: str, inputs: dict[str, np.ndarray], outputs: tuple[str, ...], **attributes: Any) -> Vector:
    """A vector that is on no disk: a node of these inputs and attributes, answered by ONNX's own evaluator."""
    schema = onnx.defs.get_schema("Attention")
    order = [[spec.name for spec in specs] for specs in (schema.inputs, schema.outputs)]
    given, wanted = ([n if n in names else "" for n in all_] for all_, names in zip(order, (inputs, outputs)))
    while not given[-1]:
        given.pop()
    while not wanted[-1]:
        wanted.pop()
    node = onnx.helper.make_node("Attention", given, wanted, **attributes)
    types = {n: onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in inputs.items()}
    graph = onnx.helper.make_graph(
        [node],
        "made",
        [onnx.helper.make_tensor_value_info(n, types[n], x.shape) for n, x in inputs.items()],
        [onnx.helper.make_tensor_value_info(n, types["Q"], None) for n in outputs],
    )
    opset = [onnx.helper.make_opsetid("", schema.since_version)]
    evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opset))
    # As the node holds them: its numbers are fp32.
    held = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return Vector(name, held, inputs, dict(zip(outputs, evaluator.run(list(outputs), inputs))))
