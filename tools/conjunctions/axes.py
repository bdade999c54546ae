"""What random attention calls are made of: axes with levels, the combinations that mean nothing, and what an engine is
drawn from.

`COMPILED` axes say which kernel serves a call, so they are settled once for a group of cases; `RUN_TIME` axes are drawn for
each case. What a level stands for is in draw.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .covering import Axes, Clause, Row, covering_rows

# Pairs (D, Dv). One family shares a compiled kernel; a level has a few.
DimFamily = tuple[tuple[int, int], ...]
HEAD_DIMS: Mapping[str, tuple[DimFamily, ...]] = {
    "tiny": (((1, 1), (2, 2), (3, 3), (7, 7), (8, 8), (15, 15), (1, 8), (8, 1), (9, 3)),),
    "power": (((16, 16),), ((32, 32),), ((64, 64),), ((128, 128),)),
    "under 64": (((40, 40), (48, 48), (56, 56), (33, 33), (36, 36), (63, 63), (40, 56), (61, 34)),),
    "under 128": (((72, 72), (80, 80), (96, 96), (112, 112), (65, 65), (100, 100), (127, 127), (72, 104), (126, 67)),),
    "under 256": (((160, 160), (192, 192), (224, 224), (248, 248), (129, 129), (200, 200), (255, 255), (160, 224)),),
    "256": (((256, 256),),),
    "192/128": (((192, 128),),),
    "wide v": (((8, 128), (3, 128), (15, 128)), ((40, 160), (56, 192), (33, 255)), ((64, 256),)),
    "wide qk": (((128, 8), (128, 5)), ((160, 40), (224, 56), (131, 63)), ((256, 1), (256, 16), (256, 9))),
}

COMPILED: Axes = {
    "dtype": ("bf16", "fp16", "fp32"),
    "head_dims": tuple(HEAD_DIMS),
    "pitch": ("16 bytes", "8 bytes", "4 bytes", "2 bytes"),  # what bases and strides of the main operands keep
    "last stride": ("1", "any"),
    "band": ("none", "causal", "left", "right", "both", "causal left"),
    "softcap": ("off", "on"),
    "mask": ("none", "bool"),
    "bias": ("none", "tile", "keys", "rows", "number"),
    "bias dtype": ("io", "fp32", "other"),
    "sink": ("none", "fp32", "io"),
    "lengths": ("none", "q", "kv", "both", "packed"),
    "index": ("int32", "int64", "mixed"),
    "dlse": ("off", "on"),
    "stats": ("on", "off"),
}

_INPUT = ("row major", "bshd", "permuted", "expanded")
_RESULT = ("row major", "bshd", "permuted")
RUN_TIME: Axes = {
    "batch": ("one", "few", "many"),
    "relation": ("equal", "shorter q", "longer q", "one query", "one key", "no query", "no key"),
    "size": ("small", "tiles"),
    "heads": ("mha", "gqa", "mqa"),
    "corner": ("top_left", "bottom_right"),
    "scale": ("default", "tiny", "large", "zero", "negative"),
    "sequences": ("plain", "zeros"),  # whether some padding lengths or packed sequences are zero
    "gaps": ("none", "some"),  # packed: tokens before the first and behind the last sequence
    "bias shape": ("per head", "per batch", "full", "shared", "low rank"),
    "mask shape": ("full", "rows and keys", "keys", "rows", "low rank"),
    "empty rows": ("none", "some"),
    "deterministic": ("off", "on"),
    "q": _INPUT, "k": _INPUT, "v": _INPUT, "do": _INPUT,
    "o": _RESULT, "lse": _RESULT, "gradients": _RESULT,
    "spacing": ("tight", "gaps"),
    "size-1 strides": ("usual", "nonsense"),
}

AXES: Axes = {**COMPILED, **RUN_TIME}

CLAUSES: tuple[Clause, ...] = (
    {"dtype": ("fp32",), "pitch": ("2 bytes",)},
    {"bias": ("none",), "bias dtype": ("fp32", "other")},
    {"bias": ("none",), "bias shape": ("per batch", "full", "shared", "low rank")},
    {"mask": ("none",), "mask shape": ("rows and keys", "keys", "rows", "low rank")},
    {"lengths": ("none",), "index": ("int64", "mixed")},
    {"lengths": ("q", "kv"), "index": ("mixed",)},
    {"lengths": ("none",), "sequences": ("zeros",)},
    {"lengths": ("none", "q", "kv", "both"), "gaps": ("some",)},
    # Rows are emptied through the mask or the bias, so one of them has to have rows.
    {"mask": ("none",), "bias": ("none", "keys", "number"), "empty rows": ("some",)},
    {"mask": ("bool",), "mask shape": ("keys",), "bias": ("none", "keys", "number"), "empty rows": ("some",)},
)

# Levels that leave little to see: no scores, all probabilities alike, or gradients of zero. What a pair of other levels does
# shows in rows without any of them, so such rows come first.
FAINT: Mapping[str, tuple[str, ...]] = {"relation": ("no query", "no key", "one key"), "scale": ("zero", "tiny")}
FAINT_CLAUSES: tuple[Clause, ...] = ({"batch": ("one",), "sequences": ("zeros",)},)

# No options at all.
_PLAIN = {
    "last stride": ("1",), "softcap": ("off",), "mask": ("none",), "bias": ("none",), "bias dtype": ("io",),
    "sink": ("none",), "lengths": ("none",), "index": ("int32",), "bias shape": ("per head",), "mask shape": ("full",),
    "sequences": ("plain",), "gaps": ("none",), "empty rows": ("none",),
}

# What an engine serves, as far as it is known beforehand: most of its cases are drawn from here, the others from all axes.
DOMAINS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "sm80": {"dtype": ("bf16", "fp16"), "last stride": ("1",), "bias dtype": ("io", "fp32")},
    "torch_sdpa": {
        **_PLAIN, "dtype": ("bf16", "fp16"), "head_dims": ("power", "under 64", "under 128", "under 256", "256"),
        "pitch": ("16 bytes",), "band": ("none", "causal"), "dlse": ("off",), "corner": ("top_left",),
        "relation": ("equal", "shorter q", "longer q", "one query"), "deterministic": ("off",),
    },
}
DOMAIN_SHARE = 0.9



@dataclass(frozen=True)
class Focus:
    """What an engine has kernels of its own for: whole groups of it, one for each family under each band."""

    families: tuple[DimFamily, ...]
    bands: Mapping[str, tuple[str, ...]]  # band -> relations between Sq and Sk
    levels: Mapping[str, tuple[str, ...]]
    share: float


_VIVID_RELATIONS = ("equal", "shorter q", "longer q", "one query")
_LAID_OUT = {name: ("row major", "bshd", "permuted") for name in ("q", "k", "v", "do")}
FOCUS: Mapping[str, Focus] = {
    # The Hopper kernels: dense, no options, no mask or a causal square, whole 16-byte rows, nothing broadcast.
    "triton": Focus(
        (((64, 64),), ((128, 128),), ((256, 256),)),
        {"none": (*_VIVID_RELATIONS, "one key"), "causal": ("equal",)},
        {**_PLAIN, **_LAID_OUT, "dtype": ("bf16", "fp16"), "pitch": ("16 bytes",), "head_dims": ("256",),
         "deterministic": ("off",)},
        0.18),
    # Exact head dims without options: what most calls are, and what pairwise rows hardly have.
    "sm80": Focus(
        (((64, 64),), ((96, 96),), ((128, 128),), ((192, 128),), ((256, 256),)),
        {"none": _VIVID_RELATIONS, "causal": _VIVID_RELATIONS, "causal left": _VIVID_RELATIONS},
        {**_PLAIN, "dtype": ("bf16", "fp16"), "pitch": ("16 bytes",), "head_dims": ("256",)},
        0.15),
}

# The fields an engine may decline with; None: any. Whatever else it declines is a failure: it says that it serves it.
MAY_DECLINE: Mapping[str, tuple[str, ...] | None] = {
    "reference": (),
    "triton": (),
    "sm80": ("device", "dtype", "stride[-1]"),
    "torch_sdpa": None,
}


def restricted(axes: Axes, levels: Mapping[str, tuple[str, ...]]) -> Axes:
    """The axes with only the given levels where some are named."""
    return {axis: tuple(x for x in all_levels if x in levels.get(axis, all_levels)) for axis, all_levels in axes.items()}


def vivid(axes: Axes) -> Axes:
    """The axes without the levels of `FAINT`."""
    return {axis: tuple(x for x in levels if x not in FAINT.get(axis, ())) for axis, levels in axes.items()}


def pairwise_rows(axes: Axes = AXES, seed: int = 0) -> list[Row]:
    """Rows with every legal pair of levels; the pairs of vivid levels in rows that have no faint one."""
    first = covering_rows(vivid(axes), (*CLAUSES, *FAINT_CLAUSES), seed)
    return covering_rows(axes, CLAUSES, seed, first)
