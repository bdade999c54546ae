"""Which engine serves which node, and why: the records of lowering and a process-wide, bounded log of them.

`stats()` aggregates (bounded by engines x ops x fields); whole records are kept for the last `KEEP` lowerings
only. A lowering counts under "{engine}:{op}"; a plan from the plan cache was lowered before, and counts
apart.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from descriptors import LIMITS, FrostError, WireError, pack, parse_json, unpack
from descriptors.limits import read_limited, shown, shown_names
from engines import forks
from engines.template_loader import write_atomically

from ._version import __version__

SCHEMA = 1
KEEP = 1024
_LIMITS = LIMITS["routing dump"]


class RoutingError(FrostError, ValueError):
    """A routing dump that cannot be read: damaged, too large, or of another schema."""


@dataclass(frozen=True)
class Declined:
    """One reason why an engine did not serve a node: the field, what was given, what would have done."""

    engine: str
    field: str
    got: str
    wanted: str
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.field}: got {self.got}, wanted {self.wanted}"


@dataclass(frozen=True)
class Route:
    """Where one node went. `engine` is the label: the engine's name, which a detail in brackets may follow.

    `declined` holds every reason of every engine asked before it. `gate` says what vouches for the engine: a
    gate's stamp, "not needed", or "off" where proofs were switched off.
    """

    graph: str
    node: str
    op: str
    engine: str
    declined: tuple[Declined, ...] = ()
    target: str = ""
    cache_hit: bool = False
    gate: str = ""

    @property
    def engine_name(self) -> str:
        """The engine's plain name."""
        return self.engine.partition("[")[0]

    @property
    def key(self) -> str:
        """ "{engine}:{op}", as `stats()` counts it."""
        return f"{self.engine.partition('[')[0]}:{self.op}"

    def hit(self) -> Route:
        """The same route, taken from the plan cache."""
        return replace(self, cache_hit=True)

    def to_wire(self) -> dict[str, Any]:
        return {"graph": self.graph, "node": self.node, "op": self.op, "engine": self.engine,
                "target": self.target, "cache_hit": self.cache_hit, "gate": self.gate,
                "declined": [[d.engine, d.field, d.got, d.wanted, d.text] for d in self.declined]}

    @staticmethod
    def from_wire(value: Any) -> Route:
        """The inverse of `to_wire`. Raises RoutingError."""
        fields = _fields(value, "route", _ROUTE_FIELDS)
        declined = []
        for parts in fields.pop("declined"):
            if not isinstance(parts, list) or len(parts) != 5 or not all(isinstance(p, str) for p in parts):
                raise RoutingError(f"route {fields['node']!r}: a declined record must be five texts")
            declined.append(Declined(*parts))
        return Route(declined=tuple(declined), **fields)


_ROUTE_FIELDS: dict[str, type] = {"graph": str, "node": str, "op": str, "engine": str, "target": str,
                                  "cache_hit": bool, "gate": str, "declined": list}


class Stats(dict[str, int]):
    """Lowerings by "{engine}:{op}" (0 where absent), with what goes beside them.

    `cache_hits`: plans served from the plan cache, by the same keys. `declines`: by "{engine}:{op}" of the
    engine that declined, a count per field. `texts`: the latest reason in words, by the same two keys.
    """

    def __init__(self, counts: Mapping[str, int] | None = None, cache_hits: Mapping[str, int] | None = None,
                 declines: Mapping[str, Mapping[str, int]] | None = None,
                 texts: Mapping[str, Mapping[str, str]] | None = None) -> None:
        super().__init__(counts or {})
        self.cache_hits: dict[str, int] = dict(cache_hits or {})
        self.declines: dict[str, dict[str, int]] = {k: dict(v) for k, v in (declines or {}).items()}
        self.texts: dict[str, dict[str, str]] = {k: dict(v) for k, v in (texts or {}).items()}

    def __missing__(self, key: str) -> int:
        return 0

    @property
    def counts(self) -> dict[str, int]:
        return dict(self)

    @property
    def lowerings(self) -> int:
        return sum(self.values())

    def add(self, route: Route) -> None:
        if route.cache_hit:
            self.cache_hits[route.key] = self.cache_hits.get(route.key, 0) + 1
            return
        self[route.key] += 1
        for d in route.declined:
            key = f"{d.engine}:{route.op}"
            fields = self.declines.setdefault(key, {})
            fields[d.field] = fields.get(d.field, 0) + 1
            self.texts.setdefault(key, {})[d.field] = str(d)

    def update_from(self, other: Stats) -> None:
        """Add another process's counts to these."""
        for mine, theirs in ((self, other), (self.cache_hits, other.cache_hits)):
            for key, n in theirs.items():
                mine[key] = mine.get(key, 0) + n
        for key, fields in other.declines.items():
            into = self.declines.setdefault(key, {})
            for name, n in fields.items():
                into[name] = into.get(name, 0) + n
        for key, texts in other.texts.items():
            self.texts.setdefault(key, {}).update(texts)

    def copy(self) -> Stats:
        return Stats(self, self.cache_hits, self.declines, self.texts)


@dataclass
class Dump:
    """What one dump file holds."""

    stats: Stats = field(default_factory=Stats)
    routes: list[Route] = field(default_factory=list)
    suite: str = ""
    version: str = __version__

    def to_wire(self) -> dict[str, Any]:
        s = self.stats
        return {"schema": SCHEMA, "version": self.version, "suite": self.suite, "counts": dict(s),
                "cache_hits": s.cache_hits, "declines": s.declines, "texts": s.texts,
                "routes": [r.to_wire() for r in self.routes]}

    @staticmethod
    def from_wire(value: Any) -> Dump:
        """Raises RoutingError where the value is no dump of this schema."""
        if isinstance(value, dict) and value.get("schema") != SCHEMA:
            raise RoutingError(f"routing dump: given schema {shown(value.get('schema'))}, expected {SCHEMA}; "
                               f"write it again with this version of FROST ({__version__})")
        fields = _fields(value, "routing dump", _DUMP_FIELDS)
        for name in ("counts", "cache_hits"):
            _table(fields[name], name, int)
        for name, kind in (("declines", int), ("texts", str)):
            for key, inner in _table(fields[name], name, dict).items():
                _table(inner, f"{name}.{key}", kind)
        stats = Stats(fields["counts"], fields["cache_hits"], fields["declines"], fields["texts"])
        return Dump(stats, [Route.from_wire(r) for r in fields["routes"]], fields["suite"], fields["version"])


_DUMP_FIELDS: dict[str, type] = {"schema": int, "version": str, "suite": str, "counts": dict,
                                 "cache_hits": dict, "declines": dict, "texts": dict, "routes": list}


def _fields(value: Any, what: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(kinds):
        given = shown_names(value) if isinstance(value, dict) else type(value).__name__
        raise RoutingError(f"{what}: given {given}, expected the fields {sorted(kinds)}")
    for name, kind in kinds.items():
        if type(value[name]) is not kind:
            raise RoutingError(f"{what}.{name}: given {type(value[name]).__name__}, expected {kind.__name__}")
    return dict(value)


def _table(value: dict[Any, Any], what: str, kind: type) -> dict[str, Any]:
    for key, item in value.items():
        if not isinstance(key, str) or type(item) is not kind or (isinstance(item, int) and item < 0):
            raise RoutingError(f"routing dump: {what}[{shown(key)}] is {shown(item)}, expected {kind.__name__}"
                               f"{' >= 0' if kind is int else ''} under a text")
    return value


# ---- the log of this process -------------------------------------------------------------------------------


class RoutingLog:
    """Counts and the last `KEEP` records. Not locked: the functions below share one lock for every attached
    log."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.stats = Stats()
        self.recent: deque[Route] = deque(maxlen=KEEP)

    def add(self, route: Route) -> None:
        self.stats.add(route)
        if not route.cache_hit:
            self.recent.append(route)

    def dump(self, suite: str = "") -> Dump:
        return Dump(self.stats.copy(), list(self.recent), suite)


_lock = forks.free_in_child(threading.Lock())
_log = RoutingLog()
_attached: list[RoutingLog] = [_log]


def attach(log: RoutingLog) -> None:
    """Have `log` see every route too, whatever `reset()` does: for tools that watch a whole process."""
    with _lock:
        _attached.append(log)


def detach(log: RoutingLog) -> None:
    """End what `attach` began; a log that is not attached is left alone."""
    with _lock:
        _attached[:] = [x for x in _attached if x is not log or x is _log]


def record(route: Route) -> None:
    """Add one route. Thread-safe."""
    with _lock:
        for log in _attached:
            log.add(route)


def count_hits(routes: Iterable[Route]) -> None:
    """Count the routes of a plan that came from the plan cache. A hot call pays this, so no record is
    made."""
    with _lock:
        for route in routes:
            key = route.key
            for log in _attached:
                hits = log.stats.cache_hits
                hits[key] = hits.get(key, 0) + 1


def stats() -> Stats:
    """A copy of the counts so far."""
    with _lock:
        return _log.stats.copy()


def routes() -> list[Route]:
    """The last `KEEP` lowerings, oldest first."""
    with _lock:
        return list(_log.recent)


def reset() -> None:
    """Forget everything."""
    with _lock:
        _log.reset()


def snapshot(suite: str = "", log: RoutingLog | None = None) -> Dump:
    """The process's log, or an attached one, as it stands, in one consistent piece."""
    with _lock:
        return (log or _log).dump(suite)


def dump(path: str | Path, *, suite: str = "") -> Path:
    """Write the log: JSON where the name ends in .json, msgpack where in .msgpack or without an ending. Folders are made.

    Raises ValueError for another ending, and OSError.
    """
    return write_dump(path, snapshot(suite))


def checked_path(path: str | Path) -> Path:
    """`path`, for a dump to be written to. Raises ValueError where its ending is that of another format."""
    path = Path(path)
    if path.suffix not in ("", ".json", ".msgpack"):
        raise ValueError(f"routing dump: given {str(path)!r}, expected a name that ends in .json or .msgpack")
    return path


def write_dump(path: str | Path, what: Dump) -> Path:
    """Write a dump that is already in hand (a merged one, say), as `dump` does."""
    path = checked_path(path)
    wire = what.to_wire()
    as_json = path.suffix == ".json"
    data = (json.dumps(wire, indent=1, sort_keys=True) + "\n").encode() if as_json else pack(wire)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path


def load(path: str | Path) -> Dump:
    """Read a dump. Raises RoutingError, naming the file, for one that is damaged, too large or of another
    schema, and OSError for one that cannot be read at all."""
    path = Path(path)
    try:
        data = read_limited(path, _LIMITS)
        return Dump.from_wire(parse_json(data, _LIMITS) if path.suffix == ".json" else unpack(data, _LIMITS))
    except (WireError, RoutingError) as e:
        raise RoutingError(f"{path}: {e}") from e


def merge(paths: Iterable[str | Path]) -> Dump:
    """Several dumps as one: counts added, the last `KEEP` routes kept, suites listed once each."""
    return merge_dumps(load(p) for p in paths)


def merge_dumps(dumps: Iterable[Dump]) -> Dump:
    out, suites = Dump(), []
    for part in dumps:
        out.stats.update_from(part.stats)
        out.routes += part.routes
        suites += [s for s in (part.suite,) if s and s not in suites]
    out.routes = out.routes[-KEEP:]
    out.suite = ", ".join(suites)
    return out


def shares(stats: Mapping[str, int], op: str | None = None) -> dict[str, float]:
    """The fraction of lowerings that each engine served, largest first; of one op where `op` is given."""
    totals: dict[str, int] = {}
    for key, n in stats.items():
        engine, _, name = key.partition(":")
        if op is None or name == op:
            totals[engine] = totals.get(engine, 0) + n
    total = sum(totals.values())
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return {engine: n / total for engine, n in ranked} if total else {}
