"""`frost probe` and `frost bench`: attention backends by name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from .common import (
    FAILED,
    OK,
    UsageError,
    console,
    folder,
    known_device,
    print_json,
    progress,
    table,
    target_for,
    working,
    writable,
    writing,
)


def probe(device: str | None, gate_dir: Path | None, as_json: bool) -> int:
    from ..backends import probe_backends
    from ..registry import banner_facts

    known_device(device)
    folder("--gate-dir", gate_dir)
    with working("probe", as_json):
        reports = probe_backends(device=device, gate_dir=gate_dir)
        facts = banner_facts(device=device, gate_dir=gate_dir)
    if as_json:
        print_json({"banner": dict(facts), "backends": [vars(r) for r in reports]})
        return OK
    listed = table("backend", "available", "engine", "gate", "reason")
    for r in reports:
        listed.add_row(
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
    screen.print(listed)
    return OK


# What `benchmark_backends` calls the options.
_OPTIONS = {
    "batch": "--batch",
    "seq": "--seq",
    "n_heads": "--heads",
    "n_kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "iters": "--iters",
    "dtype": "--dtype",
}
# What a device does in seconds.
_BATCH = {"cpu": 1, "cuda": 4}
_LENGTHS = {"cpu": (128,), "cuda": (512, 1024, 2048)}


def bench(
    batch: int | None,
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
    """Every backend at every length (none given: what suits the device). 1: nothing could run, or
    something of ours was wrong.
    """
    from ..report.facts import bench_facts
    from ..report.saved import Saved, write_saved

    target = target_for(device)
    writable("--save", save)
    made = []
    for seq in seqs or _LENGTHS[target.device]:
        try:
            made.append(
                bench_facts(
                    _BATCH[target.device] if batch is None else batch,
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
            raise UsageError(_in_options(str(e))) from e
    if save is not None:
        with writing("--save", save):
            write_saved(save.resolve(), Saved(benchmarks=made))
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
        listed = table("backend", "ms", "TFLOP/s", "pinned ms", "", title=case["title"])
        for r in case["rows"]:
            listed.add_row(
                r["candidate"],
                _number(r["ms"], ".4f"),
                _number(r["tflops"], ".3g"),
                _number(r["pinned_ms"], ".4f"),
                r.get("note", "") if r["status"] == "ok" else r["status"],
                style="red" if r in wrong else None,
            )
        screen.print(listed)
    if save is not None:
        screen.print(f"saved to {save}", highlight=False)
    return code


def _in_options(text: str) -> str:
    """An error of `benchmark_backends` in the words of the command line."""
    name, colon, rest = text.partition(":")
    text = f"{_OPTIONS.get(name, name)}{colon}{rest}"
    return re.sub(r"(?<!-)\bn_(kv_)?heads\b", lambda m: _OPTIONS[m[0]], text)


def _number(value: Any, form: str) -> str:
    return "" if value is None else "NaN" if math.isnan(value) else format(value, form)


def _bar(total: int) -> Any:
    from rich.markup import escape

    bar = progress()
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
