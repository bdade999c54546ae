"""How much of a file is taken in: one row for each kind of file that FROST reads back.

Files come from other people and from broken disks. Nothing of a file is believed before it was measured against its
row: the size before it is read, nesting and the number of values before a parser allocates anything, the counts of a
kind (nodes, rows) before anything is built from them. The rows are ten times and more what real files hold.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import WireError

_KB, _MB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Limits:
    """`what`: the kind, in words. `max_depth`: containers inside each other. `max_values`: every container, member, key
    and text. `max_text`: bytes of one text as stored. `counts`: what a kind counts beside that, by name.
    """

    what: str
    max_bytes: int
    max_depth: int
    max_values: int
    max_text: int
    counts: Mapping[str, int] = field(default_factory=dict)


# A bool or number in msgpack takes one byte and a pointer in memory: values, not bytes, are what memory grows with.
LIMITS: dict[str, Limits] = {
    row.what: row
    for row in (
        Limits("graph", 16 * _MB, 10, 500_000, 4 * _KB, {"nodes": 10_000, "symbols in a product": 16}),
        Limits("plan", 16 * _MB, 6, 25_000, 4 * _KB),
        Limits("kernel bundle", 64 * _MB, 12, 20_000, 64 * _KB),
        Limits("gate", 4 * _MB, 24, 200_000, 16 * _KB, {"files in a folder": 4_096}),
        Limits("routing dump", 16 * _MB, 8, 500_000, 16 * _KB),
        Limits(
            "saved run",
            32 * _MB,
            16,
            1_000_000,
            64 * _KB,
            {
                "graphs": 500,
                "nodes of a graph": 20_000,
                "steps of a plan": 10_000,
                "benchmarks": 5_000,
                "suites": 1_000,
                "gates": 2_000,
            },
        ),
        Limits("SDPA baseline", 64 * _KB, 6, 1_000, 1 * _KB),
        Limits("benchmark CSV", 16 * _MB, 1, 1_000_000, 16 * _KB, {"rows": 50_000, "columns": 100}),
        # Plain data in no file of its own: descriptors, the counts of a pytest worker.
        Limits("message", 16 * _MB, 32, 500_000, 16 * _MB),
    )
}

# A message about a file never holds more of it than this.
_SHOWN = 120


def shown(value: object) -> str:
    """A value read from a file, as a message shows it."""
    if isinstance(value, (dict, list, tuple)) and len(value) > _SHOWN // 4:
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (str, bytes)):
        value = value[:_SHOWN]
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def shown_names(value: Mapping[object, object]) -> list[str]:
    """The keys of a map read from a file, as a message shows them."""
    names = sorted(str(k)[: _SHOWN // 3] for k in list(value)[: _SHOWN // 4])
    return names if len(names) == len(value) else [*names, f"… {len(value)} in all"]


def read_limited(path: str | os.PathLike[str], limits: Limits) -> bytes:
    """The bytes of a file of that kind.

    Raises WireError where it is larger than its row, or no regular file (a pipe would be waited for, a device never
    ends), and OSError where it cannot be read.
    """
    flags = (
        os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    )
    fd = os.open(Path(path), flags)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise WireError(f"{limits.what}: given something other than a regular file")
        check_size(info.st_size, limits)
        with os.fdopen(fd, "rb", closefd=False) as f:
            data = f.read(info.st_size + 1)
            if len(data) > info.st_size:  # it grew meanwhile
                data += f.read(limits.max_bytes)
    finally:
        os.close(fd)
    check_size(len(data), limits)
    return data


def check_size(nbytes: int, limits: Limits, what: str | None = None) -> None:
    """Raises WireError where so many bytes are more than the row allows."""
    if nbytes > limits.max_bytes:
        raise WireError(f"{what or limits.what}: given {nbytes} bytes, expected at most {limits.max_bytes}")


def check_count(name: str, given: int, limits: Limits) -> None:
    """Raises WireError where there is more of something than the row's `counts` allow."""
    if given > limits.counts[name]:
        raise WireError(f"{limits.what}: given {given} {name}, expected at most {limits.counts[name]}")
