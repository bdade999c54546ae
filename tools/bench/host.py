"""Host cost of one call, at shapes so small that the device never sets the pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import candidates, operands, peers, report
from .candidates import Unavailable
from .cases import Case
from .report import Row, make_row
from .runner import Settings
from .timing import host_microseconds

FLASH = "torch SDPA FLASH"


def run_host(case: Case, direction: str, settings: Settings) -> list[Row]:
    """Rows for bound calls, `execute` with and without outputs, the functional API, and the peers."""
    ops = operands.make(case, layout=settings.layout)
    calls: dict[str, Callable[[], Any]] = {}
    routes: dict[str, str] = {}
    rows: list[Row] = []
    for engine in settings.engines:
        try:
            found = _plan_calls(engine, case, direction, ops, settings)
        except Unavailable as e:
            rows.append(make_row(case, direction, engine, "", report.UNAVAILABLE, check=str(e)[:300]))
            continue
        for what, (route, call) in found.items():
            calls[f"{engine} {what}"], routes[f"{engine} {what}"] = call, route
    if direction == "fwd":
        calls |= _functional(case, ops, settings)
    with peers.sdpa_backend("flash"):
        calls[FLASH] = _flash(case, ops, direction)
        calls["torch.add(out=)"] = _add(ops)
        costs = host_microseconds(calls)
    rows += [
        make_row(case, direction, name, routes.get(name, ""), report.OK, host_us=us)
        for name, us in costs.items()
    ]
    return rows


def _plan_calls(
    engine: str, case: Case, direction: str, ops: operands.Operands, settings: Settings
) -> dict[str, tuple[str, Callable[[], Any]]]:
    inputs = {n: getattr(ops, n) for n in "qkv"}
    if direction == "fwd":
        graph, buffers = candidates.forward_graph(case, ops)
    else:
        first = candidates.forward(engine, case, ops, gates=settings.gates, stats=True)
        saved = first.run()
        inputs |= {"do": ops.do, "o": saved["o"], "lse": saved["lse"]}
        graph, buffers = candidates.backward_graph(case, ops, saved["o"], saved["lse"])
    plan, _ = candidates.compile_plan(graph, engine, settings.gates)
    workspace = torch.empty(plan.workspace_size, dtype=torch.uint8, device=ops.q.device)
    everything = {**inputs, **buffers}
    route = plan.routes[0].engine
    return {
        "plan.bind()()": (route, plan.bind(everything, workspace)),
        "plan.execute(all given)": (route, lambda: plan.execute(everything, workspace=workspace)),
        "plan.execute(inputs only)": (route, lambda: plan.execute(inputs)),
    }


def _functional(case: Case, ops: operands.Operands, settings: Settings) -> dict[str, Callable[[], Any]]:
    import frost

    attention = frost.attention
    engines = list(settings.engines[:1])

    def call() -> Any:
        with torch.no_grad():
            return attention(ops.q, ops.k, ops.v, causal=case.causal, engines=engines, gates=settings.gates)

    return {"frost.attention": call}


def _flash(case: Case, ops: operands.Operands, direction: str) -> Callable[[], Any]:
    attention = peers.sdpa_call("flash", case)
    if direction == "fwd":

        def forward() -> Any:
            return attention(ops.q, ops.k, ops.v)

        return forward
    leaves = ops.leaves()
    o = attention(*leaves)
    return lambda: torch.autograd.grad(o, leaves, ops.do, retain_graph=True)


def _add(ops: operands.Operands) -> Callable[[], Any]:
    out = torch.empty_like(ops.q)
    return lambda: torch.add(ops.q, ops.q, out=out)
