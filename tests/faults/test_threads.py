"""Thirty-two threads on one plan, on a hundred plans in a cache of eight, and through `frost.attention`: every answer is
the one that a single thread gets."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.small import Spec

import frost
from descriptors import sym
from frost import _attention, cache, routing

THREADS = 32


@pytest.fixture(autouse=True)
def _hurried() -> Iterator[None]:
    """The interpreter changes threads every 10 microseconds instead of every 5 milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], Any], timeout: float = 200) -> list[Any]:
    """What `work(i)` returns in threads that start at the same moment. The first exception is raised here."""
    results: list[Any] = [None] * THREADS
    errors: list[BaseException] = []
    barrier = threading.Barrier(THREADS)

    def run(i: int) -> None:
        try:
            barrier.wait(timeout=60)
            results[i] = work(i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout)
    if errors:
        raise errors[0]
    assert not any(t.is_alive() for t in threads), "a thread never came back"
    return results


def inputs(spec: Spec, seed: int) -> dict[str, torch.Tensor]:
    pick = torch.Generator().manual_seed(seed)
    return {n: torch.randn(*shape, generator=pick) for n, (shape, _) in spec.shapes().items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["reference", "torch_sdpa", "triton"])
def test_one_plan(engine: str) -> None:
    """Each thread with buffers and workspace of its own, alternately executed and bound."""
    spec = Spec(batch=1, heads=(2, 1), seqlens=(5, 7), stats=engine != "torch_sdpa")
    plan = spec.build().compile("cpu", engines=[engine], gates="off")
    feeds = [inputs(spec, i) for i in range(THREADS)]
    expected = [{n: t.clone() for n, t in plan.execute(feed).items()} for feed in feeds]
    assert not torch.equal(expected[0]["o"], expected[1]["o"])
    rounds = 2 if engine == "triton" else 20  # interpreted kernels take turns

    def work(i: int) -> bool:
        given = {n: torch.full_like(t, float("nan")) for n, t in expected[i].items()}
        call = plan.bind({**feeds[i], **given}, torch.empty(plan.workspace_size, dtype=torch.uint8))
        for _ in range(rounds):
            for made in (plan.execute(feeds[i]), call()):
                if not all(torch.equal(made[n], t) for n, t in expected[i].items()):
                    return False
            for t in given.values():
                t.fill_(float("nan"))
        return True

    assert all(together(work))


def test_one_plan_with_many_sizes() -> None:
    """A symbolic plan remembers the layouts of 64 sizes; here every thread walks through 200."""
    s = sym("S", max=4096)
    plan = (
        Spec(batch=1, heads=(1, 1), seqlens=(s, s), dims=(4, 4)).build().compile("cpu", engines=["reference"])
    )

    def feed(n: int) -> dict[str, torch.Tensor]:
        return {name: torch.full((1, 1, n, 4), 0.5 + n % 7) for name in "qkv"}

    def work(i: int) -> bool:
        sizes = list(range(1, 201))
        random.Random(i).shuffle(sizes)
        return all(torch.equal(plan.execute(feed(n))["o"], feed(n)["v"]) for n in sizes[:60])

    assert all(together(work))
    assert len(plan._layouts) <= 64


def test_a_hundred_plans_in_a_cache_of_eight(
    fresh_cache: Path, fresh_routing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled and executed in another order by each thread, while the cache lets plans go all the time. The counters
    add up: every compile was a build or a hit."""
    monkeypatch.setenv("FROST_PLAN_CACHE_SIZE", "8")
    specs = [Spec(batch=1 + n % 2, heads=(2, 1), seqlens=(1 + n // 2, 4), dims=(4, 4)) for n in range(100)]
    feeds = [inputs(spec, n) for n, spec in enumerate(specs)]
    expected = [spec.build().compile("cpu").execute(feed)["o"] for spec, feed in zip(specs, feeds)]
    assert len({(tuple(o.shape), float(o.sum())) for o in expected}) == 100
    cache.clear()
    cache.reset_counters()
    routing.reset()
    most = []

    def work(i: int) -> bool:
        order = list(range(100))
        random.Random(i).shuffle(order)
        for n in order[:25]:
            plan = specs[n].build().compile("cpu")
            if not torch.equal(plan.execute(feeds[n])["o"], expected[n]):
                return False
            most.append(cache.info().plans)
        return True

    assert all(together(work))
    info, stats = cache.info(), routing.stats()
    assert max(most) <= 8 and info.plans == 8
    assert info.plans_built + info.hits == THREADS * 25 and info.plans_built > 100
    assert stats.lowerings == info.plans_built and sum(stats.cache_hits.values()) == info.hits


def test_attention_with_gradients(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functional call, forward and backward, over fifty shapes in a cache of eight."""
    monkeypatch.setenv("FROST_PLAN_CACHE_SIZE", "8")

    def once(n: int) -> tuple[torch.Tensor, ...]:
        pick = torch.Generator().manual_seed(n)
        q, k, v = (torch.randn(1, 2, 1 + n, 4, generator=pick, requires_grad=True) for _ in range(3))
        o = frost.attention(q, k, v, causal=True)
        o.sum().backward()
        return o.detach(), q.grad, k.grad, v.grad  # type: ignore[return-value]

    expected = [once(n) for n in range(50)]

    def work(i: int) -> bool:
        order = list(range(50))
        random.Random(i).shuffle(order)
        return all(all(map(torch.equal, once(n), expected[n])) for n in order[:12])

    assert all(together(work))
    assert cache.info().plans <= 8 and len(_attention._plans) <= 8
