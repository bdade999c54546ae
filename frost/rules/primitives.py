"""The rules of the primitive ops."""

from __future__ import annotations

from collections.abc import Iterator

from descriptors import DType, TensorDesc
from descriptors.dims import multiply
from descriptors.tensor import MAX_RANK
from frost.graph import OpNode
from frost.opset import OPS, broadcast, can_broadcast
from frost.rules import Bad, Rule, is_number, when

_MOVES = frozenset({"cast", "transpose", "reshape", "zeros_like"})
_PRIMITIVES = frozenset(name for name, spec in OPS.items() if spec.results == ("out",))
_ELEMENTWISE = frozenset({"add", "sub", "mul", "where", "mask_fill"})
_BACKWARDS = frozenset({"softmax_backward", "sigmoid_backward", "tanh_backward"})
# Operands that select values instead of being computed with.
_MASK_FIELD = {"where": "x", "mask_fill": "y"}


def _operands(node: OpNode) -> dict[str, TensorDesc]:
    return {name: t.desc for name, t in node.inputs.items()}


def _label(node: OpNode, name: str) -> str:
    return f"{name} (tensor {node.inputs[name].name!r})"


def _shape(desc: TensorDesc) -> str:
    return "[" + ", ".join(getattr(d, "name", str(d)) for d in desc.shape) + "]"


def _values(node: OpNode) -> dict[str, TensorDesc]:
    """The operands that are computed with."""
    return {name: d for name, d in _operands(node).items() if name != _MASK_FIELD.get(node.op)}


def _floating(node: OpNode) -> Iterator[Bad]:
    for name, desc in _values(node).items():
        yield from when(not desc.dtype.is_floating, Bad(_label(node, name), f"dtype {desc.dtype}", "a floating dtype"))


def _equal_dtypes(node: OpNode) -> Iterator[Bad]:
    values = _values(node)
    first = next(iter(values))
    for name, desc in values.items():
        yield from when(desc.dtype is not values[first].dtype, Bad(
            _label(node, name), f"dtype {desc.dtype}", f"{values[first].dtype} as {_label(node, first)}"))


def _mask(node: OpNode) -> Iterator[Bad]:
    name = _MASK_FIELD[node.op]
    desc = _operands(node)[name]
    yield from when(desc.dtype is not DType.BOOL, Bad(_label(node, name), f"dtype {desc.dtype}", "bool"))


def _broadcasts(node: OpNode) -> Iterator[Bad]:
    operands = _operands(node)
    onto = broadcast(*(d.shape for d in operands.values()))
    for name, desc in operands.items():
        if not can_broadcast(desc.shape, onto):
            others = " and ".join(f"{_label(node, n)} {_shape(d)}" for n, d in operands.items() if n != name)
            yield Bad(_label(node, name), f"shape {_shape(desc)}", f"one that broadcasts with {others}")
            return


def _matmul_rank(node: OpNode) -> Iterator[Bad]:
    for name, desc in _operands(node).items():
        yield from when(desc.rank < 2, Bad(_label(node, name), f"shape {_shape(desc)}", "rank 2 or more"))


def _matmul_inner(node: OpNode) -> Iterator[Bad]:
    a, b = _operands(node).values()
    if a.rank >= 2 and b.rank >= 2:
        yield from when(a.shape[-1] != b.shape[-2], Bad(
            _label(node, "y"), f"shape {_shape(b)}",
            f"{a.shape[-1]} rows, the columns of {_label(node, 'x')} {_shape(a)}"))


def _matmul_batch(node: OpNode) -> Iterator[Bad]:
    a, b = (d.shape[:-2] for d in _operands(node).values())
    onto = broadcast(a, b)
    yield from when(not (can_broadcast(a, onto) and can_broadcast(b, onto)), Bad(
        _label(node, "y"), f"leading dims {list(b)}", f"dims that broadcast with {list(a)} of {_label(node, 'x')}"))


def _axis(node: OpNode) -> Iterator[Bad]:
    axis, rank = node.attrs["axis"], node.inputs["x"].desc.rank
    ok = isinstance(axis, int) and not isinstance(axis, bool) and -rank <= axis < rank
    yield from when(not ok, Bad("axis", repr(axis), f"an int in {-rank}..{rank - 1}" if rank else "a tensor with dims"))


def _factor(node: OpNode) -> Iterator[Bad]:
    value = node.attrs["value"]
    yield from when(not is_number(value), Bad("s", repr(value), "a finite number"))


def _perm(node: OpNode) -> Iterator[Bad]:
    perm, x = node.attrs["perm"], node.inputs["x"].desc
    yield from when(not all(isinstance(p, int) for p in perm) or sorted(perm) != list(range(x.rank)),
                    Bad("perm", list(perm), f"every dim of {_label(node, 'x')} {_shape(x)} once"))


def _reshape(node: OpNode) -> Iterator[Bad]:
    shape, x, out = tuple(node.attrs["shape"]), node.inputs["x"].desc, node.outputs["out"].desc
    ok = len(shape) <= MAX_RANK and shape.count(-1) <= 1 and all(not isinstance(d, int) or d >= -1 for d in shape)
    if ok and -1 in shape:  # 0 elements leave a -1 undetermined
        ok = multiply(d for d in shape if d != -1) != 0
    yield from when(not ok or multiply(out.shape) != multiply(x.shape), Bad(
        "shape", [getattr(d, "name", d) for d in shape],
        f"the extents of {multiply(x.shape)} elements, at most one of them -1"))


def _sum_to(node: OpNode) -> Iterator[Bad]:
    x, out = node.inputs["x"].desc, node.outputs["out"].desc
    yield from when(not can_broadcast(out.shape, x.shape), Bad(
        "shape", _shape(out), f"one that broadcasts to {_label(node, 'x')} {_shape(x)}"))


def _same_shapes(node: OpNode) -> Iterator[Bad]:
    x, y = _operands(node).values()
    yield from when(x.shape != y.shape, Bad(
        _label(node, "y"), f"shape {_shape(y)}", f"{_shape(x)} as {_label(node, 'x')}"))


PRIMITIVE_RULES: tuple[Rule, ...] = (
    Rule("floating", _PRIMITIVES - _MOVES, _floating, "cast it first"),
    Rule("equal_dtypes", _PRIMITIVES - _MOVES, _equal_dtypes, "cast one of them first"),
    Rule("mask_operand", frozenset(_MASK_FIELD), _mask),
    Rule("broadcasts", _ELEMENTWISE, _broadcasts),
    Rule("matmul_rank", frozenset({"matmul"}), _matmul_rank),
    Rule("matmul_inner", frozenset({"matmul"}), _matmul_inner),
    Rule("matmul_batch", frozenset({"matmul"}), _matmul_batch),
    Rule("axis", frozenset({"softmax", "softmax_backward"}), _axis),
    Rule("factor", frozenset({"scale"}), _factor),
    Rule("perm", frozenset({"transpose"}), _perm),
    Rule("reshape", frozenset({"reshape"}), _reshape),
    Rule("sum_to", frozenset({"sum_to"}), _sum_to),
    Rule("same_shapes", _BACKWARDS, _same_shapes),
)
