"""Tensor descriptors: shape, declared strides, dtype, alignment, and the layout arithmetic on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .dims import Dim, Dims, DimsLike, Sym, SymProduct, bind_dim, dim_max, is_symbolic, multiply, symbols
from .dtype import DType
from .errors import WireError
from .limits import shown_names
from .wire import dim_from_wire, dim_to_wire, dtype_from_wire, expect

MAX_RANK = 8
# Exact self-overlap enumeration is bounded by this many elements; beyond it only layouts that nest are accepted.
_ENUMERATE_LIMIT = 1 << 20


def row_major(shape: Sequence[Dim]) -> Dims:
    """Contiguous strides in elements; zero-size dims count as 1 so that strides stay usable."""
    strides: list[Dim] = []
    acc: Dim = 1
    for dim in reversed(shape):
        strides.append(acc)
        acc = multiply((acc, max(dim, 1) if isinstance(dim, int) else dim))
    return tuple(reversed(strides))


@dataclass(frozen=True)
class TensorDesc:
    """A tensor as declared. `stride` is in elements and None where it was not declared (row-major then).

    `alignment` is what the base pointer promises, in bytes; it is checked when buffers are bound.
    """

    shape: Dims
    dtype: DType
    stride: Dims | None = None
    alignment: int = 16

    @staticmethod
    def make(shape: DimsLike, dtype: object, stride: DimsLike | None = None, alignment: int = 16) -> TensorDesc:
        """Normalises and type-checks the parts. Raises TypeError or ValueError; sizes are judged by validation."""
        dims = tuple(_as_dim(d, "shape") for d in shape)
        if len(dims) > MAX_RANK:
            raise ValueError(f"shape: given rank {len(dims)}, expected at most {MAX_RANK}")
        strides = None if stride is None else tuple(_as_dim(s, "stride") for s in stride)
        if strides is not None and len(strides) != len(dims):
            raise ValueError(f"stride: given {len(strides)} strides, expected {len(dims)} for shape {dims}")
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment: given {alignment!r}, expected a power of two, in bytes")
        return TensorDesc(dims, DType.parse(dtype), strides, alignment)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def strides(self) -> Dims:
        """The declared strides, or the row-major ones of the current shape."""
        return self.stride if self.stride is not None else row_major(self.shape)

    @property
    def is_symbolic(self) -> bool:
        return any(is_symbolic(d) for d in (*self.shape, *(self.stride or ())))

    @property
    def syms(self) -> tuple[Sym, ...]:
        return tuple(s for d in (*self.shape, *(self.stride or ())) for s in symbols(d))

    def bound(self, bindings: Mapping[str, int] | None) -> TensorDesc:
        """The same tensor with every symbol replaced by its value (None: by its maximum)."""
        if not self.is_symbolic:
            return self
        stride = None if self.stride is None else tuple(bind_dim(s, bindings) for s in self.stride)
        return replace(self, shape=tuple(bind_dim(d, bindings) for d in self.shape), stride=stride)

    @property
    def numel(self) -> int:
        """Elements at the declared maximum."""
        return dim_max(multiply(self.shape))

    @cached_property
    def max_offset(self) -> int:
        """The largest element offset from the base that is read or written, at the declared maximum; -1 if empty."""
        if self.numel == 0:
            return -1
        return sum((dim_max(d) - 1) * dim_max(s) for d, s in zip(self.shape, self.strides))

    @property
    def span(self) -> int:
        """Elements from the base to one past the last one (0 if empty), at the declared maximum."""
        return self.max_offset + 1

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize

    @property
    def needs_int64(self) -> bool:
        """True where 32-bit offsets could wrap."""
        return self.max_offset > 2**31 - 1

    @property
    def unit_last_stride(self) -> bool:
        """Last stride is 1, or never used because the last extent is at most 1."""
        return self.rank == 0 or self.strides[-1] == 1 or (self.shape[-1] in (0, 1))

    @property
    def is_row_major(self) -> bool:
        """Addresses equal the row-major ones (strides of size-1 dims do not count)."""
        return self.numel == 0 or all(
            a == b for d, a, b in zip(self.shape, self.strides, row_major(self.shape)) if d != 1)

    def _steps(self) -> list[tuple[int, int]]:
        """(stride, extent) at the declared maximum, smallest stride first, of the dims that have more than one index."""
        return sorted((dim_max(s), dim_max(d)) for d, s in zip(self.shape, self.strides) if dim_max(d) > 1)

    @property
    def nests(self) -> bool:
        """True where every stride reaches beyond all that the smaller ones can: nothing overlaps, at one glance."""
        reach = 0
        for stride, dim in self._steps():
            if stride <= reach:
                return False
            reach += stride * (dim - 1)
        return True

    def overlaps_itself(self, most: int = _ENUMERATE_LIMIT) -> bool:
        """True where two different index tuples can share an address (a written tensor must not). A layout that does not
        nest is enumerated up to `most` elements, and counts as overlapping beyond that."""
        if self.numel == 0 or self.nests:
            return False
        dims = self._steps()
        if any(s == 0 for s, _ in dims) or self.numel > most:
            return True
        offsets = np.zeros(1, dtype=np.int64)
        for stride, dim in dims:
            offsets = (offsets[:, None] + np.arange(dim, dtype=np.int64) * stride).ravel()
        return np.unique(offsets).size != offsets.size

    def key(self, packed: Mapping[int, str] | None = None) -> tuple:
        """Host scalars only: what a plan key says about this tensor (names and pointers are never in it).

        `packed` maps a dim whose extent is a packed total to the tag that stands in for it; a stride that spans
        exactly that dim (head-major [H, T] statistics, say) is written through the tag too, so no total gets in.
        """
        packed = packed or {}
        shape = tuple(packed.get(i, _dim_key(d)) if d != 1 or i in packed else 1 for i, d in enumerate(self.shape))
        if self.stride is None or (self.is_row_major and not packed):
            return (shape, self.dtype.value, None, self.alignment)
        spans = {multiply((self.shape[i], self.strides[i])): (tag, _dim_key(self.strides[i]))
                 for i, tag in packed.items()}
        unit = {i for i, d in enumerate(self.shape) if d == 1 and i not in packed}
        row_major_tail = self.is_row_major and set(packed) <= {0}
        stride = None if row_major_tail else tuple(
            0 if i in unit else spans[s] if s in spans and i not in packed else _dim_key(s)
            for i, s in enumerate(self.strides))
        # Not the total, but what it decides: whether a stride made from it still fits 32 bits.
        far = any(dim_max(s) > 2**31 - 1 for i, s in enumerate(self.strides) if i not in unit)
        return (shape, self.dtype.value, stride, self.alignment, *(("far",) if far else ()))

    def to_wire(self) -> dict[str, Any]:
        return {
            "shape": [dim_to_wire(d) for d in self.shape], "dtype": self.dtype.value,
            "stride": None if self.stride is None else [dim_to_wire(s) for s in self.stride],
            "alignment": self.alignment,
        }

    @staticmethod
    def from_wire(value: Any, what: str = "tensor") -> TensorDesc:
        expect(value, dict, what)
        if set(value) != {"shape", "dtype", "stride", "alignment"}:
            raise WireError(f"{what}: given fields {shown_names(value)}, expected shape, dtype, stride, alignment")
        shape = [dim_from_wire(d, what) for d in expect(value["shape"], list, what)]
        stride = value["stride"]
        if stride is not None:
            stride = [dim_from_wire(s, what) for s in expect(stride, list, what)]
        try:
            return TensorDesc.make(shape, dtype_from_wire(value["dtype"], what), stride,
                                   expect(value["alignment"], int, what))
        except WireError:
            raise
        except (TypeError, ValueError) as e:
            raise WireError(f"{what}: {e}") from e

    def __str__(self) -> str:
        dims = ", ".join(d.name if isinstance(d, Sym) else str(d) for d in self.shape)
        text = f"{self.dtype}[{dims}]"
        return text if self.stride is None else f"{text} stride {self.stride}"


def _dim_key(dim: Dim) -> Any:
    if isinstance(dim, Sym):
        return ("sym", dim.name, dim.max)
    if isinstance(dim, SymProduct):
        return ("product", dim.coef, *(("sym", s.name, s.max) for s in dim.syms))
    return dim


def _as_dim(value: object, what: str) -> Dim:
    if isinstance(value, (Sym, SymProduct)):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}: given {value!r}, expected an int or frost.sym(...)")
    return int(value.__index__())


class _Span:
    """An address range in numpy's array interface: nothing is ever dereferenced."""

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{itemsize}", "data": (address, False), "shape": tuple(shape),
            # The stride of a size-1 dim is never used and may be any number, also one that fits no index type.
            "strides": tuple(s * itemsize if d > 1 else itemsize for d, s in zip(shape, strides)),
        }


def may_share_memory(a: tuple[int, Sequence[int], Sequence[int], int],
                     b: tuple[int, Sequence[int], Sequence[int], int]) -> bool:
    """True where two buffers (address, shape, strides in elements, itemsize) share at least one byte.

    Exact for interleaved layouts too (three slices of one packed qkv are disjoint); a problem too hard to solve
    within a bounded effort counts as sharing.
    """
    ends = []
    for address, shape, strides, itemsize in (a, b):
        if 0 in shape:
            return False
        ends.append(address + (sum((d - 1) * s for d, s in zip(shape, strides)) + 1) * itemsize)
    if ends[0] <= b[0] or ends[1] <= a[0]:
        return False
    arrays = [np.asarray(_Span(*x)) for x in (a, b)]
    try:
        return bool(np.shares_memory(arrays[0], arrays[1], max_work=1 << 16))
    except np.exceptions.TooHardError:
        return True
