"""tools.tune: which tiles it tries, which one takes a row, and the source that it writes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.triton import configs, configs_bwd, configs_hopper, runtime
from tools import tune
from tools.bench import overrides, report, sweep

SM90 = (9, 0)
ALL = tune.slots(list(overrides.TABLES), SM90)
DKDV = next(s for s in ALL if s.table == "dkdv" and s.d == 128 and s.row.scores == "plain")
FEW = next(s for s in ALL if s.few and s.table == "fwd_hopper")


def fakes(verdicts: dict[Any, dict[str, Any]], log: list[Any]) -> dict[str, Callable[..., Any]]:
    """A compiler and a device that give each tile what `verdicts` has for it: ms, spills, status. Others take 10 ms."""

    def compile_trials(kernel: str, cases: Sequence[Any], tiles: Any, cc: Any) -> Any:
        return {c.name: {t: sweep.Trial(t, registers=200, spills=verdicts.get(t, {}).get("spills", 0)) for t in tiles[c.name]}
                for c in cases}

    def measure(kernel: str, case: Any, trials: Any) -> None:
        log.append((kernel, case.name))
        for tile, trial in trials.items():
            given = verdicts.get(tile, {})
            trial.status = given.get("status", report.OK) if case.name.startswith(given.get("where", "")) else report.OK
            trial.ms = given.get("ms", 10.0) if trial.status == report.OK else math.nan

    return {"compile_trials": compile_trials, "measure": measure}


def tuned(slot: tune.Slot, verdicts: dict[Any, dict[str, Any]], **how: Any) -> tune.Outcome:
    given: dict[str, Any] = {"most": 12, "allow_spills": False, **how}
    return tune.tune([slot], SM90, **given, **fakes(verdicts, []))[0]


def test_rows_of_a_card() -> None:
    general = [s for s in ALL if s.table in overrides.GENERAL]
    assert {s.row.arch for s in general} == {"hopper"}
    assert sum(s.table == "fwd_hopper" for s in ALL) == sum(1 + (r.few is not None) for r in configs_hopper.FWD_HOPPER)
    assert {s.row.arch for s in tune.slots(["fwd", "bwd_hopper"], (8, 6))} == {"small"}
    assert all(s.d == 64 for s in tune.slots(["dq"], SM90, [64])) and len(tune.slots(["dq"], SM90, [64])) == 2


@pytest.mark.parametrize("slot", ALL, ids=lambda s: s.describe())
def test_candidates_begin_with_what_ships_and_are_legal(slot: tune.Slot) -> None:
    made = tune.candidates(slot, 24)
    assert made[0] == slot.shipped and len(set(made)) == len(made) >= 3
    assert all(tune.legal(slot, t) for t in made[1:])
    assert {c.causal for c in tune.problems(slot)} == {False, True} or getattr(slot.row, "band", None) is not None
    assert tune.candidates(slot, 1) == [slot.shipped]


def test_the_fastest_that_is_right_and_spills_nothing_takes_the_row() -> None:
    _, a, b, c, d = tune.candidates(DKDV, 5)
    verdicts: dict[Any, dict[str, Any]] = {
        a: {"ms": 1.0, "status": report.WRONG, "where": "s8192 causal"}, b: {"ms": 2.0, "spills": 8},
        c: {"ms": 3.0, "status": report.ERROR}, d: {"ms": 4.0}}
    outcome = tuned(DKDV, verdicts)
    assert outcome.best == d and a not in outcome.speeds and c not in outcome.speeds
    assert tuned(DKDV, verdicts, allow_spills=True).best == b


def test_what_ships_stays_where_nothing_is_clearly_faster() -> None:
    other = tune.candidates(DKDV, 2)[1]
    assert tuned(DKDV, {other: {"ms": 9.95}}).best == DKDV.shipped
    assert tuned(DKDV, {other: {"ms": 9.8}}).best == other


def test_what_ships_gives_way_where_it_spills() -> None:
    """Unless nothing else is right."""
    verdicts = {DKDV.shipped: {"ms": 1.0, "spills": 40}}
    assert tuned(DKDV, verdicts).best != DKDV.shipped
    assert tuned(DKDV, verdicts, most=1).best == DKDV.shipped
    assert tuned(DKDV, verdicts, allow_spills=True).best == DKDV.shipped


def test_nothing_right_is_said() -> None:
    assert tuned(DKDV, {DKDV.shipped: {"status": report.WRONG}}, most=1).best is None


def test_time_runs_out_between_rows() -> None:
    log: list[Any] = []
    how: dict[str, Any] = {"most": 2, "allow_spills": False, **fakes({}, log)}
    assert len(tune.tune(ALL[:3], SM90, **how, until=time.monotonic() + 60)) == 3
    log.clear()
    assert tune.tune(ALL[:3], SM90, **how, until=time.monotonic() - 1) == [] and log == []


MODULES = {"fwd": configs, "dkdv": configs_bwd, "dq": configs_bwd, "fwd_hopper": configs_hopper, "bwd_hopper": configs_hopper}


def evaluated(table: str, text: str) -> Any:
    from engines.triton.params import Blocks
    from engines.triton.params_hopper import HopperBwdTile, HopperTile

    names: dict[str, Any] = {"Row": configs.Row, "HopperRow": configs_hopper.HopperRow, "Blocks": Blocks, "HopperTile": HopperTile,
                             "HopperBwdTile": HopperBwdTile}
    exec(text, names)  # our own output
    return names[overrides.TABLES[table].name]


@pytest.mark.parametrize("table", list(overrides.TABLES))
def test_a_table_that_was_not_measured_comes_out_as_it_is(table: str) -> None:
    rows = tune.updated(table, [], "card")
    assert rows == getattr(MODULES[table], overrides.TABLES[table].name)
    assert evaluated(table, tune.source(table, rows)) == rows


def test_a_row_comes_out_with_its_tile_and_its_reason() -> None:
    other = tune.candidates(DKDV, 2)[1]
    outcome = tuned(DKDV, {other: {"ms": 5.0}}, most=2)
    rows = evaluated("dkdv", tune.source("dkdv", tune.updated("dkdv", [outcome], "H200")))
    made, before = rows[DKDV.index], DKDV.row
    assert made.blocks == configs_bwd.Blocks(*other) and replace(made, blocks=before.blocks, reason=before.reason) == before
    assert "H200 s2048 full 5 ms" in made.reason and "fastest of 2" in made.reason and "200 registers, nothing spilled" in made.reason
    assert [r for i, r in enumerate(rows) if i != DKDV.index] == [
        r for i, r in enumerate(configs_bwd.DKDV) if i != DKDV.index]


def test_a_second_tile_leaves_the_first_alone() -> None:
    other = tune.candidates(FEW, 2)[1]
    rows = tune.updated("fwd_hopper", [tuned(FEW, {other: {"ms": 5.0}}, most=2)], "H200")
    assert rows[FEW.index].few == tune.TABLES["fwd_hopper"].make(other) and rows[FEW.index].tile == FEW.row.tile


def test_other_tiles_reach_hoppers_kernels() -> None:
    """Both tiles of a row, and only meanwhile; the general kernels do not stand aside for it."""
    from engines.triton import hopper

    serves = hopper.serves
    before = configs_hopper.FWD_HOPPER
    with overrides.tiles({"fwd_hopper": (64, 64, 3, False, 128)}):
        assert hopper.serves is serves
        for heads in (1, 1000):
            tile = configs_hopper.pick(configs_hopper.FWD_HOPPER, 128, True, heads=heads, extent=1000)
            assert tile == configs_hopper.HopperTile(64, 64, 3, False, 128)
    assert before == configs_hopper.FWD_HOPPER
    with overrides.tiles({"dq": (64, 64, 4, 2)}):
        assert hopper.serves is not serves
    assert hopper.serves is serves


@pytest.mark.parametrize("argv, says", [
    (["--table", "fwd,nothing"], "given nothing"), (["--head-dims", "x"], "expected numbers"), (["--most", "0"], "at least 1"),
])
def test_arguments_that_mean_nothing(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        tune.main(argv)
    assert e.value.code == 2 and says in capsys.readouterr().err


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
    assert tune.main(["--list", "--table", "dq", "--head-dims", "64"]) == 0
    assert "dq hopper 16 bits d64 plain: 64x128x4x2" in capsys.readouterr().out
    assert tune.main(["--list", "--head-dims", "7"]) == 2 and "no row" in capsys.readouterr().err


@pytest.mark.skipif(runtime.unavailable_reason() is not None, reason=str(runtime.unavailable_reason()))
def test_candidates_compile_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *sys.path])
    csv = tmp_path / "trials.csv"
    assert tune.main(["--table", "fwd", "--head-dims", "32", "--most", "1", "--compile-only", "9.0", "--csv", str(csv)]) == 0
    assert "shipped" in capsys.readouterr().out
    assert "regs" in csv.read_text() and "spills 0" in csv.read_text()
