"""The ordered engine table, and third-party engines through the entry-point group `frost.engines`.

Order is preference: where the caller names no engines, lowering asks them from the top. A third-party engine is asked
after ours and before the reference, unless its `PRIORITY` says otherwise.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
import threading

from . import forks
from .base import Engine

log = logging.getLogger("frost.registry")

ENTRY_POINT_GROUP = "frost.engines"

# name -> (module, attribute, priority). Smaller is asked first. Modules are imported when the table is first read.
_BUILTIN: dict[str, tuple[str, str, int]] = {
    "triton": ("engines.triton", "ENGINE", 20),
    "sm80": ("engines.sm80", "ENGINE", 25),
    "torch_sdpa": ("engines.torch_sdpa", "ENGINE", 30),
    "reference": ("engines.reference", "ENGINE", 100),
}
_THIRD_PARTY_PRIORITY = 50

_lock = forks.free_in_child(threading.RLock())
_engines: dict[str, tuple[int, Engine]] | None = None
_broken: dict[str, str] = {}
_registrations: dict[str, int] = {}


def _load() -> dict[str, tuple[int, Engine]]:
    global _engines
    with _lock:
        if _engines is not None:
            return _engines
        table: dict[str, tuple[int, Engine]] = {}
        for name, (module, attribute, priority) in _BUILTIN.items():
            table[name] = (priority, getattr(importlib.import_module(module), attribute))
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            try:
                made = point.load()
                engine = made() if isinstance(made, type) else made
                if not isinstance(engine, Engine) or engine.name in table:
                    raise TypeError(f"expected an engines.base.Engine with a name of its own, given {engine!r}")
            except Exception as e:  # a third party's import error must not take the library down
                _broken[point.name] = f"{type(e).__name__}: {e}"
                log.warning("engine %r from entry point %r cannot be loaded: %s", point.name, point.value, e)
                continue
            table[engine.name] = (getattr(engine, "PRIORITY", _THIRD_PARTY_PRIORITY), engine)
        _engines = table
        return table


def engines() -> tuple[Engine, ...]:
    """Every engine, in order of preference."""
    return tuple(e for _, e in sorted(_load().values(), key=lambda pair: (pair[0], pair[1].name)))


def names() -> tuple[str, ...]:
    return tuple(e.name for e in engines())


def broken() -> dict[str, str]:
    """Third-party engines that could not be loaded, with the error."""
    _load()
    return dict(_broken)


def get(name: str) -> Engine:
    """The engine of that name. Raises ValueError naming the nearest one."""
    table = _load()
    if name not in table:
        near = difflib.get_close_matches(str(name), table, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"engines: given {name!r}, expected one of {list(names())}{hint}")
    return table[name][1]


def register(engine: Engine, *, priority: int = _THIRD_PARTY_PRIORITY) -> None:
    """Add an engine in this process. Raises ValueError if the name is taken."""
    with _lock:
        table = _load()
        if engine.name in table:
            raise ValueError(f"engine: given name {engine.name!r}, expected one that is not taken")
        table[engine.name] = (priority, engine)
        _registrations[engine.name] = _registrations.get(engine.name, 0) + 1


def registrations(name: str) -> int:
    """How often an engine was registered under this name in this process: tells a new one from the one it replaced."""
    with _lock:
        return _registrations.get(name, 0)


def every_registration() -> int:
    """How often any engine was registered in this process. With `names()` it tells one set of engines from every other."""
    return sum(_registrations.values())


def unregister(name: str) -> None:
    """Remove an engine added by `register`. Raises ValueError for a built-in or unknown name."""
    with _lock:
        if name in _BUILTIN:
            raise ValueError(f"engine: {name!r} is built in and cannot be removed")
        get(name)
        del _load()[name]
