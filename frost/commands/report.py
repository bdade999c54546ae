"""`frost report`: everything on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import OK, console, load_graph, print_json, target_for

if TYPE_CHECKING:
    from ..graph import Graph


def report(
    runs: list[Path],
    graphs: list[Path],
    routing: list[Path],
    bench: list[Path],
    gate_dir: Path | None,
    device: str | None,
    out: Path,
    save: Path | None,
    as_json: bool,
) -> int:
    """From saved runs, graphs compiled here, routing dumps and benchmark CSVs; with none of them, an
    example.
    """
    from rich.progress import Progress

    from ..plan import compile_graph
    from ..report import load_saved, merge_saved, render, write_saved
    from ..report.facts import baseline_facts, csv_facts, environment, gate_facts, plan_facts, routing_facts
    from ..report.saved import Saved

    with Progress(console=console(stderr=True), transient=True, disable=as_json) as bar:
        task = bar.add_task("read", total=4)
        saved = merge_saved(map(load_saved, runs))
        if not saved.environment:
            saved.environment = environment()
        bar.update(task, description="compile graphs", advance=1)
        made = [load_graph(p) for p in graphs]
        if not (made or saved.graphs):
            made = _example()
        if made:
            target = target_for(device)
            saved.graphs += [plan_facts(g, compile_graph(g, target)) for g in made]
        bar.update(task, description="read gates and dumps", advance=1)
        here = gate_facts(gate_dir)
        saved = merge_saved(
            [
                saved,
                Saved(
                    gates=here,
                    routing=routing_facts(routing or _dumps()),
                    benchmarks=[case for path in bench for case in csv_facts(path)],
                ),
            ]
        )
        saved.benchmarks = saved.benchmarks or baseline_facts()
        bar.update(task, description="write", advance=1)
        out.parent.mkdir(parents=True, exist_ok=True)
        page = render(saved)
        out.write_text(page, encoding="utf-8")
        if save is not None:
            write_saved(save, saved)
        bar.update(task, advance=1)
    facts: dict[str, Any] = {
        "path": str(out),
        "bytes": len(page.encode()),
        "graphs": len(saved.graphs),
        "gates": len(saved.gates),
        "routing": len(saved.routing),
        "benchmarks": len(saved.benchmarks),
    }
    if as_json:
        print_json(facts)
    else:
        console().print(
            f"written to {out} ({facts['bytes'] // 1024} KiB): {facts['graphs']} graphs, "
            f"{facts['gates']} gates, "
            f"{facts['routing']} routing dumps, {facts['benchmarks']} benchmarks",
            highlight=False,
        )
    return OK


def _dumps() -> list[Path]:
    """What FROST's own suites leave in the current folder."""
    return sorted(Path(".frost_routing").glob("*.msgpack"))


def _example() -> list[Graph]:
    """Causal grouped attention with a gate on its output, and its backward."""
    from ..autodiff import backward_graph
    from ..graph import Graph

    g = Graph("example")
    q = g.tensor("q", (2, 8, 256, 64), stride=(256 * 512, 64, 512, 1), dtype="fp32")
    k, v = (g.tensor(n, (2, 2, 256, 64), dtype="fp32") for n in "kv")
    gate = g.tensor("gate", (2, 8, 256, 64), dtype="fp32")
    o, lse = g.sdpa(q, k, v, causal=True, stats=True, name="attention")
    g.output(g.mul(o, g.sigmoid(gate)), name="y")
    assert lse is not None
    g.output(lse, name="lse")
    return [g, backward_graph(g, wrt=["q", "k", "v", "gate"])]
