"""Streams, CUDA graphs, allocations and synchronisation: a bound call launches, and does nothing else."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import harness
import pytest
import torch
from torch import Tensor

REPLAYS = 50
_LONG = 100_000_000  # clock cycles of a busy wait: some 50 ms


def _packed(cu_q: list[int], cu_kv: list[int], seed: int = 0) -> dict[str, Tensor]:
    return harness.packed_inputs(512, 640, 4, 2, 64, cu_q, cu_kv, seed=seed)


def _random_offsets(total: int, sequences: int, pick: torch.Generator) -> Tensor:
    """Ascending, within the capacity, zero-length sequences and gaps at both ends included."""
    return torch.randint(0, total + 1, (sequences + 1,), generator=pick).sort().values.to(torch.int32)


@pytest.mark.parametrize("kind", ["dense", "packed", "square"])
def test_captured_graph_replays_with_new_contents(kind: str) -> None:
    """Forward and backward in one CUDA graph; contents and offsets change in place before each replay, and
    nothing that was seen at capture stays frozen (cudnn-frontend#552, vllm/flash-attention PR#18)."""
    if kind == "packed":
        inputs, options = _packed([0, 100, 100, 300, 512], [0, 200, 210, 300, 640]), {"causal": True}
    elif kind == "square":  # on Hopper: tensor maps, and a dQ that is added up in arrival order
        inputs, options = harness.dense_inputs(2, 4, 2, 300, 300, 128), {"causal": True}
    else:
        inputs, options = (
            harness.dense_inputs(2, 4, 2, 200, 264, 64),
            {"causal": True, "align": "bottom_right"},
        )
    captured, eager = harness.bind_pair(inputs, **options), harness.bind_pair(inputs, **options)
    captured.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    pick = torch.Generator().manual_seed(1)
    for replay in range(REPLAYS):
        for i, name in enumerate(("q", "k", "v", "do")):
            inputs[name].copy_(harness.randn(*inputs[name].shape, seed=100 * replay + i))
        if kind == "packed":
            for name, total in (("cu_seqlens_q", 512), ("cu_seqlens_kv", 640)):
                inputs[name].copy_(_random_offsets(total, 4, pick))
        captured.spoil()
        eager.spoil()
        graph.replay()
        eager.run()
        for name, t in captured.results.items():
            if not (kind == "square" and name == "dq"):
                assert harness.same_bits(t, eager.results[name]), f"{name} differs from eager at replay {replay}"
    captured.check("the last replay")


@pytest.mark.parametrize("deterministic", [False, True])
def test_side_stream_sees_what_its_stream_wrote(deterministic: bool) -> None:
    """Launches go to the current stream: q is written late on a side stream (flash-attention PR#2505)."""
    inputs = harness.dense_inputs(2, 4, 4, 256, 256, 64)
    wanted = harness.bind_pair(inputs, deterministic=deterministic)
    wanted.run()
    torch.cuda.synchronize()
    late = {n: harness.nan_like(t) for n, t in inputs.items()}
    pair = harness.bind_pair(late, deterministic=deterministic)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_LONG)
        for n, t in inputs.items():
            late[n].copy_(t)
        pair.run()
        copies = pair.copies()
    stream.synchronize()
    for name, t in wanted.results.items():
        assert harness.same_bits(copies[name], t) or (name == "dq" and not deterministic), name
    dataclasses.replace(wanted, results=copies).check("side stream")


def test_side_stream_does_not_wait_for_the_default_stream() -> None:
    inputs = harness.dense_inputs(1, 2, 2, 128, 128, 64)
    pair = harness.bind_pair(inputs)
    pair.run()
    torch.cuda.synchronize()
    stream, blocked, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(10 * _LONG)
    blocked.record()
    with torch.cuda.stream(stream):
        pair.run()
        done.record()
    done.synchronize()
    assert not blocked.query(), "the call waited for work on another stream"


def _calls(kind: str) -> tuple[harness.Pair, list[Any]]:
    if kind == "packed":
        inputs = _packed([0, 100, 100, 300, 512], [0, 200, 210, 300, 640])
    elif kind == "plain":  # on Hopper: tensor maps
        inputs = harness.dense_inputs(2, 4, 2, 300, 264, 128)
    else:
        inputs = harness.dense_inputs(2, 4, 2, 200, 264, 64)
        inputs["bias"] = harness.randn(1, 4, 1, 264, seed=7)
        inputs["sink"] = harness.randn(4, dtype=torch.float32, seed=8)
    pair = harness.bind_pair(inputs)
    return pair, pair.calls


@pytest.mark.parametrize("kind", ["dense", "packed", "plain"])
def test_bound_call_allocates_nothing(kind: str) -> None:
    pair, calls = _calls(kind)
    pair.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        for call in calls:
            call()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("kind", ["dense", "packed", "plain"])
def test_bound_call_never_synchronises(kind: str) -> None:
    _, calls = _calls(kind)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bound_call_returns_before_the_device_is_done() -> None:
    """Whatever the debug mode does not know about would show as a wait."""
    pair, _ = _calls("packed")
    pair.run()
    torch.cuda.synchronize()
    pending = torch.cuda.Event()
    torch.cuda._sleep(5 * _LONG)
    pair.run()
    pending.record()
    assert not pending.query(), "the call waited for the device"


def test_execute_with_everything_given_allocates_and_waits_for_nothing() -> None:
    inputs = {n: t for n, t in harness.dense_inputs(2, 4, 2, 200, 264, 64).items() if n != "do"}
    o = harness.nan_like(inputs["q"])
    plan = harness.forward_plan(inputs, {"o": o})
    workspace = torch.empty(plan.workspace_size, dtype=torch.uint8, device=harness.DEVICE)
    everything = {**inputs, "o": o}
    plan.execute(everything, workspace=workspace)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        torch.cuda.set_sync_debug_mode("error")
        plan.execute(everything, workspace=workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("how", ["execute", "bind"])
def test_a_thread_that_has_not_touched_cuda(how: str) -> None:
    """It has no current context, and tensor maps are encoded before anything is launched."""
    inputs = {n: t for n, t in harness.dense_inputs(1, 4, 2, 256, 256, 128).items() if n != "do"}
    o = harness.nan_like(inputs["q"])
    plan = harness.forward_plan(inputs, {"o": o}, causal=True)
    want = plan.execute(inputs)["o"].clone()
    fresh = harness.forward_plan(inputs, {"o": o}, causal=True)
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            feeds = {**inputs, "o": o}
            if how == "execute":
                fresh.execute(feeds)
            else:
                fresh.bind(feeds)()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not failed and not thread.is_alive(), failed
    torch.cuda.synchronize()
    assert harness.same_bits(o, want)
