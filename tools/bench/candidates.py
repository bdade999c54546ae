"""FROST's engines as candidates: bound plans over NaN-filled outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .operands import Operands, empty_like

ENGINES = ("triton", "sm80", "torch_sdpa", "reference")


class Unavailable(Exception):
    """A candidate that cannot run a case; the message says why."""


@dataclass
class Candidate:
    """Something that computes a case. `run` returns its results by name (o, lse or dq, dk, dv); `poison`
    spoils what the next run has to write. `compile_s`: seconds spent making it, 0 where nothing was
    compiled. `saved`: the (o, lse) that a backward was given; None where it has its own."""

    name: str
    route: str
    run: Callable[[], Mapping[str, Tensor]]
    poison: Callable[[], None]
    compile_s: float = 0.0
    saved: tuple[Tensor, Tensor] | None = None


def _sdpa_options(case: Case, options: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "causal": case.causal,
        "window": (case.window_left, None),
        "softcap": case.softcap,
        **options,
    }
    if case.packed:
        out |= {"max_seqlen_q": case.s, "max_seqlen_kv": case.s}
    return out


def forward_graph(case: Case, operands: Operands, *, stats: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """The forward's graph, and NaN-filled buffers for its outputs."""
    from frost.graph import Graph

    g = Graph(f"bench {case.name}")
    q, k, v = (g.tensor_like(n, getattr(operands, n)) for n in "qkv")
    options = {n: g.tensor_like(n, t) for n, t in operands.options.items()}
    o, lse = g.sdpa(q, k, v, stats=stats, **_sdpa_options(case, options))
    buffers = {"o": empty_like(operands.do)}
    g.output(o, name="o", stride=operands.do.stride())
    if lse is not None:
        rows = operands.q.shape[:-1]
        buffers["lse"] = torch.full(rows, float("nan"), device=operands.q.device)
        g.output(lse, name="lse")
    return g, buffers


def backward_graph(
    case: Case, operands: Operands, o: Tensor, lse: Tensor, *, grads: tuple[str, ...] = ("q", "k", "v")
) -> tuple[Any, dict[str, Tensor]]:
    """The backward's graph, and NaN-filled buffers for the gradients (of every float option too)."""
    from frost.graph import Graph

    g = Graph(f"bench {case.name} backward")
    named = {"q": operands.q, "k": operands.k, "v": operands.v, "o": o, "do": operands.do, "lse": lse}
    tensors = [g.tensor_like(n, t) for n, t in named.items()]
    how = _sdpa_options(case, {n: g.tensor_like(n, t) for n, t in operands.options.items()})
    how |= {f"d{n}": True for n in ("bias", "sink") if n in operands.options and len(grads) == 3}
    how |= {"grads": grads, "deterministic": case.deterministic}
    q, k, v, saved, do, stats = tensors
    made = g.sdpa_backward(q, k, v, saved, do, stats, **how)
    buffers = {}
    for name, tensor in made._asdict().items():
        if tensor is None:
            continue
        like = named.get(name[1:], operands.options.get(name[1:]))
        assert like is not None
        buffers[name] = empty_like(like)
        g.output(tensor, name=name, stride=like.stride())
    return g, buffers


def compile_plan(graph: Any, engine: str, gates: str, device: Any = None) -> tuple[Any, float]:
    """The plan and the seconds its making took. Raises Unavailable with the engine's reasons."""
    from frost.errors import NotSupportedError

    start = time.perf_counter()
    try:
        plan = graph.compile(device, engines=[engine], gates=gates)
    except NotSupportedError as e:
        raise Unavailable("; ".join(e.reasons.get(engine, [str(e)]))) from e
    except ValueError as e:
        if str(e).startswith("engines:"):
            raise Unavailable(str(e)) from e
        raise
    return plan, time.perf_counter() - start


def _candidate(
    engine: str, graph: Any, inputs: Mapping[str, Tensor], buffers: dict[str, Tensor], gates: str
) -> Candidate:
    plan, seconds = compile_plan(graph, engine, gates)
    call = plan.bind({**inputs, **buffers})

    def poison() -> None:
        for x in buffers.values():
            x.fill_(float("nan"))

    route = plan.routes[0]
    stamp = f" gates={gates}" if gates == "off" else ""
    return Candidate(engine, f"{route.engine}{stamp}", call, poison, seconds)


def forward(engine: str, case: Case, operands: Operands, *, gates: str, stats: bool = False) -> Candidate:
    """Raises Unavailable."""
    graph, buffers = forward_graph(case, operands, stats=stats)
    inputs = {n: getattr(operands, n) for n in "qkv"} | operands.options
    return _candidate(engine, graph, inputs, buffers, gates)


def backward(
    engine: str, case: Case, operands: Operands, *, gates: str, grads: tuple[str, ...] = ("q", "k", "v")
) -> Candidate:
    """The backward on the engine's own o and lse. Raises Unavailable."""
    first = forward(engine, case, operands, gates=gates, stats=True)
    saved = first.run()
    o, lse = saved["o"], saved["lse"]
    graph, buffers = backward_graph(case, operands, o, lse, grads=grads)
    inputs = (
        {n: getattr(operands, n) for n in ("q", "k", "v", "do")} | operands.options | {"o": o, "lse": lse}
    )
    made = _candidate(engine, graph, inputs, buffers, gates)
    made.compile_s += first.compile_s
    made.saved = (o, lse)
    return made
