"""Who serves what, judged on descriptors alone: the verdicts and routes of the case table."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from cases import graphs
from cases.data import make
from cases.model import Case
from cases.table import BY_NAME, CASES

from engines import registry
from engines.base import API_TYPES, Target

ENGINES = ("reference", "torch_sdpa", "triton")
OPS = [pytest.param(case, op, id=f"{op}-{case.name}") for case in CASES for op in case.ops]


@lru_cache(maxsize=512)
def desc_of(case: Case, op: str) -> Any:
    return graphs.op_desc(case, op, make(case))


def support(engine: str, desc: Any, target: Target) -> Any:
    return registry.get(engine).adapter(API_TYPES[type(desc)]).check_support(desc, target)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("case", "op"), OPS)
def test_verdict(case: Case, op: str, engine: str) -> None:
    """A decline names every field that the table lists, says what was given and what would do."""
    verdict = support(engine, desc_of(case, op), Target.cpu())
    expected = case.verdict(engine, op)
    assert verdict.ok == (not expected), list(map(str, verdict.reasons))
    assert set(expected) <= {r.field for r in verdict.reasons}
    for reason in verdict.reasons:
        assert reason.got and reason.wanted and str(reason)


@pytest.mark.parametrize(("case", "op"), OPS)
def test_automatic_route_on_a_cpu(case: Case, op: str) -> None:
    """`engines=None`: PyTorch's attention where it is exact, else the reference; an interpreted kernel
    never."""
    g, _ = graphs.build(case, op, make(case))
    route = g.compile("cpu").routes[0]
    assert route.engine_name == case.route(op)
    declined = {d.engine for d in route.declined}
    assert "triton" in declined
    assert ("torch_sdpa" in declined) == (route.engine_name == "reference")


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
@pytest.mark.parametrize(
    ("cc", "served"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True), ((12, 0), True)]
)
def test_triton_serves_sm_80_and_newer(op: str, cc: tuple[int, int], served: bool) -> None:
    """No GPU is needed to ask."""
    verdict = support("triton", desc_of(BY_NAME["dtype bf16"], op), Target.cuda(cc))
    assert verdict.ok == served
    assert served or [r.field for r in verdict.reasons] == ["arch"]


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
def test_all_reasons_are_reported_not_the_first(op: str) -> None:
    """dtype and head dim are both wrong for Triton here; a user who mends one should know of the other."""
    case = BY_NAME["head_dim 512"].with_("two reasons", dtype="fp64")
    fields = {r.field for r in support("triton", desc_of(case, op), Target.cpu()).reasons}
    assert {"dtype", "head_dim", "head_dim_v"} <= fields


@pytest.mark.parametrize("engine", ENGINES)
def test_deterministic_never_routes_to_an_engine_that_is_not(engine: str) -> None:
    """flash-attention PR#1870: a flag accepted but not wired. On every device, an engine whose row says it is
    not reproducible declines by that name."""
    case = BY_NAME["dtype fp16"].with_("deterministic", deterministic=True)
    for target in (Target.cpu(), Target.cuda((8, 0)), Target.cuda((9, 0))):
        desc = desc_of(case, "sdpa_backward")
        adapter = registry.get(engine).adapter(API_TYPES[type(desc)])
        rows = [r for r in adapter.capabilities if target.device in r.devices and desc.q.dtype in r.dtypes]
        verdict = adapter.check_support(desc, target)
        if not any(r.deterministic and "deterministic" in r.features for r in rows):
            assert not verdict.ok
