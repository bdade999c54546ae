"""The plan cache: bounded, thread-safe, least recently used out first, one builder per key while others wait."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from engines import forks
from engines.template_loader import loader

from . import env


@dataclass(frozen=True)
class CacheInfo:
    """Counters since the process started or `reset_counters`. `plans` and `capacity`: what the plan cache holds now."""

    plans_built: int
    hits: int
    kernels_compiled: int
    disk_hits: int
    plans: int
    capacity: int


class _Interrupted(Exception):
    """The thread that was at the build was interrupted (KeyboardInterrupt, SystemExit)."""


class _Building:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.owner = threading.get_ident()
        self.value: Any = None
        self.error: BaseException | None = None


class PlanCache:
    """`get(key, build) -> (value, hit)`."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self._building: dict[Hashable, _Building] = {}
        self.built = 0
        self.hits = 0

    def get(self, key: Hashable, build: Callable[[], Any]) -> tuple[Any, bool]:
        """The value of `key`, built at most once at a time. A failed build is not kept; its error reaches every
        waiter. An interrupt is the builder's alone: a waiter builds instead."""
        while True:
            try:
                return self._get(key, build)
            except _Interrupted:
                continue

    def _get(self, key: Hashable, build: Callable[[], Any]) -> tuple[Any, bool]:
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                self.hits += 1
                return self._plans[key], True
            limit = max(1, self._capacity())  # may raise: before anybody can come to wait for this build
            job = self._building.get(key)
            mine = job is None
            if job is None:
                job = self._building[key] = _Building()
        if not mine:
            if job.owner == threading.get_ident():
                raise RuntimeError("plan cache: a build asked for its own key; an engine compiles the graph it serves")
            job.done.wait()
            if job.error is not None:
                raise job.error if isinstance(job.error, Exception) else _Interrupted
            with self._lock:
                self.hits += 1
            return job.value, True
        try:
            job.value = build()
        except BaseException as e:
            job.error = e
            raise
        finally:
            with self._lock:
                if job.error is None:
                    self._plans[key] = job.value
                    self.built += 1
                    while len(self._plans) > limit:
                        self._plans.popitem(last=False)
                del self._building[key]
            job.done.set()
        return job.value, False

    def touch(self, key: Hashable) -> bool:
        """Whether the key is held; if so, this is a hit like any other."""
        with self._lock:
            if key not in self._plans:
                return False
            self._plans.move_to_end(key)
            self.hits += 1
            return True

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()

    def after_fork(self) -> None:
        """In a child: builds of threads that are not here will never end."""
        self._lock = threading.Lock()
        self._building.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._plans)


plans = PlanCache(env.plan_cache_size)
forks.in_child(plans.after_fork)
loader.set_folder(env.kernel_cache_dir)


def info() -> CacheInfo:
    """Counters that tests and operators can rely on."""
    return CacheInfo(plans.built, plans.hits, loader.stats.kernels_compiled, loader.stats.disk_hits, len(plans),
                     env.plan_cache_size())


def clear(*, kernels: bool = False) -> None:
    """Forget the plans, and with `kernels=True` the compiled kernels in memory too. Files on disk stay."""
    plans.clear()
    if kernels:
        loader.clear()


def reset_counters() -> None:
    """Set every counter to zero."""
    plans.built = plans.hits = 0
    loader.stats.__init__()  # type: ignore[misc]
