"""What a saved run may hold, as a table: the type of everything that the page reads.

A saved run comes from anywhere. What the page would stumble over is refused when it is read, with the place in the file;
what the page does not read may be there or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from descriptors import LIMITS

COUNTS = LIMITS["saved run"].counts


@dataclass(frozen=True)
class Kind:
    """One scalar: its name in messages, and its test."""

    name: str
    types: tuple[type, ...]

    def fits(self, value: Any) -> bool:
        return type(value) in self.types and (not isinstance(value, (int, float)) or math.isfinite(value))


@dataclass(frozen=True)
class Items:
    """A list of one kind, or a list of exactly these."""

    of: Any
    most: str = ""  # of COUNTS


@dataclass(frozen=True)
class Table:
    """A map from texts to one kind."""

    of: Any


@dataclass(frozen=True)
class Maybe:
    """A member that may be missing or null."""

    of: Any


TEXT, FLAG = Kind("a text", (str,)), Kind("true or false", (bool,))
COUNT, REAL = Kind("a whole number of at least 0", (int,)), Kind("a number", (int, float))
NUMBER = Kind("a number or null", (int, float, type(None)))  # null stands for NaN

_OUTPUT = {
    "shape": Items(COUNT),
    "dtype": TEXT,
    "mean": NUMBER,
    "largest": NUMBER,
    "nan": COUNT,
    "difference": Maybe(NUMBER),
}
_RUN = {"ms": REAL, "repeat": COUNT, "outputs": Table(_OUTPUT)}
_REGION = {"name": TEXT, "offset": COUNT, "bytes": COUNT, "first": COUNT, "last": COUNT}

FIELDS: dict[str, Any] = {
    "graphs": Items(
        {
            "name": TEXT,
            "target": TEXT,
            "key": Maybe(TEXT),
            "nodes": Items(
                {"id": COUNT, "kind": TEXT, "label": TEXT, "lines": Items(TEXT)}, "nodes of a graph"
            ),
            "edges": Items((COUNT, COUNT, TEXT)),
            "routes": Items(
                {
                    "node": TEXT,
                    "op": TEXT,
                    "engine": TEXT,
                    "gate": TEXT,
                    "declined": Items((TEXT, TEXT, TEXT, TEXT, TEXT)),
                }
            ),
            "steps": Items(
                {"name": TEXT, "op": TEXT, "engine": TEXT, "details": Table(TEXT)}, "steps of a plan"
            ),
            "workspace": {"bytes": COUNT, "regions": Items(_REGION)},
            "run": Maybe(_RUN),
        },
        "graphs",
    ),
    "benchmarks": Items(
        {
            "title": TEXT,
            "card": Maybe(TEXT),
            "dtype": Maybe(TEXT),
            "rows": Items(
                {
                    "candidate": TEXT,
                    "ms": NUMBER,
                    "tflops": NUMBER,
                    "pinned_ms": Maybe(NUMBER),
                    "status": TEXT,
                }
            ),
            "ceilings": Items({"label": TEXT, "tflops": NUMBER, "low": Maybe(NUMBER)}),
        },
        "benchmarks",
    ),
    "routing": Items(
        {
            "suite": TEXT,
            "counts": Table(COUNT),
            "shares": Table(REAL),
            "declines": Table(Table(COUNT)),
            "cache_hits": Maybe(Table(COUNT)),
            "texts": Maybe(Table(Table(TEXT))),
        },
        "suites",
    ),
    "gates": Items(
        {
            "name": TEXT,
            "engine": TEXT,
            "op": TEXT,
            "verdict": TEXT,
            "environment": Maybe(TEXT),
            "problem": Maybe(TEXT),
            "covers": Maybe(COUNT),
            "declined": Maybe(COUNT),
            "date": Maybe(TEXT),
            "shipped": Maybe(FLAG),
        },
        "gates",
    ),
    "environment": Table(TEXT),
}


def problems(content: Mapping[str, Any]) -> Iterator[str]:
    """What does not fit, each with its place in the file."""
    fits = True
    for bad in _check(content, FIELDS, ""):
        fits = False
        yield bad
    for i, graph in enumerate(content["graphs"] if fits else ()):
        yield from _drawing(graph, f"graphs[{i}]")


def _check(value: Any, kind: Any, where: str) -> Iterator[str]:
    if isinstance(kind, Kind):
        if not kind.fits(value) or kind is COUNT and value < 0:
            yield f"{where}: expected {kind.name}"
    elif isinstance(kind, Maybe):
        if value is not None:
            yield from _check(value, kind.of, where)
    elif isinstance(kind, dict):
        if not isinstance(value, dict):
            yield f"{where or 'the run'}: expected an object"
            return
        missing = [n for n, k in kind.items() if n not in value and not isinstance(k, Maybe)]
        if missing:
            yield f"{where or 'the run'}: an item without {', '.join(missing)}"
        for name, inner in kind.items():
            if name in value:
                yield from _check(value[name], inner, f"{where}.{name}" if where else name)
    elif isinstance(kind, Table):
        if not isinstance(value, dict):
            yield f"{where}: expected a dict"
            return
        for name, inner in value.items():
            yield from _check(inner, kind.of, f"{where}.{name[:40]}")
    elif isinstance(kind, tuple):
        if not isinstance(value, list) or len(value) != len(kind):
            yield f"{where}: expected a list of {len(kind)}"
            return
        for i, (inner, each) in enumerate(zip(value, kind)):
            yield from _check(inner, each, f"{where}[{i}]")
    else:
        if not isinstance(value, list):
            yield f"{where}: expected a list"
        elif kind.most and len(value) > COUNTS[kind.most]:
            yield f"{where}: given {len(value)} {kind.most}, expected at most {COUNTS[kind.most]}"
        else:
            for i, inner in enumerate(value):
                yield from _check(inner, kind.of, f"{where}[{i}]")


def _drawing(graph: Any, where: str) -> Iterator[str]:
    """Nodes have numbers of their own, and edges run between them."""
    ids = [node["id"] for node in graph["nodes"]]
    known = set(ids)
    if len(known) != len(ids):
        yield f"{where}.nodes: expected an id of its own for each"
    for i, (a, b, _) in enumerate(graph["edges"]):
        if a not in known or b not in known:
            yield f"{where}.edges[{i}]: expected the ids of two nodes"
            return
