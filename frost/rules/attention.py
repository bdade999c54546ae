"""The rules of `sdpa` and `sdpa_backward`: one table for both, so that backward accepts what forward accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from descriptors import ALIGNMENTS, Dim, DType, TensorDesc
from frost.graph import OpNode
from frost.opset import ATTENTION, stats_dtype
from frost.rules import FP32_MAX, Bad, Rule, is_count, is_number, when

# The axes of every operand, [dense, packed]. Packed, Sq and Sk are the token totals.
_AXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "q": (("B", "Hq", "Sq", "D"), ("Sq", "Hq", "D")),
    "k": (("B", "Hk", "Sk", "D"), ("Sk", "Hk", "D")),
    "v": (("B", "Hk", "Sk", "Dv"), ("Sk", "Hk", "Dv")),
    **dict.fromkeys(("o", "do"), (("B", "Hq", "Sq", "Dv"), ("Sq", "Hq", "Dv"))),
    **dict.fromkeys(("lse", "dlse"), (("B", "Hq", "Sq"), ("Sq", "Hq"))),
    "sink": (("Hq",), ("Hq",)),
    **dict.fromkeys(("seq_len_q", "seq_len_kv"), (("B",), ("B",))),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), (("B+1",), ("B+1",))),
}
# rule, axis, the operand that says it, the operands that follow.
_AGREE: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("batch", "B", "q", ("k", "v", "o", "do", "lse", "dlse", "seq_len_q", "seq_len_kv")),
    ("head_dim", "D", "q", ("k",)),
    ("kv_seqlen", "Sk", "k", ("v",)),
    ("kv_heads", "Hk", "k", ("v",)),
    ("query_heads", "Hq", "q", ("o", "do", "lse", "dlse", "sink")),
    ("query_seqlen", "Sq", "q", ("o", "do", "lse", "dlse")),
    ("head_dim_v", "Dv", "v", ("o", "do")),
    ("offsets_length", "B+1", "cu_seqlens_q", ("cu_seqlens_kv",)),
)
_LENGTHS = ("seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv")


class View:
    """An attention node's operands by axis; None where an operand is absent or has another rank."""

    def __init__(self, node: OpNode) -> None:
        self.node, self.attrs = node, node.attrs
        self.packed = "cu_seqlens_q" in node.inputs or "cu_seqlens_kv" in node.inputs

    def desc(self, name: str) -> TensorDesc | None:
        tensor = self.node.inputs.get(name)
        return None if tensor is None else tensor.desc

    def label(self, name: str) -> str:
        """The operand, and the tensor in its place where it has another name."""
        tensor = self.node.inputs.get(name)
        return name if tensor is None or tensor.name == name else f"{name} (tensor {tensor.name!r})"

    def axes(self, name: str) -> tuple[str, ...]:
        return _AXES[name][self.packed]

    def extent(self, name: str, axis: str) -> Dim | None:
        desc = self.desc(name)
        if desc is None or axis not in self.axes(name) or desc.rank != len(self.axes(name)):
            return None
        return desc.shape[self.axes(name).index(axis)]


def _shape(desc: TensorDesc | None) -> str:
    return "[" + ", ".join(getattr(d, "name", str(d)) for d in desc.shape) + "]" if desc else "nothing"


# ---- options


def _flags(v: View) -> Iterator[Bad]:
    for name in ("causal", "stats", "dbias", "dsink", "deterministic"):
        value = v.attrs.get(name, False)
        yield from when(not isinstance(value, bool), Bad(name, repr(value), "True or False"))


def _align(v: View) -> Iterator[Bad]:
    value = v.attrs["align"]
    yield from when(value not in ALIGNMENTS, Bad("align", repr(value), " or ".join(map(repr, ALIGNMENTS))))


def _window(v: View) -> Iterator[Bad]:
    window = v.attrs["window"]
    if not isinstance(window, tuple) or len(window) != 2:
        yield Bad("window", repr(window), f"a pair (left, right) such as ({window if is_count(window) else 5}, None)")
        return
    for side, value in zip(("left", "right"), window):
        yield from when(value is not None and not is_count(value),
                        Bad(f"window {side}", repr(value), "None or an int in 0..2147483647"))


def _causal_window(v: View) -> Iterator[Bad]:
    window = v.attrs["window"]
    right = window[1] if isinstance(window, tuple) and len(window) == 2 else None
    yield from when(v.attrs["causal"] is True and is_count(right) and right != 0,
                    Bad("window right", right, "None or 0 beside causal=True"))


def _scale(v: View) -> Iterator[Bad]:
    value = v.attrs["scale"]
    yield from when(value is not None and not is_number(value, FP32_MAX), Bad("scale", repr(value), "None or a finite number"))


def _softcap(v: View) -> Iterator[Bad]:
    value = v.attrs["softcap"]
    yield from when(value is not None and not (is_number(value, FP32_MAX) and value >= 0),
                    Bad("softcap", repr(value), "None or a finite number >= 0"))


def _max_seqlen(v: View) -> Iterator[Bad]:
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        value = v.attrs[name]
        yield from when(value is not None and not is_count(value), Bad(name, repr(value), "None or an int >= 0"))


def _max_seqlen_packed(v: View) -> Iterator[Bad]:
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        yield from when(v.attrs[name] is not None and not v.packed, Bad(name, v.attrs[name], "None without cu_seqlens"))


def _grads(v: View) -> Iterator[Bad]:
    for name in v.attrs["grads"]:
        yield from when(name not in ("q", "k", "v"), Bad("grads", repr(name), "'q', 'k' or 'v'"))


def _nothing_asked(v: View) -> Iterator[Bad]:
    yield from when(not v.node.outputs, Bad("grads", "no gradient at all", "at least one of q, k, v, bias, sink"))


def _asked_for(option: str) -> Callable[[View], Iterator[Bad]]:
    def check(v: View) -> Iterator[Bad]:
        yield from when(v.attrs["d" + option] is True and v.desc(option) is None,
                        Bad("d" + option, "True", f"a {option} to take the gradient of"))
    return check


def _has_lse(v: View) -> Iterator[Bad]:
    yield from when(v.desc("lse") is None, Bad("lse", "None", "the forward's statistics"))


# ---- packing and padding


def _both_offsets(v: View) -> Iterator[Bad]:
    names = ("cu_seqlens_q", "cu_seqlens_kv")
    for name, other in zip(names, reversed(names)):
        yield from when(v.packed and v.desc(name) is None, Bad(name, "None", f"offsets, since {other} is given"))


def _packed_padding(v: View) -> Iterator[Bad]:
    for name in ("seq_len_q", "seq_len_kv"):
        yield from when(v.packed and v.desc(name) is not None,
                        Bad(v.label(name), "padding lengths", "none beside cu_seqlens"))


def _some_offset(v: View) -> Iterator[Bad]:
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        yield from when(v.extent(name, "B+1") == 0, Bad(v.label(name), "shape [0]", "[B + 1], at least one offset"))


# ---- shapes


# The operands whose rank says which layout is meant.
_LAID_OUT = ("q", "k", "v", "o", "do")


def _rank(names: tuple[str, ...]) -> Callable[[View], Iterator[Bad]]:
    def check(v: View) -> Iterator[Bad]:
        for name in names:
            desc = v.desc(name)
            if desc is not None and desc.rank != len(v.axes(name)):
                yield Bad(v.label(name), f"shape {_shape(desc)}", f"[{', '.join(v.axes(name))}]")
    return check


def _agreement(axis: str, source: str, followers: tuple[str, ...]) -> Callable[[View], Iterator[Bad]]:
    def check(v: View) -> Iterator[Bad]:
        want = v.extent(source, axis)
        for name in followers:
            got = v.extent(name, axis)
            if want is not None and got is not None and got != want:
                yield Bad(v.label(name), f"{axis} = {got} (shape {_shape(v.desc(name))})",
                          f"{axis} = {want} as in {v.label(source)} (shape {_shape(v.desc(source))})")
    return check


def _positive(v: View) -> Iterator[Bad]:
    for name, axis in (("q", "Hq"), ("k", "Hk"), ("q", "D"), ("v", "Dv")):
        value = v.extent(name, axis)
        if value is not None and not (isinstance(value, int) and value >= 1):
            yield Bad(v.label(name), f"{axis} = {value}", "a number of at least 1")


def _groups(v: View) -> Iterator[Bad]:
    hq, hk = v.extent("q", "Hq"), v.extent("k", "Hk")
    if isinstance(hq, int) and isinstance(hk, int) and hq > 0 and hk > 0:
        yield from when(hq % hk != 0, Bad(
            v.label("q"), f"Hq = {hq} (shape {_shape(v.desc('q'))})",
            f"a multiple of Hk = {hk} as in {v.label('k')} (shape {_shape(v.desc('k'))})"))


def _on_scores(name: str) -> Callable[[View], Iterator[Bad]]:
    """bias and mask: 2 to 4 dims that broadcast to the scores; packed, in positions of the sequence."""
    def check(v: View) -> Iterator[Bad]:
        desc = v.desc(name)
        if desc is None:
            return
        axes, bounds = _score_axes(v)
        expected = f"2 to 4 dims, broadcastable to [{', '.join(axes)}]"
        if not 2 <= desc.rank <= 4:
            yield Bad(v.label(name), f"shape {_shape(desc)}", expected)
            return
        for dim, bound in zip(reversed(desc.shape), reversed(bounds)):
            if dim != 1 and bound is not None and dim != bound:
                yield Bad(v.label(name), f"shape {_shape(desc)}", expected)
                return
    return check


def _score_axes(v: View) -> tuple[list[str], list[Dim | None]]:
    """The names of the scores' axes with their extents, and the extents (None = any)."""
    bounds: list[Dim | None]
    if v.packed:
        offsets = v.extent("cu_seqlens_q", "B+1")
        batch = offsets - 1 if isinstance(offsets, int) else None
        bounds = [batch, v.extent("q", "Hq"), v.attrs["max_seqlen_q"], v.attrs["max_seqlen_kv"]]
        names = ["B", "Hq", "max_seqlen_q", "max_seqlen_kv"]
    else:
        bounds = [v.extent("q", "B"), v.extent("q", "Hq"), v.extent("q", "Sq"), v.extent("k", "Sk")]
        names = ["B", "Hq", "Sq", "Sk"]
    return [n if b is None else f"{n}={getattr(b, 'name', b)}" for n, b in zip(names, bounds)], bounds


# ---- dtypes


def _floating_io(v: View) -> Iterator[Bad]:
    q = v.node.inputs["q"].desc
    yield from when(not q.dtype.is_floating, Bad(v.label("q"), f"dtype {q.dtype}", "a floating dtype"))


def _io_dtype(v: View) -> Iterator[Bad]:
    q = v.node.inputs["q"].desc
    if not q.dtype.is_floating:  # nothing to be equal to
        return
    for name in ("k", "v", "o", "do"):
        desc = v.desc(name)
        if desc is not None and desc.dtype is not q.dtype:
            yield Bad(v.label(name), f"dtype {desc.dtype}", f"{q.dtype} as q")


def _one_of(names: tuple[str, ...], allowed: Callable[[DType], tuple[DType, ...]]) -> Callable[[View], Iterator[Bad]]:
    """Operands whose dtype must be one of `allowed`(q's dtype)."""
    def check(v: View) -> Iterator[Bad]:
        wanted = allowed(v.node.inputs["q"].desc.dtype)
        for name in names:
            desc = v.desc(name)
            if desc is not None and desc.dtype not in wanted:
                yield Bad(v.label(name), f"dtype {desc.dtype}", " or ".join(map(str, dict.fromkeys(wanted))))
    return check


def _bias_dtypes(io: DType) -> tuple[DType, ...]:
    usual = (DType.F32, DType.BF16, DType.F16)
    return (DType.F64, *usual) if io is DType.F64 else usual


# ---- the table


_BOTH, _BACKWARD = frozenset(ATTENTION), frozenset({"sdpa_backward"})


def _rule(name: str, check: Callable[[View], Iterator[Bad]], hint: str = "", ops: frozenset[str] = _BOTH) -> Rule:
    def on_node(node: Any) -> Iterator[Bad]:
        return check(View(node))
    return Rule(name, ops, on_node, hint)


_HINTS = {
    "kv_seqlen": "k and v are indexed by the same keys",
    "kv_heads": "repeat or slice the heads of one of them",
}

ATTENTION_RULES: tuple[Rule, ...] = (
    _rule("flags", _flags),
    _rule("align", _align),
    _rule("window", _window, "None means unbounded, not -1"),
    _rule("causal_window", _causal_window, "causal means right = 0; for a wider band leave causal out"),
    _rule("scale", _scale),
    _rule("softcap", _softcap, "None or 0 is off"),
    _rule("max_seqlen", _max_seqlen),
    _rule("max_seqlen_packed", _max_seqlen_packed, "dense lengths are the extents of q and k"),
    _rule("grads", _grads, ops=_BACKWARD),
    _rule("nothing_asked", _nothing_asked, ops=_BACKWARD),
    _rule("dbias", _asked_for("bias"), ops=_BACKWARD),
    _rule("dsink", _asked_for("sink"), ops=_BACKWARD),
    _rule("lse", _has_lse, "make the forward with stats=True and pass its lse", ops=_BACKWARD),
    _rule("both_offsets", _both_offsets, "packed attention needs cu_seqlens_q and cu_seqlens_kv"),
    _rule("packed_padding", _packed_padding, "shorten the sequences through their offsets instead"),
    _rule("some_offset", _some_offset),
    _rule("rank", _rank(_LAID_OUT), "rank 3 is the packed layout and needs cu_seqlens_q and cu_seqlens_kv, rank 4 is dense"),
    _rule("other_rank", _rank(tuple(name for name in _AXES if name not in _LAID_OUT))),
    *(_rule(name, _agreement(axis, source, followers), _HINTS.get(name, ""))
      for name, axis, source, followers in _AGREE),
    _rule("positive", _positive),
    _rule("groups", _groups),
    _rule("bias_shape", _on_scores("bias")),
    _rule("mask_shape", _on_scores("mask")),
    _rule("io_floating", _floating_io),
    _rule("io_dtype", _io_dtype, "cast them to one dtype first"),
    _rule("stats_dtype", _one_of(("lse", "dlse"), lambda io: (stats_dtype(io),))),
    _rule("length_dtype", _one_of(_LENGTHS, lambda io: (DType.I32, DType.I64))),
    _rule("bias_dtype", _one_of(("bias",), _bias_dtypes)),
    _rule("mask_dtype", _one_of(("mask",), lambda io: (DType.BOOL,)), "True keeps; what is added to scores is a bias"),
    _rule("sink_dtype", _one_of(("sink",), lambda io: (DType.F32, io))),
)
