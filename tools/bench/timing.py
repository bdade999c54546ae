"""Device time by CUDA events, host time by the host's clock.

Candidates are interleaved, so that a clock that drifts drifts for all. Before each timed call the L2 cache is
overwritten and the device is kept busy for as long as the host needs to enqueue the call: the interval
between the events then holds device work only, also where a peer's host path (autograd) is slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

WARMUP = 3
MIN_REPS = 20
_CLOCK_HZ = 2.0e9  # an upper bound of the SM clock: a busy wait is then never shorter than asked for
_LONGEST_WAIT_S = 5e-3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call. `spread` is (p90 - p10) / median."""

    median_ms: float
    best_ms: float
    spread: float
    reps: int


def summarise(samples_ms: list[float]) -> Timing:
    """Median, best and spread of the samples. Raises ValueError where there are none."""
    if not samples_ms:
        raise ValueError("samples: given none, expected at least one")
    ordered = sorted(samples_ms)
    n = len(ordered)
    median = statistics.median(ordered)
    low, high = ordered[int(0.1 * (n - 1))], ordered[round(0.9 * (n - 1))]
    return Timing(median, ordered[0], (high - low) / median if median else 0.0, n)


class _CacheFlush:
    """Overwrites twice the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(max(2 * size, 64 << 20), dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self._buffer.zero_()


def time_interleaved(
    calls: Mapping[str, Callable[[], Any]],
    *,
    reps: int = MIN_REPS,
    warmup: int = WARMUP,
    device: torch.device | None = None,
) -> dict[str, Timing]:
    """Time every call `reps` times, in rounds over all of them. Needs a CUDA device."""
    device = device or torch.device("cuda", torch.cuda.current_device())
    flush = _CacheFlush(device)
    waits: dict[str, int] = {}
    for name, call in calls.items():
        host = []
        for _ in range(max(1, warmup)):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            call()
            host.append(time.perf_counter() - start)
        waits[name] = int(min(1.5 * min(host) + 20e-6, _LONGEST_WAIT_S) * _CLOCK_HZ)
    torch.cuda.synchronize(device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(reps):
        for name, call in calls.items():
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            torch.cuda._sleep(waits[name])
            start_event.record()
            call()
            end_event.record()
            events[name].append((start_event, end_event))
        torch.cuda.synchronize(device)  # keeps the queue, and what the calls allocate, bounded
    return {name: summarise([a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def host_microseconds(
    calls: Mapping[str, Callable[[], Any]],
    *,
    calls_per_batch: int = 50,
    batches: int = 40,
    sync: Callable[[], Any] = torch.cuda.synchronize,
) -> dict[str, float]:
    """Median over batches of the host time of one call, in microseconds. The queue is emptied after each
    batch, outside the clock, so that a call never waits for room in it."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(calls_per_batch):
            call()
        sync()
    for _ in range(batches):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(calls_per_batch):
                call()
            samples[name].append((time.perf_counter() - start) / calls_per_batch * 1e6)
            sync()
    return {name: statistics.median(x) for name, x in samples.items()}
