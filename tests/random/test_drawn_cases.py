"""Cases as they are drawn: spelled in one line that means the same, legal, laid out as their group says, repeatable."""

from __future__ import annotations

import itertools
import random

import pytest

from descriptors import TensorDesc
from frost.gate_matrix_nsa import NsaConfig
from tools.conjunctions import draw, selection
from tools.conjunctions.axes import AXES, CLAUSES, FOCUS, pairwise_rows
from tools.conjunctions.case import Attention, Selection, layout_of, parse, spell
from tools.conjunctions.covering import random_row
from tools.conjunctions.groups import draw_groups

SIZES = {"interpreter": draw.INTERPRETER, "device": draw.DEVICE}


def attention_cases(count: int, sizes: draw.Sizes, seed: int = 0) -> list[tuple[dict[str, str], Attention]]:
    pick = random.Random(seed)
    rows = [random_row(AXES, CLAUSES, pick) for _ in range(count)]
    return [(row, draw.attention(row, draw.family_of(row, pick), pick, sizes)) for row in rows]


# ---- lines


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_line_means_the_same_case(sizes: draw.Sizes) -> None:
    cases = [case for _, case in attention_cases(300, sizes)]
    cases += [case for group in draw_groups("nsa_selection", "triton", 100, 10, 3, sizes) for case in group.cases]
    for case in cases:
        line = spell(case)
        assert parse(line) == case and spell(parse(line)) == line
        assert not set(line) & set("'\"$\\`\n!;&|()<>*?"), "a line is pasted between quotes into a shell"
    assert len(set(map(spell, cases))) == len(cases)


@pytest.mark.parametrize(("line", "said"), [
    ("", "given ''"), ("conv dtype=fp32", "given 'conv'"), ("sdpa dtyp=fp32", "'dtyp=fp32'"), ("sdpa packed", "'packed'"),
    ("sdpa heads=2/x", "'heads=2/x'"), ("sdpa q=1,2@x", "'q=1,2@x'"), ("sdpa scale", "'scale'"),
])
def test_a_word_that_means_nothing_is_named(line: str, said: str) -> None:
    with pytest.raises(ValueError, match="case: ") as found:
        parse(line)
    assert said in str(found.value)


# ---- numbers


def test_draws_repeat_from_the_seed() -> None:
    for op in ("sdpa", "nsa_selection"):
        one, again, other = (draw_groups(op, "triton", 40, 8, seed, draw.DEVICE) for seed in (1, 1, 2))
        assert one == again and one != other
        assert sum(len(g.cases) for g in one) == 40


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_levels_mean_what_they_say(sizes: draw.Sizes) -> None:
    for row, case in attention_cases(400, sizes, seed=5):
        (hq, hk), (sq, sk) = case.heads, case.seqlens
        assert hq % hk == 0 and min(case.dims) >= 1 and max(case.dims) <= 256
        assert (case.cu_q is not None) == (row["lengths"] == "packed") and (case.len_q is not None) == (row["lengths"] in ("q", "both"))
        assert (case.bias is None) == (row["bias"] == "none") and (case.mask is None) == (row["mask"] == "none")
        assert (case.softcap or 0) > 0 if row["softcap"] == "on" else not case.softcap
        assert case.batch * hq * max(1, min(sq, sk)) <= sizes.max_scores
        scale = {"default": None, "zero": 0.0}.get(row["scale"], case.scale)
        assert case.scale == scale and (row["scale"] != "negative" or case.scale < 0)
        if case.cu_q is not None:
            lengths = [b - a for a, b in itertools.pairwise(case.cu_q)]
            assert min(lengths) >= 0 and (case.cu_q[0] > 0) == (row["gaps"] == "some") == (case.cu_q[-1] < sq)
            continue
        relation = {"equal": sq == sk, "shorter q": sq < sk, "longer q": sq > sk, "one query": sq == 1 < sk, "one key": sk == 1 < sq,
                    "no query": sq == 0 < sk, "no key": sk == 0 < sq}
        assert relation[row["relation"]], (row["relation"], case.seqlens)
        for lengths_, extent in ((case.len_q, sq), (case.len_kv, sk)):
            assert lengths_ is None or all(0 <= n <= extent for n in lengths_)


def test_results_never_overlap_and_bases_keep_what_the_pitch_says() -> None:
    for row, case in attention_cases(400, draw.DEVICE, seed=6):
        size = draw.ITEMSIZE[case.dtype]
        pitch = max(size, int(row["pitch"].split()[0]))
        for name, shape in draw.shapes(case).items():
            strides, offset = layout_of(case, name) or (draw.strides.row_major(shape), 0)
            desc = TensorDesc.make(shape, "fp32", strides)
            if name in ("o", "lse", "dq", "dk", "dv", "dbias", "dsink"):
                assert not desc.overlaps_itself(), (name, spell(case))
            if name not in draw.MAIN:
                continue
            assert offset * size % pitch == 0
            if row["last stride"] == "1":
                assert desc.unit_last_stride and all(
                    s * size % pitch == 0 for n, s in zip(shape[:-1], strides[:-1]) if n > 1), (name, spell(case))
        q = layout_of(case, "q")
        assert pitch == 16 or q is not None and q[1] * size % 16 == pitch, spell(case)


def test_every_level_of_every_axis_is_drawn_in_a_pairwise_run() -> None:
    rows = pairwise_rows()
    assert all({row[axis] for row in rows} == set(levels) for axis, levels in AXES.items())


# ---- groups


def test_a_group_shares_what_selects_a_kernel() -> None:
    for group in draw_groups("sdpa", "triton", 320, 20, 9, draw.DEVICE):
        cases = [c for c in group.cases if isinstance(c, Attention)]
        for fact in (lambda c: c.dtype, lambda c: c.causal, lambda c: [x is None for x in c.window], lambda c: c.bias_dtype,
                     lambda c: c.sink, lambda c: c.dlse, lambda c: c.stats, lambda c: c.cu_q is None, lambda c: c.len_q is None,
                     lambda c: c.len_kv is None, lambda c: c.mask is None, lambda c: bool(c.softcap)):
            assert len({repr(fact(c)) for c in cases}) == 1, group.name


def test_groups_of_an_engine_are_mostly_what_it_serves() -> None:
    def share(engine: str, wanted) -> float:
        cases = [c for g in draw_groups("sdpa", engine, 640, 20, 2, draw.DEVICE) for c in g.cases]
        return sum(map(wanted, cases)) / len(cases)

    assert share("sm80", lambda c: c.dtype != "fp32") > 0.8
    assert share("torch_sdpa", lambda c: c.bias is None and c.mask is None and c.cu_q is None) > 0.75
    plain = FOCUS["triton"].share
    assert share("triton", lambda c: not any((c.bias, c.mask, c.sink, c.softcap, c.cu_q, c.len_q, c.len_kv)) and c.dims in (
        (64, 64), (128, 128), (256, 256)) and c.dtype != "fp32") >= plain - 0.02


def test_selection_cases_reach_their_corners() -> None:
    cases = [c for g in draw_groups("nsa_selection", "triton", 600, 10, 4, draw.DEVICE) for c in g.cases]
    assert all(isinstance(c, Selection) for c in cases)
    assert {c.heads[1] for c in cases} >= {1, 2, 3, 5, 7, 8, 16}
    for fact in (lambda c: c.seqlens[1] % 2 == 1, lambda c: c.counts, lambda c: c.hostile, lambda c: c.packed is not None,
                 lambda c: c.seqlens[0] < c.seqlens[1], lambda c: c.seqlens[0] > c.seqlens[1], lambda c: c.scale == 0.0,
                 lambda c: c.dlse, lambda c: c.deterministic, lambda c: c.index == "int64"):
        assert any(map(fact, cases)) and not all(map(fact, cases))


def test_selection_entries_hold_duplicates_and_blocks_that_are_none() -> None:
    """What `hostile` stands for in the values."""
    from frost.equivalence_nsa import nsa_operands

    x = nsa_operands(NsaConfig("random 5", block_size=16, slots=9, hostile=True, seqlen=(99, 99)))["block_indices"]
    blocks = -(-99 // 16)
    assert bool((x < 0).any()) and bool((x >= blocks).any())
    assert any(len(set(row)) < len(row) for row in x.flatten(0, -2).tolist())
    assert selection.shapes(Selection(heads=(2, 3), seqlens=(5, 7), batch=2, slots=4))["block_indices"] == (2, 2, 5, 4)
