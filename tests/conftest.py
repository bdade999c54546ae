"""What every suite shares: the routing dump, a cache of the run's own, and GPU tests only where there is a
GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from engines import registry
from engines.base import Engine, Target
from frost import cache, pytest_plugin, routing
from frost.errors import NotSupportedError

MIN_CC = (8, 0)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the routing plugin from the checkout where the package isn't installed."""
    if not pluginmanager.is_registered(pytest_plugin):
        pluginmanager.register(pytest_plugin, "frost.pytest_plugin")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """FROST's own suites always dump their routing, by default to .frost_routing/<suite>.msgpack."""
    # Triton 3.6's interpreter turns 1-element arrays into numbers in a way that NumPy will drop.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
    if config.getoption("--frost-routing") is None:
        suite = re.sub(
            r"[^\w.]+", "-", " ".join(os.path.relpath(a, config.rootpath) for a in config.args)
        ).strip("-")
        config.option.frost_routing = str(
            config.rootpath / ".frost_routing" / f"{suite[:80] or 'all'}.msgpack"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    waits = {"gpu": _no_gpu()}
    if "tables" not in config.option.markexpr:
        waits["tables"] = "compiles or emulates a whole table of kernels (tens of minutes in all): make test-kernels"
    for item in items:
        for mark, reason in waits.items():
            if reason is not None and item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Where Triton's interpreter doesn't run at all (a NumPy it can't work with, say), a test that asks for interpreted
    kernels is skipped with that reason. Where it does run, nothing is hidden."""
    try:
        return (yield)
    except NotSupportedError as e:
        missing = registry.get("triton").unavailable(Target.cpu())
        if missing is not None and str(missing) in e.reasons.get("triton", ()):
            pytest.skip(str(missing))
        raise


def _no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    import torch

    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU: torch.cuda.is_available() is False"
    cc = torch.cuda.get_device_capability()
    return None if cc >= MIN_CC else f"needs an NVIDIA GPU of sm_80 or newer, this one is sm_{cc[0]}{cc[1]}"


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's caches and gates, nor obeys the user's FROST_* settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("FROST_")]:
            patch.delenv(name)
        patch.setenv("FROST_CACHE_DIR", str(tmp_path_factory.mktemp("frost_cache")))
        yield


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, no plans and no compiled kernels in memory, all counters at zero. Yields the
    folder."""
    folder = tmp_path / "frost_cache"
    monkeypatch.setenv("FROST_CACHE_DIR", str(folder))
    cache.clear(kernels=True)
    cache.reset_counters()
    yield folder
    cache.clear(kernels=True)


@pytest.fixture
def fresh_routing() -> Iterator[None]:
    """Routing counts from zero."""
    routing.reset()
    yield
    routing.reset()


@pytest.fixture
def register() -> Iterator[Callable[..., Engine]]:
    """`register(engine, priority=...)`: an engine for one test. Plans made meanwhile are forgotten with
    it."""
    added: list[str] = []

    def add(engine: Engine, **how: int) -> Engine:
        registry.register(engine, **how)
        added.append(engine.name)
        return engine

    cache.clear()
    yield add
    for name in added:
        registry.unregister(name)
    cache.clear()
