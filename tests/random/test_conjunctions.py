"""Every pair of what an attention call may be, on every engine, forward and backward, against the fp64 oracle.

Small sizes, for one engine is interpreted; thousands of larger cases run on a device with `python -m tools.conjunctions`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, lru_cache

import pytest
import torch

from tools.conjunctions import draw
from tools.conjunctions.axes import pairwise_rows
from tools.conjunctions.buffers import Prepared, prepare
from tools.conjunctions.case import AnyCase, spell
from tools.conjunctions.groups import draw_groups
from tools.conjunctions.judge import DECLINED, PASSED, judge

CPU = torch.device("cpu")
ROWS = pairwise_rows()
SELECTIONS = [c for g in draw_groups("nsa_selection", "triton", 16, 2, 1, draw.INTERPRETER) for c in g.cases]

@cache
def attention_case(number: int) -> AnyCase:
    pick = random.Random(number)
    return draw.attention(ROWS[number], draw.family_of(ROWS[number], pick), pick, draw.INTERPRETER)


@lru_cache(maxsize=2)
def prepared(case: AnyCase) -> Prepared:
    return prepare(case)


def check(case: AnyCase, engine: str) -> None:
    for op in case.OPS:
        v = judge(prepared(case), op, engine, CPU)
        assert not v.bad, (f"{op} on {engine}: {v.verdict}; repeat it with\n"
                           f"  python -m tools.conjunctions --engine {engine} --case '{spell(case)}'\n{v.detail}")
        if engine != "torch_sdpa":
            assert v.verdict == PASSED, f"{engine} declined {spell(case)}: {v.detail}"
        elif v.verdict == DECLINED:
            assert v.fields and v.detail


@pytest.mark.parametrize("engine", ["reference", "torch_sdpa", "triton"])
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_pairs_of_features(number: int, engine: str) -> None:
    check(attention_case(number), engine)


@pytest.mark.parametrize("engine", ["reference", "triton"])
@pytest.mark.parametrize("number", range(len(SELECTIONS)))
def test_selection(number: int, engine: str) -> None:
    check(SELECTIONS[number], engine)


def test_plain_attention_is_served_by_pytorch_too() -> None:
    """Pairwise rows are nearly all more than PyTorch's attention does exactly, so this draws from what it does. In fp32: its
    16-bit backward on a CPU is none of that."""
    drawn = [c for g in draw_groups("sdpa", "torch_sdpa", 48, 4, 1, draw.INTERPRETER) for c in g.cases]
    served = {"sdpa": 0, "sdpa_backward": 0}
    for case in drawn:
        case = replace(case, dtype="fp32", deterministic=False)
        check(case, "torch_sdpa")
        for op in case.OPS:
            served[op] += judge(prepared(case), op, "torch_sdpa", CPU).verdict == PASSED
    assert min(served.values()) > len(drawn) / 3, served
