"""Faults on a device: memory that runs out, forks, compilers and drivers that fail, thousands of shapes, many threads.

python3 -m pytest tests/gpu/test_gpu_faults.py -m gpu -q
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from processes import finish, start

import frost
from engines import cuda_driver, registry
from engines.base import Target
from engines.template_loader import Bundle, loader
from frost import cache
from frost.errors import DriverError

SHAPES, WARM = 10_000, 600
HEADS = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]
MB = 1 << 20


def ours() -> list[str]:
    """Engines of ours that run here."""
    target = (
        Target.cuda(torch.cuda.get_device_capability()) if torch.cuda.is_available() else Target.cuda((8, 0))
    )
    return [
        n for n in ("triton", "sm80") if n in registry.names() and registry.get(n).unavailable(target) is None
    ]


# ---- memory that runs out ----------------------------------------------------------------------------------------


@pytest.fixture
def limited() -> Iterator[Any]:
    """`limited(nbytes)`: PyTorch may reserve so many more bytes than now."""

    def limit(nbytes: int) -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min((torch.cuda.memory_reserved() + nbytes) / total, 1.0), 0
        )

    limit(1 << 40)  # drops what earlier tests left cached: operands carved out of it would leave holes that no limit reaches
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor that fills blocks of the allocator of its own (10 MB and more), made without a wider one: otherwise what a limit
    forbids would fit into the holes that were left."""
    pick = torch.Generator(device="cuda").manual_seed(seed)
    made = torch.randn(shape, generator=pick, device="cuda", dtype=torch.bfloat16)
    assert made.nbytes >= 10 * MB
    return made


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_that_runs_out_in_attention(deterministic: bool, limited: Any) -> None:
    """Forward and backward, with a little more memory each time, so that one allocation after the other fails:
    PyTorch's own error each time, nothing kept, and afterwards the same bits."""
    q, k, v = (whole(2, 16, 4096, 64, seed=i).requires_grad_() for i in range(3))
    how: dict[str, Any] = {
        "engines": ["triton"],
        "gates": "off",
        "causal": True,
        "deterministic": deterministic,
    }
    do = whole(2, 16, 4096, 64, seed=3)

    def call() -> list[torch.Tensor]:
        o = frost.attention(q, k, v, **how)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]

    expected = call()
    torch.cuda.synchronize()
    gc.collect()  # what only cycles of the first call held is no part of what is held from now on
    built, allocated, outcomes = cache.info().plans_built, torch.cuda.memory_allocated(), {}
    # o and the three gradients are 64 MB, dQ's sums 32 more where the order of sums is left open
    for spare in range(0, 160, 8):
        limited(spare * MB)
        try:
            call()
            outcomes[spare] = "ran"
        except torch.OutOfMemoryError:
            outcomes[spare] = "no memory"
        gc.collect()
        kept = torch.cuda.memory_allocated() - allocated
        assert kept == 0, f"with {spare} MB, which {outcomes[spare]}: {kept} bytes more are held than before"
    assert outcomes[0] == outcomes[8] == "no memory" and outcomes[152] == "ran", outcomes
    limited(1 << 40)
    made = call()
    for n, (got, want) in enumerate(zip(made, expected)):
        if deterministic or n == 0:
            assert harness.same_bits(got, want), n
        else:  # dQ may be added up in arrival order
            torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert cache.info().plans_built == built


def test_no_memory_for_an_output_means_no_launch(limited: Any) -> None:
    """The output that was given is untouched: everything is allocated before the first launch. Also through bind."""
    inputs = {n: whole(1, 16, 8192, 64, seed=i) for i, n in enumerate("qkv")}
    given = torch.empty_like(inputs["q"]).fill_(float("nan"))
    g = frost.Graph()
    q, k, v = (g.tensor_like(n, t) for n, t in inputs.items())
    first, _ = g.sdpa(q, k, v)
    second, _ = g.sdpa(q, k, v, causal=True)
    g.output(first, name="first")
    g.output(second, name="second")
    plan = g.compile("cuda", engines=["triton"], gates="off")
    limited(1 * MB)
    for call in (plan.execute, plan.bind):
        with pytest.raises(torch.OutOfMemoryError):
            call({**inputs, "first": given})
    torch.cuda.synchronize()
    assert bool(given.isnan().all())
    limited(1 << 40)
    out = plan.execute({**inputs, "first": given})
    assert bool(out["first"].isfinite().all()) and bool(out["second"].isfinite().all())


def test_a_card_that_is_really_full() -> None:
    """Filled to the last megabytes, so that the driver says no, too."""
    inputs = {n: t for n, t in harness.dense_inputs(1, 4, 4, 4096, 4096, 64).items() if n != "do"}
    plan = harness.forward_plan(inputs, {"o": harness.nan_like(inputs["q"])})
    want = plan.execute(dict(inputs))["o"].clone()
    torch.cuda.synchronize()
    hoard: list[torch.Tensor] = []
    for size in (1 << 32, 1 << 28, 1 << 24, 1 << 21):
        while True:
            try:
                hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    try:
        with pytest.raises(torch.OutOfMemoryError):
            keep = [plan.execute(dict(inputs)) for _ in range(64)]
            del keep
    finally:
        hoard.clear()
        gc.collect()
        torch.cuda.empty_cache()
    assert harness.same_bits(plan.execute(dict(inputs))["o"], want)


# ---- forks -------------------------------------------------------------------------------------------------------

FORKED = """
    import os, sys, time
    import torch, frost
    def graph(dtype):
        g = frost.Graph()
        q, k, v = (g.tensor(n, (1, 2, 64, 64), dtype=dtype) for n in "qkv")
        g.output(g.sdpa(q, k, v)[0], name="o")
        return g
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    feed = {"q": q, "k": k, "v": v, "o": torch.empty_like(q)}
    how = {"engines": ["triton"], "gates": "off"}
    plan = graph("bf16").compile("cuda", **how)
    call = plan.bind(feed)
    want = call()["o"].clone()
    frost.attention(q, k, v, **how)
    torch.cuda.synchronize()
    cpu = graph("fp32").compile("cpu")
    host = {n: torch.randn(1, 2, 64, 64) for n in "qkv"}

    def refused(what, work):
        try:
            work()
        except frost.DriverError as e:
            assert "forked" in str(e) and "spawn" in str(e), (what, str(e))
        else:
            raise AssertionError(what + " was not refused")

    pid = os.fork()
    if pid == 0:
        try:
            refused("compile", lambda: graph("bf16").compile("cuda", **how))
            refused("compile for the default device", lambda: graph("bf16").compile())
            refused("execute", lambda: plan.execute(feed))
            refused("bind", lambda: plan.bind(feed))
            refused("a bound call", call)
            refused("attention", lambda: frost.attention(q, k, v, **how))
            refused("attention on another shape", lambda: frost.attention(q[:, :1], k[:, :1], v[:, :1], **how))
            torch.set_num_threads(1)  # the parent's pool of threads is not here
            cpu.execute(host)
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    for _ in range(3000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        os.kill(pid, 9)
        sys.exit("the child hung")
    assert status == 0, status
    feed["o"].fill_(float("nan"))  # the parent goes on as if nothing had happened
    assert torch.equal(call()["o"], want) and torch.equal(plan.execute(feed)["o"], want)
    torch.cuda.synchronize()
    print("fine")
"""


def test_a_fork_after_cuda_was_used_is_refused_clearly(tmp_path: Path) -> None:
    """In words, at once, at every way in; the parent is unharmed and the child can use the CPU."""
    out, err = finish(start(FORKED, FROST_CACHE_DIR=str(tmp_path)), timeout=200)
    assert out.strip() == "fine", err


# ---- compilers and drivers that fail -----------------------------------------------------------------------------


def _call() -> torch.Tensor:
    q, k, v = (harness.randn(1, 2, 100, 72, seed=i) for i in range(3))
    return frost.attention(q, k, v, engines=["triton"], gates="off")


def test_a_compile_error_reaches_every_thread_and_the_next_call_works(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = _call()
    cache.clear(kernels=True)
    for path in (fresh_cache / "kernels").iterdir():
        path.unlink()
    cache.reset_counters()

    def crash(build: Any) -> Bundle:
        raise RuntimeError("PassManager::run failed")

    with monkeypatch.context() as patch:
        patch.setattr(loader, "_build", crash)
        results: list[Any] = [None] * 16

        def work(i: int) -> None:
            try:
                results[i] = _call()
            except RuntimeError as e:
                results[i] = e

        threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert all(isinstance(r, RuntimeError) and "PassManager" in str(r) for r in results), results
    assert cache.info().kernels_compiled == 0 and list((fresh_cache / "kernels").iterdir()) == []
    assert harness.same_bits(_call(), want) and cache.info().kernels_compiled >= 1


def test_machine_code_that_the_driver_refuses(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error with the driver's own word for it, and a context that still works."""
    want = _call()
    cache.clear(kernels=True)
    real = loader.get

    def spoilt(*args: Any, **how: Any) -> Bundle:
        bundle = real(*args, **how)
        return Bundle(b"not machine code\0", bundle.meta)

    with monkeypatch.context() as patch:
        patch.setattr(loader, "get", spoilt)
        patch.setattr(cuda_driver, "_loaded", {})
        with pytest.raises(DriverError, match="cuModuleLoadData: CUDA_ERROR"):
            _call()
        with pytest.raises(DriverError, match="cuModuleLoadData: CUDA_ERROR"):
            _call()
        assert cuda_driver._loaded == {}
    cache.clear(kernels=True)
    assert harness.same_bits(_call(), want)
    torch.cuda.synchronize()


# ---- thousands of shapes, many threads ---------------------------------------------------------------------------


def _shapes() -> list[tuple[int, int, int, int, int]]:
    """(B, Hq, Hk, Sq, Sk), all different, in an order that has everything early."""
    made = [
        (b, hq, hk, sq, sk)
        for sq, sk, b, (hq, hk) in itertools.product(range(20, 45), range(30, 50), range(1, 5), HEADS)
    ]
    random.Random(0).shuffle(made)
    return made


def _every_kind() -> Iterator[tuple[int, int, int, int, int, bool, bool]]:
    """(B, Hq, Hk, Sq, Sk, causal, with a backward): a shape of each kind that may have kernels of its own (groups, a causal
    square, few rows), which chance alone may bring up late. Their sizes are none of `_shapes`."""
    for (hq, hk), sq, more, causal, backward in itertools.product(HEADS, (18, 60), (0, 3), (False, True), (False, True)):
        yield 1, hq, hk, sq, sq + more, causal, backward


def _resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / MB


def _device_used_mb() -> tuple[float, float]:
    """What PyTorch holds for this process, and what the whole card has in use: other processes count in the second."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_reserved() / MB, (total - free) / MB


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ours() or ["triton"])
def test_ten_thousand_shapes(engine: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one shape of each kind and a few hundred others: no kernel compiled, none loaded from disk or onto the device again,
    and memory of the device and of the process where it was. Every twentieth has a backward."""
    shapes = _shapes()
    assert len(set(shapes)) == SHAPES
    how: dict[str, Any] = {"engines": [engine], "gates": "off"}
    modules: list[str] = []  # every module that goes onto the device, through `load` or around it
    real = cuda_driver.Function.__init__

    def counted(self: Any, cubin: bytes, name: str, **options: Any) -> None:
        modules.append(name)
        real(self, cubin, name, **options)

    monkeypatch.setattr(cuda_driver.Function, "__init__", counted)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)  # read once: a read each time would wait for the device

    def one(n: int, b: int, hq: int, hk: int, sq: int, sk: int, causal: bool, backward: bool) -> None:
        value = 1.0 + n % 5
        q = torch.ones(b, hq, sq, 64, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
        k = torch.ones(b, hk, sk, 64, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
        v = torch.full((b, hk, sk, 64), value, device="cuda", dtype=torch.bfloat16)
        o = frost.attention(q, k, v, causal=causal, **how)
        if backward:
            o.float().sum().backward()
        wrong.add_((~((o.detach().float() - value).abs() <= 0.01 * value)).sum())

    for kind in _every_kind():
        one(0, *kind)
    start, used, host, before, known = time.perf_counter(), (0.0, 0.0), 0.0, cache.info(), 0
    for n, shape in enumerate(shapes):
        if n == WARM:
            used, host, before, known = _device_used_mb(), _resident_mb(), cache.info(), len(modules)
        one(n, *shape, n % 3 == 0, n % 20 == 0)
    after = cache.info()
    (ours_now, card_now), grown_host = _device_used_mb(), _resident_mb() - host
    grown = ours_now - used[0]
    print(
        f"{engine}: {SHAPES} shapes in {time.perf_counter() - start:.0f} s, device {used[0]:.0f} {grown:+.1f} MB, "
        f"the whole card {used[1]:.0f} {card_now - used[1]:+.1f} MB, "
        f"host {host:.0f} {grown_host:+.1f} MB, {after.kernels_compiled} kernels compiled",
        file=sys.stderr,
    )
    assert int(wrong) == 0, f"{int(wrong)} numbers are wrong"
    assert after.plans_built - before.plans_built >= SHAPES - WARM and after.plans <= after.capacity
    late = (after.kernels_compiled - before.kernels_compiled, after.disk_hits - before.disk_hits)
    assert late == (0, 0), f"(compiled, read from disk) after {WARM} shapes: {late}"
    assert modules[known:] == [], f"loaded onto the device after {WARM} shapes: {modules[known:][:8]}"
    assert grown < 64, f"{grown:.0f} MB more of the device than after {WARM} shapes"
    assert grown_host < 64, f"{grown_host:.0f} MB more resident than after {WARM} shapes"


def test_thirty_two_threads_on_one_plan() -> None:
    """Each with a stream, buffers and a bound call of its own."""
    inputs = [
        {n: t for n, t in harness.dense_inputs(1, 4, 2, 200, 264, 64, seed=10 * i).items() if n != "do"}
        for i in range(32)
    ]
    plan = harness.forward_plan(inputs[0], {"o": harness.nan_like(inputs[0]["q"])}, causal=True)
    want = [plan.execute(feed)["o"].clone() for feed in inputs]
    torch.cuda.synchronize()
    errors: list[str] = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                out = harness.nan_like(want[i])
                call = plan.bind({**inputs[i], "o": out})
                for _ in range(50):
                    out.fill_(float("nan"))
                    call()
                    if not harness.same_bits(out, want[i]) or not harness.same_bits(
                        plan.execute(inputs[i])["o"], want[i]
                    ):
                        errors.append(f"thread {i} got another answer")
                        return
        except BaseException as e:
            errors.append(f"thread {i}: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not errors and not any(t.is_alive() for t in threads), errors[:3]
