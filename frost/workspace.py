"""One region list both sizes and carves the workspace: step scratch and intermediates, placed by lifetime."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

ALIGNMENT = 256


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


def place(requests: Iterable[Request]) -> Placement:
    """Largest first, each at the lowest offset that is free for its whole lifetime. Deterministic."""
    placed: list[tuple[int, int, Request]] = []
    offsets: dict[Hashable, tuple[int, int]] = {}
    total = 0
    for request in sorted(requests, key=lambda r: (-r.nbytes, r.first, str(r.key))):
        if request.nbytes == 0:
            offsets[request.key] = (0, 0)
            continue
        size = -(-request.nbytes // ALIGNMENT) * ALIGNMENT
        at = 0
        for start, end, other in sorted(placed, key=lambda p: p[0]):
            if other.last < request.first or request.last < other.first:
                continue
            if at + size <= start:
                break
            at = max(at, end)
        placed.append((at, at + size, request))
        offsets[request.key] = (at, request.nbytes)
        total = max(total, at + size)
    return Placement(total, offsets)
