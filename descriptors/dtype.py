"""Element types, named once for the whole library, with no dependency on torch."""

from __future__ import annotations

import difflib
import enum


class DType(enum.Enum):
    """An element type. `DType.parse` takes "bf16", "bfloat16", torch.bfloat16, np.float32 or a DType."""

    F64 = "fp64"
    F32 = "fp32"
    F16 = "fp16"
    BF16 = "bf16"
    I64 = "int64"
    I32 = "int32"
    BOOL = "bool"
    U8 = "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        return self in _FLOATING

    @property
    def is_index(self) -> bool:
        """Usable for lengths, offsets and block indices."""
        return self in (DType.I32, DType.I64)

    @property
    def torch_name(self) -> str:
        """The attribute of the `torch` module with this type, e.g. "bfloat16"."""
        return _TORCH_NAME[self]

    @classmethod
    def parse(cls, value: object) -> DType:
        """Raises TypeError, naming the nearest known type, when `value` is no element type of ours."""
        if isinstance(value, cls):
            return value
        text = str(getattr(value, "__name__", value)).lower().removeprefix("torch.")
        found = _ALIASES.get(text)
        if found is None:
            near = _nearest(text)
            hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(map(str, cls))}"
            raise TypeError(f"dtype: given {value!r}, expected a known element type{hint}")
        return found

    def __repr__(self) -> str:
        return f"DType.{self.name}"

    def __str__(self) -> str:
        return self.value


def _nearest(text: str) -> str | None:
    """The alias that `text` is a misspelling of; None where it may well be another format, rightly spelt."""
    near = difflib.get_close_matches(text, _ALIASES, n=1, cutoff=0.8)
    if not near or text in _OTHER_FORMATS or _digits(text) != _digits(near[0]):
        return None
    return near[0]


def _digits(text: str) -> str:
    return "".join(c for c in text if c.isdigit())


# Formats that differ from one of ours by a letter; those that differ by their width need no mention.
_OTHER_FORMATS = frozenset({"int8", "i8", "tf32", "bfloat"})
_ITEMSIZE = {
    DType.F64: 8, DType.F32: 4, DType.F16: 2, DType.BF16: 2,
    DType.I64: 8, DType.I32: 4, DType.BOOL: 1, DType.U8: 1,
}
_FLOATING = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
_TORCH_NAME = {
    DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16",
    DType.I64: "int64", DType.I32: "int32", DType.BOOL: "bool", DType.U8: "uint8",
}
_ALIASES = {
    **{d.value: d for d in DType},
    **{name: d for d, name in _TORCH_NAME.items()},
    "double": DType.F64, "float": DType.F32, "half": DType.F16, "f64": DType.F64, "f32": DType.F32,
    "f16": DType.F16, "i64": DType.I64, "i32": DType.I32, "long": DType.I64, "int": DType.I32,
}
