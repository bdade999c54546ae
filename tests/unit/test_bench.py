"""The benchmark's own arithmetic, tables and checks, none of which needs a GPU."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.reference.plain import plain_composition
from tools.bench import candidates, check, operands, overrides, peers, prewarm, report, runner, sweep, timing
from tools.bench.__main__ import main, parser
from tools.bench.candidates import Candidate, Unavailable
from tools.bench.cases import TABLES, Case, flops, select, tflops, visible_pairs
from tools.bench.report import Row, make_row

SMALL = Case("dense", "small", b=2, hq=4, hk=2, s=130, d=16)


# ---- cases and FLOPs
# -------------------------------------------------------------------------------------------


def test_dense_table_has_16k_tokens_and_hidden_2048() -> None:
    dense = TABLES["dense"]
    assert {(c.s, c.d, c.causal) for c in dense} == {
        (s, d, causal) for s in (2048, 8192) for d in (64, 128, 256) for causal in (False, True)
    }
    assert all(c.b * c.s == 16384 and c.hq * c.d == 2048 and c.hq == c.hk for c in dense)


def test_names_are_unique_and_bases_exist() -> None:
    for cases in TABLES.values():
        names = {c.name for c in cases}
        assert len(names) == len(cases)
        assert all(c.relative_to in names for c in cases if c.relative_to)


def test_flops_follow_the_convention() -> None:
    full, causal = (
        next(c for c in TABLES["dense"] if c.s == 8192 and c.d == 128 and c.causal is x)
        for x in (False, True)
    )
    assert flops(full, "fwd") == 2 * 2 * 16 * 8192 * 8192 * (128 + 128)
    assert flops(causal, "fwd") == flops(full, "fwd") / 2
    assert flops(full, "bwd") == 2.5 * flops(full, "fwd")
    assert tflops(full, "fwd", flops(full, "fwd") / 1e12 * 1e3) == pytest.approx(1.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [0, 1, 5, 100])
def test_pairs_of_a_window_are_counted_exactly(causal: bool, left: int) -> None:
    s = 13
    wanted = sum(1 for i in range(s) for j in range(s) if j >= i - left and (not causal or j <= i))
    assert visible_pairs(s, causal, left) == wanted


def test_selection() -> None:
    assert {c.suite for c in select(["all"])} == set(TABLES)
    assert {c.d for c in select(["dense"], head_dims=(64,))} == {64}
    assert all("causal" in c.name for c in select(["short"], match="causal"))
    assert {(c.s, c.d) for c in select(["dense"], quick=True)} == {(8192, 64), (8192, 128)}
    with pytest.raises(ValueError, match="given .*'dens'.*expected some of"):
        select(["dens"])


# ---- timing and report
# -----------------------------------------------------------------------------------------


def test_summary_of_samples() -> None:
    made = timing.summarise([3.0, 1.0, 2.0, 100.0, 2.5])
    assert (made.median_ms, made.best_ms, made.reps) == (2.5, 1.0, 5)
    with pytest.raises(ValueError, match="given none"):
        timing.summarise([])


def test_host_cost_is_a_median_per_call() -> None:
    synced: list[int] = []
    costs = timing.host_microseconds(
        {"a": lambda: None, "b": lambda: sum(range(2000))},
        calls_per_batch=5,
        batches=4,
        sync=lambda: synced.append(1),
    )
    assert 0 < costs["a"] < costs["b"]
    assert len(synced) == 2 + 2 * 4


def test_geometric_mean() -> None:
    assert report.geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(report.geomean([]))
    with pytest.raises(ValueError, match="positive"):
        report.geomean([1.0, 0.0])


def _rows() -> list[Row]:
    out = []
    for case in TABLES["dense"]:
        for direction in ("fwd", "bwd"):
            for name, ms in (
                ("triton", 2.0),
                ("flex", 3.0),
                ("cudnn", 1.0),
                ("flash", 4.0),
                ("efficient", 8.0),
            ):
                out.append(
                    make_row(
                        case,
                        direction,
                        name,
                        name,
                        report.OK,
                        timing=timing.Timing(ms, ms, 0.01, 20),
                        check="0.4 o",
                    )
                )
    return out


def test_ratios_say_how_much_faster_we_are() -> None:
    found = report.ratios(_rows(), "triton", "flex", direction="fwd")
    assert len(found) == 12 and all(r == pytest.approx(1.5) for r in found.values())
    text = report.geomeans(_rows(), ["triton"], ["flex", "cudnn"])
    assert "flex 1.500 (min 1.50, n=8), cudnn 0.500" in text


def test_wrong_candidates_count_in_no_ratio() -> None:
    rows = [
        dataclasses.replace(r, status=report.WRONG) if r.candidate == "triton" and r.s == 2048 else r
        for r in _rows()
    ]
    assert len(report.ratios(rows, "triton", "flex", direction="fwd")) == 6
    assert "WRONG" in report.table(rows, "fwd", ["triton"], ["flex"])
    assert "triton: WRONG" in report.problems(rows)


def test_a_whole_run_prints_less_than_12000_characters() -> None:
    rows = [
        make_row(
            c,
            d,
            n,
            n,
            report.OK,
            timing=timing.Timing(1.2345, 1.2, 0.01, 20),
            check="0.41 dk, 2.5e-03 vs cudnn",
        )
        for suite in ("dense", "gqa", "short", "overheads")
        for c in TABLES[suite]
        for d in ("fwd", "bwd")
        for n in ("triton", "flex", "cudnn", "flash", "efficient")
    ]
    names = ["flex", "cudnn", "flash", "efficient"]
    parts = [report.table(rows, d, ["triton"], names) for d in ("fwd", "bwd")]
    parts += [
        report.geomeans(rows, ["triton"], names),
        report.overheads(rows, select(["overheads"]), ["triton"]),
    ]
    assert len("\n".join(parts)) < 11_000


def test_overheads_compare_time_with_work() -> None:
    base, windowed = (
        next(c for c in TABLES["overheads"] if c.name == n) for n in ("s16384 causal", "s16384 window 512")
    )
    rows = [
        make_row(c, "fwd", "triton", "triton", report.OK, timing=timing.Timing(ms, ms, 0, 20))
        for c, ms in ((base, 8.0), (windowed, 1.0))
    ]
    text = report.overheads(rows, TABLES["overheads"], ["triton"])
    work = visible_pairs(16384, True, 512) / visible_pairs(16384, True, None)
    assert f"0.125 x 's16384 causal', work {work:.3f} x" in text


def test_csv_keeps_environment_and_leaves_missing_figures_empty(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "out.csv"
    missing = make_row(SMALL, "fwd", "flex", "", report.ERROR, check='out of memory, "quoted"')
    report.write_csv(path, [*_rows()[:2], missing], {"card": "Some GPU", "torch": "2.11"})
    lines = list(csv.DictReader(path.open()))
    assert [x["status"] for x in lines] == ["ok", "ok", "error"]
    assert lines[0]["card"] == "Some GPU" and lines[0]["ms"] == "2" and float(lines[0]["tflops"]) > 0
    assert lines[2]["ms"] == "" and lines[2]["check"] == 'out of memory, "quoted"'


def test_environment_is_known_without_a_gpu() -> None:
    env = report.environment()
    assert env["torch"] == torch.__version__ and {
        "card",
        "driver",
        "cudnn",
        "triton",
        "date",
        "frost",
    } <= set(env)


# ---- correctness before timing
# ---------------------------------------------------------------------------------


def _right(
    direction: str, case: Case = SMALL
) -> tuple[operands.Operands, check.Oracle, dict[str, torch.Tensor]]:
    ops = operands.make(case, device="cpu")
    make = candidates.forward if direction == "fwd" else candidates.backward
    made = make("reference", case, ops, gates="off")
    made.poison()
    return ops, check.Oracle(case, ops, direction), {n: t.clone() for n, t in made.run().items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_left": 20},
        {"softcap": 5.0},
        {"sink": True},
        {"bias": "full"},
        {"bias": "keys"},
        {"mask": "full"},
        {"seq_lens": True},
        {"packed": True, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_right_answer_passes_the_oracle(direction: str, options: dict[str, Any]) -> None:
    _, oracle, got = _right(direction, dataclasses.replace(SMALL, **options))
    ok, text = check.verdict(oracle.shares(got))
    assert ok, text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t[:, :, 65:].fill_(math.nan),  # half of it never written
        lambda t: t.mul_(1.05),
        lambda t: t[0, 0, 0].add_(0.1),
        lambda t: t[-1, -1, -1].zero_(),
    ],
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_wrong_answer_fails_the_oracle(direction: str, spoil: Any) -> None:
    _, oracle, got = _right(direction)
    spoil(got["o" if direction == "fwd" else "dk"])
    ok, text = check.verdict(oracle.shares(got))
    assert not ok and ("o" if direction == "fwd" else "dk") in text


@pytest.mark.parametrize("options", [{}, {"sink": True, "b": 1}, {"packed": True, "causal": True}], ids=str)
def test_a_backward_and_its_yardstick_start_from_the_same_saved_o(options: dict[str, Any]) -> None:
    """The plain composition itself, from an o that was rounded the other way: half of what is allowed."""
    case = dataclasses.replace(SMALL, **options)
    ops = operands.make(case, device="cpu")
    oracle = check.Oracle(case, ops, "bwd")
    first = candidates.forward("reference", case, ops, gates="off", stats=True).run()
    up = torch.rand(first["o"].shape, generator=torch.Generator().manual_seed(3)) < 0.5
    o = first["o"].clone()
    o[up] = (o[up].view(torch.int16) + 1).view(torch.bfloat16)
    saved = (o, first["lse"])
    how = {"causal": case.causal, **ops.options}
    grads = plain_composition(ops.q, ops.k, ops.v, do=ops.do, saved=saved, **how)
    got = {n: x for n, x in grads.items() if n.startswith("d")}
    shares = oracle.shares(got, saved)
    assert set(shares) == {"o", "lse", *got} and max(shares[n] for n in got) <= 0.5 + 1e-6
    own = oracle.shares(got)
    assert any(own[n] > shares[n] for n in got)


def test_a_backward_from_a_wrong_o_is_wrong_whatever_its_yardstick_allows() -> None:
    case = SMALL
    ops = operands.make(case, device="cpu")
    made = candidates.backward("reference", case, ops, gates="off")
    assert made.saved is not None
    oracle = check.Oracle(case, ops, "bwd")
    ok, text = check.verdict(oracle.shares(made.run(), made.saved))
    assert ok, text
    made.saved[0][0, 0, 0] += 0.5
    ok, text = check.verdict(oracle.shares(made.run(), made.saved))
    assert not ok and "o " in text


def test_runner_checks_a_backward_from_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made = candidates.backward("reference", SMALL, operands.make(SMALL, device="cpu"), gates="off")
    seen = []

    class Spy:
        def shares(self, got: Any, saved: Any = None) -> dict[str, float]:
            seen.append(saved)
            return {"dq": 0.0}

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert runner._oracle_check(made, Spy())[0]  # type: ignore[arg-type]
    assert seen == [made.saved] and made.saved is not None


def test_an_answer_without_results_is_no_answer() -> None:
    _, oracle, _ = _right("fwd")
    assert not check.verdict(oracle.shares({}))[0]


def test_a_wrong_head_that_was_not_sampled_shows_in_the_whole_comparison() -> None:
    case = dataclasses.replace(SMALL, hq=6, hk=3)
    _, oracle, got = _right("fwd", case)
    wrong = {"o": got["o"].clone()}
    wrong["o"][0, 2, 64:128] = wrong["o"][0, 4, 64:128]  # kv head 1 of batch 0: not among the sampled ones
    assert check.verdict(oracle.shares(wrong))[0]
    assert check.whole_error(got, got) == {"o": 0.0}
    assert check.whole_error(wrong, got)["o"] > check.WHOLE_TOLERANCE["bf16"]
    wrong["o"][1, 2, 129, 3] = math.nan
    assert check.whole_error(wrong, got)["o"] == math.inf


def _fake(name: str, result: torch.Tensor) -> Candidate:
    return Candidate(name, f"{name} route", lambda: {"o": result}, lambda: None)


def test_runner_times_the_right_ones_only_and_keeps_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(SMALL, hq=3, hk=3)
    _, _, got = _right("fwd", case)
    good, half = got["o"], got["o"].clone()
    half[:, :, 70:] = math.nan
    elsewhere = good.clone()
    elsewhere[0, 1] *= 1.5
    made = {"cudnn": good, "flash": half, "efficient": elsewhere}

    def make_peer(peer: str, *_: Any) -> Candidate:
        if peer == "flex":
            raise RuntimeError("no such\nkernel")
        return _fake(peer, made[peer])

    def make_ours(engine: str, *_: Any, **__: Any) -> Candidate:
        if engine == "sm80":
            raise Unavailable("engines: unknown")
        return _fake(engine, good)

    timed: list[str] = []

    def time_all(calls: dict[str, Any], **_: Any) -> dict[str, timing.Timing]:
        timed.extend(calls)
        return {n: timing.Timing(1.0, 1.0, 0.0, 20) for n in calls}

    monkeypatch.setattr(peers, "make", make_peer)
    monkeypatch.setattr(candidates, "forward", make_ours)
    monkeypatch.setattr(runner, "time_interleaved", time_all)
    monkeypatch.setattr(operands, "make", lambda c, layout: _operands(c))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    rows = {r.candidate: r for r in runner.run_case(case, "fwd", runner.Settings(engines=("triton", "sm80")))}
    assert timed == ["triton", "cudnn"]
    assert {n: r.status for n, r in rows.items()} == {
        "triton": "ok",
        "sm80": "unavailable",
        "flex": "error",
        "cudnn": "ok",
        "flash": "WRONG",
        "efficient": "WRONG",
    }
    assert rows["flex"].check == "RuntimeError: no such kernel"
    assert "differs from cudnn" in rows["efficient"].check
    assert "vs cudnn" in rows["triton"].check


_make_operands = operands.make


def _operands(case: Case) -> operands.Operands:
    return _make_operands(case, device="cpu")


def test_peers_decline_what_they_do_not_have() -> None:
    ops = operands.make(dataclasses.replace(SMALL, sink=True), device="cpu")
    for peer in peers.PEERS:
        with pytest.raises(Unavailable, match="sink"):
            peers.make(peer, dataclasses.replace(SMALL, sink=True), ops, "fwd")
    with pytest.raises(Unavailable, match="grouped heads"):
        peers.make("efficient", SMALL, ops, "fwd")


def test_an_unknown_engine_is_unavailable_with_the_reason() -> None:
    graph, _ = candidates.forward_graph(SMALL, operands.make(SMALL, device="cpu"))
    with pytest.raises(Unavailable, match="no-such-engine"):
        candidates.compile_plan(graph, "no-such-engine", "off", "cpu")


def test_operands_come_in_both_layouts_and_without_memory() -> None:
    assert operands.make(SMALL, device="cpu").q.is_contiguous()
    strided = operands.make(SMALL, device="cpu", layout="bshd").q
    assert strided.shape == (2, 4, 130, 16) and strided.transpose(1, 2).is_contiguous()
    nothing = operands.make(
        dataclasses.replace(SMALL, bias="heads", mask="full", sink=True, seq_lens=True), device="meta"
    )
    assert nothing.q.is_meta and set(nothing.options) == {"bias", "mask", "sink", "seq_len_q", "seq_len_kv"}


# ---- compiling ahead, tiles, command line
# ----------------------------------------------------------------------


def test_kernels_are_compiled_once_for_all_sizes_and_flex_for_each() -> None:
    jobs = prewarm.plan_jobs(
        TABLES["dense"], ("fwd", "bwd"), ("triton", "torch_sdpa"), ("flex", "cudnn"), (9, 0)
    )
    count = {n: sum(j.candidate == n for j in jobs) for n in ("triton", "flex", "torch_sdpa", "cudnn")}
    assert count == {"triton": 2 * 3 * 2, "flex": 2 * 12, "torch_sdpa": 0, "cudnn": 0}
    assert jobs[0].direction == "bwd"  # the longest first


def test_a_failing_job_is_a_result() -> None:
    result = prewarm.run_job(prewarm.Job("no-such-engine", SMALL, "fwd", (9, 0)))
    assert result.error is not None and "no-such-engine" in result.error
    assert "no-such-engine small fwd" in prewarm.summary([result])


def test_tiles_are_replaced_for_a_while() -> None:
    from engines.triton import configs

    before = configs.FWD
    with overrides.tiles({"fwd": (64, 32, 4, 2)}):
        blocks = {row.blocks for row in configs.FWD}
        assert [(b.block_m, b.block_n, b.num_warps, b.num_stages) for b in blocks] == [(64, 32, 4, 2)]
    assert configs.FWD is before


def test_tiles_are_parsed() -> None:
    assert overrides.parse_override("dq=128, 64,8,3") == ("dq", (128, 64, 8, 3))
    for text in ("fwd=1,2,3", "nope=1,2,3,4", "fwd=a,b,c,d", "fwd"):
        with pytest.raises(ValueError, match="blocks: given"):
            overrides.parse_override(text)


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    args = parser().parse_args(
        [
            "--cases",
            "dense,gqa",
            "--peers",
            "flex,cudnn",
            "--engines",
            "triton,sm80",
            "--gates",
            "off",
            "--direction",
            "bwd",
            "--blocks",
            "fwd=128,64,4,2",
            "--csv",
            "x.csv",
            "--quick",
        ]
    )
    assert (
        args.cases == ("dense", "gqa")
        and args.peers == ("flex", "cudnn")
        and args.blocks == [("fwd", (128, 64, 4, 2))]
    )
    assert parser().parse_args(["--peers", "none"]).peers == ()
    assert parser().parse_args([]).gates == "off"
    for bad in (["--cases", "dens"], ["--peers", "fa9"], ["--blocks", "fwd=1"], ["--head-dims", "x"]):
        with pytest.raises(SystemExit):
            main(bad)
    assert "expected some of" in capsys.readouterr().err


def test_listing_needs_no_gpu_and_running_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--list", "--cases", "all"]) == 0
    assert "s8192 d128 causal" in capsys.readouterr().out
    assert main(["--list", "--match", "no such case"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2 and sweep.main([]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_sweep_problems_and_grid() -> None:
    args = sweep.parser().parse_args(["--head-dims", "64,128", "--causal", "both", "--seqlen", "2048,8192"])
    made = sweep.problems(args)
    assert len(made) == 8 and all(c.b * c.s == 16384 and c.hq * c.d == 2048 for c in made)
    for d in (64, 128, 256):
        grid = sweep.default_tiles(d)
        assert grid and len(set(grid)) == len(grid)


def test_a_configuration_past_shared_memory_is_not_launched() -> None:
    job = prewarm.Job("triton", SMALL, "fwd", (8, 6), tiles={"fwd": (64, 64, 4, 3)})
    kernels = (
        {"kernel": "sdpa_fwd", "registers": 200, "spill_bytes": 8, "shared": 120 * 1024, "static_shared": 0},
    )
    trial = sweep._trial("fwd", (64, 64, 4, 3), prewarm.Result(job, 2.0, kernels), (8, 6))
    assert trial.status == report.UNAVAILABLE and "at most 101376" in trial.text and trial.spills == 8
