"""What is built and compiled, and how often: counters that stand still while packed batches and shapes
change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare
import pytest
from cases import graphs
from cases.data import make
from cases.model import Case
from cases.small import Spec

from descriptors import sym
from engines import registry
from engines.base import API_TYPES, SdpaBwdDsl, SdpaFwdDsl, Target
from frost import cache
from frost.graph import Graph

SM90 = Target.cuda((9, 0))


def batches(count: int, seed: int = 0) -> Iterator[Case]:
    """Packed cases with other totals, lengths and numbers of sequences each time; empty sequences and gaps
    too."""
    rng = random.Random(seed)
    base = Case("packed step", heads=(2, 1), dims=(8, 8), dlse=True, causal=True, align="bottom_right")
    for i in range(count):
        n = rng.randint(1, 4)
        cu = [[rng.randint(0, 2)], [rng.randint(0, 2)]]
        for side in cu:
            for _ in range(n):
                side.append(side[-1] + rng.choice((0, 1, rng.randint(2, 14))))
        totals = tuple(side[-1] + rng.randint(0, 3) for side in cu)
        yield base.with_(
            f"packed step {i}", seqlens=totals, cu_q=tuple(cu[0]), cu_kv=tuple(cu[1]), index_dtype="int32"
        )


def spy_on_compile(monkeypatch: pytest.MonkeyPatch, engine: str) -> list[str]:
    """Every compile of the engine's attention cells, by op."""
    seen: list[str] = []
    for api in (SdpaFwdDsl, SdpaBwdDsl):
        adapter = registry.get(engine).adapter(api)
        original = type(adapter).compile

        def compile(self: Any, desc: Any, target: Any, original: Any = original) -> Any:
            seen.append(desc.op)
            return original(self, desc, target)

        monkeypatch.setattr(type(adapter), "compile", compile)
    return seen


@pytest.mark.parametrize("engine", ["triton", "reference"])
def test_twenty_packed_batches_build_each_plan_once(
    engine: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cudnn-frontend#604: totals change at every step; one plan and one compile serve them all, gradients
    right each time."""
    compiled = spy_on_compile(monkeypatch, engine)
    kernels = None
    for case in batches(20):
        for op in case.ops:
            _, data, results = graphs.execute(case, op, engine)
            data.check_canaries()
            compare.assert_answer(results, data.problem, ref=data.ref, plain=data.plain, context=case.name)
        info = cache.info()
        assert info.plans_built == 2
        assert kernels in (None, info.kernels_compiled)
        kernels = info.kernels_compiled
    assert compiled == ["sdpa", "sdpa_backward"]
    assert cache.info().hits == 38


@pytest.mark.parametrize("engine", ["triton", "reference"])
def test_one_symbolic_plan_serves_every_total(engine: str, fresh_cache: Path) -> None:
    """`frost.sym`: bound at execute, never a reason to build anything. Capacities below are declared, not
    used."""
    tq, tk, n = sym("TQ", max=1 << 20), sym("TK", max=1 << 20), sym("N", max=1 << 10)
    plans = {
        op: Spec(
            op=op,
            packed=True,
            heads=(2, 1),
            seqlens=(tq, tk),
            sequences=n,
            dlse=True,
            options={"causal": True, "align": "bottom_right"},
        )
        .build()
        .compile("cpu", engines=[engine], gates="off")
        for op in ("sdpa", "sdpa_backward")
    }
    for case in batches(5, seed=7):
        for op, plan in plans.items():
            data = make(case)
            names = [*plan.program.inputs, *plan.program.outputs]
            _, tensors = graphs.build(case, op, data)
            results = plan.execute({name: tensors[name] for name in names})
            compare.assert_answer(results, data.problem, ref=data.ref, plain=data.plain, context=case.name)
    assert cache.info().plans_built == 2


def test_a_bias_shared_by_all_sequences_and_one_of_each_share_a_plan(fresh_cache: Path) -> None:
    """The number of sequences is no key fact, so a plan made for bias [1, H, ..] meets [B, H, ..] too: how it
    is broadcast has to be read off the launch, in forward and in dBias."""
    base = Case(
        "packed bias", heads=(2, 1), dims=(8, 8), seqlens=(20, 22), cu_q=(0, 9, 20), cu_kv=(0, 12, 22)
    )
    for engine in ("triton", "reference"):
        for shape in ((1, 2, 11, 12), (2, 2, 11, 12), (1, 2, 11, 12), (1, 1, 1, 12), (2, 1, 1, 12)):
            case = base.with_(f"packed bias {shape} {engine}", bias=shape)
            for op in case.ops:
                _, data, results = graphs.execute(case, op, engine)
                compare.assert_answer(
                    results, data.problem, ref=data.ref, plain=data.plain, context=case.name
                )


# ---- real kernels, compiled for a card that isn't here ---------------------------------------------------


def compile_for_sm90(spec: Spec) -> tuple[int, int]:
    """(plans, kernels) that compiling this took."""
    before = cache.info()
    spec.build().compile(SM90, engines=["triton"], gates="off")
    after = cache.info()
    return after.plans_built - before.plans_built, after.kernels_compiled - before.kernels_compiled


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
def test_a_new_dense_shape_compiles_no_kernel(op: str, fresh_cache: Path) -> None:
    """Kernels are keyed on TemplateParams, arch and source: sizes are run-time arguments. A Hopper card has three sets for
    this problem (small tiles where large ones would not fill the card, large ones, the general kernels for symbolic
    extents); once each was met, no shape compiles anything."""
    if registry.get("triton").unavailable(SM90) is not None:
        pytest.skip("Triton's compiler is not available here")
    spec = Spec(op=op, dtype="bf16", dims=(64, 64), seqlens=(128, 128))
    for first in (spec, spec.but(batch=200), spec.but(seqlens=(sym("S", max=1024), 50))):
        assert compile_for_sm90(first)[1] > 0, first
    others = (
        spec.but(batch=300),
        spec.but(batch=7),
        spec.but(seqlens=(1, 4096)),
        spec.but(heads=(12, 4)),
        spec.but(options={"scale": 0.5}),
        spec.but(strides={"q": (128 * 4 * 64, 64, 4 * 64, 1)}),
        spec.but(seqlens=(sym("S", max=8192), 77)),
        spec.but(batch=70_000, heads=(1, 1), seqlens=(1, 1)),
    )
    for other in others:
        assert compile_for_sm90(other)[1] == 0, other
    assert compile_for_sm90(spec) == (0, 0)


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
def test_new_packed_totals_and_window_widths_compile_no_kernel(op: str, fresh_cache: Path) -> None:
    if registry.get("triton").unavailable(SM90) is not None:
        pytest.skip("Triton's compiler is not available here")
    spec = Spec(
        op=op, dtype="bf16", dims=(64, 64), packed=True, seqlens=(100, 130), options={"window": (64, 0)}
    )
    assert compile_for_sm90(spec)[1] > 0
    assert compile_for_sm90(spec.but(seqlens=(9000, 1), sequences=40)) == (0, 0)
    assert compile_for_sm90(spec.but(options={"window": (4096, 0), "scale": 0.1})) == (0, 0)


def test_compiled_kernels_come_back_from_disk(fresh_cache: Path) -> None:
    """A second process (here: memory forgotten) loads what the first compiled."""
    if registry.get("triton").unavailable(SM90) is not None:
        pytest.skip("Triton's compiler is not available here")
    spec = Spec(dtype="fp16", dims=(32, 32))
    _, made = compile_for_sm90(spec)
    cache.clear(kernels=True)
    assert compile_for_sm90(spec) == (1, 0)
    assert cache.info().disk_hits == made > 0
    assert len(list((fresh_cache / "kernels").glob("*.frostk"))) == made


def test_the_plan_cache_hit_shows_in_the_route(fresh_cache: Path) -> None:
    first, second = (Spec().build().compile("cpu") for _ in range(2))
    assert [r.cache_hit for r in first.routes] == [False] and [r.cache_hit for r in second.routes] == [True]
    assert first.key == second.key and second.cache_hit and "plan cache hit" in second.explain()


def test_api_types_cover_every_op_record() -> None:
    from descriptors.ops import OP_TYPES

    assert set(API_TYPES) == set(OP_TYPES.values())
    assert isinstance(Spec().build(), Graph)


def test_a_total_that_the_cached_engine_cannot_serve_is_lowered_anew(fresh_cache: Path) -> None:
    """Totals are not in the key, limits on them are still kept: positions past 2**28 are no 32-bit matter any
    more, and a plan for a small batch must not be handed out for such a one."""
    if registry.get("triton").unavailable(SM90) is not None:
        pytest.skip("Triton's compiler is not available here")
    small = Spec(packed=True, dtype="bf16", heads=(1, 1), seqlens=(64, 64), dims=(16, 16))
    huge = small.but(seqlens=(2**29, 64))

    def plan(spec: Spec) -> Any:
        return spec.build().compile(SM90, engines=["triton", "reference"], gates="off")

    assert plan(small).routes[0].engine_name == "triton"
    assert plan(huge).routes[0].engine_name == "reference"
    assert [d.field for d in plan(huge).routes[0].declined] == ["q.shape"]
    assert plan(small).routes[0].engine_name == "triton"
