"""Operands in awkward layouts, and outputs that notice stray writes.

An input built here is a view into a buffer whose every other element is poison (NaN): whoever reads past what is
logically there spoils the result. An output is a view into a buffer filled with canaries, and starts as NaN: unwritten
elements and stray writes both show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CANARY = 1234.0
NONSENSE_STRIDE = 987_654_321
"""What stands as the stride of a size-1 dim: nobody may multiply it into an address that matters."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory. `write` is False where elements share an address (inputs only)."""

    name: str
    strides: Callable[[Sequence[int]], tuple[int, ...]]
    offset: int = 0
    write: bool = True
    applies: Callable[[Sequence[int]], bool] = lambda shape: True

    def __str__(self) -> str:
        return self.name


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, acc = [], 1
    for extent in reversed(shape):
        strides.append(acc)
        acc *= max(1, extent)
    return tuple(reversed(strides))


def _permuted(order: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Strides of a tensor stored row-major with its axes in `order`."""
    def strides(shape: Sequence[int]) -> tuple[int, ...]:
        stored = row_major([shape[axis] for axis in order])
        return tuple(stored[order.index(axis)] for axis in range(len(shape)))
    return strides


def _swapped(shape: Sequence[int]) -> tuple[int, ...]:
    """Heads and sequence exchanged in memory: BSHD for [B, H, S, D], [H, T, D] for a packed [T, H, D]."""
    order = list(range(len(shape)))
    first = max(0, len(shape) - 3)
    order[first], order[first + 1] = order[first + 1], order[first]
    return _permuted(order)(shape)


def _last_outer(shape: Sequence[int]) -> tuple[int, ...]:
    """The last two axes exchanged in memory: x.transpose(-1, -2) of a row-major tensor."""
    n = len(shape)
    return _permuted([*range(n - 2), n - 1, n - 2])(shape)


def _packed_qkv(shape: Sequence[int]) -> tuple[int, ...]:
    """One of three equal slices of a [.., S, 3, H, D] (packed [T, 3, H, D]) projection."""
    if len(shape) == 3:
        _, h, d = shape
        return (3 * h * d, d, 1)
    _, h, s, d = shape
    return (s * 3 * h * d, d, 3 * h * d, 1)


def _pitched(pad: int) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Rows `pad` elements longer than what is in them."""
    return lambda shape: row_major([*shape[:-1], shape[-1] + pad])[:-1] + (1,)


def _scaled(factor: int) -> Callable[[Sequence[int]], tuple[int, ...]]:
    return lambda shape: tuple(factor * s for s in row_major(shape))


def _zero(axis: int) -> Callable[[Sequence[int]], tuple[int, ...]]:
    def strides(shape: Sequence[int]) -> tuple[int, ...]:
        out = list(row_major([1 if i == axis else extent for i, extent in enumerate(shape)]))
        out[axis] = 0
        return tuple(out)
    return strides


def _nonsense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(NONSENSE_STRIDE if extent == 1 else s for extent, s in zip(shape, row_major(shape)))


def _rank(*ranks: int) -> Callable[[Sequence[int]], bool]:
    return lambda shape: len(shape) in ranks


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (
    Layout("row_major", row_major),
    Layout("swapped", _swapped, applies=lambda shape: len(shape) >= 2),
    Layout("packed_qkv", _packed_qkv, applies=_rank(3, 4)),
    Layout("padded_pitch", _pitched(3), applies=lambda shape: len(shape) >= 1),
    Layout("padded_pitch_8", _pitched(8), applies=lambda shape: len(shape) >= 1),
    Layout("offset_1", row_major, offset=1),
    Layout("last_stride_2", _scaled(2), applies=lambda shape: len(shape) >= 1),
    Layout("last_dim_outer", _last_outer, applies=lambda shape: len(shape) >= 2),
    Layout("nonsense_size_1", _nonsense, applies=lambda shape: 1 in shape),
    Layout("stride_0_batch", _zero(0), write=False, applies=_rank(4)),
    Layout("stride_0_head", _zero(1), write=False, applies=_rank(3, 4)),
)}


def layouts_for(shape: Sequence[int], *, write: bool = False) -> list[Layout]:
    """The layouts that make sense for a shape; with `write`, those in which no two elements share an address."""
    return [x for x in LAYOUTS.values() if x.applies(shape) and (x.write or not write)]


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides))


def _view(buffer: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return torch.as_strided(buffer, tuple(shape), tuple(strides), offset)


def lay_out(x: Tensor, layout: Layout | str, *, margin: int = 16) -> Tensor:
    """The values of `x` in a layout, everything around and between them poisoned with NaN (dtypes that have one).

    Where the layout makes elements share an address, the first along that axis stands for all: compare with the
    returned tensor's own values, not with `x`.
    """
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    strides = layout.strides(x.shape)
    start = margin + layout.offset
    poison = math.nan if x.is_floating_point() else 0
    buffer = torch.full((start + _span(x.shape, strides) + margin,), poison, dtype=x.dtype, device=x.device)
    view = _view(buffer, x.shape, strides, start)
    target = view
    for axis, stride in enumerate(strides):
        if stride == 0 and x.shape[axis] > 1:
            target, x = target.narrow(axis, 0, 1), x.narrow(axis, 0, 1)
    target.copy_(x)
    return view


@dataclass
class CanaryBuffer:
    """An output tensor inside a buffer of canaries: `tensor` starts as NaN, `check_canaries` looks at all the rest."""

    tensor: Tensor
    buffer: Tensor
    name: str
    _inside: Tensor = field(repr=False)

    def check_canaries(self) -> None:
        """Raises AssertionError, naming the places, where anything outside the tensor was written."""
        touched = (self.buffer != CANARY) & ~self._inside
        if bool(touched.any()):
            places = touched.nonzero()[:8, 0].tolist()
            raise AssertionError(f"{self.name}: {int(touched.sum())} elements outside the tensor were written, at buffer "
                                 f"elements {places} (the tensor starts at {self.tensor.storage_offset()})")

    def check_written(self) -> None:
        """Raises AssertionError where the tensor still holds the NaN it started with."""
        left = torch.isnan(self.tensor)
        if bool(left.any()):
            raise AssertionError(f"{self.name}: {int(left.sum())} elements are NaN, first at {left.nonzero()[0].tolist()}: "
                                 "never written, or spoilt")


def output_like(
    shape: Sequence[int], dtype: torch.dtype, layout: Layout | str = "row_major", *, device: torch.device | str = "cpu",
    margin: int = 16, name: str = "output",
) -> CanaryBuffer:
    """A NaN-filled output of the given shape and layout with canaries before, behind and between its rows."""
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    if not layout.write:
        raise ValueError(f"{name}: given layout {layout}, in which elements share an address; expected a writable one")
    strides = layout.strides(shape)
    start = margin + layout.offset
    buffer = torch.full((start + _span(shape, strides) + margin,), CANARY, dtype=dtype, device=device)
    inside = torch.zeros_like(buffer, dtype=torch.bool)
    tensor = _view(buffer, shape, strides, start)
    if tensor.numel():
        _view(inside, shape, strides, start).fill_(True)
        tensor.fill_(math.nan)
    return CanaryBuffer(tensor, buffer, name, inside)


def check_canaries(*outputs: CanaryBuffer) -> None:
    """Check several outputs at once."""
    for output in outputs:
        output.check_canaries()


def pairwise(names: Sequence[str], choices: Sequence[Sequence[str]], seed: int = 0) -> list[dict[str, str]]:
    """Rows of {operand: layout} such that every pair of (operand, layout) choices occurs in some row (greedy)."""
    pick = torch.Generator().manual_seed(seed)
    open_pairs = {((a, x), (b, y)) for a in range(len(names)) for b in range(a + 1, len(names))
                  for x in choices[a] for y in choices[b]}
    rows = []
    while open_pairs:
        best, best_gain = None, -1
        (a, x), (b, y) = min(open_pairs)
        for _ in range(20):
            row = [c[int(torch.randint(len(c), (1,), generator=pick))] for c in choices]
            row[a], row[b] = x, y
            gain = sum(row[i] == u and row[j] == w for (i, u), (j, w) in open_pairs)
            if gain > best_gain:
                best, best_gain = row, gain
        assert best is not None
        open_pairs = {p for p in open_pairs if not (best[p[0][0]] == p[0][1] and best[p[1][0]] == p[1][1])}
        rows.append(dict(zip(names, best)))
    return rows
