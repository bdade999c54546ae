"""`frost explain GRAPH` and `frost run GRAPH`: where a graph's nodes go, and what they make."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import (
    FAILED,
    OK,
    CommandError,
    UsageError,
    console,
    load_graph,
    names,
    print_json,
    progress,
    table,
    target_for,
    usage,
    working,
    writable,
    writing,
)

if TYPE_CHECKING:
    import torch

    from engines.base import Target

    from ..graph import Graph
    from ..plan import Plan


_MOST_REPEATS = 1_000_000


def compiled(
    path: Path, target: Target, engines: str | None, gates: str | None, quiet: bool
) -> tuple[Graph, Plan]:
    from ..plan import compile_graph

    graph = load_graph(path)
    try:
        with working("compile", quiet):
            return graph, compile_graph(graph, target, engines=names(engines), gates=gates)
    except ValueError as e:
        name = str(e).partition(":")[0]
        if name in ("engines", "gates"):
            raise usage(f"--{name}", e, name) from e
        raise


def explain(path: Path, device: str | None, engines: str | None, gates: str | None, as_json: bool) -> int:
    from ..report.facts import plan_facts

    graph, plan = compiled(path, target_for(device, archs=True), engines, gates, as_json)
    if as_json:
        print_json({**plan_facts(graph, plan), "tree": graph.to_text().splitlines()})
        return OK
    screen = console()
    screen.print(graph.to_text(), highlight=False)
    listed = table("step", "node", "op", "engine", "gate")
    for i, r in enumerate(plan.routes):
        listed.add_row(str(i), r.node, r.op, r.engine, r.gate)
    screen.print(listed)
    screen.print(plan.explain(), highlight=False)
    return OK


def parse_bindings(pairs: list[str]) -> dict[str, int]:
    """NAME=NUMBER, each name once. Raises UsageError."""
    out: dict[str, int] = {}
    for pair in pairs:
        name, _, value = (part.strip() for part in pair.partition("="))
        if not name or not value.isdecimal() or len(value) > 18:
            raise UsageError(f"--bind: given {pair!r}, expected NAME=NUMBER such as T=128")
        if out.setdefault(name, int(value)) != int(value):
            raise UsageError(f"--bind: given {name} as {out[name]} and as {int(value)}, expected one value")
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

    if not 1 <= repeat <= _MOST_REPEATS:
        raise UsageError(f"--repeat: given {repeat}, expected a number in 1..{_MOST_REPEATS}")
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"--seed: given {seed}, expected a number in 0..2^63-1")
    target = target_for(device)
    writable("--save", save)
    given = parse_bindings(bind)
    graph, plan = compiled(path, target, engines, gates, as_json)
    try:
        bindings = choose_symbols(graph, given)
    except ValueError as e:
        raise usage("--bind", e, "symbol") from e
    on = torch.device("cpu") if target.device == "cpu" else torch.device("cuda", target.index)
    with working("operands", as_json), _in_memory():
        feeds = make_inputs(graph, bindings, on, seed)
    with _in_memory():
        outputs, ms = _execute(plan, feeds, on, repeat, as_json)
    with working("compare with the reference engine", as_json), _in_memory():
        compared, wrong = _compare(graph, plan, feeds, outputs) if check else ({}, {})
    facts = plan_facts(graph, plan)
    facts["run"] = {
        "ms": ms,
        "repeat": repeat,
        "seed": seed,
        "symbols": bindings,
        "outputs": {n: {**_summary(t), **compared.get(n, {})} for n, t in outputs.items()},
    }
    if save is not None:
        with writing("--save", save):
            write_saved(save.resolve(), Saved(graphs=[facts]))
    if as_json:
        print_json({**facts, "ok": not wrong, "wrong": wrong})
        return FAILED if wrong else OK
    screen = console()
    listed = table("output", "shape", "mean", "largest", "NaN", "difference from the reference engine")
    for name, made in facts["run"]["outputs"].items():
        difference = made.get("difference")
        listed.add_row(
            name,
            str(made["shape"]),
            f"{made['mean']:.4g}",
            f"{made['largest']:.4g}",
            str(made["nan"]),
            "" if difference is None else f"{difference:.3g}",
            style="red" if name in wrong else None,
        )
    screen.print(", ".join(f"{r.node}: {r.engine}" for r in plan.routes), highlight=False)
    screen.print(listed)
    screen.print(f"{ms:.3f} ms, median of {repeat}" + (f"; saved to {save}" if save else ""), highlight=False)
    for name, text in wrong.items():
        screen.print(f"FAIL {name}: {text}", style="red")
    return FAILED if wrong else OK


@contextlib.contextmanager
def _in_memory() -> Iterator[None]:
    """Operands, results and workspace that do not fit are told in one line."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if isinstance(e, MemoryError) or re.search("out of memory|allocate", str(e)):
            raise CommandError(
                f"GRAPH: too large for the memory here ({' '.join(str(e).split())[:200]})"
            ) from e
        raise


def _execute(
    plan: Plan, feeds: Mapping[str, torch.Tensor], device: torch.device, repeat: int, quiet: bool
) -> tuple[dict[str, torch.Tensor], float]:
    import torch

    call = plan.bind(feeds)
    outputs = call()
    samples = []
    with progress(quiet) as bar:
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


# Root mean square of the error over that of the result, by the narrowest float of the graph: more than rounding
# explains. A proof is the gate's business, whose bounds are far narrower.
_MOST = {"bfloat16": 5e-2, "float16": 2e-2, "float32": 5e-3, "float64": 1e-6}
_NAN = "NaN where the reference engine has none, or the other way round"


def _compare(
    graph: Graph, plan: Plan, feeds: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """By output: the largest difference from the reference engine; and what is wrong, where something is."""
    import torch

    from ..plan import compile_graph

    expected = compile_graph(graph, plan.target, engines=["reference"]).execute(dict(feeds))
    floats = [t.dtype for t in (*feeds.values(), *outputs.values()) if t.is_floating_point()]
    most = max((_MOST.get(str(d).removeprefix("torch."), 0.0) for d in floats), default=0.0)
    compared, wrong = {}, {}
    for name, got in outputs.items():
        a, b = got.double(), expected[name].double()
        gap = torch.where((a == b) | (torch.isnan(a) & torch.isnan(b)), 0.0, (a - b).abs())
        compared[name] = {"difference": float(gap.max()) if gap.numel() else 0.0}
        size = (
            torch.where(torch.isfinite(b), b, 0.0).square().mean().sqrt().clamp(min=1e-6)
            if gap.numel()
            else b.new_ones(())
        )
        error = float(gap.square().mean().sqrt() / size) if gap.numel() else 0.0
        if bool((torch.isnan(a) != torch.isnan(b)).any()):
            wrong[name] = _NAN
        elif got.is_floating_point() and not error <= most:
            wrong[name] = (
                f"{error:.3g} of its size away from the reference engine's, expected at most {most:g}"
            )
    return compared, wrong
