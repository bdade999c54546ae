"""Every case of the table, forward and backward, on every engine that serves it, against the fp64 oracle.

Whatever an engine may not read is NaN, outputs start as NaN between canaries, and each operand lies as the
case says. One failing case again: pytest tests/numerics/test_cases.py -k "triton and sdpa_backward and <case
name>". """

from __future__ import annotations

import compare
import pytest
from cases import graphs
from cases.model import Case
from cases.table import CASES

ENGINES = ("reference", "torch_sdpa", "triton")
SERVED = [
    pytest.param(engine, op, case, id=f"{engine}-{op}-{case.name}")
    for engine in ENGINES
    for case in CASES
    for op in case.ops
    if not case.verdict(engine, op)
]


@pytest.mark.parametrize(("engine", "op", "case"), SERVED)
def test_matches_the_oracle(engine: str, op: str, case: Case) -> None:
    plan, data, results = graphs.execute(case, op, engine)
    data.check_canaries()
    assert plan.routes[0].engine.startswith(engine)
    compare.assert_answer(
        results, data.problem, ref=data.ref, plain=data.plain, context=f"{case.name}, {engine}"
    )


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.dtype == "fp32" and c.recipe.q_scale and not c.sink_values], ids=str
)
def test_the_oracle_matches_an_independent_formulation(case: Case) -> None:
    """The reference's formulas against einsum, explicit masks and autograd, which share no code with it."""
    import oracle
    import torch
    from cases.data import make

    problem = make(case).problem
    ours, naive = oracle.reference(problem), oracle.naive(problem)
    for name, value in naive.items():
        torch.testing.assert_close(
            getattr(ours, name), value, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )
