"""Worker processes: every line is answered for, whatever happens to the process that runs it."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest

from tools.conjunctions import pool as pools
from tools.conjunctions.__main__ import main
from tools.conjunctions.pool import Outcome, Pool, tasks_of

pytestmark = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="workers are forked with a stand-in")


def lines(*seeds: int) -> list[str]:
    return [f"sdpa dtype=fp32 seqlens=2/3 seed={seed}" for seed in seeds]


def run(monkeypatch: pytest.MonkeyPatch, stand_in: Any, groups: list[list[str]], **how: Any) -> tuple[dict[str, str], Pool]:
    """Verdicts by line, with `stand_in` in place of running a case; workers are forked, so they have it too."""
    monkeypatch.setattr(pools, "run_line", stand_in)
    pool = Pool("reference", "cpu", how.pop("workers", 2), method="fork", **how)
    return {o.line: o.verdicts[0].verdict for o in pool.run(groups)}, pool


def passes(line: str, engine: str, device: str) -> Outcome:
    return Outcome(line, (pools.Verdict("sdpa", "passed"),))


def test_every_line_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [lines(*range(40)), lines(*range(40, 43)), [], lines(50)]
    found, pool = run(monkeypatch, passes, groups)
    assert found == {line: "passed" for group in groups for line in group} and pool.left == 0


def test_a_process_that_dies_costs_its_case_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(line: str, engine: str, device: str) -> Outcome:
        if line.endswith(("seed=3", "seed=7", "seed=30")):
            os._exit(11)
        return passes(line, engine, device)

    groups = [lines(*range(20)), lines(*range(30, 35))]
    found, pool = run(monkeypatch, dies, groups)
    dead = set(lines(3, 7, 30))
    assert found == {line: "crashed" if line in dead else "passed" for group in groups for line in group} and pool.left == 0


def test_a_case_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(line: str, engine: str, device: str) -> Outcome:
        if line.endswith("seed=2"):
            time.sleep(60)
        return passes(line, engine, device)

    monkeypatch.setattr(pools, "CASE_LIMIT_S", 0.5)
    found, pool = run(monkeypatch, hangs, [lines(1, 2, 3)], workers=1)
    assert list(found.values()) == ["passed", "crashed", "passed"] and pool.left == 0


def test_the_limit_is_kept_whatever_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(line: str, engine: str, device: str) -> Outcome:
        time.sleep(0.0 if line.endswith("seed=0") else 30)
        return passes(line, engine, device)

    start = time.monotonic()
    found, pool = run(monkeypatch, slow, [lines(*range(10))], workers=1, limit_s=1.5)
    assert time.monotonic() - start < 8
    assert found == dict.fromkeys(lines(0), "passed") and pool.left == 9


def test_workers_that_never_work_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def stillborn(pipe: Any, engine: str, device: str) -> None:
        os._exit(3)

    monkeypatch.setattr(pools, "_work", stillborn)
    pool = Pool("reference", "cpu", 2, method="fork")
    assert list(pool.run([lines(1, 2, 3)])) == [] and pool.left == 3


def test_the_first_lines_of_a_group_go_out_first() -> None:
    task = tasks_of(lines(*range(30)))
    assert task.lines == lines(*range(pools.FIRST_LINES)) and task.count == 30
    assert [line for t in task.then for line in t.lines] == lines(*range(pools.FIRST_LINES, 30))


def test_the_command_tells_success_failure_and_nonsense(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = "sdpa dtype=fp32 seqlens=5/7 dims=8/8 causal"
    assert main(["--engine", "reference", "--case", line]) == 0
    assert main(["--engine", "referenc", "--case", line]) == 2
    assert main(["--engine", "reference", "--case", "sdpa colour=red"]) == 2
    assert "did you mean 'reference'" in (said := capsys.readouterr().err) and "colour=red" in said
    monkeypatch.setattr(pools, "parse", lambda text: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        main(["--engine", "reference", "--case", line])


def test_a_run_writes_what_it_found(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    path = tmp_path / "out" / "report.json"
    assert main(["--engine", "reference", "--cases", "6", "--workers", "1", "--report", str(path)]) == 0
    [report] = json.loads(path.read_text())
    assert report["ok"] and report["cases"] == 6 and report["not_run"] == 0 and report["failures"] == []
    assert report["verdicts"] == {"sdpa": {"passed": 6}, "sdpa_backward": {"passed": 6}}
    assert report["routes"] == {"reference:sdpa": 6, "reference:sdpa_backward": 6} and report["served"]
    assert "0 failures" in capsys.readouterr().out
