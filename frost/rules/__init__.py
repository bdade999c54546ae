"""What makes a graph valid, as tables of rules: of the graph itself, of attention, of the primitives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Bad(NamedTuple):
    """One violation: the tensor or option, what was given, what was expected."""

    what: str
    given: object
    expected: object


@dataclass(frozen=True)
class Rule:
    """`check` yields what is wrong with a subject: the graph where `ops` is None, else a node of one of these ops.

    `hint` is the way out, added to every message of the rule.
    """

    name: str
    ops: frozenset[str] | None
    check: Callable[[Any], Iterable[Bad]]
    hint: str = ""


FP32_MAX = 3.4028234663852886e38
FP64_MAX = 1.7976931348623157e308


def is_number(value: object, limit: float = FP64_MAX) -> bool:
    """A real Python number (a bool is none) no larger than `limit`; NaN and inf are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= limit


def is_count(value: object, limit: int = 2**31 - 1) -> bool:
    """An int in 0..limit (a bool is none)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def when(condition: bool, *bad: Bad) -> Iterator[Bad]:
    if condition:
        yield from bad
