"""msgpack form of descriptors: plain maps and lists with a type tag, read back with limits; and JSON under the same limits.

Untrusted bytes are an expected input: every reader goes through `unpack` or `parse_json`, which measure size, nesting
and the number of values before the parser allocates anything, and raise `WireError` (a ValueError) for anything they
do not like. Nothing is ever executed from the wire.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgpack

from .dims import Dim, Sym, SymProduct, multiply
from .dtype import DType
from .errors import WireError
from .limits import LIMITS, Limits, check_count, check_size, shown, shown_names


def pack(obj: Any) -> bytes:
    """Plain data (dict, list, str, int, float, bool, None, bytes) to msgpack bytes."""
    return msgpack.packb(obj, use_bin_type=True)


def unpack(data: bytes, limits: Limits = LIMITS["message"], *, what: str | None = None) -> Any:
    """msgpack bytes to plain data. Raises WireError on oversized, truncated, trailing or malformed bytes.

    `what`: how messages call it, where the kind alone does not say it.
    """
    what = what or limits.what
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise WireError(f"{what}: given {type(data).__name__}, expected bytes")
    check_size(len(data), limits, what)
    _measure(bytes(data), limits, what)
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, max_str_len=limits.max_bytes,
                               max_bin_len=limits.max_bytes, max_array_len=limits.max_values,
                               max_map_len=limits.max_values)
    except Exception as e:
        # Text that is no UTF-8, keys that are no texts...: all mean "not a valid message".
        raise WireError(f"{what}: not a valid msgpack message ({type(e).__name__}: {shown(str(e))})") from e


# ---- msgpack, measured -------------------------------------------------------------------------------------------

_SCALAR, _TEXT, _BYTES, _ARRAY, _MAP, _REFUSED = range(6)


def _heads() -> list[tuple[int, int, int]]:
    """By first byte: what it opens, how many bytes of length follow, and the length or payload it stands for itself.

    Extension types (0xc7 to 0xc9, 0xd4 to 0xd8) are refused: none is ever written. 0xc1 is nothing at all.
    """
    table = [(_REFUSED, 0, 0)] * 256
    for first in (*range(0x80), *range(0xe0, 0x100), 0xc0, 0xc2, 0xc3):
        table[first] = (_SCALAR, 0, 0)
    for first, n in ((0xca, 4), (0xcb, 8), (0xcc, 1), (0xcd, 2), (0xce, 4), (0xcf, 8), (0xd0, 1), (0xd1, 2), (0xd2, 4),
                     (0xd3, 8)):
        table[first] = (_SCALAR, 0, n)
    for kind, start, count in ((_MAP, 0x80, 16), (_ARRAY, 0x90, 16), (_TEXT, 0xa0, 32)):
        for n in range(count):
            table[start + n] = (kind, 0, n)
    for kind, start, widths in ((_BYTES, 0xc4, (1, 2, 4)), (_TEXT, 0xd9, (1, 2, 4)), (_ARRAY, 0xdc, (2, 4)),
                                (_MAP, 0xde, (2, 4))):
        for i, width in enumerate(widths):
            table[start + i] = (kind, width, 0)
    return table


_HEADS = _heads()


def _measure(data: bytes, limits: Limits, what: str) -> None:
    """Walk the headers only. The parser makes room for what a header declares, so it is not shown a header that lies."""
    pos, end, values = 0, len(data), 0
    open_: list[int] = [1]  # how many values each container still lacks, outermost first
    while open_:
        if not open_[-1]:
            open_.pop()
            continue
        open_[-1] -= 1
        values += 1
        if values > limits.max_values:
            raise WireError(f"{what}: given more than {limits.max_values} values")
        if pos >= end:
            raise WireError(f"{what}: not a valid msgpack message (truncated)")
        kind, width, length = _HEADS[data[pos]]
        pos += 1
        if width:
            if pos + width > end:
                raise WireError(f"{what}: not a valid msgpack message (truncated)")
            length = int.from_bytes(data[pos:pos + width], "big")
            pos += width
        if kind >= _ARRAY:
            if kind == _REFUSED:
                raise WireError(f"{what}: not a valid msgpack message (type byte 0x{data[pos - 1]:02x})")
            length *= kind - _ARRAY + 1  # keys and values
            if len(open_) > limits.max_depth:
                raise WireError(f"{what}: nested too deeply, expected at most {limits.max_depth} levels")
            open_.append(length)
            continue
        if kind == _TEXT and length > limits.max_text:
            raise WireError(f"{what}: given a text of {length} bytes, expected at most {limits.max_text}")
        pos += length
        if pos > end:
            raise WireError(f"{what}: not a valid msgpack message (truncated)")
    if pos != end:
        raise WireError(f"{what}: not a valid msgpack message ({end - pos} bytes behind its end)")


# ---- JSON, measured ----------------------------------------------------------------------------------------------

_NOT_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_DIGITS = 19  # of an int64
_MAX_FLOAT = 400  # characters; the longest exact fp64 that is not written with an exponent has about 325


def parse_json(data: bytes, limits: Limits, *, what: str | None = None) -> Any:
    """UTF-8 JSON to plain data. Raises WireError on oversized or malformed text, NaN and infinities, and integers beyond
    64 bits.
    """
    what = what or limits.what
    check_size(len(data), limits, what)
    _measure_json(data, limits, what)
    try:
        value = json.loads(data.decode(), parse_int=_integer, parse_float=_finite, parse_constant=_no_constant)
        if _HALF_PAIR.search(data):  # half of a surrogate pair cannot be printed or written again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise WireError(f"{what}: not valid JSON ({shown(str(e))})") from e
    return value


def _measure_json(data: bytes, limits: Limits, what: str) -> None:
    """A backslash only occurs inside a text, so once escaped ones and escaped quotes are gone, every second piece between
    quotes is a text."""
    if data.count(b'"') > 4 * limits.max_values or data.count(b",") + data.count(b":") > 64 * limits.max_values:
        raise WireError(f"{what}: given more than {limits.max_values} values")
    pieces = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    longest = max(map(len, pieces[1::2]), default=0)
    if longest > limits.max_text:
        raise WireError(f"{what}: given a text of {longest} bytes, expected at most {limits.max_text}")
    outside = b"".join(pieces[::2])
    brackets = outside.translate(None, _NOT_BRACKETS)
    if outside.count(b",") + outside.count(b":") + len(brackets) > limits.max_values:
        raise WireError(f"{what}: given more than {limits.max_values} values")
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > limits.max_depth:
            raise WireError(f"{what}: nested too deeply, expected at most {limits.max_depth} levels")


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_DIGITS:
        raise ValueError(f"given an integer of {len(text)} digits, expected one of 64 bits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text) if len(text) <= _MAX_FLOAT else math.inf
    if not math.isfinite(value):
        raise ValueError(f"given the number {shown(text)}, expected a finite one of at most {_MAX_FLOAT} characters")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"given {text}, for which JSON has no word")


# ---- descriptors -------------------------------------------------------------------------------------------------


def expect(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """`value` if it has the type `kind` (bool is never an int here), else WireError."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool) and bool not in kinds or not isinstance(value, kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise WireError(f"{what}: given {type(value).__name__}, expected {names}")
    return value


def dim_to_wire(dim: Dim) -> Any:
    if isinstance(dim, Sym):
        return {"sym": dim.name, "max": dim.max}
    if isinstance(dim, SymProduct):
        return {"coef": dim.coef, "of": [dim_to_wire(s) for s in dim.syms]}
    return dim


def dim_from_wire(value: Any, what: str = "dim") -> Dim:
    if isinstance(value, dict):
        try:
            if set(value) == {"sym", "max"}:
                return Sym(value["sym"], value["max"])
            if set(value) == {"coef", "of"}:
                given = expect(value["of"], list, what)
                check_count("symbols in a product", len(given), LIMITS["graph"])
                parts = [dim_from_wire(v, what) for v in given]
                if not all(isinstance(p, Sym) for p in parts):
                    raise WireError(f"{what}: expected symbols inside a product")
                return multiply([expect(value["coef"], int, what), *parts])
        except WireError:
            raise
        except (ValueError, TypeError) as e:
            raise WireError(f"{what}: {e}") from e
        raise WireError(f"{what}: given keys {shown_names(value)}, expected a symbol")
    return expect(value, int, what)


def dtype_from_wire(value: Any, what: str = "dtype") -> DType:
    try:
        return DType(expect(value, str, what))
    except ValueError as e:
        raise WireError(f"{what}: given {shown(value)}, expected one of {[d.value for d in DType]}") from e
