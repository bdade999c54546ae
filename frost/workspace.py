"""One region list both sizes and carves the workspace: step scratch and intermediates, placed by lifetime."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

ALIGNMENT = 256
_BRIEF = 16  # steps


@dataclass(frozen=True)
class Request:
    """`nbytes` needed from step `first` to step `last`, both inclusive."""

    key: Hashable
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Placement:
    """Where everything lies: key -> (offset, nbytes), and the size of the whole."""

    nbytes: int
    offsets: dict[Hashable, tuple[int, int]]


_Placed = tuple[int, int, int, Request]


def place(requests: Iterable[Request]) -> Placement:
    """Largest first, each at the lowest offset that is free for its whole lifetime. Deterministic."""
    # (start, end, a number that tells equal ones apart, request). A graph of thousands of steps has thousands of
    # intermediates that live for two of them, so those are found by the steps they live in.
    placed: list[_Placed] = []
    long: list[_Placed] = []
    by_step: dict[int, list[_Placed]] = {}
    offsets: dict[Hashable, tuple[int, int]] = {}
    total = 0
    for request in sorted(requests, key=lambda r: (-r.nbytes, r.first, str(r.key))):
        if request.nbytes == 0:
            offsets[request.key] = (0, 0)
            continue
        size = -(-request.nbytes // ALIGNMENT) * ALIGNMENT
        lifetime = range(request.first, request.last + 1)
        brief = len(lifetime) <= _BRIEF
        near = sorted({*(p for s in lifetime for p in by_step.get(s, ())), *long}) if brief else placed
        at = 0
        for start, end, _, other in near:
            if other.last < request.first or request.last < other.first:
                continue
            if at + size <= start:
                break
            at = max(at, end)
        made = (at, at + size, len(placed), request)
        insort(placed, made)
        if brief:
            for s in lifetime:
                by_step.setdefault(s, []).append(made)
        else:
            insort(long, made)
        offsets[request.key] = (at, request.nbytes)
        total = max(total, at + size)
    return Placement(total, offsets)
