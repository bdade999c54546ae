"""Memory that runs out while a plan executes: the allocator's own error, before anything was launched where that can be
known, and a plan that works when there is memory again."""

from __future__ import annotations

import pytest
import torch
from processes import finish, start

import frost

# More bytes than any machine can address, from operands of one element.
ROWS = 1 << 44


def test_no_memory_for_an_output() -> None:
    """The other output, which the caller gave, is untouched: outputs are allocated before the first launch."""
    g = frost.Graph()
    q, k, v = (
        g.tensor(n, (1, 1, s, 8), stride=(0, 0, 0, 1), dtype="fp32")
        for n, s in (("q", ROWS), ("k", 4), ("v", 4))
    )
    g.output(g.tanh(k), name="first")
    g.output(g.sdpa(q, k, v)[0], name="o")
    plan = g.compile("cpu", engines=["reference"])
    row, first = torch.ones(8), torch.full((1, 1, 4, 8), float("nan"))
    feed = {"q": row.expand(1, 1, ROWS, 8), "k": row.expand(1, 1, 4, 8), "v": row.expand(1, 1, 4, 8)}
    for _ in range(3):
        with pytest.raises(RuntimeError, match="allocate"):
            plan.execute({**feed, "first": first})
        with pytest.raises(RuntimeError, match="allocate"):
            plan.bind({**feed, "first": first})
    assert bool(first.isnan().all())


def test_no_memory_for_the_workspace() -> None:
    g = frost.Graph()
    x, y = (
        g.tensor("x", (2, ROWS), stride=(0, 0), dtype="fp32"),
        g.tensor("y", (ROWS, 2), stride=(0, 0), dtype="fp32"),
    )
    z = g.tensor("z", (3,), dtype="fp32")
    g.output(g.tanh(z), name="first")
    g.output(g.matmul(g.tanh(x), y), name="o")
    plan = g.compile("cpu")
    assert plan.workspace_size >= 8 * ROWS
    feed = {"x": torch.ones(1, 1).expand(2, ROWS), "y": torch.ones(1, 1).expand(ROWS, 2), "z": torch.ones(3)}
    out = {"o": torch.full((2, 2), 7.0), "first": torch.full((3,), 7.0)}
    with pytest.raises(RuntimeError, match="allocate"):
        plan.execute({**feed, **out})
    assert bool((out["o"] == 7.0).all()) and bool((out["first"] == 7.0).all())


SCRIPT = """
    import resource, sys
    import torch, frost
    from frost import cache
    engine, backward = sys.argv[1], sys.argv[2] == "backward"
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 2048, 64, requires_grad=backward) for _ in range(3))

    def call():
        for t in (q, k, v):
            t.grad = None
        o = frost.attention(q, k, v, engines=[engine])
        if backward:
            o.sum().backward()
            return [o.detach().clone(), q.grad, k.grad, v.grad]
        return [o]

    expected = call()
    built = cache.info().plans_built
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    failed = 0
    for spare in range(0, 40):
        resource.setrlimit(resource.RLIMIT_AS, (used + (spare << 18), resource.RLIM_INFINITY))
        try:
            call()
        except (RuntimeError, MemoryError) as e:
            failed += 1
            assert isinstance(e, MemoryError) or "allocate" in str(e), e
            del e
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert failed >= 3, failed
    assert all(map(torch.equal, call(), expected))
    assert cache.info().plans_built == built
    print("fine", failed)
"""


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("engine", ["reference", "torch_sdpa"])
def test_memory_that_runs_out_in_the_middle_of_an_engine(engine: str, direction: str) -> None:
    """The address space ends a little later each time, so that one allocation after the other fails; afterwards the
    same plan gives the same bits."""
    out, _ = finish(start(SCRIPT, engine, direction, MALLOC_ARENA_MAX="1"), timeout=200)
    assert out.startswith("fine")
