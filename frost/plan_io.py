"""Saved plans: a graph, the engines that serve it, and every version it depends on, in one self-checked file.

No pickle, nothing executable: loading validates and lowers the graph again (compiled kernels come from the kernel
cache) and then insists that the result is the plan that was saved.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from descriptors import LIMITS, FrostError, pack, unpack
from descriptors.errors import WireError
from descriptors.limits import read_limited, shown
from engines import registry
from engines.base import Target
from engines.template_loader import write_atomically

from ._version import __version__
from .errors import GraphError, NotSupportedError, PlanError
from .plan_key import key_text

if TYPE_CHECKING:
    from .plan import Plan

MAGIC = b"FROSTPLN"
SCHEMA = 1
_LIMITS = LIMITS["plan"]
_FIELDS = {"schema", "versions", "arch", "key", "engines", "order", "gates", "digests", "toolchains", "graph"}


def _versions() -> dict[str, str]:
    return {"frost": __version__, "torch": torch.__version__.split("+")[0]}


def save_plan(plan: Plan, path: Any) -> None:
    """Write `plan` to `path` (atomically). Raises OSError where that is impossible, PlanError for a plan beyond what
    `load_plan` takes in."""
    from .graph import Graph

    used = sorted({route.engine.split("[")[0] for route in plan.routes})
    body = pack({
        "schema": SCHEMA, "versions": _versions(), "arch": plan.target.arch, "key": key_text(plan.key),
        "engines": [r.engine for r in plan.routes],
        "order": None if plan.policy.engines is None else list(plan.policy.engines), "gates": plan.policy.gates,
        "digests": {n: registry.get(n).source_digest() for n in used},
        "toolchains": {n: dict(registry.get(n).toolchain()) for n in used}, "graph": plan._graph_bytes,
    })
    data = MAGIC + hashlib.sha256(body).digest() + body
    try:
        _parse(data, f"plan {path}")
        Graph.from_bytes(plan._graph_bytes)
    except FrostError as e:
        raise PlanError(f"plan {path}: it could not be read back ({e}); split the graph, or shorten its names") from e
    write_atomically(Path(path), data)


def load_plan(path: Any, *, device: Any = None) -> Plan:
    """The plan saved at `path`, for `device` (default: as `Graph.compile`).

    Raises PlanError where the file is damaged, or was made for another arch, other versions, other kernel sources, or
    where lowering no longer gives the same engines; FileNotFoundError where there is none.
    """
    from .graph import Graph
    from .plan import compile_graph, resolve_target

    record = _read(Path(path))
    target: Target = resolve_target("cpu" if device is None and record["arch"] == "cpu" else device)
    _same("arch", record["arch"], target.arch)
    for name, version in _versions().items():
        _same(f"version of {name}", record["versions"].get(name), version)
    for name, digest in record["digests"].items():
        engine = _engine(name)
        _same(f"kernel source of engine {name}", digest, engine.source_digest())
        _same(f"toolchain of engine {name}", record["toolchains"].get(name), dict(engine.toolchain()))
    try:
        graph = Graph.from_bytes(record["graph"])
        plan = compile_graph(graph, target, engines=record["order"], gates=record["gates"])
    except (GraphError, WireError, NotSupportedError, ValueError, TypeError) as e:
        raise PlanError(f"plan {path}: cannot be compiled here: {e}") from e
    _same("engines", record["engines"], [r.engine for r in plan.routes])
    _same("plan key", record["key"], key_text(plan.key))
    return plan


def _engine(name: str) -> Any:
    try:
        return registry.get(name)
    except ValueError as e:
        raise PlanError(f"plan: {e}") from e


def _same(what: str, saved: object, here: object) -> None:
    if saved != here:
        raise PlanError(f"plan: given {what} {shown(saved)}, expected {shown(here)}; compile the graph again on this machine")


def _read(path: Path) -> dict[str, Any]:
    what = f"plan {path}"
    try:
        return _parse(read_limited(path, _LIMITS), what)
    except WireError as e:
        raise PlanError(f"{what}: {e}") from e


def _parse(data: bytes, what: str) -> dict[str, Any]:
    """Raises PlanError or WireError."""
    if data[:len(MAGIC)] != MAGIC or len(data) < len(MAGIC) + 32:
        raise PlanError(f"{what}: not a FROST plan, or truncated")
    digest, body = data[len(MAGIC):len(MAGIC) + 32], data[len(MAGIC) + 32:]
    if hashlib.sha256(body).digest() != digest:
        raise PlanError(f"{what}: checksum does not match, the file is damaged")
    record = unpack(body, _LIMITS)
    if not isinstance(record, dict) or set(record) != _FIELDS or record["schema"] != SCHEMA:
        raise PlanError(f"{what}: given another schema or unknown fields, expected schema {SCHEMA}")
    texts, lists, maps = ("arch", "key", "gates"), ("engines",), ("versions", "digests", "toolchains")
    fine = (all(isinstance(record[f], str) for f in texts) and isinstance(record["graph"], bytes)
            and all(isinstance(record[f], dict) for f in maps)
            and all(isinstance(record[f], list) and all(isinstance(x, str) for x in record[f]) for f in lists)
            and (record["order"] is None or (isinstance(record["order"], list)
                                             and all(isinstance(x, str) for x in record["order"]))))
    if not fine:
        raise PlanError(f"{what}: a field has the wrong type")
    return record
