"""msgpack form of descriptors: plain maps and lists with a type tag, read back with limits.

Untrusted bytes are an expected input: every reader goes through `unpack`, which bounds size, nesting and counts and
raises `WireError` (a ValueError) for anything it does not like. Nothing is ever executed from the wire.
"""

from __future__ import annotations

from typing import Any

import msgpack

from .dims import Dim, Sym, SymProduct, multiply
from .dtype import DType

MAX_BYTES = 16 << 20
MAX_COUNT = 100_000


class WireError(ValueError):
    """Bytes that are no valid FROST message."""


def pack(obj: Any) -> bytes:
    """Plain data (dict, list, str, int, float, bool, None, bytes) to msgpack bytes."""
    return msgpack.packb(obj, use_bin_type=True)


def unpack(data: bytes, *, what: str = "message", max_bytes: int = MAX_BYTES) -> Any:
    """msgpack bytes to plain data. Raises WireError on oversized, truncated, trailing or malformed bytes."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise WireError(f"{what}: given {type(data).__name__}, expected bytes")
    if len(data) > max_bytes:
        raise WireError(f"{what}: given {len(data)} bytes, expected at most {max_bytes}")
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_str_len=max_bytes, max_bin_len=max_bytes,
            max_array_len=MAX_COUNT, max_map_len=MAX_COUNT,
        )
    except RecursionError as e:  # msgpack reports deep nesting this way on some builds
        raise WireError(f"{what}: nested too deeply") from e
    except Exception as e:
        # msgpack raises ExtraData, StackError, UnicodeDecodeError, ValueError...: all mean "not a valid message".
        raise WireError(f"{what}: not a valid msgpack message ({type(e).__name__}: {e})") from e


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
                parts = [dim_from_wire(v, what) for v in expect(value["of"], list, what)[:16]]
                if not all(isinstance(p, Sym) for p in parts):
                    raise WireError(f"{what}: expected symbols inside a product")
                return multiply([expect(value["coef"], int, what), *parts])
        except (ValueError, TypeError) as e:
            raise WireError(f"{what}: {e}") from e
        raise WireError(f"{what}: given keys {sorted(map(str, value))}, expected a symbol")
    return expect(value, int, what)


def dtype_from_wire(value: Any, what: str = "dtype") -> DType:
    try:
        return DType(expect(value, str, what))
    except ValueError as e:
        raise WireError(f"{what}: given {value!r}, expected one of {[d.value for d in DType]}") from e
