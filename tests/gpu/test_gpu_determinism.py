"""Bit-equal results from run to run, under load, and wherever in the batch a sequence stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import harness
import pytest
import torch


@contextmanager
def side_load() -> Iterator[None]:
    """Matrix products on another stream, so that blocks are scheduled differently each time."""
    stream = torch.cuda.Stream()
    a = harness.randn(4096, 4096)
    with torch.cuda.stream(stream):
        for _ in range(200):
            a = (a @ a).clamp(-1, 1)
    yield
    stream.synchronize()


def _assert_equal_runs(pair: harness.Pair, runs: int) -> None:
    pair.run()
    first = pair.copies()
    pair.check()
    with side_load():
        for i in range(runs):
            pair.spoil()
            pair.run()
            for name, t in first.items():
                assert harness.same_bits(pair.results[name], t), f"{name} differs in run {i + 1}"


def test_200_runs_of_a_packed_backward_are_bit_equal() -> None:
    """Group of 4, a window, three sequences of several tiles each (flash-attention PR#1870)."""
    inputs = harness.packed_inputs(900, 900, 8, 2, 64, [0, 300, 620, 900], [0, 310, 630, 900])
    pair = harness.bind_pair(inputs, causal=True, window=(128, None), deterministic=True)
    _assert_equal_runs(pair, 200)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_20_runs_are_bit_equal(d: int, causal: bool) -> None:
    inputs = harness.dense_inputs(2, 8, 2, 700, 700, d)
    _assert_equal_runs(harness.bind_pair(inputs, causal=causal, deterministic=True), 20)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 260), (1, 16, 1, 260), (1, 1, 250, 260), (3, 1, 1, 1), (1, 1, 1, 1)]
)
def test_gradients_of_broadcast_bias_and_sink_are_bit_equal(shape: tuple[int, ...]) -> None:
    """Sums over batches and heads have a fixed order (cudnn-frontend PR#707)."""
    # 16 heads: the yardstick of dsink is the largest of that many errors, and of few it says little.
    inputs = harness.dense_inputs(3, 16, 2, 250, 260, 64)
    inputs["bias"] = harness.randn(*shape, seed=5)
    inputs["sink"] = harness.randn(16, dtype=torch.float32, seed=6)
    _assert_equal_runs(harness.bind_pair(inputs, deterministic=True), 20)


def test_a_sequence_does_not_depend_on_its_place_in_the_batch() -> None:
    inputs = harness.dense_inputs(6, 4, 2, 333, 333, 64)
    order = torch.tensor([4, 0, 5, 2, 1, 3], device=harness.DEVICE)
    plain = harness.bind_pair(inputs, causal=True, deterministic=True)
    moved = harness.bind_pair(
        {n: t[order].contiguous() for n, t in inputs.items()}, causal=True, deterministic=True
    )
    plain.run()
    moved.run()
    for name, t in plain.results.items():
        assert harness.same_bits(t[order], moved.results[name]), name
