"""Every environment variable that FROST reads, in one table, with typed accessors.

Values are read when an accessor is called, so a change takes effect at the next call. An empty variable
counts as unset. A value that cannot be used raises ValueError with the variable, what was given and what was
expected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GATE_POLICIES = ("require", "auto", "off")
MAX_PLAN_CACHE_SIZE = 1 << 20

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _bad(name: str, given: str, expected: str) -> ValueError:
    return ValueError(f"{name}: given {given!r}, expected {expected}")


def parse_policy(name: str, text: str) -> str:
    """One of `GATE_POLICIES`."""
    if text.strip().lower() not in GATE_POLICIES:
        raise _bad(name, text, "one of " + ", ".join(GATE_POLICIES))
    return text.strip().lower()


def parse_flag(name: str, text: str) -> bool:
    """1/true/yes/on or 0/false/no/off."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise _bad(name, text, "1 or 0 (true/false, yes/no and on/off work too)")
    return word in _TRUE


def parse_count(name: str, text: str) -> int:
    """A whole number in [1, 2^20]."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_PLAN_CACHE_SIZE:
        raise _bad(name, text, f"a whole number between 1 and {MAX_PLAN_CACHE_SIZE}")
    return value


def parse_folder(name: str, text: str) -> Path:
    """A folder; `~` is expanded. It need not exist."""
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise _bad(name, text, f"a folder whose ~ can be expanded ({e})") from e


def parse_cache_folder(name: str, text: str) -> Path | None:
    """A folder, or "off" for none at all (a folder of that name is "./off")."""
    return None if text.strip().lower() == "off" else parse_folder(name, text)


@dataclass(frozen=True)
class Variable:
    """One environment variable. `default` is what an unset one means, in words where it is computed."""

    name: str
    default: str
    expects: str
    doc: str
    parse: Callable[[str, str], Any]


VARIABLES: dict[str, Variable] = {v.name: v for v in (
    Variable("FROST_CACHE_DIR", "$XDG_CACHE_HOME/frost, else ~/.cache/frost", 'a folder, or "off"',
             "Where compiled kernels and the user's own gates are kept; off = in memory only.",
             parse_cache_folder),
    Variable("FROST_GATES", "require", " | ".join(GATE_POLICIES),
             "What lowering does, where the call doesn't say, about an engine without a covering equivalence "
             "gate: decline it, run the missing gate once, or take it unproven (the route shows it).",
             parse_policy),
    Variable("FROST_GATE_DIR", "the folder `gates` in the cache folder", "a folder",
             "Where the user's own gates are read and written; looked at before the shipped ones.",
             parse_folder),
    Variable("FROST_PLAN_CACHE_SIZE", "256", "a whole number, at least 1",
             "How many plans are kept in memory; the least recently used go first.", parse_count),
    Variable("FROST_CHECK_VALUES", "0", "1 | 0",
             "Check values that live on the device (offsets, lengths, indices) at every execute; on a GPU "
             "that costs a synchronisation.",
             parse_flag),
)}


def get(name: str) -> Any:
    """The parsed value of a variable, None where it is unset or empty. Raises KeyError for one not in the
    table and ValueError for a value that cannot be used."""
    variable = VARIABLES[name]
    text = os.environ.get(name, "")
    return variable.parse(name, text) if text.strip() else None


def cache_dir() -> Path | None:
    """The cache folder (it may not exist yet); None without a home folder, or with FROST_CACHE_DIR=off."""
    if os.environ.get("FROST_CACHE_DIR", "").strip():
        return get("FROST_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification has relative paths ignored
        return Path(base) / "frost"
    try:
        return Path.home() / ".cache" / "frost"
    except RuntimeError:
        return None


def kernel_cache_dir() -> Path | None:
    """Where compiled kernels are kept on disk; None = in memory only."""
    cache = cache_dir()
    return None if cache is None else cache / "kernels"


def gate_dir() -> Path | None:
    """Where the user's own gates live; None where there is neither FROST_GATE_DIR nor a cache folder."""
    given = get("FROST_GATE_DIR")
    if given is not None:
        return given
    cache = cache_dir()
    return None if cache is None else cache / "gates"


def gates() -> str:
    """The gate policy where a call doesn't state one: "require", "auto" or "off"."""
    return get("FROST_GATES") or VARIABLES["FROST_GATES"].default


def plan_cache_size() -> int:
    """How many plans are kept in memory."""
    return get("FROST_PLAN_CACHE_SIZE") or int(VARIABLES["FROST_PLAN_CACHE_SIZE"].default)


def check_values() -> bool:
    """Whether values on the device are checked at execute even where reading them costs a synchronisation."""
    return bool(get("FROST_CHECK_VALUES"))
