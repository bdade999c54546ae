"""The frozen records of random cases, and the one line that spells each of them.

A line is `name=value` fields with blanks between, flags by name alone; what is left out has its default. Layouts are strides
and offset in elements, `q=640,1,64,1@8`: nothing is derived again when a line is read, so a line means the same for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

Pair = tuple[int, int]
Window = tuple[int | None, int | None]
# operand -> (strides, offset), in elements; row-major where an operand is not named
Layouts = tuple[tuple[str, tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Attention:
    """One attention forward and backward. Packed where `cu_q` is given: `seqlens` are the token totals then."""

    OP: ClassVar[str] = "sdpa"
    OPS: ClassVar[tuple[str, ...]] = ("sdpa", "sdpa_backward")

    dtype: str = "bf16"
    batch: int = 1
    heads: Pair = (1, 1)          # Hq, Hk
    seqlens: Pair = (1, 1)        # Sq, Sk
    dims: Pair = (16, 16)         # D, Dv
    causal: bool = False
    align: str = "top_left"
    window: Window = (None, None)
    scale: float | None = None
    softcap: float | None = None
    bias: tuple[int, ...] | None = None     # shape
    bias_dtype: str | None = None           # the io dtype where None
    mask: tuple[int, ...] | None = None     # shape
    sink: str | None = None                 # dtype
    sink_values: tuple[float, ...] | None = None
    len_q: tuple[int, ...] | None = None
    len_kv: tuple[int, ...] | None = None
    cu_q: tuple[int, ...] | None = None
    cu_kv: tuple[int, ...] | None = None
    index: tuple[str, str] = ("int32", "int32")  # of q's and of k's lengths or offsets
    dlse: bool = False
    stats: bool = True
    deterministic: bool = False
    gain: float = 1.0                       # q is this many times a standard normal
    masked_rows: tuple[int, ...] = ()       # rows that the mask shuts out
    bias_inf_rows: tuple[int, ...] = ()     # rows whose bias is -inf
    seed: int = 0
    layouts: Layouts = ()

    @property
    def sequences(self) -> int:
        return self.batch if self.cu_q is None else len(self.cu_q) - 1


@dataclass(frozen=True)
class Selection:
    """One selection attention forward and backward. `hostile`: entries in any order, twice, out of range, of the future."""

    OP: ClassVar[str] = "nsa_selection"
    OPS: ClassVar[tuple[str, ...]] = ("nsa_selection", "nsa_selection_backward")

    dtype: str = "bf16"
    batch: int = 1
    heads: Pair = (1, 1)          # Hk, group
    seqlens: Pair = (1, 1)        # Tq, Tk
    dims: Pair = (16, 16)
    block: int = 16
    slots: int = 1
    counts: bool = False
    hostile: bool = False
    packed: tuple[int, ...] | None = None
    index: str = "int32"
    scale: float | None = None
    gain: float = 1.0
    dlse: bool = False
    deterministic: bool = False
    seed: int = 0
    layouts: Layouts = ()


AnyCase = Attention | Selection
KINDS: Mapping[str, type[Any]] = {kind.OP: kind for kind in (Attention, Selection)}


def layout_of(case: AnyCase, operand: str) -> tuple[tuple[int, ...], int] | None:
    """(strides, offset) of an operand or result; None: row-major."""
    return next(((strides, offset) for name, strides, offset in case.layouts if name == operand), None)


# ---- spelling ----------------------------------------------------------------------------------------------

_Codec = tuple[Callable[[Any], str], Callable[[str], Any]]


def _numbers(read: Callable[[str], Any], between: str = ",") -> _Codec:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(read(part) for part in text.split(between)) if text else ()
    return (lambda values: between.join(map(_plain, values))), parse


def _plain(value: Any) -> str:
    return "-" if value is None else repr(value) if isinstance(value, float) else str(value)


def _or_none(text: str) -> int | None:
    return None if text == "-" else int(text)


_TEXT: _Codec = (str, str)
_INT: _Codec = (str, int)
_FLOAT: _Codec = (repr, float)
_INTS, _FLOATS, _PAIR, _TEXTS = _numbers(int), _numbers(float), _numbers(int, "/"), _numbers(str, "/")
# By the field's declared type.
_CODECS: Mapping[str, _Codec] = {
    "str": _TEXT, "str | None": _TEXT, "int": _INT, "float": _FLOAT, "float | None": _FLOAT, "Pair": _PAIR,
    "Window": _numbers(_or_none, "/"), "tuple[int, ...]": _INTS, "tuple[int, ...] | None": _INTS,
    "tuple[float, ...] | None": _FLOATS, "tuple[str, str]": _TEXTS,
}


def spell(case: AnyCase) -> str:
    """The line that `parse` reads back as the same case."""
    words = [case.OP]
    for f in fields(case):
        value = getattr(case, f.name)
        if value == f.default or f.name == "layouts":
            continue
        if isinstance(value, bool):
            words.append(f.name if value else f"no-{f.name}")
        else:
            words.append(f"{f.name}={_CODECS[str(f.type)][0](value)}")
    words += [f"{name}={','.join(map(str, strides))}@{offset}" for name, strides, offset in case.layouts]
    return " ".join(words)


def parse(line: str) -> AnyCase:
    """The case of a line. Raises ValueError naming the word that means nothing."""
    kind, *words = line.split() or [""]
    if kind not in KINDS:
        raise ValueError(f"case: given {kind!r} first, expected one of {sorted(KINDS)}")
    cls = KINDS[kind]
    types = {f.name: str(f.type) for f in fields(cls)}
    found: dict[str, Any] = {}
    layouts: list[tuple[str, tuple[int, ...], int]] = []
    for word in words:
        name, given, value = word.partition("=")
        try:
            if given and "@" in value:
                strides, _, offset = value.partition("@")
                layouts.append((name, _INTS[1](strides), int(offset)))
            elif given:
                found[name] = _CODECS[types[name]][1](value)
            else:
                flag = name.removeprefix("no-")
                if types[flag] != "bool":
                    raise KeyError(flag)
                found[flag] = flag == name
        except (KeyError, ValueError) as e:
            raise ValueError(f"case: the word {word!r} means nothing for {kind} ({type(e).__name__}: {e})") from None
    return cls(**found, layouts=tuple(layouts))
