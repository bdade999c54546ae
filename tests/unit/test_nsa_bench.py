"""What the selection benchmark counts and runs on, and the gradient gate as a command, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.triton import configs_nsa, interpret
from frost.gate_matrix_nsa import CONFIGS, make_block_idx
from tools import gradcheck_gate
from tools.bench import nsa as bench

SMALL = bench.Case(1, 300, 4, 2, 16, s=4, block=16)


@pytest.mark.parametrize("how", bench.SELECTIONS)
def test_a_selection_has_the_first_and_the_own_block_and_no_duplicates(how: str) -> None:
    indices = bench.choose(SMALL, how, "cpu")
    assert indices.shape == (1, 2, 300, 4) and indices.dtype is torch.int32
    for t in (0, 15, 16, 100, 299):
        row = [n for n in indices[0, 1, t].tolist() if n >= 0]
        assert len(set(row)) == len(row) == min(4, t // 16 + 1) and {0, t // 16} <= set(row) and max(row) == t // 16


def test_neighbours_share_most_blocks_in_the_realistic_selection() -> None:
    def shared(how: str) -> float:
        rows = [set(r) for r in bench.choose(SMALL, how, "cpu")[0, 0, 200:232].tolist()]
        return sum(len(a & b) for a, b in zip(rows, rows[1:])) / (4 * 31)

    assert shared("near") > 0.75 > shared("random")


def test_useful_pairs_are_those_that_the_mask_has() -> None:
    from engines.reference.nsa import Places, selection_mask

    indices = bench.choose(SMALL, "random", "cpu")
    mask = selection_mask(indices, None, Places.dense(300, 300, torch.device("cpu")), 16)
    assert bench.useful_pairs(SMALL, indices) == int(mask.sum())


def test_tiles_and_sizes_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FWD", "FORWARD_ROWS", "COMBINE"):
        monkeypatch.setattr(configs_nsa, name, getattr(configs_nsa, name))
    bench.override(["FWD=128x8x2", "FORWARD_ROWS=1024", "COMBINE=16x2x1"])
    tile = configs_nsa.pick(configs_nsa.FWD, (9, 0), 2, 128).blocks
    assert (tile.block_m, tile.num_warps, tile.num_stages) == (128, 8, 2) and configs_nsa.FORWARD_ROWS == 1024
    assert configs_nsa.COMBINE.num_warps == 2
    with pytest.raises(ValueError, match="--set"):
        bench.override(["TILE=3"])


def test_what_is_tried_is_put_back_and_a_wrong_result_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sampled:
        def worst(self, got: dict[str, float]) -> dict[str, float]:
            return got

    seen: list[int] = []

    def calls(case: bench.Case, x: object) -> object:
        seen.append(configs_nsa.FORWARD_ROWS)
        return (lambda: {"o": 1e-3}), (lambda: {"dq": 0.5, "dk": 1e-3})

    monkeypatch.setattr(bench, "frost_calls", calls)
    monkeypatch.setattr(bench, "kernel_times", lambda call, reps: {"nsa_fwd_blocks": (1, 0.5), "nsa_slots": (1, 0.001)})
    before = configs_nsa.FORWARD_ROWS
    said = bench.attempt(SMALL, None, Sampled(), "FORWARD_ROWS=1024,PART_BYTES=1")  # type: ignore[arg-type]
    assert said == "fwd 0.501 (fwd_blocks 0.500) | bwd WRONG 0.5 0.501 (fwd_blocks 0.500)"
    assert seen == [1024] and configs_nsa.FORWARD_ROWS == before and configs_nsa.PART_BYTES > 1
    assert "expected a name" in bench.attempt(SMALL, None, Sampled(), "TILE=3")  # type: ignore[arg-type]


# ---- the gradient gate -----------------------------------------------------------------------------------------


def test_the_matrix_covers_what_it_has_to() -> None:
    assert {c.heads[1] for c in CONFIGS} >= {1, 3, 4, 16} and {c.block_size for c in CONFIGS} >= {16, 32, 64}
    assert {c.head_dim for c in CONFIGS} >= {(32, 32), (64, 64), (128, 128), (192, 128)}
    assert {c.dtype for c in CONFIGS} >= {"fp32", "bf16"} and any(c.seqlen[0] % 2 for c in CONFIGS)
    assert any(c.slots * c.block_size > 2 * c.seqlen[1] for c in CONFIGS) and len({c.name for c in CONFIGS}) == len(CONFIGS)
    assert gradcheck_gate.make_block_idx is make_block_idx


needs_interpreter = pytest.mark.skipif(interpret.unavailable_reason() is not None, reason="needs Triton's interpreter")


@needs_interpreter
def test_a_green_run_ends_in_0_and_a_part_writes_no_gate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gradcheck_gate.main(["--device", "cpu", "--only", "one-token", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "one-token" in said and "PASS" in said and "GREEN" in said and not list(tmp_path.iterdir())


@needs_interpreter
def test_a_wrong_gradient_is_red(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradcheck_gate.nsa.selection_attn

    def off_by_tf32(q: torch.Tensor, k: torch.Tensor, *args: object, **options: object) -> object:
        return right(q, k + k.detach() * 7e-4, *args, **options)

    monkeypatch.setattr(gradcheck_gate.nsa, "selection_attn", off_by_tf32)
    assert gradcheck_gate.main(["--device", "cpu", "--only", "fp32-g1"]) == 1
    said = capsys.readouterr().out
    assert "FAIL" in said and "x the allowed error" in said and "RED" in said


@needs_interpreter
def test_a_whole_green_matrix_writes_both_gates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from frost import gates
    from frost.gate_matrix_nsa import NSA_MATRIX

    monkeypatch.setattr(gradcheck_gate, "CONFIGS", tuple(c for c in CONFIGS if c.name == "one-token"))
    for op, rows in NSA_MATRIX.items():
        monkeypatch.setitem(NSA_MATRIX, op, tuple(c for c in rows if c.name == "one-token"))
    assert gradcheck_gate.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    for op in NSA_MATRIX:
        assert gates.check_equivalence_gate(engine="triton", op=op, device="cpu", gate_dir=tmp_path)


@pytest.mark.parametrize("args", [["--op", "nsa_selections"], ["--engine", "tritn"], ["--device", "tpu"]])
def test_arguments_that_mean_nothing_end_in_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert gradcheck_gate.main(args) == 2
    assert "expected one of" in capsys.readouterr().err or args[0] == "--device"


def test_other_engines_and_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert gradcheck_gate.main(["--device", "cpu", "--engine", "reference", "--op", "sdpa_backward", "--only", "one-by-one"]) == 0
    assert "one-by-one" in capsys.readouterr().out
