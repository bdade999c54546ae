"""Processes made by fork: what the parent's other threads were at doesn't hold the child up, plans for the CPU work
there, and CUDA, which does not survive a fork, is refused in words."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from processes import finish, start

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

HEAD = """
    import os, sys, threading, time
    import torch, frost
    from engines import registry
    from engines.template_loader import Bundle, KernelKey, loader
    from frost import _attention, _nsa_plans, cache, gates, routing
    from frost.graph import Graph

    def graph(dtype="fp32"):
        g = Graph()
        q, k, v = (g.tensor(n, (1, 1, 4, 16), dtype=dtype) for n in "qkv")
        g.output(g.sdpa(q, k, v)[0], name="o")
        return g

    def in_child(work, limit=60):
        # Exit status of a child that runs work(); one that hangs is killed, which fails.
        pid = os.fork()
        if pid == 0:
            try:
                work()
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return "hung"

    t = torch.randn(1, 1, 4, 16)
    feed = {"q": t, "k": t, "v": t}
    expected = graph().compile("cpu", engines=["reference"]).execute(feed)["o"]
"""

LOCKS = """
    locks = [routing._lock, _attention._lock, _nsa_plans._lock, gates._auto_lock, gates._warn_lock, registry._lock,
             cache.plans._lock, loader._lock]
    held, release = threading.Event(), threading.Event()

    def hold():
        for lock in locks:
            lock.acquire()
        held.set()
        release.wait()
        for lock in reversed(locks):
            lock.release()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()

    def work():
        assert torch.equal(graph().compile("cpu", engines=["reference"]).execute(feed)["o"], expected)
        torch.testing.assert_close(frost.attention(t, t, t, engines=["reference"]), expected)
        registry.names(), gates.gate_for_route("triton", "sdpa", frost.gates.target_of("sm_90"), "require", automatic=True)
        loader.get(KernelKey("e", "new", (), "a", "d"), lambda: Bundle(b"x", {}), persist=False)

    print(in_child(work))
    release.set()
    work()
"""

BUILDS = """
    entered, release = threading.Event(), threading.Event()
    key = KernelKey("e", "k", (), "a", "d")

    def slowly():
        entered.set()
        release.wait()
        return Bundle(b"parent", {})

    threading.Thread(target=loader.get, args=(key, slowly), kwargs={"persist": False}, daemon=True).start()
    entered.wait()
    entered.clear()
    threading.Thread(target=cache.plans.get, args=("plan", slowly), daemon=True).start()
    entered.wait()
    loader.get(KernelKey("e", "there", (), "a", "d"), lambda: Bundle(b"kept", {}), persist=False)

    def work():
        assert loader.get(key, lambda: Bundle(b"child", {}), persist=False).code == b"child"
        assert cache.plans.get("plan", lambda: "child") == ("child", False)
        assert loader.get(KernelKey("e", "there", (), "a", "d"), lambda: 1 / 0, persist=False).code == b"kept"
        assert graph().compile("cpu", engines=["reference"]).cache_hit

    print(in_child(work))
    release.set()
    assert cache.plans.get("plan", lambda: 1 / 0)[0].code == loader.get(key, lambda: 1 / 0).code == b"parent"
"""

INTERPRETED = """
    missing = registry.get("triton").unavailable(frost.gates.target_of("cpu"))
    if missing:
        print("skip", missing)
        sys.exit()
    from engines.triton import interpret
    plan = graph().compile("cpu", engines=["triton"])
    plan.execute(feed)
    busy, stop = threading.Event(), threading.Event()

    def kernels():
        while not stop.is_set():
            plan.execute(feed)
            busy.set()

    thread = threading.Thread(target=kernels, daemon=True)
    thread.start()
    busy.wait()

    def work():
        torch.testing.assert_close(plan.execute(feed)["o"], expected)

    print(*[in_child(work) for _ in range(3)])
    stop.set()
    thread.join()  # a thread that is inside native code when the interpreter ends aborts the process
"""

CUDA = """
    plan = graph().compile("cpu", engines=["reference"])
    call = plan.bind(feed)
    torch.cuda.is_initialized = lambda: True  # as after the first use of a GPU
    from engines.base import Target
    from frost.plan import BoundPlan

    def refused(what, work):
        try:
            work()
        except frost.DriverError as e:
            text = str(e)
            assert "forked" in text and "spawn" in text, text
        else:
            raise AssertionError(f"{what} was not refused")

    launched = []
    bound = BoundPlan([launched.append], torch.device("cuda", 0), {}, [], [])

    def work():
        assert torch.equal(plan.execute(feed)["o"], expected) and torch.equal(call()["o"], expected)
        assert graph().compile("cpu", engines=["reference"]).cache_hit
        torch.testing.assert_close(frost.attention(t, t, t), expected)
        graph("fp16").compile(Target.cuda((9, 0)), engines=["reference"])  # compiling needs no device
        for device in ("cuda", "cuda:0", torch.device("cuda"), None):
            refused(f"compile for {device}", lambda: graph().compile(device))
        refused("a bound call", bound)
        assert not launched
        # A child of the child knows too, though CUDA was never used in its own parent.
        torch.cuda.is_initialized = lambda: False
        assert in_child(lambda: refused("a grandchild's compile", lambda: graph().compile("cuda"))) == 0

    print(in_child(work))
"""

CLEAN = """
    # Forked before the first use of CUDA: nothing is refused for that reason.
    from frost import _forked
    def work():
        assert not _forked.cuda_is_broken()
        _forked.check()
        assert torch.equal(graph().compile("cpu", engines=["reference"]).execute(feed)["o"], expected)
    print(in_child(work))
"""


@pytest.mark.parametrize("script", [LOCKS, BUILDS, CUDA, CLEAN], ids=["locks", "builds", "cuda", "clean"])
def test_a_child_made_while_other_threads_are_busy(script: str) -> None:
    """triton's and torch's loaders fork workers in the middle of anything."""
    out, err = finish(start(HEAD + script, FROST_CACHE_DIR="off"), timeout=150)
    assert out.split() == ["0"], err


def test_a_child_made_in_the_middle_of_an_interpreted_kernel() -> None:
    """The fork waits for the kernel's end: half-way through, Triton's language is patched."""
    out, err = finish(start(HEAD + INTERPRETED, FROST_CACHE_DIR="off"), timeout=200)
    if out.startswith("skip"):
        pytest.skip(out[5:].strip())
    assert out.split() == ["0"] * 3, err


def _attend(seed: int) -> float:
    import torch

    import frost

    pick = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 5, 8, generator=pick) for _ in range(3))
    return float(frost.attention(q, k, v, causal=True).sum())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_pools(method: str) -> None:
    """As a data loader's workers: the parent has plans, the workers use and make others."""
    expected = [_attend(i) for i in range(6)]
    with multiprocessing.get_context(method).Pool(2) as pool:
        got = pool.map_async(_attend, range(6)).get(timeout=120)
    assert got == pytest.approx(expected, abs=1e-5)
