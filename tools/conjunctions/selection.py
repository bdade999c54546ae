"""Random selection attention: groups of 1 to 16 heads, odd lengths, sets with duplicates and blocks that are none."""

from __future__ import annotations

import random
from dataclasses import replace

from . import strides
from .case import Layouts, Selection
from .draw import ITEMSIZE, MAIN, Sizes
from .strides import Rules

_DIMS = (
    ((16, 16),), ((64, 64),), ((128, 128),), ((40, 24), (33, 48), (56, 40)), ((72, 72), (96, 80), (101, 65)), ((192, 128),),
    ((1, 1), (7, 3), (15, 8)), ((256, 256),),
)
_BLOCKS = (8, 16, 24, 32, 64, 128)
_KINDS = ("row major", "bshd", "permuted")


def group(pick: random.Random, count: int, sizes: Sizes) -> tuple[str, tuple[Selection, ...], float]:
    """(what they share, cases, relative cost of compiling): dtype, head dims, block size, heads of a group, slots."""
    family = pick.choice(_DIMS)
    shared = Selection(
        dtype=pick.choice(("bf16", "bf16", "fp16", "fp32")), heads=(1, pick.choice((1, 1, 2, 3, 4, 5, 7, 8, 12, 16))),
        block=pick.choice(_BLOCKS), counts=pick.random() < 0.4, dlse=pick.random() < 0.4,
        index=pick.choice(("int32", "int32", "int64")))
    top_slots = pick.choice((1, 2, 4, 8, 16, 32))  # slots are padded to a power of two inside a kernel
    packed, pitch, any_last = pick.random() < 0.3, pick.choice((16, 16, 8, 4, 2)), pick.random() < 0.2
    cases = tuple(_case(shared, family, top_slots, packed, pitch, any_last, pick, sizes) for _ in range(count))
    name = (f"{shared.dtype}, head dims {family[0]}, block {shared.block}, {shared.heads[1]} heads a group, "
            f"{top_slots} slots{', packed' * packed}")
    return name, cases, 2.0 * max(family[0])


def _case(shared: Selection, family: tuple[tuple[int, int], ...], top_slots: int, packed: bool, pitch: int, any_last: bool,
          pick: random.Random, sizes: Sizes) -> Selection:
    level = pick.choices(list(sizes.weights), list(sizes.weights.values()))[0]
    longest = pick.randint(*sizes.extents[level])
    batch, kv = pick.choice((1, 1, 2, 3)), pick.choice((1, 1, 2, 3))
    while batch * kv * shared.heads[1] * longest**2 > sizes.max_scores and batch * kv > 1:
        batch, kv = (batch - 1, kv) if batch > 1 else (batch, kv - 1)
    while shared.heads[1] * longest**2 > sizes.max_scores:
        longest //= 2
    case = replace(
        shared, dims=pick.choice(family), batch=batch, heads=(kv, shared.heads[1]), seed=pick.randrange(1 << 30),
        slots=pick.randint(top_slots // 2 + 1, top_slots), hostile=pick.random() < 0.5,
        scale=pick.choice((None, None, 0.0, -0.2, 0.05)), gain=pick.choice((1.0, 1.0, 3.0)),
        deterministic=pick.random() < 0.3)
    if packed:
        lengths = [pick.choice((0, 1, pick.randint(1, longest), longest)) for _ in range(batch + 1)]
        cu = [pick.choice((0, 3))]
        for n in lengths:
            cu.append(cu[-1] + n)
        total = cu[-1] + pick.choice((0, 5))
        case = replace(case, batch=1, packed=tuple(cu), seqlens=(total, total))
    else:
        rows = pick.choice((longest, longest, longest, 1, pick.randint(1, longest)))
        case = replace(case, seqlens=(rows, longest) if pick.random() < 0.9 else (longest, rows))
    return replace(case, layouts=_layouts(case, pitch, any_last, pick))


def shapes(case: Selection) -> dict[str, tuple[int, ...]]:
    """Every operand and result by name."""
    (kv, heads), (tq, tk), (d, dv) = case.heads, case.seqlens, case.dims

    def rows(h: int, t: int, *width: int) -> tuple[int, ...]:
        return (t, h, *width) if case.packed else (case.batch, h, t, *width)

    q, k, v, o = rows(kv * heads, tq, d), rows(kv, tk, d), rows(kv, tk, dv), rows(kv * heads, tq, dv)
    out = {"q": q, "k": k, "v": v, "o": o, "do": o, "lse": o[:-1], "dq": q, "dk": k, "dv": v,
           "block_indices": rows(kv, tq, case.slots)}
    if case.dlse:
        out["dlse"] = o[:-1]
    if case.counts:
        out["block_counts"] = rows(kv, tq)
    if case.packed:
        out["cu_seqlens"] = (len(case.packed),)
    return out


def _layouts(case: Selection, pitch: int, any_last: bool, pick: random.Random) -> Layouts:
    size = ITEMSIZE[case.dtype]
    rules = Rules(max(1, pitch // size), size, any_last, pick.random() < 0.5, pick.random() < 0.5)
    out = []
    for name, shape in shapes(case).items():
        kind = pick.choice(_KINDS)
        if name in MAIN:
            made = strides.main_operand(shape, kind, rules, pick, odd_base=name == "q")
        else:
            made = strides.side_operand(shape, kind, rules, pick)
        if made != (strides.row_major(shape), 0):
            out.append((name, *made))
    return tuple(out)
