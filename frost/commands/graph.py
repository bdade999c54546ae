"""`frost explain GRAPH` and `frost run GRAPH`: where a graph's nodes go, and what they make."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .common import FAILED, OK, UsageError, console, load_graph, names, print_json, target_for

if TYPE_CHECKING:
    import torch

    from ..graph import Graph
    from ..plan import Plan


def compiled(path: Path, device: str | None, engines: str | None, gates: str | None) -> tuple[Graph, Plan]:
    from ..plan import compile_graph

    graph, target = load_graph(path), target_for(device)
    try:
        return graph, compile_graph(graph, target, engines=names(engines), gates=gates)
    except ValueError as e:
        if str(e).startswith(("engines:", "gates:")):
            raise UsageError(f"--{e}") from e
        raise


def explain(path: Path, device: str | None, engines: str | None, gates: str | None, as_json: bool) -> int:
    from ..report.facts import plan_facts

    graph, plan = compiled(path, device, engines, gates)
    if as_json:
        print_json({**plan_facts(graph, plan), "tree": graph.to_text().splitlines()})
        return OK
    screen = console()
    screen.print(graph.to_text(), highlight=False)
    table = Table("step", "node", "op", "engine", "gate")
    for i, r in enumerate(plan.routes):
        table.add_row(str(i), r.node, r.op, r.engine, r.gate)
    screen.print(table)
    screen.print(plan.explain(), highlight=False)
    return OK


def parse_bindings(pairs: list[str]) -> dict[str, int]:
    out = {}
    for pair in pairs:
        name, sep, value = pair.partition("=")
        if not sep or not value.strip().isdigit():
            raise UsageError(f"--bind: given {pair!r}, expected NAME=NUMBER such as T=128")
        out[name.strip()] = int(value)
    return out


def run(
    path: Path,
    device: str | None,
    engines: str | None,
    gates: str | None,
    bind: list[str],
    seed: int,
    repeat: int,
    check: bool,
    save: Path | None,
    as_json: bool,
) -> int:
    """Execute on seeded operands; the outputs are compared with the reference engine's."""
    import torch

    from ..report.facts import plan_facts
    from ..report.saved import Saved, write_saved
    from ..sample_inputs import choose_symbols, make_inputs

    if repeat < 1:
        raise UsageError(f"--repeat: given {repeat}, expected a number >= 1")
    graph, plan = compiled(path, device, engines, gates)
    try:
        bindings = choose_symbols(graph, parse_bindings(bind))
    except ValueError as e:
        raise UsageError(f"--bind: {e}") from e
    target = plan.target
    on = torch.device("cpu") if target.device == "cpu" else torch.device("cuda", target.index)
    if on.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device: given {target}, which this machine can compile for but not run on")
    feeds = make_inputs(graph, bindings, on, seed)
    outputs, ms = _execute(plan, feeds, on, repeat, as_json)
    compared, wrong = _compare(graph, plan, feeds, outputs) if check else ({}, [])
    facts = plan_facts(graph, plan)
    facts["run"] = {
        "ms": ms,
        "repeat": repeat,
        "seed": seed,
        "symbols": bindings,
        "outputs": {n: {**_summary(t), **compared.get(n, {})} for n, t in outputs.items()},
    }
    if save is not None:
        write_saved(save, Saved(graphs=[facts]))
    if as_json:
        print_json({**facts, "ok": not wrong})
        return FAILED if wrong else OK
    screen = console()
    table = Table("output", "shape", "mean", "largest", "NaN", "difference from the reference engine")
    for name, made in facts["run"]["outputs"].items():
        difference = made.get("difference")
        table.add_row(
            name,
            str(made["shape"]),
            f"{made['mean']:.4g}",
            f"{made['largest']:.4g}",
            str(made["nan"]),
            "" if difference is None else f"{difference:.3g}",
            style="red" if name in wrong else None,
        )
    screen.print(", ".join(f"{r.node}: {r.engine}" for r in plan.routes), highlight=False)
    screen.print(table)
    screen.print(f"{ms:.3f} ms, median of {repeat}" + (f"; saved to {save}" if save else ""), highlight=False)
    for name in wrong:
        screen.print(
            f"FAIL {name}: NaN where the reference engine has none, or the other way round", style="red"
        )
    return FAILED if wrong else OK


def _execute(
    plan: Plan, feeds: Mapping[str, torch.Tensor], device: torch.device, repeat: int, quiet: bool
) -> tuple[dict[str, torch.Tensor], float]:
    import torch
    from rich.progress import Progress

    call = plan.bind(feeds)
    outputs = call()
    samples = []
    with Progress(console=console(stderr=True), transient=True, disable=quiet) as bar:
        for _ in bar.track(range(repeat), description="run"):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples.append((time.perf_counter() - start) * 1e3)
    return outputs, statistics.median(samples)


def _summary(t: torch.Tensor) -> dict[str, Any]:
    import torch

    wide = t.detach().double()
    finite = wide[torch.isfinite(wide)]
    return {
        "shape": list(t.shape),
        "dtype": str(t.dtype).removeprefix("torch."),
        "nan": int(torch.isnan(wide).sum()),
        "mean": float(finite.mean()) if finite.numel() else 0.0,
        "largest": float(finite.abs().max()) if finite.numel() else 0.0,
    }


def _compare(
    graph: Graph, plan: Plan, feeds: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """By output: the largest difference from the reference engine; and those whose NaN are elsewhere."""
    import torch

    from ..plan import compile_graph

    expected = compile_graph(graph, plan.target, engines=["reference"]).execute(dict(feeds))
    compared, wrong = {}, []
    for name, got in outputs.items():
        a, b = got.double(), expected[name].double()
        same = (a == b) | (torch.isnan(a) & torch.isnan(b))
        if bool((torch.isnan(a) != torch.isnan(b)).any()):
            wrong.append(name)
        gap = torch.where(same, 0.0, (a - b).abs())
        compared[name] = {"difference": float(gap.max()) if gap.numel() else 0.0}
    return compared, wrong
