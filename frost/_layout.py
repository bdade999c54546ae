"""Strides of the functional API's results, as arithmetic on shapes: the same code answers for real and fake tensors.

Works on ints and on torch's symbolic ints.
"""

from __future__ import annotations

from collections.abc import Sequence

Strides = tuple[int, ...]


def dim_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Dims from the outermost in memory to the innermost.

    A dim of extent 1 or stride 0 says nothing about the order: it stays beside its left neighbour, and the last dim
    stays innermost.
    """
    rank = len(shape)
    order: list[int] = []
    for dim in range(rank):
        if shape[dim] == 1 or stride[dim] == 0:
            continue
        at = len(order)
        while at > 0 and stride[order[at - 1]] < stride[dim]:
            at -= 1
        order.insert(at, dim)
    for dim in range(rank):
        if dim not in order:
            at = 0 if dim == 0 else order.index(dim - 1) + 1
            order.insert(len(order) if dim == rank - 1 else at, dim)
    return order


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Strides without gaps for dims stored in `order`, outermost first."""
    strides: list[int] = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * (1 if shape[dim] == 0 else shape[dim])
    return tuple(strides)


def laid_out_like(shape: Sequence[int], stride: Sequence[int], new_shape: Sequence[int]) -> Strides:
    """Gapless strides for `new_shape` with its dims in the memory order of a tensor of `shape` and `stride`."""
    return dense_strides(new_shape, dim_order(shape, stride))


def gradient_strides(shape: Sequence[int], stride: Sequence[int]) -> Strides:
    """The operand's own strides where it is dense and no element shares an address, row-major ones otherwise."""
    step = 1
    for dim in reversed(dim_order(shape, stride)):
        if shape[dim] != 1:
            if stride[dim] != step:
                return dense_strides(shape, range(len(shape)))
            step = step * shape[dim]
    return tuple(stride)
