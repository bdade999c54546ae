"""Random layouts: an order of axes in memory, gaps, an offset, strides that mean nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Layout = tuple[tuple[int, ...], int]  # (strides, offset), in elements

NONSENSE = (987_654_321, 1_000_003, 7, 0)
_VECTOR = 16  # bytes that an aligned address is a multiple of


@dataclass(frozen=True)
class Rules:
    """What the layouts of one case have in common. `unit`: elements that strides and offsets of main operands are
    multiples of. `any_last`: the last axis may have a stride other than 1."""

    unit: int
    itemsize: int
    any_last: bool
    gaps: bool
    nonsense: bool


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """As torch lays out a contiguous tensor."""
    strides, acc = [], 1
    for extent in reversed(shape):
        strides.append(acc)
        acc *= max(1, extent)
    return tuple(reversed(strides))


def main_operand(shape: Sequence[int], kind: str, rules: Rules, pick: random.Random, *, odd_base: bool = False) -> Layout:
    """A layout of q, k, v, o, dO or a gradient. `odd_base`: its address keeps `rules.unit` elements and no more."""
    # Half of the operands keep the unit stride even where others need not; the one that says what a case's addresses keep
    # never does.
    free = rules.any_last and (odd_base or pick.random() < 0.5)
    order = _order(kind, len(shape), pick, keep_last=not free)
    step = pick.choice((2, 3)) if odd_base and free else pick.choice((1, 2, 3)) if free else 1
    strides = _strides(shape, order, rules, pick, step, rules.unit)
    vector = max(1, _VECTOR // rules.itemsize)
    offset = rules.unit * pick.choice((0, 1, 2, 5, 8)) if rules.unit < vector else vector * pick.choice((0, 0, 1, 3))
    if odd_base and rules.unit < vector:
        offset = rules.unit + vector * pick.choice((0, 1, 4))
    if kind == "expanded":
        strides = _expanded(shape, strides, pick)
    return strides, offset


def side_operand(shape: Sequence[int], kind: str, rules: Rules, pick: random.Random) -> Layout:
    """A layout of statistics, a bias, a mask, a sink, lengths or offsets: any order, any last stride, any offset."""
    order = _order(kind, len(shape), pick, keep_last=False)
    strides = _strides(shape, order, rules, pick, pick.choice((1, 1, 2)) if rules.gaps else 1, 1)
    if kind == "expanded":
        strides = _expanded(shape, strides, pick)
    return strides, pick.choice((0, 0, 1, 3, 4))


def _order(kind: str, rank: int, pick: random.Random, *, keep_last: bool) -> list[int]:
    """Axes from the outermost to the innermost in memory."""
    order = list(range(rank))
    if kind == "bshd" and rank >= 2:
        first = max(0, rank - 3)
        if rank > first + 1:
            order[first], order[first + 1] = order[first + 1], order[first]
    elif kind == "permuted":
        head, tail = (order[:-1], order[-1:]) if keep_last else (order, [])
        pick.shuffle(head)
        order = head + tail
    return order


def _strides(shape: Sequence[int], order: Sequence[int], rules: Rules, pick: random.Random, step: int, unit: int
             ) -> tuple[int, ...]:
    strides = [0] * len(shape)
    reach = 0
    for axis in reversed(order):
        if reach == 0:
            stride = step
        else:
            stride = -(-reach // unit) * unit
            stride += unit * pick.choice((0, 1, 3, 8)) if rules.gaps else 0
        strides[axis] = stride
        reach = stride * max(1, shape[axis])
    if rules.nonsense:
        strides = [pick.choice(NONSENSE) if n == 1 else s for n, s in zip(shape, strides)]
    return tuple(strides)


def _expanded(shape: Sequence[int], strides: tuple[int, ...], pick: random.Random) -> tuple[int, ...]:
    """The stride of one axis with more than one element is 0: not the last one, which engines read in vectors."""
    axes = [i for i, n in enumerate(shape[:-1]) if n > 1]
    if not axes:
        return strides
    zero = pick.choice(axes)
    return tuple(0 if i == zero else s for i, s in enumerate(strides))
