"""Extents: an int, a named symbol with a declared maximum, or a product of those.

A symbol is bound when a plan executes; sizes derived from it (strides, workspace) are evaluated then, and at the
declared maximum when a size must be known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True)
class Sym:
    """A named extent, bound at execute to a value in [0, max]."""

    name: str
    max: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"sym: given name {self.name!r}, expected an identifier such as 'T'")
        if isinstance(self.max, bool) or not isinstance(self.max, int) or self.max < 0:
            raise ValueError(f"sym {self.name}: given max={self.max!r}, expected an int >= 0")

    def __mul__(self, other: Dim) -> Dim:
        return multiply((self, other))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"sym({self.name!r}, max={self.max})"


@dataclass(frozen=True)
class SymProduct:
    """`coef` times each of `syms` (sorted by name; a symbol may repeat). Only made by `multiply`."""

    coef: int
    syms: tuple[Sym, ...]

    def __mul__(self, other: Dim) -> Dim:
        return multiply((self, other))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return "*".join([str(self.coef), *(s.name for s in self.syms)])


Dim = Union[int, Sym, SymProduct]  # noqa: UP007 - evaluated at import, also on Python 3.10
Dims = tuple[Dim, ...]
DimsLike = Iterable[Dim]


def sym(name: str, max: int) -> Sym:
    """A symbolic extent: `frost.sym("T", max=65536)`."""
    return Sym(name, max)


def multiply(dims: Iterable[Dim]) -> Dim:
    """The product of extents, in one normal form so that equal products compare equal."""
    coef = 1
    syms: list[Sym] = []
    for dim in dims:
        if isinstance(dim, SymProduct):
            coef *= dim.coef
            syms += dim.syms
        elif isinstance(dim, Sym):
            syms.append(dim)
        else:
            coef *= int(dim)
    if coef == 0 or not syms:
        return coef
    if coef == 1 and len(syms) == 1:
        return syms[0]
    return SymProduct(coef, tuple(sorted(syms, key=lambda s: s.name)))


def is_symbolic(dim: Dim) -> bool:
    return not isinstance(dim, int)


def symbols(dim: Dim) -> tuple[Sym, ...]:
    if isinstance(dim, Sym):
        return (dim,)
    return dim.syms if isinstance(dim, SymProduct) else ()


def dim_max(dim: Dim) -> int:
    """The largest value an extent can take."""
    return bind_dim(dim, None)


def bind_dim(dim: Dim, bindings: Mapping[str, int] | None) -> int:
    """The value of an extent under `bindings` (symbol name -> value); None means every symbol at its maximum.

    Raises KeyError for a symbol that `bindings` lacks.
    """
    if isinstance(dim, int):
        return dim
    value = dim.coef if isinstance(dim, SymProduct) else 1
    for s in symbols(dim):
        value *= s.max if bindings is None else bindings[s.name]
    return value
