"""The plan cache: bounded, least recently used out first, one builder per key while the others wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases.small import Spec

from engines.base import (
    Adapter,
    BoundCall,
    Capabilities,
    Engine,
    Executable,
    Launch,
    SdpaFwdDsl,
    Target,
    Workspace,
)
from frost import cache
from frost.cache import PlanCache

THREADS = 8


def together(work: Callable[[int], Any], count: int = THREADS, timeout: float = 60) -> list[Any]:
    """Run `work(i)` in threads that start at the same moment; results or exceptions, by thread."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        barrier.wait()
        try:
            results[i] = work(i)
        except BaseException as e:
            results[i] = e

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout)
    assert not any(t.is_alive() for t in threads), "a waiter was never woken"
    return results


# ---- the cache itself ------------------------------------------------------------------------------------


def test_one_build_while_the_others_wait() -> None:
    plans, built = PlanCache(lambda: 4), []

    def build() -> object:
        built.append(threading.get_ident())
        time.sleep(0.1)
        return object()

    results = together(lambda i: plans.get("key", build))
    assert len(built) == 1 and len({id(value) for value, _ in results}) == 1
    assert [hit for _, hit in results].count(False) == 1
    assert (plans.built, plans.hits) == (1, THREADS - 1)


def test_builds_of_different_keys_do_not_wait_for_each_other() -> None:
    plans, meet = PlanCache(lambda: 64), threading.Barrier(THREADS)
    together(lambda i: plans.get(i, lambda: meet.wait(timeout=30)))
    assert plans.built == THREADS


def test_a_failed_build_reaches_every_waiter_and_is_tried_again_later() -> None:
    plans, attempts = PlanCache(lambda: 4), []

    def fail() -> None:
        attempts.append(1)
        time.sleep(0.1)
        raise ZeroDivisionError("no such kernel")

    results = together(lambda i: plans.get("key", fail))
    assert all(isinstance(r, ZeroDivisionError) for r in results) and len(attempts) == 1
    assert plans.get("key", lambda: "made") == ("made", False)
    assert plans.get("key", lambda: "made again") == ("made", True)


def test_an_interrupt_during_a_build_does_not_leave_the_key_locked() -> None:
    plans = PlanCache(lambda: 4)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plans.get("key", interrupted)
    assert plans.get("key", lambda: 1) == (1, False)


def test_least_recently_used_goes_first() -> None:
    plans = PlanCache(lambda: 3)
    for key in "abc":
        plans.get(key, lambda key=key: key)
    plans.get("a", lambda: "never")
    plans.get("d", lambda: "d")
    assert len(plans) == 3
    assert [plans.get(key, lambda: None)[1] for key in "acd"] == [True, True, True]
    assert plans.get("b", lambda: "b again") == ("b again", False)


def test_a_capacity_that_shrinks_is_obeyed() -> None:
    size = 5
    plans = PlanCache(lambda: size)
    for key in range(5):
        plans.get(key, lambda key=key: key)
    size = 2
    plans.get("new", lambda: 0)
    assert len(plans) == 2


def test_a_build_that_asks_for_its_own_key_is_an_error_and_no_deadlock() -> None:
    plans = PlanCache(lambda: 4)
    with pytest.raises(RuntimeError, match="own key"):
        plans.get("key", lambda: plans.get("key", lambda: 1))
    assert plans.get("key", lambda: 1) == (1, False)


def test_a_capacity_that_cannot_be_read_does_not_leave_the_key_locked() -> None:
    """FROST_PLAN_CACHE_SIZE=zero: an error for the caller, and again at the next call; never a wait without
    end."""
    plans = PlanCache(lambda: int("zero"))
    for _ in range(2):
        results = together(lambda i: plans.get("key", lambda: 1), count=2, timeout=10)
        assert all(isinstance(r, ValueError) for r in results), results


# ---- through Graph.compile --------------------------------------------------------------------------------


class Slow(Engine):
    """Serves any forward; `compile` takes a while and can be made to fail."""

    name = "slow"
    error: Exception | None = None

    def __init__(self) -> None:
        self.compiled = 0

        class Fwd(SdpaFwdDsl):
            engine = "slow"
            capabilities = (Capabilities("slow", "sdpa", ("cpu",), (), frozenset({"lse"})),)

            def check_support(cell, desc: Any, target: Target) -> Any:
                from engines.base import Support

                return Support()

            def compile(cell, desc: Any, target: Target) -> Executable:
                self.compiled += 1
                time.sleep(0.1)
                if self.error is not None:
                    raise self.error
                return Nothing()

        self._cell = Fwd()

    def adapters(self) -> tuple[Adapter, ...]:
        return (self._cell,)


class Nothing(Executable):
    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        return lambda stream: None


def test_eight_threads_compile_one_graph_once(register: Callable[..., Engine]) -> None:
    engine = register(Slow())
    before = cache.info()
    plans = together(lambda i: Spec(prefix=f"layer{i}_").build().compile("cpu", engines=["slow"]))
    assert engine.compiled == 1 and cache.info().plans_built - before.plans_built == 1  # type: ignore[attr-defined]
    assert len({p.key for p in plans}) == 1 and len({id(p._core) for p in plans}) == 1
    assert sorted(p.cache_hit for p in plans) == [False] + [True] * (THREADS - 1)
    assert all(next(iter(p.program.inputs)) == f"layer{i}_q" for i, p in enumerate(plans))


def test_a_compile_that_fails_tells_every_thread_and_later_works(register: Callable[..., Engine]) -> None:
    engine = register(Slow())
    engine.error = OSError("compiler crashed")  # type: ignore[attr-defined]
    results = together(lambda i: Spec().build().compile("cpu", engines=["slow"]))
    assert all(isinstance(r, OSError) for r in results) and engine.compiled == 1  # type: ignore[attr-defined]
    engine.error = None  # type: ignore[attr-defined]
    assert Spec().build().compile("cpu", engines=["slow"]).routes[0].engine == "slow"


def test_the_number_of_plans_is_bounded_by_the_environment(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROST_PLAN_CACHE_SIZE", "3")
    for n in range(1, 8):
        Spec(batch=n).build().compile("cpu")
    info = cache.info()
    assert (info.plans, info.capacity, info.plans_built) == (3, 3, 7)


def test_plans_made_before_and_after_an_eviction_both_work(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("FROST_PLAN_CACHE_SIZE", "1")
    first = Spec().build().compile("cpu")
    Spec(batch=5).build().compile("cpu")
    again = Spec().build().compile("cpu")
    inputs = {n: torch.randn(*shape) for n, (shape, _) in Spec().shapes().items()}
    assert not again.cache_hit and torch.equal(first.execute(inputs)["o"], again.execute(inputs)["o"])


def test_buffers_that_take_an_old_address_are_not_mistaken_for_the_old_ones(fresh_cache: Path) -> None:
    """sglang PR#29755: caches keyed on id() or data_ptr() hit again after a free. Same size, other contents,
    each time."""
    import torch

    plan = Spec().build().compile("cpu")
    # Memory that outlives the tensors: whether an allocator hands out an old address again is not left to chance.
    memory = {n: torch.empty(shape) for n, (shape, _) in Spec().shapes().items()}
    addresses = set()
    for i in range(20):
        inputs = {n: torch.from_numpy(m.numpy()).fill_(float(i)) for n, m in memory.items()}
        addresses.add(inputs["v"].data_ptr())
        torch.testing.assert_close(plan.execute(inputs)["o"], torch.full((2, 4, 6, 8), float(i)))
        del inputs
    assert addresses == {memory["v"].data_ptr()}


def test_clear_forgets_plans_and_on_demand_kernels(fresh_cache: Path) -> None:
    Spec().build().compile("cpu")
    assert cache.info().plans == 1
    cache.clear()
    assert cache.info().plans == 0 and cache.info().plans_built == 1
    cache.reset_counters()
    assert cache.info().plans_built == cache.info().hits == cache.info().kernels_compiled == 0
