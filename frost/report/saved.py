"""A saved run: what a report is made from, as one JSON file."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from engines.template_loader import write_atomically

SCHEMA = 1
KIND = "frost-run"
MAX_BYTES = 64 << 20


class SavedError(ValueError):
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


_KINDS = {f.name: dict if f.name == "environment" else list for f in fields(Saved)}
# What the page reads of each item; anything else may be there or not.
_NEEDED = {
    "graphs": ("name", "target", "nodes", "edges", "routes", "steps", "workspace"),
    "benchmarks": ("title", "rows", "ceilings"),
    "routing": ("suite", "counts", "shares", "declines"),
    "gates": ("name", "engine", "op", "verdict"),
}


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
    if path.stat().st_size > MAX_BYTES:
        raise SavedError(f"{path}: given {path.stat().st_size} bytes, expected at most {MAX_BYTES}")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise SavedError(f"{path}: not valid JSON ({e})") from e
    if not isinstance(content, dict) or content.get("kind") != KIND or content.get("schema") != SCHEMA:
        raise SavedError(
            f"{path}: expected a saved run of schema {SCHEMA}, as `frost run --save` and `frost bench "
            "--save` write it"
        )
    for name, kind in _KINDS.items():
        if not isinstance(content.get(name), kind):
            raise SavedError(f"{path}: {name}: expected a {kind.__name__}")
        for item in content[name] if kind is list else ():
            missing = [n for n in _NEEDED[name] if not isinstance(item, dict) or n not in item]
            if missing:
                raise SavedError(f"{path}: {name}: an item without {', '.join(missing)}")
    return Saved(**{name: content[name] for name in _KINDS})


def merge_saved(parts: Iterable[Saved]) -> Saved:
    """Several runs as one: lists joined, the same gate once, environments side by side where they differ."""
    out = Saved()
    for part in parts:
        out.graphs += part.graphs
        out.benchmarks += part.benchmarks
        out.routing += part.routing
        out.gates += [g for g in part.gates if g not in out.gates]
        for name, value in part.environment.items():
            seen = out.environment.setdefault(name, value)
            if value not in seen.split(" | "):
                out.environment[name] = f"{seen} | {value}"
    return out


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
