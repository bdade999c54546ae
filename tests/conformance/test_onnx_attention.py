"""ONNX's own vectors for its `Attention` operator, every one on every engine, through the graph API.

The expected outputs turn out to be fp64 results rounded once to the io dtype, in fp32 and fp16 alike, so
FROST in fp64 has to meet them to half a unit in the last place: semantics with no tolerance to hide in. An
engine in the io dtype is then allowed that half unit, and what the tolerance rule allows it against fp64.

One vector again: pytest tests/conformance/test_onnx_attention.py -k "triton and <name>"
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[dev]'")

import closeness
import onnx_mapping as mapping
import onnx_vectors as vectors
from onnx_mapping import Call
from torch import Tensor

from frost.errors import NotSupportedError
from frost.plan import Plan

# What the pinned wheel has. A release with others needs a look at what they ask for.
NODES = 64
# How many an engine serves whole; the others it declines, in part or altogether, with the reasons of DECLINES.
SERVED = {"reference": 64, "triton": 50, "torch_sdpa": 10}


def calls() -> list[Call]:
    return [mapping.call_of(vectors.load(name)) for name in vectors.nodes()]


def run(call: Call, engines: list[str], device: str = "cpu") -> tuple[Plan, dict[str, Tensor]]:
    """(plan, results by ONNX's names)."""
    g, tensors, results = mapping.build(call, device)
    plan = g.compile(device, engines=engines, gates="off")
    plan.execute(tensors)
    return plan, {name: t.cpu() for name, t in results.items()}


def assert_meets(call: Call, results: dict[str, Tensor]) -> None:
    """Half a unit for the vector's rounding, and the tolerance rule for the engine's."""
    for output, got in results.items():
        want = call.vector.expected(output)
        allowed = mapping.rule(call, output) + closeness.half_ulp(want)
        closeness.assert_within(got, want, allowed, f"{output} of {call.vector}")


def test_every_vector_is_found_and_mapped() -> None:
    assert len(vectors.nodes()) == len(calls()) == NODES


def test_no_engine_declines_more_than_it_did() -> None:
    assert {e: sum(not mapping.declines(c, e) for c in calls()) for e in SERVED} == SERVED


def test_the_diagonals_tell_the_corners_apart() -> None:
    """Were no causal vector off both of FROST's corners, a mistaken one would pass."""
    causal = [c for c in calls() if c.vector.attributes.get("is_causal")]
    assert any(c.past not in (0, c.seqlens[1] - c.seqlens[0]) for c in causal)
    assert any(c.past == 0 != c.seqlens[1] - c.seqlens[0] for c in causal)


def test_what_has_no_mapping_is_an_error() -> None:
    vector = vectors.load(vectors.nodes()[0])
    with pytest.raises(mapping.Unmapped, match="softmax_precision"):
        mapping.call_of(
            vectors.Vector(
                "other", {**vector.attributes, "softmax_precision": 1}, vector.inputs, vector.outputs
            )
        )


@pytest.mark.parametrize("name", vectors.nodes())
def test_fp64_meets_the_vector_to_its_last_bit(name: str) -> None:
    call = mapping.call_of(vectors.load(name))
    _, results = run(call.widened(), ["reference"])
    for output, got in {**results, **call.presents}.items():
        want = call.vector.expected(output)
        closeness.assert_within(got, want, closeness.half_ulp(want), f"{output} of {name}")
    assert set(results) | set(call.presents) == set(call.vector.outputs)


@pytest.mark.parametrize("engine", mapping.DECLINES)
@pytest.mark.parametrize("name", vectors.nodes())
def test_engine_meets_the_vector_or_declines_with_its_reasons(name: str, engine: str) -> None:
    call = mapping.call_of(vectors.load(name))
    expected = mapping.declines(call, engine)
    plan, results = run(call, [engine, "reference"] if expected else [engine])
    told = [d for route in plan.routes for d in route.declined]
    assert {d.field for d in told} == expected and all(d.engine == engine and d.text for d in told)
    if expected:
        with pytest.raises(NotSupportedError) as caught:
            run(call, [engine])
        assert list(caught.value.reasons) == [engine] and all(caught.value.reasons[engine])
    # Beside an intermediate that only the reference makes, attention itself stays with the engine.
    attention = next(route for route in plan.routes if route.op == "sdpa")
    assert attention.engine.startswith("reference" if expected - {"op"} else engine)
    assert_meets(call, results)


# ---- what the vectors on disk leave out: nodes made here, answered by ONNX's evaluator


def _random(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(sum(map(sum, shapes.values())))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


_HEADS = {"Q": (2, 6, 4, 8), "K": (2, 2, 5, 8), "V": (2, 2, 5, 10)}
_PAST = {"past_key": (2, 2, 7, 8), "past_value": (2, 2, 7, 10)}
_PRESENT = ("Y", "present_key", "present_value")
_FOLDED = {"Q": (2, 4, 48), "K": (2, 5, 16), "V": (2, 5, 20)}
MADE: dict[str, Callable[[], vectors.Vector]] = {
    "mask shorter than the keys, no lengths": lambda: vectors.made(
        "short", _random(**_HEADS, attn_mask=(2, 6, 4, 3)), ("Y",)
    ),
    "boolean mask shorter than the keys": lambda: vectors.made(
        "short_bool",
        {**_random(**_HEADS), "attn_mask": np.eye(4, 3, 1) + np.eye(4, 3) + np.eye(4, 3, -1) > 0},
        ("Y",),
    ),
    "past, causal, grouped, no mask": lambda: vectors.made(
        "past_causal", _random(**_HEADS, **_PAST), _PRESENT, is_causal=1
    ),
    "folded, past, causal, softcap": lambda: vectors.made(
        "folded",
        _random(**_FOLDED, **_PAST),
        _PRESENT,
        is_causal=1,
        softcap=1.5,
        q_num_heads=6,
        kv_num_heads=2,
    ),
    # Without a scale of its own, which takes the evaluator from fp64 to fp32.
    "past, causal, softcap, bias": lambda: vectors.made(
        "all",
        _random(**_HEADS, **_PAST, attn_mask=(1, 6, 4, 12)),
        _PRESENT,
        is_causal=1,
        softcap=1.5,
    ),
    # With a whole mask: the evaluator cannot broadcast lengths over anything smaller.
    "lengths, causal, softcap, bias": lambda: vectors.made(
        "lengths",
        {**_random(**_HEADS, attn_mask=(2, 6, 4, 5)), "nonpad_kv_seqlen": np.array([3, 5])},
        ("Y",),
        is_causal=1,
        softcap=1.5,
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_fp64_meets_the_evaluator(name: str) -> None:
    call = mapping.call_of(MADE[name]())
    _, results = run(call.widened(), ["reference"])
    for output, got in {**results, **call.presents}.items():
        want = call.vector.expected(output)
        closeness.assert_within(got, want, closeness.half_ulp(want), f"{output} of {name}")


@pytest.mark.parametrize("name", MADE)
def test_interpreted_kernels_meet_the_evaluator(name: str) -> None:
    call = mapping.call_of(MADE[name]())
    assert_meets(call, run(call, ["triton"])[1])


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", vectors.nodes())
def test_compiled_kernels_meet_the_vector(name: str) -> None:
    call = mapping.call_of(vectors.load(name))
    engines = ["triton", "reference"] if mapping.declines(call, "triton") else ["triton"]
    plan, results = run(call, engines, "cuda")
    assert next(route for route in plan.routes if route.op == "sdpa").engine.startswith("triton")
    assert_meets(call, results)
