"""Rows of choices in which every legal pair of levels occurs: a greedy covering array with constraints.

An axis is a name with levels; a clause is a combination that makes no sense, as {axis: levels}: a row is illegal where it
holds one of the levels of every axis of some clause.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

Axes = Mapping[str, Sequence[str]]
Clause = Mapping[str, Sequence[str]]
Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

TRIES = 12  # candidate rows per step; more shorten the array by a row or two only


def legal(row: Mapping[str, str], clauses: Sequence[Clause]) -> bool:
    """Whether no clause holds in a row, or in the part of a row that is decided."""
    return not any(all(row.get(axis) in levels for axis, levels in clause.items()) for clause in clauses)


def complete(row: Mapping[str, str], axes: Axes, clauses: Sequence[Clause]) -> Row | None:
    """A legal row that holds everything decided so far, or None where there is none."""
    if not legal(row, clauses):
        return None
    # Only axes that a clause speaks of can get in each other's way.
    spoken = {axis for clause in clauses for axis in clause}
    found = _search(dict(row), [a for a in axes if a not in row and a in spoken], axes, clauses)
    return None if found is None else {**{a: levels[0] for a, levels in axes.items()}, **found}


def _search(row: Row, open_axes: Sequence[str], axes: Axes, clauses: Sequence[Clause]) -> Row | None:
    if not open_axes:
        return row
    axis, rest = open_axes[0], open_axes[1:]
    for level in axes[axis]:
        trial = {**row, axis: level}
        if legal(trial, [c for c in clauses if axis in c]):
            found = _search(trial, rest, axes, clauses)
            if found is not None:
                return found
    return None


def pairs_of(row: Mapping[str, str]) -> Iterator[Pair]:
    """Every pair of (axis, level) of a row, the axes in alphabetical order."""
    return combinations(sorted(row.items()), 2)  # type: ignore[return-value]


def legal_pairs(axes: Axes, clauses: Sequence[Clause]) -> set[Pair]:
    """Every pair of levels of two axes that some legal row holds."""
    found: set[Pair] = set()
    for a, b in combinations(sorted(axes), 2):
        for x, y in product(axes[a], axes[b]):
            if ((a, x), (b, y)) not in found:
                row = complete({a: x, b: y}, axes, clauses)
                if row is not None:
                    found.update(pairs_of(row))
    return found


def uncovered(rows: Sequence[Mapping[str, str]], axes: Axes, clauses: Sequence[Clause]) -> list[Pair]:
    """The legal pairs that no row holds, in order."""
    seen = {pair for row in rows for pair in pairs_of(row)}
    return sorted(legal_pairs(axes, clauses) - seen)


def random_row(axes: Axes, clauses: Sequence[Clause], pick: random.Random) -> Row:
    """One legal row, its axes decided in random order."""
    return _fill({}, axes, clauses, pick, frozenset())


def covering_rows(axes: Axes, clauses: Sequence[Clause], seed: int = 0, start: Sequence[Row] = ()) -> list[Row]:
    """`start` and the rows it takes beyond it to hold every legal pair. Each row starts from a pair that is missing and
    takes, axis by axis, the level that brings most of the missing ones; the best of a few such rows is kept. Repeatable
    from the seed."""
    pick = random.Random(seed)
    rows = list(start)
    missing = legal_pairs(axes, clauses).difference(*map(pairs_of, rows))
    while missing:
        first = dict(min(missing))
        candidates = [_fill(dict(first), axes, clauses, pick, missing) for _ in range(TRIES)]
        best = max(candidates, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        missing = missing.difference(pairs_of(best))
        rows.append(best)
    return rows


def _fill(row: Row, axes: Axes, clauses: Sequence[Clause], pick: random.Random, missing: set[Pair] | frozenset[Pair]
          ) -> Row:
    order = [a for a in axes if a not in row]
    pick.shuffle(order)
    spoken = {axis for clause in clauses for axis in clause}
    for axis in order:
        levels = list(axes[axis])
        if missing:
            gains = {x: sum(_ordered((axis, x), given) in missing for given in row.items()) for x in levels}
            pick.shuffle(levels)
            levels.sort(key=lambda x: -gains[x])
        else:
            pick.shuffle(levels)
        row[axis] = levels[0] if axis not in spoken else next(
            x for x in levels if complete({a: y for a, y in (*row.items(), (axis, x)) if a in spoken}, axes, clauses))
    return row


def _ordered(a: tuple[str, str], b: tuple[str, str]) -> Pair:
    return (a, b) if a < b else (b, a)
