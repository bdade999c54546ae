"""Ten thousand shapes: memory stays where it was after the first thousand, and no kernel is compiled after the first
few."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.small import Spec

import frost
from engines import cuda_driver, registry
from engines.base import Target
from frost import cache, routing

SHAPES = 10_000
WARM = 1_000
# Growth of resident memory allowed after the warm-up: one plan kept by mistake for each shape would be over 100 MB.
ALLOWED_MB = 16


def shapes() -> Iterator[tuple[int, int, int, int, int]]:
    """(B, Hq, Hk, Sq, Sk), all different."""
    heads = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]
    for sq, sk, b, (hq, hk) in itertools.product(range(1, 26), range(1, 21), range(1, 5), heads):
        yield b, hq, hk, sq, sk


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_attention_over_ten_thousand_shapes(fresh_cache: Path, fresh_routing: None) -> None:
    """Every shape is one plan; every tenth is called again, and every hundredth has a backward."""
    assert len(set(shapes())) == SHAPES
    at_first, last = 0.0, None
    for n, (b, hq, hk, sq, sk) in enumerate(shapes()):
        if n == WARM:
            at_first = resident_mb()
        q = torch.ones(b, hq, sq, 8, requires_grad=n % 100 == 0)
        k, v = torch.ones(b, hk, sk, 8), torch.full((b, hk, sk, 8), 1.0 + n % 5)
        o = frost.attention(q, k, v, causal=n % 3 == 0)
        assert torch.allclose(o, torch.tensor(1.0 + n % 5)), (b, hq, hk, sq, sk)
        if n % 100 == 0:
            o.sum().backward()
        if n % 10 == 0:
            again = frost.attention(q, k, v, causal=n % 3 == 0)
            assert torch.equal(again, o)
        last = o
    grown = resident_mb() - at_first
    info, stats = cache.info(), routing.stats()
    print(f"{SHAPES} shapes: {at_first:.1f} MB resident after {WARM}, {grown:+.1f} MB since")
    assert last is not None and grown < ALLOWED_MB, f"{grown:.1f} MB more than after {WARM} shapes"
    assert info.plans <= info.capacity == 256 and info.plans_built == SHAPES + SHAPES // 100
    assert info.hits == SHAPES // 10 and info.kernels_compiled == info.disk_hits == 0
    assert stats.lowerings == info.plans_built and len(routing.routes()) == routing.KEEP


def test_new_shapes_compile_no_kernel_for_a_gpu(fresh_cache: Path) -> None:
    """Real kernels for a GPU that need not be here: after a handful of shapes, small and large (which may have tiles of
    their own), four hundred others add none, neither compiled nor loaded."""
    target = Target.cuda((9, 0))
    missing = registry.get("triton").unavailable(target)
    if missing is not None:
        pytest.skip(str(missing))

    def build(b: int, hq: int, hk: int, sq: int, sk: int, causal: bool) -> None:
        spec = Spec(
            dtype="bf16", batch=b, heads=(hq, hk), seqlens=(sq, sk), dims=(64, 64), options={"causal": causal}
        )
        assert spec.build().compile(target, engines=["triton"], gates="off").routes[0].engine_name == "triton"

    for warm in (
        (2, 4, 2, 128, 128),
        (1, 1, 1, 1, 1),
        (1, 3, 1, 77, 1000),
        (8, 16, 16, 4096, 4096),
        (2, 32, 8, 8192, 4096),
    ):
        for causal in (False, True):
            build(*warm, causal)
    before = cache.info()
    assert 1 <= before.kernels_compiled <= 6
    chosen = list(itertools.islice(shapes(), 0, SHAPES, SHAPES // 398)) + [
        (8, 32, 8, 4096, 8192),
        (1, 5, 5, 100_003, 99_991),
    ]
    for n, shape in enumerate(chosen):
        build(*shape, causal=n % 2 == 0)
    after = cache.info()
    assert after.plans_built - before.plans_built >= 400
    assert (after.kernels_compiled, after.disk_hits) == (before.kernels_compiled, before.disk_hits)


class Loaded:
    """Stands for a module on a device."""

    count = 0

    def __init__(self, cubin: bytes, name: str, *, threads: int, shared: int, index: int) -> None:
        type(self).count += 1
        time.sleep(0.01)


@pytest.mark.parametrize("engine", ["triton", "sm80"])
def test_new_shapes_load_no_kernel_onto_the_device(
    engine: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules are never unloaded, so a kernel must not be loaded again for each plan. Thirty plans share two kernels."""
    target = Target.cuda((9, 0) if engine == "triton" else (8, 0))
    missing = registry.get(engine).unavailable(target)
    if missing is not None:
        pytest.skip(str(missing))
    monkeypatch.setattr(cuda_driver, "Function", Loaded)
    monkeypatch.setattr(cuda_driver, "_loaded", {})
    monkeypatch.setattr(Loaded, "count", 0)
    module: Any = importlib.import_module(f"engines.{engine}.launching")
    made: list[Any] = []
    begin = module.Kernel.__init__

    def noted(self: Any, *args: Any, **how: Any) -> None:
        begin(self, *args, **how)
        made.append(self)

    monkeypatch.setattr(module.Kernel, "__init__", noted)
    for n in range(1, 16):
        for causal in (False, True):
            spec = Spec(
                dtype="fp16", batch=n, seqlens=(16 * n, 8 * n), dims=(64, 64), options={"causal": causal}
            )
            spec.build().compile(target, engines=[engine], gates="off")
    assert len(made) == 30 and len({id(k.bundle) for k in made}) == cache.info().kernels_compiled <= 2
    load = [getattr(k, "function", None) or k._function for k in made]
    with ThreadPoolExecutor(16) as pool:
        functions = list(pool.map(lambda f: f(0), load)) + [load[0](1)]
    assert Loaded.count == cache.info().kernels_compiled + 1  # and one of them on a second device
    assert len(set(map(id, functions))) == Loaded.count
