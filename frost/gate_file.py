"""What a gate's file holds and how it is read: sorted JSON with a schema number and a checksum over its
content."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from descriptors import LIMITS, FrostError, WireError, parse_json
from descriptors.limits import shown, shown_names

SCHEMA = 1
_LIMITS = LIMITS["gate"]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")


class GateFormatError(FrostError, ValueError):
    """Bytes that are no valid gate."""


@dataclass(frozen=True)
class Gate:
    """An equivalence gate. Its fields can be read as attributes or as items.

    `environment` is matched, `recorded` is not. `errors` is None where the writer vouched instead of
    measuring.
    """

    engine: str
    op: str
    source: str
    environment: Mapping[str, str]
    recorded: Mapping[str, str]
    tolerances: Any
    errors: Any
    shapes_covered: Sequence[Any]
    declined: Mapping[str, str]
    date: str
    verdict: str

    @property
    def vouched(self) -> bool:
        """True where nothing was measured: the writer vouched."""
        return self.errors is None

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None


def make_gate(*, tolerances: Any, errors: Any, shapes_covered: Sequence[Any], **fields: Any) -> Gate:
    """A gate from what the writer gave, with its verdict. Raises ValueError for values that mean nothing."""
    for name in ("engine", "op"):
        if not _NAME.match(fields[name]):
            raise ValueError(f"{name}: given {fields[name]!r}, expected letters, digits, '_', '.' or '-'")
    numbers = list(_leaves(tolerances, "tolerances"))
    if not numbers:
        raise ValueError(f"tolerances: given {tolerances!r}, expected a number or numbers by name")
    for path, value in numbers:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{'.'.join(path)}: given {value}, expected a finite number, at least 0")
    if isinstance(shapes_covered, (str, bytes)) or len(shapes_covered) == 0:
        raise ValueError(f"shapes_covered: given {shapes_covered!r}, expected a list with at least one shape")
    if errors is not None and not list(_leaves(errors, "errors")):
        raise ValueError(f"errors: given {errors!r}, expected numbers, or None where the caller vouches")
    bad = beyond_tolerance(errors, tolerances)
    return Gate(verdict="fail" if bad else "pass", tolerances=_plain(tolerances), errors=_plain(errors),
                shapes_covered=_plain(shapes_covered), **fields)


def beyond_tolerance(errors: Any, tolerances: Any) -> list[str]:
    """Every error that is no number or larger than what its tolerance allows, in words. [] for errors=None.

    The tolerance of an error is the one under the same names, or under the longest tail of them, or the
    single number. Raises ValueError for an error without one.
    """
    if errors is None:
        return []
    allowed = {path[1:]: value for path, value in _leaves(tolerances, "tolerances")}
    out = []
    for path, value in _leaves(errors, "errors"):
        names = path[1:]
        limit = next((allowed[names[i:]] for i in range(len(names) + 1) if names[i:] in allowed), None)
        if limit is None:
            there = ", ".join(".".join(n) for n in allowed)
            raise ValueError(f"errors: given {'.'.join(names) or value!r}, expected a tolerance under that "
                             f"name; there is {there}")
        if not value <= limit:  # a NaN is beyond every tolerance
            out.append(f"{'.'.join(names) or 'error'}: given {value:.3g}, expected at most {limit:.3g}")
    return out


def _leaves(value: Any, *path: str) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, *path, str(key))
    elif value in _SPECIAL if isinstance(value, str) else type(value) in (int, float):
        yield path, float(value)
    else:
        raise ValueError(f"{'.'.join(path)}: given {shown(value)}, expected a number or numbers by name")


# JSON has no word for these.
_SPECIAL = ("nan", "inf", "-inf")


def _plain(value: Any) -> Any:
    """Plain JSON data; raises ValueError for anything else."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    raise ValueError(f"gate: given {value!r}, expected plain data (numbers, text, lists, mappings)")


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def gate_to_bytes(gate: Gate) -> bytes:
    content = {"schema": SCHEMA, **asdict(gate), "vouched": gate.vouched}
    return (json.dumps({**content, "checksum": _checksum(content)}, sort_keys=True, indent=1) + "\n").encode()


def gate_from_bytes(data: bytes) -> Gate:
    """Raises GateFormatError for bytes that are damaged, edited by hand, or of another schema."""
    try:
        content = parse_json(data, _LIMITS)
    except WireError as e:
        raise GateFormatError(str(e)) from e
    if not isinstance(content, dict):
        raise GateFormatError(f"given a {type(content).__name__}, expected an object")
    if content.pop("checksum", None) != _checksum(content):
        raise GateFormatError("its checksum does not match its content")
    if content.get("schema") != SCHEMA:
        raise GateFormatError(f"given schema {shown(content.get('schema'))}, expected {SCHEMA}")
    return _gate_from_content(content)


_KINDS: dict[str, tuple[type, ...]] = {
    "engine": (str,), "op": (str,), "source": (str,), "environment": (dict,), "recorded": (dict,),
    "tolerances": (dict, int, float), "errors": (dict, int, float, str, type(None)),
    "shapes_covered": (list,), "declined": (dict,), "date": (str,), "verdict": (str,), "vouched": (bool,),
    "schema": (int,),
}


def _gate_from_content(content: dict[str, Any]) -> Gate:
    if set(content) != set(_KINDS):
        raise GateFormatError(f"unknown or missing fields {shown_names(dict.fromkeys(set(content) ^ set(_KINDS)))}")
    for name, kinds in _KINDS.items():
        if type(content[name]) not in kinds:
            given = type(content[name]).__name__
            raise GateFormatError(f"{name}: given {given}, expected {kinds[0].__name__}")
    for name in ("environment", "recorded", "declined"):
        if not all(isinstance(v, str) for v in content[name].values()):
            raise GateFormatError(f"{name}: expected texts")
    try:
        beyond_tolerance(content["errors"], content["tolerances"])
    except ValueError as e:
        raise GateFormatError(str(e)) from e
    if not content["shapes_covered"]:
        raise GateFormatError("shapes_covered: given none, expected at least one")
    return Gate(**{name: content[name] for name in _KINDS if name not in ("schema", "vouched")})
