"""What the judge of random cases finds: each fault on its own, in an engine that is otherwise the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import spoilt_engine
import torch

from engines.reference.plain import allowed_error
from tools.conjunctions import judge as judging
from tools.conjunctions.buffers import prepare
from tools.conjunctions.case import parse
from tools.conjunctions.judge import DECLINED, FAILED, PASSED, Verdict

LINE = ("sdpa dtype=fp32 batch=2 heads=4/2 seqlens=9/12 dims=8/16 causal align=bottom_right deterministic seed=3 "
        "q=700,160,16,2@3 o=1152,16,64,1@8 dq=288,8,32,1@5")
CPU = torch.device("cpu")


def verdicts(line: str, engine: str) -> list[Verdict]:
    case = parse(line)
    made = prepare(case)
    return [judging.judge(made, op, engine, CPU) for op in case.OPS]


def test_a_sound_engine_passes(register: Callable[..., Any]) -> None:
    register(spoilt_engine.spoilt(lambda operands: None))
    for v in verdicts(LINE, "spoilt"):
        assert v.verdict == PASSED and v.shares and max(v.shares.values()) <= 1, v


@pytest.mark.parametrize(("fault", "said"), [
    (spoilt_engine.nudge, "elements are off"),
    (spoilt_engine.unwritten, "NaN 1"),
    (spoilt_engine.behind, "bytes outside the results were written"),
    (spoilt_engine.far_behind, "bytes outside the results were written"),
    (spoilt_engine.operand, "from the start of k"),
], ids=["wrong value", "unwritten", "just behind", "far behind", "operand changed"])
def test_each_fault_is_found(fault: Any, said: str, register: Callable[..., Any]) -> None:
    register(spoilt_engine.spoilt(fault))
    for v in verdicts(LINE, "spoilt"):
        assert v.verdict == FAILED and said in v.detail, v


def test_runs_that_differ_are_found_where_they_may_not(register: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judging.REPEATS, "cpu", 3)
    register(spoilt_engine.spoilt(spoilt_engine.drifting))
    forward, backward = verdicts(LINE, "spoilt")
    assert forward.verdict == PASSED and "not bit-equal" in backward.detail
    assert [v.verdict for v in verdicts(LINE.replace("deterministic ", ""), "spoilt")] == [PASSED, PASSED]


def test_an_exception_is_a_verdict_of_its_own(register: Callable[..., Any]) -> None:
    def fails(operands: Any) -> None:
        raise RuntimeError("no such kernel")

    register(spoilt_engine.spoilt(fails))
    assert [(v.verdict, v.detail) for v in verdicts(LINE, "spoilt")] == [("error", "RuntimeError: no such kernel")] * 2


def test_declining_without_a_reason_fails(register: Callable[..., Any]) -> None:
    register(spoilt_engine.spoilt(lambda operands: None, declines=True))
    assert [(v.verdict, v.detail) for v in verdicts(LINE, "spoilt")] == [(FAILED, "declined without a reason")] * 2


def test_declines_name_their_fields() -> None:
    forward, backward = verdicts("sdpa dtype=fp32 seqlens=4/5 dims=8/4 softcap=3.0 q=32,32,8,1@0 k=80,80,1,10@0 dlse", "torch_sdpa")
    assert forward.verdict == DECLINED and {"softcap", "head_dim_v", "operand.stride[-1]"} <= set(forward.fields), forward
    assert "dlse" in backward.fields


def test_an_engine_may_not_decline_what_it_says_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judging.MAY_DECLINE, "torch_sdpa", ("stride[-1]",))  # type: ignore[arg-type]
    forward, _ = verdicts("sdpa dtype=fp32 seqlens=4/5 softcap=3.0", "torch_sdpa")
    assert forward.verdict == FAILED and "declined what it says it serves" in forward.detail


def test_poison_is_where_nothing_may_be_read() -> None:
    """A case's operands are NaN in padding, in keys that no row sees, and all around."""
    made = prepare(parse("sdpa dtype=fp32 batch=2 seqlens=4/6 dims=8/8 causal len_q=2,4 len_kv=6,3 q=64,64,16,1@3"))
    q, k = made.views["q"], made.views["k"]
    assert torch.isnan(q[0, :, 2:]).all() and not torch.isnan(q[0, :, :2]).any()
    assert torch.isnan(k[0, :, 2:]).all() and not torch.isnan(k[0, :, :2]).any()  # rows 0 and 1, from the top left
    around = torch.empty(0).set_(q.untyped_storage())
    assert int((~torch.isnan(around)).sum()) == (2 + 4) * 8


@pytest.mark.parametrize(("factor", "near"), [(5.0, True), (20.0, False), (float("nan"), False), (float("inf"), False)])
def test_only_what_is_nearly_right_is_measured_again(factor: float, near: bool) -> None:
    """A lucky yardstick explains a small excess in one element, not a large one."""
    made = prepare(parse(LINE))
    allowed = allowed_error("o", made.ref["o"].double(), made.plain["o"], made.ref["lse"]).expand(made.ref["o"].shape)
    got = made.ref["o"].double().clone()
    at = (0,) * got.dim()
    assert judging._is_near(made, "o", got)
    got[at] += factor * allowed[at]
    assert judging._is_near(made, "o", got) == near
