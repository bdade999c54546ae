"""The covering array against brute force: every legal pair, and nothing illegal."""

from __future__ import annotations

import itertools
import random

from tools.conjunctions.axes import AXES, CLAUSES, FAINT, FAINT_CLAUSES, pairwise_rows, vivid
from tools.conjunctions.covering import complete, covering_rows, legal, legal_pairs, random_row, uncovered

SMALL = {"a": ("0", "1", "2"), "b": ("0", "1"), "c": ("0", "1"), "d": ("x", "y")}
# c = 1 leaves only a = 2, and that leaves only b = 0: b = 1 with c = 1 is illegal although no clause holds both.
RULES = ({"c": ("1",), "a": ("0", "1")}, {"a": ("2",), "b": ("1",)})


def all_legal(axes, clauses):
    rows = (dict(zip(axes, levels)) for levels in itertools.product(*axes.values()))
    return [row for row in rows if legal(row, clauses)]


def brute_pairs(axes, clauses):
    return {pair for row in all_legal(axes, clauses) for pair in itertools.combinations(sorted(row.items()), 2)}


def test_legal_pairs_are_those_of_the_legal_rows():
    pairs = legal_pairs(SMALL, RULES)
    assert pairs == brute_pairs(SMALL, RULES)
    assert (("b", "1"), ("c", "1")) not in pairs


def test_small_axes_are_covered_by_legal_rows():
    for seed in range(20):
        rows = covering_rows(SMALL, RULES, seed)
        assert all(legal(row, RULES) and set(row) == set(SMALL) for row in rows)
        assert {p for row in rows for p in itertools.combinations(sorted(row.items()), 2)} == brute_pairs(SMALL, RULES)
        assert len(rows) <= 10  # 3 * 2 pairs at least, and not many more


def test_random_axes_are_covered():
    pick = random.Random(7)
    for _ in range(15):
        axes = {name: tuple("abcd"[:pick.randint(1, 4)]) for name in "pqrst"[:pick.randint(2, 5)]}
        rules = []
        for _ in range(pick.randint(0, 3)):
            two = pick.sample(list(axes), 2)
            rules.append({name: tuple(pick.sample(axes[name], 1)) for name in two})
        if not all_legal(axes, rules):
            continue
        rows = covering_rows(axes, rules, 1)
        assert {p for row in rows for p in itertools.combinations(sorted(row.items()), 2)} == brute_pairs(axes, rules)
        assert uncovered(rows, axes, rules) == []


def test_a_missing_row_is_noticed():
    rows = covering_rows(SMALL, RULES, 0)
    alone = [row for row in rows if uncovered([r for r in rows if r is not row], SMALL, RULES)]
    assert alone, "every row could be left out"


def test_the_axes_of_attention_are_covered():
    rows = pairwise_rows()
    assert all(legal(row, CLAUSES) and set(row) == set(AXES) for row in rows)
    assert uncovered(rows, AXES, CLAUSES) == []
    clear = [row for row in rows if not any(row[axis] in levels for axis, levels in FAINT.items())]
    assert uncovered(clear, vivid(AXES), (*CLAUSES, *FAINT_CLAUSES)) == []
    assert len(rows) < 130


def test_rows_repeat_from_the_seed():
    assert covering_rows(SMALL, RULES, 5) == covering_rows(SMALL, RULES, 5)
    assert random_row(AXES, CLAUSES, random.Random(1)) == random_row(AXES, CLAUSES, random.Random(1))
    assert random_row(AXES, CLAUSES, random.Random(1)) != random_row(AXES, CLAUSES, random.Random(2))


def test_every_level_can_be_in_a_row():
    for axis, levels in AXES.items():
        for level in levels:
            row = complete({axis: level}, AXES, CLAUSES)
            assert row is not None and legal(row, CLAUSES)
