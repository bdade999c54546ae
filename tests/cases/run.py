"""Attention on one engine straight from torch tensors: a graph declared like the buffers, compiled and
executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from oracle import Answer, Problem
from torch import Tensor

from cases.graphs import alignment
from frost.graph import Graph

NAN = float("nan")


def _declare(g: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: g.tensor(name, tuple(t.shape), stride=tuple(t.stride()), dtype=t.dtype, alignment=alignment(t))
        for name, t in tensors.items()
    }


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    given = {n: v for n, v in options.items() if v is not None}
    return (
        {n: v for n, v in given.items() if isinstance(v, Tensor)},
        {n: v for n, v in given.items() if not isinstance(v, Tensor)},
    )


def _finish(
    g: Graph, results: Mapping[str, Any], engine: str, tensors: dict[str, Tensor], out: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    for name, handle in results.items():
        buffer = out.get(name)
        if buffer is None:
            buffer = torch.full(tuple(handle.shape), NAN, dtype=getattr(torch, handle.dtype.torch_name))
        g.output(handle, name=name, stride=tuple(buffer.stride()), alignment=alignment(buffer))
        tensors[name] = buffer
    plan = g.compile("cpu", engines=[engine], gates="off")
    return plan.execute(tensors)


def forward(
    engine: str, q: Tensor, k: Tensor, v: Tensor, *, out: Mapping[str, Tensor] | None = None, **options: Any
) -> dict[str, Tensor]:
    """{"o", "lse"} of `g.sdpa(q, k, v, **options)`; results start as NaN, in the buffers of `out` where
    given."""
    extra, plain = _split(options)
    g = Graph()
    tensors = {"q": q, "k": k, "v": v, **extra}
    t = _declare(g, tensors)
    o, lse = g.sdpa(t["q"], t["k"], t["v"], stats=True, **{n: t[n] for n in extra}, **plain)
    return _finish(g, {"o": o, "lse": lse}, engine, tensors, out or {})


def backward(
    engine: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    out: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Every gradient there is: dq, dk, dv, and dbias, dsink where there is a bias, a sink."""
    extra, plain = _split(options)
    g = Graph()
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, **extra}
    if dlse is not None:
        tensors["dlse"] = dlse
    t = _declare(g, tensors)
    made = g.sdpa_backward(
        *(t[n] for n in ("q", "k", "v", "o", "do", "lse")),
        dlse=t.get("dlse"),
        dbias="bias" in extra,
        dsink="sink" in extra,
        **{n: t[n] for n in extra},
        **plain,
    )
    return _finish(g, {n: h for n, h in made._asdict().items() if h is not None}, engine, tensors, out or {})


def both(engine: str, problem: Problem, **options: Any) -> dict[str, Tensor]:
    """Forward, then backward from its own o and lse: what training does. Options in the graph's words."""
    fwd = forward(engine, problem.q, problem.k, problem.v, **options)
    if problem.do is None:
        return fwd
    grads = backward(
        engine,
        problem.q,
        problem.k,
        problem.v,
        fwd["o"],
        problem.do,
        fwd["lse"],
        dlse=problem.dlse,
        **options,
    )
    return {**fwd, **grads}


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None = None, dlse: Tensor | None = None, **options: Any
) -> Problem:
    """The oracle's form of the same call."""
    given = dict(options)
    given["align_bottom_right"] = given.pop("align", "top_left") == "bottom_right"
    for name in ("deterministic", "max_seqlen_q", "max_seqlen_kv"):
        given.pop(name, None)
    return Problem(q, k, v, do, dlse, given)


def check(
    engine: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    *,
    context: str = "",
    **options: Any,
) -> tuple[dict[str, Tensor], Answer]:
    """Run `both` and hold everything to the oracle. (results, the oracle's answer)."""
    import compare
    import oracle

    problem = problem_of(q, k, v, do, dlse, **options)
    ref = oracle.reference(problem)
    got = both(engine, problem, **options)
    compare.assert_answer(got, problem, ref=ref, context=f"{context} on {engine}")
    return got, ref
