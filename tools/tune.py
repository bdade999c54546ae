"""Regenerates the tile tables of the Triton engine: `python -m tools.tune`.

For each row of a table that is this card's: tiles around the one that ships are compiled in parallel processes, held to the fp64
oracle, and those that are right are timed together on problems that the row serves. The fastest by geometric mean that spills no
registers takes the row, unless the one that ships is as fast. Nothing is edited: `--emit FILE` writes the table as source, with what
was measured as each row's reason, for a maintainer to take over (a change of tiles voids the gates).

    python -m tools.tune --table fwd,dkdv,dq --head-dims 64,128 --emit tables.py
    python -m tools.tune --table bwd_hopper --budget-s 300 --csv tune.csv
    python -m tools.tune --table dkdv --compile-only 9.0        registers and spills of the candidates; needs no GPU

Exit code 0: every row that was tried has a tile that is right; 1: one has none; 2: cannot run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.bench import overrides, report, sweep
from tools.bench.cases import Case, tflops
from tools.bench.overrides import TABLES, Tile

TOKENS, HIDDEN = 16384, 2048
SAME = 0.01  # the tile that ships stays where the best is less than this much faster
BANDS = {None: (False, True), False: (False,), True: (True,)}
# What a candidate may be made of. The general kernels' last two are warps and stages.
GENERAL_AXES = ((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3))
HOPPER_AXES: dict[str, tuple[tuple[Any, ...], ...]] = {
    "fwd_hopper": ((64, 128, 256), (64, 128), (2, 3, 4, 6), (False, True), (None, 128)),
    "bwd_hopper": ((64, 128), (64, 128), (2, 4)),  # its rings are walked with masks and shifts
}
# Numbers of the accumulators per thread past which a tile can only spill: (matrices of BLOCK_M x d, of BLOCK_N x d, of
# BLOCK_M x BLOCK_N) that a kernel holds at a time.
ACCUMULATORS = {"fwd": (1, 0, 1), "dkdv": (0, 2, 2), "dq": (1, 0, 2)}
MOST_NUMBERS = 240


@dataclass(frozen=True)
class Slot:
    """One tile of one row. `few`: the second tile of a Hopper row, for problems that are small."""

    table: str
    index: int
    few: bool = False

    @property
    def row(self) -> Any:
        return TABLES[self.table].rows[self.index]

    @property
    def shipped(self) -> Tile:
        row = self.row
        return astuple(row.blocks if self.table in overrides.GENERAL else row.few if self.few else row.tile)

    @property
    def d(self) -> int:
        return self.row.d_pad if self.table in overrides.GENERAL else self.row.d

    def describe(self) -> str:
        row = self.row
        if self.table in overrides.GENERAL:
            bands = {None: "", False: " no band", True: " band"}[row.band]
            return f"{self.table} {row.arch} {8 * row.itemsize} bits d{row.d_pad} {row.scores}{bands}"
        return f"{self.table} d{row.d}{' few' if self.few else ''}"


def slots(tables: Sequence[str], cc: tuple[int, int], head_dims: Sequence[int] = (), scores: str = "") -> list[Slot]:
    """The rows that belong to a card's own class; "small"'s, which other cards borrow, are tuned on a small card."""
    from engines.triton.configs import arch_class

    found = []
    for table in tables:
        for index, row in enumerate(TABLES[table].rows):
            general = table in overrides.GENERAL
            if general and (row.arch != arch_class(cc) or scores not in ("", row.scores)):
                continue
            if not general and cc != (9, 0):
                continue
            slot = Slot(table, index)
            if not head_dims or slot.d in head_dims:
                found += [slot] if general or row.few is None else [slot, replace(slot, few=True)]
    return found


def problems(slot: Slot) -> list[Case]:
    """What a row is timed on: 16k tokens at hidden 2048, long and short; a small grid for the second tile of a Hopper row."""
    row, d = slot.row, slot.d
    general = slot.table in overrides.GENERAL
    corners = BANDS[row.band if general else row.causal]
    dtype = "fp32" if general and row.itemsize == 4 else "bf16"
    option: dict[str, Any] = {"mask": "full"} if general and row.scores == "tiled" else {}
    if slot.few:
        shapes = [(1, 8, 1024)]
    else:
        heads = max(1, HIDDEN // d)
        lengths = (512, 2048, 8192) if not general else (2048,) if dtype == "fp32" else (2048, 8192)
        shapes = [(TOKENS // s, heads, s) for s in lengths]
    return [Case("tune", f"s{s} {'causal' if causal else 'full'}", b, h, h, s, d, causal, dtype, **option)
            for (b, h, s), causal in itertools.product(shapes, corners)]


def legal(slot: Slot, tile: Tile) -> bool:
    """Whether a tile means anything to the kernel, and can keep its accumulators in registers."""
    if slot.table not in overrides.GENERAL:
        from engines.triton.params_hopper import HopperBwdParams, HopperFwdParams

        made = TABLES[slot.table].make(tile)
        try:
            if slot.table == "fwd_hopper":
                HopperFwdParams("bf16", slot.d, True, True, made)
            else:
                HopperBwdParams("bf16", slot.d, True, made)
        except ValueError:
            return False
        return True
    m, n, warps, _ = (int(x or 0) for x in tile)
    by_m, by_n, by_both = ACCUMULATORS[slot.table]
    numbers = (by_m * m * slot.d + by_n * n * slot.d + by_both * m * n) / (32 * warps)
    return numbers <= MOST_NUMBERS


def candidates(slot: Slot, most: int) -> list[Tile]:
    """The tile that ships first, then its neighbours, the nearest first."""
    axes = GENERAL_AXES if slot.table in overrides.GENERAL else HOPPER_AXES[slot.table]
    shipped = slot.shipped

    def distance(tile: Tile) -> float:
        return sum(abs(math.log2(int(a or 512)) - math.log2(int(b or 512))) if not isinstance(a, bool) else float(a != b)
                   for a, b in zip(tile, shipped))

    others = sorted((t for t in itertools.product(*axes) if t != shipped and legal(slot, t)), key=distance)
    return [shipped, *others[:max(most - 1, 0)]]


# ---- measuring -----------------------------------------------------------------------------------------------------------

Trials = Mapping[str, Mapping[Tile, sweep.Trial]]  # by problem
Compile = Callable[[str, Sequence[Case], Mapping[str, Sequence[Tile]], tuple[int, int]], Trials]
Measure = Callable[[str, Case, Mapping[Tile, sweep.Trial]], None]


@dataclass
class Outcome:
    """What became of one row: its candidates' trials, and the tile that has earned it (None: none was right)."""

    slot: Slot
    cases: Sequence[Case]
    trials: Trials
    best: Tile | None = None
    speeds: dict[Tile, float] = field(default_factory=dict)  # TFLOP/s, geometric mean; only of tiles right everywhere

    def worst(self, tile: Tile) -> sweep.Trial:
        """The trial that says most about a tile: the first that is not OK, else the one with the most spills."""
        mine = [self.trials[c.name][tile] for c in self.cases]
        return next((t for t in mine if t.status != report.OK), max(mine, key=lambda t: t.spills))


def choose(outcome: Outcome, *, allow_spills: bool) -> Outcome:
    """Fills in speeds and best. A tile that is wrong or does not run on one problem is out on all."""
    direction = sweep.RUNS[outcome.slot.table][0]
    shipped = outcome.slot.shipped
    for tile in outcome.trials[outcome.cases[0].name]:
        if outcome.worst(tile).status == report.OK:
            each = [tflops(c, direction, outcome.trials[c.name][tile].ms) for c in outcome.cases]
            if all(math.isfinite(x) for x in each):
                outcome.speeds[tile] = math.exp(sum(map(math.log, each)) / len(each))
    fit = {t: x for t, x in outcome.speeds.items() if allow_spills or t == shipped or outcome.worst(t).spills == 0}
    if shipped in fit and len(fit) > 1 and not allow_spills and outcome.worst(shipped).spills:
        del fit[shipped]
    if fit:
        outcome.best = max(fit, key=lambda t: fit[t])
        if shipped in fit and fit[outcome.best] < (1 + SAME) * fit[shipped]:
            outcome.best = shipped
    return outcome


def tune(wanted: Sequence[Slot], cc: tuple[int, int], *, most: int, allow_spills: bool, compile_trials: Compile, measure: Measure,
         until: float = math.inf, on_row: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
    """Row by row, until `until` on the monotonic clock. What was not reached is not in the result."""
    done: list[Outcome] = []
    for slot in wanted:
        if time.monotonic() >= until:
            break
        cases = problems(slot)
        tiles = candidates(slot, most)
        trials = compile_trials(slot.table, cases, {c.name: tiles for c in cases}, cc)
        for case in cases:
            measure(slot.table, case, trials[case.name])
        done.append(choose(Outcome(slot, cases, trials), allow_spills=allow_spills))
        on_row(done[-1])
    return done


# ---- what comes out --------------------------------------------------------------------------------------------------------


def reason(outcome: Outcome, card: str) -> str:
    """A row's reason, from what was measured."""
    best, direction = outcome.best, sweep.RUNS[outcome.slot.table][0]
    assert best is not None
    times = ", ".join(f"{c.name} {outcome.trials[c.name][best].ms:.3g} ms ({tflops(c, direction, outcome.trials[c.name][best].ms):.0f})"
                      for c in outcome.cases)
    rivals = sorted((t for t in outcome.speeds if t != best), key=lambda t: -outcome.speeds[t])
    text = f"{card} {times}; fastest of {len(outcome.speeds)}" if len(outcome.speeds) > 1 else f"{card} {times}; alone"
    if rivals:
        text += f" ({spelled(rivals[0])}: {outcome.speeds[rivals[0]] / outcome.speeds[best]:.2f} of it)"
    trial = outcome.worst(best)
    return f"{text}; {trial.registers} registers, {trial.spills or 'no'} bytes spilled".replace("no bytes", "nothing")


def spelled(tile: Tile) -> str:
    return "x".join(str(x) for x in tile)


def updated(table: str, outcomes: Sequence[Outcome], card: str) -> tuple[Any, ...]:
    """The table's rows with the tiles that earned them; rows that were not measured, or have none, as they are."""
    rows = list(TABLES[table].rows)
    for o in (o for o in outcomes if o.slot.table == table and o.best is not None):
        made, index = TABLES[table].make(o.best or ()), o.slot.index
        if table in overrides.GENERAL:
            rows[index] = replace(rows[index], blocks=made, reason=reason(o, card))
        elif o.slot.few:
            rows[index] = replace(rows[index], few=made)
        else:
            rows[index] = replace(rows[index], tile=made, reason=reason(o, card))
    return tuple(rows)


def source(table: str, rows: Sequence[Any]) -> str:
    """A table as Python; evaluates to equal rows in the module that has it."""
    return f"{TABLES[table].name} = (\n" + "".join(f"    {row!r},\n" for row in rows) + ")\n"


def show(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    direction = sweep.RUNS[outcome.slot.table][0]
    table = Table(title=f"{outcome.slot.describe()}, TFLOP/s", title_justify="left")
    for column in ("tile", "registers", "spills", "shared", *(c.name for c in outcome.cases), "mean", ""):
        table.add_column(column, justify="left" if column in ("tile", "") else "right")
    for tile in sorted(outcome.trials[outcome.cases[0].name], key=lambda t: -outcome.speeds.get(t, 0)):
        trial = outcome.worst(tile)
        speeds = [tflops(c, direction, outcome.trials[c.name][tile].ms) for c in outcome.cases]
        said = ["shipped"] if tile == outcome.slot.shipped else []
        said += ["best"] if tile == outcome.best else []
        said += [f"{trial.status} {trial.text[:50]}"] if trial.status != report.OK else []
        table.add_row(spelled(tile), str(trial.registers), str(trial.spills), str(trial.shared),
                      *("" if math.isnan(x) else f"{x:.0f}" for x in speeds),
                      f"{outcome.speeds[tile]:.0f}" if tile in outcome.speeds else "", ", ".join(said))
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def csv_rows(outcomes: Sequence[Outcome]) -> list[report.Row]:
    return [report.Row("tune", f"{o.slot.describe()} {c.name}", sweep.RUNS[o.slot.table][0], f"triton {spelled(tile)}",
                       "best" if tile == o.best else "shipped" if tile == o.slot.shipped else "", trial.status, ms=trial.ms,
                       tflops=tflops(c, sweep.RUNS[o.slot.table][0], trial.ms), check=trial.text, compile_s=trial.compile_s, b=c.b,
                       hq=c.hq, hk=c.hk, s=c.s, d=c.d, causal=c.causal, dtype=c.dtype,
                       options=f"regs {trial.registers} spills {trial.spills} shared {trial.shared}")
            for o in outcomes for c in o.cases for tile, trial in o.trials[c.name].items()]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m tools.tune", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--table", default=",".join(TABLES), help=f"comma-separated: {', '.join(TABLES)} (default: all)")
    p.add_argument("--head-dims", default="", help="comma-separated: only rows of these (padded) head dims")
    p.add_argument("--scores", choices=("plain", "tiled"), default="", help="general tables: only these rows")
    p.add_argument("--most", type=int, default=24, help="candidates of a row (default 24)")
    p.add_argument("--reps", type=int, default=8, help="timed calls per candidate and problem (default 8)")
    p.add_argument("--allow-spills", action="store_true", help="let a tile that spills registers take a row")
    p.add_argument("--budget-s", type=float, default=math.inf, help="start no row after so many seconds")
    p.add_argument("--workers", type=int, default=0, help="compiling processes (default: one per core, at most 16)")
    p.add_argument("--emit", type=Path, help="write the tables as source here")
    p.add_argument("--csv", type=Path, help="write every trial here")
    p.add_argument("--list", action="store_true", help="print rows and candidates of a card and stop; needs no GPU")
    p.add_argument("--compile-only", metavar="CC", help="compile for this compute capability and stop; needs no GPU")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    tables = [t.strip() for t in args.table.split(",") if t.strip()]
    if unknown := [t for t in tables if t not in TABLES]:
        p.error(f"--table: given {', '.join(unknown)}, expected some of {', '.join(TABLES)}")
    if args.most < 1:
        p.error(f"--most: given {args.most}, expected at least 1")
    try:
        dims = [int(x) for x in args.head_dims.split(",") if x]
        major, minor = (int(x) for x in (args.compile_only or "9.0").split("."))
    except ValueError:
        p.error("--head-dims, --compile-only: expected numbers such as 64,128 and 9.0")
    import torch

    offline = args.list or args.compile_only
    if not offline and not torch.cuda.is_available():
        print("tools.tune needs an NVIDIA GPU, and this process sees none (--list and --compile-only work without)", file=sys.stderr)
        return 2
    cc = (major, minor) if offline else torch.cuda.get_device_capability()
    wanted = slots(tables, cc, dims, args.scores)
    if not wanted:
        print(f"no row of {', '.join(tables)} belongs to sm_{cc[0]}{cc[1]} and these options", file=sys.stderr)
        return 2
    if args.list:
        for slot in wanted:
            print(f"{slot.describe()}: {', '.join(spelled(t) for t in candidates(slot, args.most))}")
        return 0
    if len({slot.table for slot in wanted}) < len(tables):
        print("some tables have no row for this card", file=sys.stderr)
    return _run(args, tables, wanted, cc)


def _run(args: argparse.Namespace, tables: Sequence[str], wanted: Sequence[Slot], cc: tuple[int, int]) -> int:
    from rich.console import Console
    from rich.progress import Progress

    card = "nothing measured" if args.compile_only else report.environment()["card"].removeprefix("NVIDIA ")

    def compile_trials(kernel: str, cases: Sequence[Case], tiles: Mapping[str, Sequence[Tile]], cc: tuple[int, int]) -> Trials:
        return sweep.compile_trials(kernel, cases, tiles, cc, args.workers)

    def measure(kernel: str, case: Case, trials: Mapping[Tile, sweep.Trial]) -> None:
        if not args.compile_only:
            sweep.measure(kernel, case, trials, args.reps)

    with tempfile.TemporaryDirectory(prefix="frost-tune-") as folder, Progress(console=Console(stderr=True), transient=True) as bar:
        os.environ["FROST_CACHE_DIR"] = folder  # all is compiled anew: registers and spills are seen
        task = bar.add_task("rows", total=len(wanted))

        def on_row(outcome: Outcome) -> None:
            bar.advance(task)
            show(outcome)

        until = time.monotonic() + args.budget_s
        done = tune(wanted, cc, most=args.most, allow_spills=args.allow_spills, compile_trials=compile_trials, measure=measure,
                    until=until, on_row=on_row)
    if args.csv:
        report.write_csv(args.csv, csv_rows(done), report.environment())
    if args.emit and not args.compile_only:
        env = report.environment()
        head = f"# {env['card']}, torch {env['torch']}, Triton {env['triton']}, {env['date']}: python -m tools.tune\n"
        args.emit.write_text(head + "\n".join(source(t, updated(t, done, card)) for t in tables))
    if len(done) < len(wanted):
        print(f"time ran out: {len(wanted) - len(done)} of {len(wanted)} rows were not tried", file=sys.stderr)
    if args.compile_only:
        return 0
    for o in done:
        change = "none was right" if o.best is None else "stays" if o.best == o.slot.shipped else f"becomes {spelled(o.best)}"
        print(f"{o.slot.describe()}: {spelled(o.slot.shipped)} {change}")
    return 1 if any(o.best is None for o in done) else 0


if __name__ == "__main__":
    sys.exit(main())
