"""The yardstick in other orders of summation: the same results up to rounding, and no cover for a wrong one."""

from __future__ import annotations

import pytest
import torch

from tools.conjunctions.buffers import prepare
from tools.conjunctions.case import parse

LINES = (
    "sdpa dtype=bf16 batch=2 heads=4/2 seqlens=20/33 dims=40/24 causal align=bottom_right softcap=4.0 bias=1,4,20,33 sink=fp32 "
    "dlse gain=3.0 seed=1",
    "sdpa dtype=fp16 heads=3/1 seqlens=19/22 dims=8/16 cu_q=2,9,15 cu_kv=0,7,20 mask=2,1,8,13 seed=2",
    "nsa_selection dtype=bf16 batch=2 heads=2/3 seqlens=40/40 dims=16/24 slots=3 hostile dlse seed=3",
    "nsa_selection dtype=fp16 heads=1/2 seqlens=44/44 block=8 slots=4 packed=3,20,41 counts seed=4",
)


@pytest.mark.parametrize("line", LINES)
def test_another_order_gives_the_same_results_up_to_rounding(line: str) -> None:
    made = prepare(parse(line))
    again = made.again(0)
    seen = False
    for name, plain in made.plain.items():
        # Rounding P, dS and o to the io dtype may fall the other way: a few units in the last place of the largest.
        unit = torch.finfo(made.views["q"].dtype).eps * max(1.0, plain.double().nan_to_num(neginf=0).abs().max().item())
        same = again[name] == plain
        assert bool((same | ((again[name].double() - plain.double()).abs() <= 4 * unit)).all()), name
        seen |= not bool(same.all())
    assert seen, "nothing was summed up in another order"


def test_orders_differ_and_repeat() -> None:
    made = prepare(parse(LINES[0]))
    a, b, c = (made.again(n)["lse"] for n in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
