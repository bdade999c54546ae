"""Cases in groups that share compiled kernels: what selects a kernel is drawn once for a group, all else for each case."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from . import draw, selection
from .axes import AXES, CLAUSES, COMPILED, DOMAIN_SHARE, DOMAINS, FOCUS, DimFamily, Focus, restricted, vivid
from .case import AnyCase, Selection
from .covering import Row, covering_rows, random_row

FAINT_SHARE = 0.2  # of the cases may have a level that leaves little to see


@dataclass(frozen=True)
class Group:
    """What the cases of a group have in common, in words, the cases, and what compiling costs, relatively."""

    name: str
    cases: tuple[AnyCase, ...]
    cost: float


def draw_groups(op: str, engine: str, count: int, size: int, seed: int, sizes: draw.Sizes) -> list[Group]:
    """`count` cases in groups of about `size`; repeatable from the seed."""
    pick = random.Random(f"{op} {engine} {seed}")
    wanted = [size] * (count // size) + [count % size] * (count % size > 0)
    if op == Selection.OP:
        return [Group(*selection.group(pick, n, sizes)) for n in wanted]
    return [_attention_group(plan, pick, n, sizes) for plan, n in zip(_plans(engine, len(wanted), pick), wanted)]


@dataclass(frozen=True)
class _Plan:
    """What a group is drawn from: levels of the compiled axes, head dims that share a kernel, and limits of all axes."""

    row: Row
    family: DimFamily
    limits: Mapping[str, tuple[str, ...]]


_COMPILED_CLAUSES = [c for c in CLAUSES if set(c) <= set(COMPILED)]


def _plans(engine: str, count: int, pick: random.Random) -> list[_Plan]:
    """What the engine has special kernels for, then pairwise rows of what it serves, then random ones, a few of them from
    all that there is."""
    plans = _focused(FOCUS[engine], count, pick) if engine in FOCUS else []
    domain = DOMAINS.get(engine, {})
    own = restricted(COMPILED, domain)
    rows = covering_rows(own, _COMPILED_CLAUSES, pick.randrange(1 << 30))
    pick.shuffle(rows)
    left = count - len(plans)
    inside = round(left * DOMAIN_SHARE) if domain else left
    rows = rows[:inside] + [random_row(own, _COMPILED_CLAUSES, pick) for _ in range(inside - len(rows))]
    plans += [_Plan(row, draw.family_of(row, pick), {**domain, **_relations(row, domain, pick)}) for row in rows]
    others = [random_row(COMPILED, _COMPILED_CLAUSES, pick) for _ in range(left - len(rows))]
    return plans + [_Plan(row, draw.family_of(row, pick), _relations(row, {}, pick)) for row in others]


def _relations(row: Row, domain: Mapping[str, tuple[str, ...]], pick: random.Random) -> Mapping[str, tuple[str, ...]]:
    """A single row or key makes other kernels of a bias, so not every group has such cases."""
    if "relation" in domain or row["bias"] not in ("tile", "rows", "keys") or pick.random() < 0.3:
        return {}
    return {"relation": ("equal", "shorter q", "longer q")}


def _focused(focus: Focus, count: int, pick: random.Random) -> list[_Plan]:
    plans = []
    choices = [(family, band) for family in focus.families for band in focus.bands]
    for n in range(math.ceil(count * focus.share)):
        family, band = choices[n % len(choices)]
        limits = {**focus.levels, "band": (band,), "relation": focus.bands[band]}
        plans.append(_Plan(random_row(restricted(COMPILED, limits), _COMPILED_CLAUSES, pick), family, limits))
    return plans


def _attention_group(plan: _Plan, pick: random.Random, count: int, sizes: draw.Sizes) -> Group:
    row = plan.row
    open_axes = restricted(AXES, {**plan.limits, **{a: (x,) for a, x in row.items()}})
    cases = []
    for _ in range(count):
        chosen = random_row(open_axes if pick.random() < FAINT_SHARE else vivid(open_axes), CLAUSES, pick)
        chosen["size"] = pick.choices(list(sizes.weights), list(sizes.weights.values()))[0]
        cases.append(draw.attention(chosen, plan.family, pick, sizes))
    said = ", ".join(f"{a} {x}" for a, x in row.items() if x not in ("none", "off"))
    dearer = 1.0 + (row["bias"] != "none") + (row["mask"] != "none")
    return Group(said, tuple(cases), max(map(max, plan.family)) * dearer)
