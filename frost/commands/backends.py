"""`frost probe` and `frost bench`: attention backends by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.table import Table

from .common import FAILED, OK, UsageError, console, known_device, print_json, target_for


def probe(device: str | None, gate_dir: Path | None, as_json: bool) -> int:
    from ..backends import probe_backends
    from ..registry import banner_facts

    known_device(device)
    if gate_dir is not None and not gate_dir.is_dir():
        raise UsageError(f"--gate-dir: given {gate_dir}, expected a folder")
    reports = probe_backends(device=device, gate_dir=gate_dir)
    facts = banner_facts(device=device, gate_dir=gate_dir)
    if as_json:
        print_json({"banner": dict(facts), "backends": [vars(r) for r in reports]})
        return OK
    table = Table("backend", "available", "engine", "gate", "reason")
    for r in reports:
        table.add_row(
            r.name,
            "yes" if r.available else "no",
            r.engine,
            r.gate,
            r.reason,
            style=None if r.available else "dim",
        )
    screen = console()
    for key, value in facts.items():
        screen.print(f"{key}: {value}", highlight=False)
    screen.print(table)
    return OK


def bench(
    batch: int,
    seqs: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    iters: int,
    device: str | None,
    dtype: str | None,
    save: Path | None,
    as_json: bool,
) -> int:
    """Every backend at every length. 1: nothing of ours could run, or something of ours was wrong."""
    from ..report.facts import bench_facts
    from ..report.saved import Saved, write_saved

    if device is not None:
        target_for(device)
    made = []
    for seq in seqs:
        try:
            made.append(
                bench_facts(
                    batch,
                    seq,
                    heads,
                    kv_heads,
                    head_dim,
                    iters,
                    device,
                    dtype,
                    progress=None if as_json else _bar,
                )
            )
        except (ValueError, TypeError) as e:
            raise UsageError(str(e)) from e
    if save is not None:
        write_saved(save, Saved(benchmarks=made))
    wrong = [
        r
        for case in made
        for r in case["rows"]
        if r["candidate"].startswith("frost[") and r["status"].startswith("equivalence")
    ]
    idle = not any(r["ms"] is not None and not math.isnan(r["ms"]) for case in made for r in case["rows"])
    code = FAILED if wrong or idle else OK
    if as_json:
        print_json({"ok": code == OK, "benchmarks": made})
        return code
    screen = console()
    for case in made:
        table = Table("backend", "ms", "TFLOP/s", "pinned ms", "", title=case["title"])
        for r in case["rows"]:
            table.add_row(
                r["candidate"],
                _number(r["ms"], ".4f"),
                _number(r["tflops"], ".1f"),
                _number(r["pinned_ms"], ".4f"),
                r.get("note", "") if r["status"] == "ok" else r["status"],
                style="red" if r in wrong else None,
            )
        screen.print(table)
    if save is not None:
        screen.print(f"saved to {save}", highlight=False)
    return code


def _number(value: Any, form: str) -> str:
    return "" if value is None else "NaN" if math.isnan(value) else format(value, form)


def _bar(total: int) -> Any:
    from rich.markup import escape
    from rich.progress import Progress

    bar = Progress(console=console(stderr=True), transient=True)
    task = bar.add_task("benchmark", total=total)

    class Steps:
        def __enter__(self) -> Any:
            bar.start()

            def step(name: str, stage: str) -> None:
                bar.update(task, description=escape(f"{name}: {stage}"), advance=1 if stage == "done" else 0)

            return step

        def __exit__(self, *_: object) -> None:
            bar.stop()

    return Steps()
