"""From a row of levels to a case: the numbers behind each level, drawn from a seeded generator."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from . import strides
from .axes import HEAD_DIMS, DimFamily
from .case import Attention, Layouts, Pair
from .strides import Rules

ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4}
_OTHER = {"bf16": "fp16", "fp16": "bf16", "fp32": "bf16"}  # a bias that is neither fp32 nor of the io dtype
Levels = Mapping[str, str]


@dataclass(frozen=True)
class Sizes:
    """What size levels mean, as inclusive ranges. `max_scores`: of B * Hq * Sq * Sk; larger cases get fewer heads, then
    sequences."""

    extents: Mapping[str, Pair]
    batches: Mapping[str, Pair]
    groups: tuple[int, ...]
    max_scores: int
    weights: Mapping[str, int]  # how often a size level is drawn where no row of levels says which


# The interpreter's cost is per tile of 32 x 32: at most a few tiles per head, and few heads.
INTERPRETER = Sizes({"small": (2, 20), "tiles": (33, 45)}, {"one": (1, 1), "few": (2, 3), "many": (5, 5)}, (2, 3, 7), 5_000,
                    {"small": 3, "tiles": 1})
DEVICE = Sizes(
    {"small": (2, 40), "tiles": (41, 160), "large": (161, 500), "huge": (1000, 2048)},
    {"one": (1, 1), "few": (2, 4), "many": (5, 16)}, (2, 3, 4, 5, 7, 8, 16, 24), 9_000_000,
    {"small": 42, "tiles": 38, "large": 16, "huge": 4})


def family_of(levels: Levels, pick: random.Random) -> DimFamily:
    """Head dims that share a compiled kernel; with 16-byte pitches those whose rows are whole vectors, where there are
    any."""
    family = pick.choice(HEAD_DIMS[levels["head_dims"]])
    if levels["pitch"] != "16 bytes":
        return family
    size = ITEMSIZE[levels["dtype"]]
    return tuple(p for p in family if all(d * size % 16 == 0 for d in p)) or family


def attention(levels: Levels, family: DimFamily, pick: random.Random, sizes: Sizes) -> Attention:
    """A case of the levels."""
    case = Attention(dtype=levels["dtype"], dims=pick.choice(family), seed=pick.randrange(1 << 30))
    for step in _STEPS:
        case = step(case, levels, pick, sizes)
    return replace(case, layouts=_layouts(case, levels, pick))


def _between(bounds: Pair, pick: random.Random) -> int:
    return pick.randint(*bounds)


# ---- extents -----------------------------------------------------------------------------------------------


def _heads(case: Attention, levels: Levels, pick: random.Random, sizes: Sizes) -> Attention:
    kv, group = {"mha": (pick.randint(1, 4), 1), "gqa": (pick.randint(2, 3), pick.choice(sizes.groups[:5])),
                 "mqa": (1, pick.choice(sizes.groups))}[levels["heads"]]
    return replace(case, heads=(kv * group, kv))


def _extents(relation: str, bounds: Pair, pick: random.Random) -> Pair:
    n, m = sorted(pick.sample(range(bounds[0], bounds[1] + 1), 2))
    return {"equal": (n, n), "shorter q": (n, m), "longer q": (m, n), "one query": (1, n), "one key": (n, 1),
            "no query": (0, n), "no key": (n, 0)}[relation]


def _sequences(case: Attention, levels: Levels, pick: random.Random, sizes: Sizes) -> Attention:
    batch = _between(sizes.batches[levels["batch"]], pick)
    bounds = sizes.extents[levels["size"]]
    top = _extents(levels["relation"], bounds, pick)
    hq, hk = case.heads
    # Few heads first, then few sequences; a single sequence of one head is what the size level says.
    while batch * hq * top[0] * top[1] > sizes.max_scores and (hq > hk or hk > 1 or batch > 1):
        hq, hk, batch = (hk * max(1, hq // hk // 2), hk, batch) if hq > hk else (
            (hk // 2, hk // 2, batch) if hk > 1 else (1, 1, batch // 2))
    case = replace(case, batch=batch, heads=(hq, hk), seqlens=top)
    return _packed(case, levels, pick) if levels["lengths"] == "packed" else _padded(case, levels, pick)


def _padded(case: Attention, levels: Levels, pick: random.Random) -> Attention:
    kind = levels["lengths"]
    wants = {"len_q": kind in ("q", "both"), "len_kv": kind in ("kv", "both")}
    made: dict[str, tuple[int, ...]] = {}
    zeros = _zeros(case.batch, pick) if levels["sequences"] == "zeros" else set()
    for (name, wanted), extent in zip(wants.items(), case.seqlens):
        if wanted:
            made[name] = _lengths(case.batch, extent, zeros, pick)
    return replace(case, **made)  # type: ignore[arg-type]


def _zeros(count: int, pick: random.Random) -> set[int]:
    """Sequences that get a length of zero: at least one, and one is left where there are several."""
    some = {i for i in range(count) if pick.random() < 0.3} | {pick.randrange(count)}
    return some if len(some) < count or count == 1 else some - {pick.randrange(count)}


def _lengths(count: int, extent: int, zeros: set[int], pick: random.Random) -> tuple[int, ...]:
    lengths = [extent if pick.random() < 0.2 else pick.randint(min(1, extent), extent) for _ in range(count)]
    # A zero on one side leaves the other side's tokens alone, so both sides have zeros of their own.
    return tuple(0 if i in zeros and pick.random() < 0.8 else n for i, n in enumerate(lengths))


def _packed(case: Attention, levels: Levels, pick: random.Random) -> Attention:
    longest = max(3, *case.seqlens)
    pairs = [case.seqlens, *(_extents(levels["relation"], (2, longest), pick) for _ in range(case.batch - 1))]
    pick.shuffle(pairs)
    for i in _zeros(len(pairs), pick) if levels["sequences"] == "zeros" else ():
        pairs[i] = pick.choice(((0, 0), (0, pairs[i][1]), (pairs[i][0], 0)))
    offsets, totals = [], []
    for side in (0, 1):
        before, behind = (pick.randint(1, 9), pick.randint(1, 9)) if levels["gaps"] == "some" else (0, 0)
        cu = [before]
        for pair in pairs:
            cu.append(cu[-1] + pair[side])
        offsets.append(tuple(cu))
        totals.append(cu[-1] + behind)
    return replace(case, cu_q=offsets[0], cu_kv=offsets[1], seqlens=(totals[0], totals[1]))


def _longest(case: Attention) -> Pair:
    """Rows and columns of the scores: the longest sequences where packed."""
    if case.cu_q is None or case.cu_kv is None:
        return case.seqlens
    a, b = (max((y - x for x, y in zip(cu, cu[1:])), default=0) for cu in (case.cu_q, case.cu_kv))
    return a, b


# ---- options -----------------------------------------------------------------------------------------------


def _band(case: Attention, levels: Levels, pick: random.Random, sizes: Sizes) -> Attention:
    reach = max(*_longest(case), 1)

    def width() -> int:
        return pick.choice((0, 1, pick.randint(0, reach), pick.randint(0, reach), 10**6))

    kind = levels["band"]
    left = width() if kind in ("left", "both", "causal left") else None
    right = width() if kind in ("right", "both") else None
    return replace(case, causal=kind.startswith("causal"), window=(left, right), align=levels["corner"])


def _scores(case: Attention, levels: Levels, pick: random.Random, sizes: Sizes) -> Attention:
    usual = case.dims[0] ** -0.5
    scales: dict[str, float | None] = {
        "default": None, "tiny": 10 ** pick.uniform(-8, -4), "large": usual * pick.uniform(8, 40), "zero": 0.0,
        "negative": -usual * pick.uniform(0.1, 3)}
    scale = scales[levels["scale"]]
    softcap: float | None
    if levels["softcap"] == "on":
        softcap, gain = _short(math.exp(pick.uniform(math.log(0.5), math.log(50)))), pick.choice((1.0, 4.0))
    else:  # 0 is another way to say off
        softcap = pick.choice((None,) * 9 + (0.0,))
        gain = 1.0 if levels["scale"] == "large" else pick.choice((1.0, 1.0, 3.0))
    return replace(case, scale=None if scale is None else _short(scale), softcap=softcap, gain=gain)


def _short(x: float) -> float:
    return float(f"{x:.4g}")


def _score_shape(case: Attention, outer: str, inner: str, pick: random.Random) -> tuple[int, ...]:
    """The shape of a bias or mask. A packed one covers the longest sequence, and sometimes more than that."""
    rows, columns = _longest(case)
    if case.cu_q is not None:
        rows, columns = rows + pick.choice((0, 0, 1, 5)), columns + pick.choice((0, 0, 1, 5))
    last = {"tile": (rows, columns), "keys": (1, columns), "rows": (rows, 1), "number": (1, 1)}[inner]
    b, h = case.sequences, case.heads[0]
    first = {"per head": (1, h), "per batch": (b, 1), "full": (b, h), "shared": (1, 1),
             "low rank": pick.choice(((), (1,), (h,)))}[outer]
    return (*first, *last)


def _added(case: Attention, levels: Levels, pick: random.Random, sizes: Sizes) -> Attention:
    made: dict[str, object] = {}
    if levels["bias"] != "none":
        made["bias"] = _score_shape(case, levels["bias shape"], levels["bias"], pick)
        made["bias_dtype"] = {"io": None, "fp32": "fp32", "other": _OTHER[case.dtype]}[levels["bias dtype"]]
    if levels["mask"] == "bool":
        outer, inner = _MASK_SHAPES[levels["mask shape"]]
        made["mask"] = _score_shape(case, pick.choice(outer), inner, pick)
    if levels["empty rows"] == "some":
        for name, field in (("mask", "masked_rows"), ("bias", "bias_inf_rows")):
            shape = made.get(name)
            # A mask without rows would shut out everything.
            if isinstance(shape, tuple) and shape[-2] > 1:
                made[field] = tuple(sorted(pick.sample(range(shape[-2]), min(shape[-2], pick.randint(1, 3)))))
    if levels["sink"] != "none":
        made["sink"] = case.dtype if levels["sink"] == "io" else "fp32"
        if pick.random() < 0.15:
            values = [_short(pick.gauss(0, 1)) for _ in range(case.heads[0])]
            values[pick.randrange(len(values))] = pick.choice((math.inf, -math.inf))
            made["sink_values"] = tuple(values)
    return replace(case, **made)  # type: ignore[arg-type]


_MASK_SHAPES = {
    "full": (("full",), "tile"), "rows and keys": (("shared", "per head"), "tile"), "keys": (("per batch", "full"), "keys"),
    "rows": (("full", "per head"), "rows"), "low rank": (("low rank",), "tile"),
}


def _switches(case: Attention, levels: Levels, pick: random.Random, sizes: Sizes) -> Attention:
    index = {"int32": ("int32", "int32"), "int64": ("int64", "int64"), "mixed": pick.choice(
        (("int32", "int64"), ("int64", "int32")))}[levels["index"]]
    return replace(case, dlse=levels["dlse"] == "on", stats=levels["stats"] == "on", index=index,
                   deterministic=levels["deterministic"] == "on")


_STEPS: tuple[Callable[[Attention, Levels, random.Random, Sizes], Attention], ...] = (
    _heads, _sequences, _band, _scores, _added, _switches)


# ---- layouts -----------------------------------------------------------------------------------------------


def shapes(case: Attention) -> dict[str, tuple[int, ...]]:
    """Every operand and result by name."""
    (hq, hk), (sq, sk), (d, dv), b = case.heads, case.seqlens, case.dims, case.batch
    q, k, v, o = (((s, h, n) if case.cu_q is not None else (b, h, s, n)) for s, h, n in (
        (sq, hq, d), (sk, hk, d), (sk, hk, dv), (sq, hq, dv)))
    out: dict[str, tuple[int, ...]] = {"q": q, "k": k, "v": v, "o": o, "do": o, "lse": o[:-1], "dq": q, "dk": k, "dv": v}
    if case.dlse:
        out["dlse"] = o[:-1]
    for name, shape in (("bias", case.bias), ("mask", case.mask), ("sink", None if case.sink is None else (hq,))):
        if shape is not None:
            out[name] = shape
            if name != "mask":
                out[f"d{name}"] = shape
    for name, values in (("seq_len_q", case.len_q), ("seq_len_kv", case.len_kv), ("cu_seqlens_q", case.cu_q),
                         ("cu_seqlens_kv", case.cu_kv)):
        if values is not None:
            out[name] = (len(values),)
    return out


MAIN = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
_KINDS = ("row major", "bshd", "permuted")


def _layouts(case: Attention, levels: Levels, pick: random.Random) -> Layouts:
    size = ITEMSIZE[case.dtype]
    rules = Rules(max(1, int(levels["pitch"].split()[0]) // size), size, levels["last stride"] == "any",
                  levels["spacing"] == "gaps", levels["size-1 strides"] == "nonsense")
    out = []
    for name, shape in shapes(case).items():
        if name in MAIN:
            kind = levels.get(name, levels["gradients"])
            made = strides.main_operand(shape, kind, rules, pick, odd_base=name == "q")
        else:
            writes = name in ("lse", "dbias", "dsink")
            kind = levels["lse"] if name == "lse" else pick.choice((*_KINDS, *(() if writes else ("expanded",))))
            made = strides.side_operand(shape, kind, rules, pick)
        if made != (strides.row_major(shape), 0):
            out.append((name, *made))
    return tuple(out)
