"""An exception inside an engine's compile: everybody who waits for that plan gets it, nothing of it is kept, no other
engine is asked in its place, and the next try begins anew."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.small import Spec

import frost
from engines import registry
from engines.base import (
    Adapter,
    BoundCall,
    Capabilities,
    Decline,
    Engine,
    Executable,
    Launch,
    Reason,
    SdpaFwdDsl,
    Support,
    Target,
    Workspace,
)
from engines.template_loader import Bundle, KernelKey, TemplateLoader, loader
from engines.triton import runtime
from frost import _attention, cache, routing

THREADS = 32


class Odd(Exception):
    """An error of a third party, with a constructor of its own."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__()
        self.code, self.detail = code, detail


class Fragile(Engine):
    """Serves any forward on the CPU; `compile` waits a moment, so that everybody comes to wait for it, and then raises
    what is next in `errors`."""

    name = "fragile"

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.compiled = 0

        class Fwd(SdpaFwdDsl):
            engine = "fragile"
            capabilities = (Capabilities("fragile", "sdpa", ("cpu",), (), frozenset({"lse"})),)

            def check_support(cell, desc: Any, target: Target) -> Support:
                return Support()

            def compile(cell, desc: Any, target: Target) -> Executable:
                self.compiled += 1
                time.sleep(0.3)
                if self.errors:
                    raise self.errors.pop(0)
                return Copies()

        self._cell = Fwd()

    def adapters(self) -> tuple[Adapter, ...]:
        return (self._cell,)


class Copies(Executable):
    """o = 1, whatever is asked."""

    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        return lambda stream: launch.operands["o"].fill_(1.0)


def together(work: Callable[[], Any]) -> list[Any]:
    """Results and exceptions of threads that start at the same moment."""
    results: list[Any] = [None] * THREADS
    barrier = threading.Barrier(THREADS)

    def run(i: int) -> None:
        barrier.wait(timeout=60)
        try:
            results[i] = work()
        except BaseException as e:
            results[i] = e

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(100)
    assert not any(t.is_alive() for t in threads), "a waiter was never woken"
    return results


ERRORS = [
    OSError(28, "No space left on device"),
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
    AssertionError(),
    StopIteration("from a generator"),
    TimeoutError("ptxas"),
    Odd(7, detail="third party"),
    Exception("plain"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_every_waiter_gets_it_and_nothing_is_kept(
    error: Exception, register: Callable[..., Engine], fresh_cache: Path, fresh_routing: None
) -> None:
    engine: Any = register(Fragile())
    engine.errors = [error]
    results = together(lambda: Spec().build().compile("cpu", engines=["fragile"]))
    assert all(r is error for r in results) and engine.compiled == 1
    info = cache.info()
    assert (info.plans, info.plans_built, info.hits) == (0, 0, 0)
    assert dict(routing.stats()) == {} and routing.routes() == []
    plan = Spec().build().compile("cpu", engines=["fragile"])
    assert not plan.cache_hit and engine.compiled == 2 and cache.info().plans == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__)
def test_an_interrupt_is_the_builders_alone(
    error: BaseException, register: Callable[..., Engine], fresh_cache: Path
) -> None:
    """Ctrl-C reaches one thread. Of those that wait for its plan one builds instead."""
    engine: Any = register(Fragile())
    engine.errors = [error]
    results = together(lambda: Spec().build().compile("cpu", engines=["fragile"]))
    assert [r for r in results if isinstance(r, BaseException)] == [error]
    made = [r for r in results if r is not error]
    assert engine.compiled == 2 and len({id(p._core) for p in made}) == 1
    assert [p.cache_hit for p in made].count(False) == 1


def test_it_is_no_decline(register: Callable[..., Engine], fresh_cache: Path) -> None:
    """A bug in one engine is not hidden by another that would serve; a typed decline moves on, with its reason."""
    engine: Any = register(Fragile())
    engine.errors = [ZeroDivisionError("tile of 0"), Decline(Reason("tile", "0", "at least 16"))]
    with pytest.raises(ZeroDivisionError, match="tile of 0"):
        Spec().build().compile("cpu", engines=["fragile", "reference"])
    plan = Spec().build().compile("cpu", engines=["fragile", "reference"])
    assert plan.routes[0].engine_name == "reference"
    assert [(d.engine, d.field) for d in plan.routes[0].declined] == [("fragile", "tile")]


def test_through_attention(register: Callable[..., Engine], fresh_cache: Path) -> None:
    """The functional call keeps nothing of it either, and the same tensors work at the next call."""
    engine: Any = register(Fragile())
    engine.errors = [OSError(28, "No space left on device")]
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    known = len(_attention._plans)
    with pytest.raises(OSError, match="No space left"):
        frost.attention(q, k, v, engines=["fragile"])
    assert len(_attention._plans) == known
    assert torch.equal(frost.attention(q, k, v, engines=["fragile"]), torch.ones(1, 2, 3, 4))


# ---- compiled kernels -------------------------------------------------------------------------------------


def test_a_compiler_that_crashes(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own compile, for a GPU that need not be here: no kernel in memory or on disk, no lock left behind."""
    target = Target.cuda((9, 0))
    missing = registry.get("triton").unavailable(target)
    if missing is not None:
        pytest.skip(str(missing))
    real, calls = runtime.compile_kernel, []

    def crash(*args: Any, **kwargs: Any) -> Bundle:
        calls.append(1)
        time.sleep(0.3)
        raise RuntimeError("PassManager::run failed")

    def compiled() -> Any:
        return Spec(dtype="fp16", dims=(16, 16)).build().compile(target, engines=["triton"], gates="off")

    monkeypatch.setattr(runtime, "compile_kernel", crash)
    results = together(compiled)
    assert all(isinstance(r, RuntimeError) and "PassManager" in str(r) for r in results) and len(calls) == 1
    assert cache.info().kernels_compiled == cache.info().plans == 0
    assert loader._entries == {} and list((fresh_cache / "kernels").iterdir()) == []
    monkeypatch.setattr(runtime, "compile_kernel", real)
    assert compiled().routes[0].engine_name == "triton"
    assert cache.info().kernels_compiled == 1


def test_an_interrupted_kernel_is_built_by_a_waiter(tmp_path: Path) -> None:
    made, key, errors = (
        TemplateLoader(lambda: tmp_path),
        KernelKey("e", "k", (), "sm_90", "d"),
        [KeyboardInterrupt()],
    )
    built = []

    def build() -> Bundle:
        built.append(os.getpid())
        time.sleep(0.3)
        if errors:
            raise errors.pop()
        return Bundle(b"code", {})

    results = together(lambda: made.get(key, build))
    assert [type(r) for r in results].count(KeyboardInterrupt) == 1 and len(built) == 2
    assert {r.code for r in results if isinstance(r, Bundle)} == {b"code"}
    assert sum(isinstance(r, Bundle) for r in results) == THREADS - 1
