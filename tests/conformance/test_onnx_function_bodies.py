"""The function bodies of ONNX's `Attention` (`…_expanded`), op for op through FROST's primitives.

A body has the data of its node, byte for byte. It multiplies q and k with the root of the scale, rounded to
the io dtype, so its fp64 result is off the vector by that constant's rounding: see `_constant`. Bodies fuse
into attention unless something stands between product and softmax that fusion has no word for (a softcap),
or a caller wants an intermediate.
"""

from __future__ import annotations

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[dev]'")

import closeness
import onnx_bodies as bodies
import onnx_mapping as mapping
import onnx_vectors as vectors
import torch
from onnx_mapping import SCORES, Call

from frost.errors import NotSupportedError

BODIES, FUSED = 64, 42
ENGINES = ("reference", "triton", "torch_sdpa")


def call_of(body: str) -> Call:
    return mapping.call_of(vectors.load(body.removesuffix(vectors.BODY)))


def fuses(call: Call) -> bool:
    return call.mode is None and not call.options["softcap"]


def test_every_body_has_its_node_and_the_same_data() -> None:
    assert len(vectors.bodies()) == BODIES
    assert {n + vectors.BODY for n in vectors.nodes()} == set(vectors.bodies())
    assert all(vectors.digest(n) == vectors.digest(n + vectors.BODY) for n in vectors.nodes())
    assert len({vectors.digest(n) for n in vectors.nodes()}) > 1  # digests say something
    assert sum(fuses(call_of(n)) for n in vectors.bodies()) == FUSED


@pytest.mark.parametrize("name", vectors.bodies())
def test_fp64_primitives_meet_the_vector(name: str) -> None:
    g, tensors, expected = bodies.translate(name, torch.float64)
    results = g.compile("cpu", engines=["reference"]).execute(tensors)
    for output, want in expected.items():
        allowed = closeness.half_ulp(want) + _constant(call_of(name), output)
        closeness.assert_within(results[output], want, allowed, f"{output} of {name}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", vectors.bodies())
def test_body_on_an_engine(name: str, engine: str) -> None:
    """What fuses is attention with a bias, served as such; every other op is the reference's."""
    call = call_of(name)
    g, tensors, expected = bodies.translate(name)
    plan = g.compile("cpu", engines=list(dict.fromkeys([engine, "reference"])), gates="off")
    found = [route for route in plan.routes if route.op == "sdpa"]
    assert len(found) == fuses(call)
    served = "reference" if engine == "torch_sdpa" else engine
    assert all(route.engine.startswith(served) for route in found)
    told = {d.field for route in plan.routes for d in route.declined}
    whole = engine == "reference" or (engine == "triton" and len(plan.routes) == len(found))
    assert whole == (not told)
    assert engine != "torch_sdpa" or ("bias" in told) == fuses(call)
    assert len(found) == len(plan.routes) or engine == "reference" or "op" in told
    if not whole:
        with pytest.raises(NotSupportedError) as caught:
            g.compile("cpu", engines=[engine], gates="off")
        assert list(caught.value.reasons) == [engine] and all(caught.value.reasons[engine])
    results = plan.execute(tensors)
    for output, want in expected.items():
        allowed = mapping.rule(call, output) + closeness.half_ulp(want) + _constant(call, output)
        closeness.assert_within(results[output], want, allowed, f"{output} of {name} on {engine}")


def _constant(call: Call, output: str) -> float:
    """What two factors, each off by a unit roundoff u, do: scores s become s (1 + 2 u). That is 2 u S in a
    score of at most S; a weight then moves by twice the share that its scores do, and o by that times the
    largest value."""
    q, k, v = (call.tensors[n].double() for n in ("q", "k", "v"))
    scale = call.options["scale"] or q.shape[-1] ** -0.5
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    moved = 2 * closeness.unit_roundoff(call.dtype) * scores.abs().max().item()
    if output == SCORES:
        return 2 * moved if call.mode == len(mapping.STAGES) else moved
    return 2 * moved * v.abs().max().item()
