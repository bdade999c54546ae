"""A saved run: what a report is made from, as one JSON file."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from descriptors import LIMITS, FrostError, WireError, parse_json
from descriptors.limits import read_limited
from engines.template_loader import write_atomically

from .saved_fields import problems

SCHEMA = 1
KIND = "frost-run"
_LIMITS = LIMITS["saved run"]


class SavedError(FrostError, ValueError):
    """A file that is no saved run, or is damaged."""


@dataclass
class Saved:
    """Lists of facts (see facts.py). `environment` is where they were gathered; filled in where it is left
    out.
    """

    graphs: list[dict[str, Any]] = field(default_factory=list)
    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    routing: list[dict[str, Any]] = field(default_factory=list)
    gates: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def write_saved(path: Path, saved: Saved) -> Path:
    """Write a run (atomically). NaN becomes null. Raises OSError."""
    from .facts import environment

    saved.environment = saved.environment or environment()
    content = {"kind": KIND, "schema": SCHEMA, **asdict(saved)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(_plain(content), indent=1, allow_nan=False) + "\n").encode())
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def load_saved(path: Path) -> Saved:
    """Raises SavedError, naming the file, for anything but a whole saved run, and OSError where it cannot
    be read.
    """
    try:
        content = parse_json(read_limited(path, _LIMITS), _LIMITS)
    except WireError as e:
        raise SavedError(f"{path}: {e}") from e
    if not isinstance(content, dict) or content.get("kind") != KIND or content.get("schema") != SCHEMA:
        raise SavedError(
            f"{path}: expected a saved run of schema {SCHEMA}, as `frost run --save` and `frost bench "
            "--save` write it"
        )
    bad = next(problems(content), None)
    if bad is not None:
        raise SavedError(f"{path}: {bad}")
    return Saved(**{f.name: content[f.name] for f in fields(Saved)})


def merge_saved(parts: Iterable[Saved]) -> Saved:
    """Several runs as one: what is the same is there once, environments are side by side where they differ."""
    out = Saved()
    kept: set[str] = set()
    plans: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        for graph in part.graphs:
            _add_graph(graph, plans, out.graphs)
        for name in ("benchmarks", "routing", "gates"):
            for item in getattr(part, name):
                text = name + _content(item)
                if text not in kept:
                    kept.add(text)
                    getattr(out, name).append(item)
        for name, value in part.environment.items():
            seen = out.environment.setdefault(name, value)
            if value not in seen.split(" | "):
                out.environment[name] = f"{seen} | {value}"
    return out


def _content(item: Any) -> str:
    return json.dumps(_plain(item), sort_keys=True)


def _plan_content(graph: dict[str, Any]) -> str:
    """What a plan is, without how it came about and what one run of it measured."""
    routes = [{n: v for n, v in r.items() if n != "cache_hit"} for r in graph["routes"]]
    return _content({**{n: v for n, v in graph.items() if n not in ("cache_hit", "run")}, "routes": routes})


def _add_graph(graph: dict[str, Any], plans: dict[str, list[dict[str, Any]]], out: list[dict[str, Any]]) -> None:
    """A plan once, with its run where there is one; once more for each run that measured something else."""
    same = plans.setdefault(_plan_content(graph), [])
    run = graph.get("run")
    if same and (run is None or any(_content(g.get("run")) == _content(run) for g in same)):
        return
    if same and same[0].get("run") is None:
        same[0]["run"] = run
        return
    same.append(dict(graph))
    out.append(same[-1])


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
