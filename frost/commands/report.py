"""`frost report`: everything on one page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import (
    OK,
    UsageError,
    console,
    folder,
    load_graph,
    print_json,
    progress,
    reading,
    target_for,
    writable,
    writing,
)

if TYPE_CHECKING:
    from ..graph import Graph
    from ..report import Saved


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
    from ..plan import compile_graph
    from ..report import Saved, merge_saved, render, write_saved
    from ..report.facts import baseline_facts, environment, gate_facts, plan_facts

    folder("--gate-dir", gate_dir)
    writable("--out", out, pipes=True)
    writable("--save", save)
    with progress(as_json) as bar:
        task = bar.add_task("read", total=4)
        saved = merge_saved([*_runs(runs), Saved(benchmarks=_csvs(bench), routing=list(_dumps(routing)))])
        if not saved.environment:
            saved.environment = environment()
        bar.update(task, description="compile graphs", advance=1)
        made = [load_graph(p, "--graph") for p in graphs]
        if not (runs or graphs or routing or bench):
            made = _example()
        if made:
            target = target_for(device, archs=True)
            saved.graphs += [plan_facts(g, compile_graph(g, target)) for g in made]
        bar.update(task, description="read gates", advance=1)
        saved = merge_saved([saved, Saved(gates=gate_facts(gate_dir))])
        saved.benchmarks = saved.benchmarks or baseline_facts()
        bar.update(task, description="write", advance=1)
        page = render(saved)
        _write(out, page)
        if save is not None:
            with writing("--save", save):
                write_saved(save.resolve(), saved)
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


def _runs(paths: Iterable[Path]) -> Iterator[Saved]:
    from ..report import load_saved

    for path in paths:
        with reading("RUN", path, "a saved run, as `frost run --save` and `frost bench --save` write it"):
            yield load_saved(path)


def _csvs(paths: Iterable[Path]) -> list[dict[str, Any]]:
    from ..report.facts import csv_facts

    made = []
    for path in paths:
        with reading("--bench", path, "a CSV as `python -m tools.bench --csv` writes it"):
            made += csv_facts(path)
    return made


def _dumps(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """The named dumps; with none, what FROST's own suites leave in the current folder, as far as it is whole."""
    from ..report.facts import routing_facts

    for path in paths or sorted(Path(".frost_routing").glob("*.msgpack")):
        try:
            with reading("--routing", path, "a routing dump, as `pytest --frost-routing=FILE` writes it"):
                made = routing_facts([path])
        except UsageError as e:
            if paths:
                raise
            print(f"frost: left out: {e}", file=sys.stderr)
        else:
            yield from made


def _write(path: Path, page: str) -> None:
    """Whole or not at all, where it is a file: somebody may have the old one open."""
    from engines.template_loader import write_atomically

    if path.exists() and not path.is_file():  # /dev/stdout
        path.write_text(page, encoding="utf-8")
        return
    with writing("--out", path):
        write_atomically(path.resolve(), page.encode())


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
