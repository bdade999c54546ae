"""The rules of native sparse attention: one table, so that a backward accepts what its forward accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from descriptors import Dim, DType, TensorDesc
from descriptors.nsa_ops import compressed_blocks, packed_compressed_blocks
from frost.graph import OpNode
from frost.nsa_opset import NSA_ATTENTION, NSA_OPS
from frost.opset import stats_dtype
from frost.rules import FP32_MAX, Bad, Rule, is_count, is_number, when

_COMPRESSED = frozenset({"nsa_compressed_attention", "nsa_compressed_attention_backward"})
_COMPRESS = frozenset({"nsa_compress", "nsa_compress_backward"})
_SELECTION = frozenset({"nsa_selection", "nsa_selection_backward"})
_TOPK = frozenset({"nsa_topk"})
_ATTENTION = frozenset(NSA_ATTENTION)
_BACKWARD = frozenset(op for op in NSA_OPS if op.endswith("_backward"))
_ALL = frozenset(NSA_OPS)

# The axes of every operand, [dense, packed].
_ROWS = (("B", "Hq", "Tq", "Dv"), ("Tq", "Hq", "Dv"))
_AXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "q": (("B", "Hq", "Tq", "D"), ("Tq", "Hq", "D")),
    "k": (("B", "Hk", "Tk", "D"), ("Tk", "Hk", "D")),
    "v": (("B", "Hk", "Tk", "Dv"), ("Tk", "Hk", "Dv")),
    **dict.fromkeys(("o", "do"), _ROWS),
    **dict.fromkeys(("lse", "dlse"), (("B", "Hq", "Tq"), ("Tq", "Hq"))),
    "block_indices": (("B", "Hk", "Tq", "S"), ("Tq", "Hk", "S")),
    "block_counts": (("B", "Hk", "Tq"), ("Tq", "Hk")),
    "importance": (("B", "Hk", "Tq", "M"), ("Tq", "Hk", "M")),
    "x": (("B", "Hk", "T", "D"), ("T", "Hk", "D")),
    "dcompressed": (("B", "Hk", "N", "Do"), ("N", "Hk", "Do")),
    "cu_seqlens": (("B+1",), ("B+1",)),
}
_AGREE: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("nsa_batch", "B", "q", ("k", "v", "o", "do", "lse", "dlse", "block_indices", "block_counts")),
    ("nsa_head_dim", "D", "q", ("k",)),
    ("nsa_kv_rows", "Tk", "k", ("v",)),
    ("nsa_kv_heads", "Hk", "k", ("v", "block_indices", "block_counts")),
    ("nsa_query_heads", "Hq", "q", ("o", "do", "lse", "dlse")),
    ("nsa_query_rows", "Tq", "q", ("o", "do", "lse", "dlse", "block_indices", "block_counts")),
    ("nsa_head_dim_v", "Dv", "v", ("o", "do")),
    ("nsa_compress_batch", "B", "x", ("dcompressed",)),
    ("nsa_compress_heads", "Hk", "x", ("dcompressed",)),
)


class View:
    """A node's operands by axis; None where an operand is absent or has another rank."""

    def __init__(self, node: OpNode) -> None:
        self.node, self.attrs = node, node.attrs
        self.packed = "cu_seqlens" in node.inputs

    def desc(self, name: str) -> TensorDesc | None:
        tensor = self.node.inputs.get(name)
        return None if tensor is None else tensor.desc

    def label(self, name: str) -> str:
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
    for name in ("stats", "importance", "deterministic"):
        value = v.attrs.get(name, False)
        yield from when(not isinstance(value, bool), Bad(name, repr(value), "True or False"))


def _scale(v: View) -> Iterator[Bad]:
    value = v.attrs["scale"]
    yield from when(value is not None and not is_number(value, FP32_MAX), Bad("scale", repr(value), "None or a finite number"))


def _sizes(v: View) -> Iterator[Bad]:
    for name in ("block_size", "block_len", "stride", "n_blocks"):
        value = v.attrs.get(name, 1)
        yield from when(not (is_count(value) and value >= 1), Bad(name, repr(value), "an int of at least 1"))
    for name in ("n_init", "n_local", "seqlen_kv"):
        value = v.attrs.get(name, 0)
        yield from when(not is_count(value), Bad(name, repr(value), "an int of at least 0"))


def _overlap(v: View) -> Iterator[Bad]:
    length, stride = v.attrs["block_len"], v.attrs["stride"]
    yield from when(is_count(length) and is_count(stride) and length < stride,
                    Bad("block_len", length, f"at least stride = {stride}"))


def _forced(v: View) -> Iterator[Bad]:
    first, local, total = (v.attrs[n] for n in ("n_init", "n_local", "n_blocks"))
    if is_count(first) and is_count(local) and is_count(total):
        yield from when(first + local > total, Bad("n_blocks", total, f"at least n_init + n_local = {first + local}"))


def _grads(v: View) -> Iterator[Bad]:
    known = ("x", "weights") if v.node.op in _COMPRESS else ("q", "k", "v")
    for name in v.attrs["grads"]:
        yield from when(name not in known, Bad("grads", repr(name), " or ".join(map(repr, known))))


def _nothing_asked(v: View) -> Iterator[Bad]:
    yield from when(not v.node.outputs, Bad("grads", "no gradient at all", "at least one that can be given"))


def _has_lse(v: View) -> Iterator[Bad]:
    yield from when(v.desc("lse") is None, Bad("lse", "None", "the forward's statistics"))


# ---- shapes


def _rank(v: View) -> Iterator[Bad]:
    for name, tensor in v.node.inputs.items():
        if name in _AXES and tensor.desc.rank != len(v.axes(name)):
            yield Bad(v.label(name), f"shape {_shape(tensor.desc)}", f"[{', '.join(v.axes(name))}]")


def _some_offset(v: View) -> Iterator[Bad]:
    yield from when(v.extent("cu_seqlens", "B+1") == 0, Bad(v.label("cu_seqlens"), "shape [0]", "[B + 1]"))


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
    for name, axis in (("q", "Hq"), ("k", "Hk"), ("q", "D"), ("v", "Dv"), ("x", "Hk"), ("x", "D")):
        value = v.extent(name, axis)
        if value is not None and not (isinstance(value, int) and value >= 1):
            yield Bad(v.label(name), f"{axis} = {value}", "a number of at least 1")


def _slots(v: View) -> Iterator[Bad]:
    value = v.extent("block_indices", "S")
    yield from when(value is not None and not isinstance(value, int), Bad(v.label("block_indices"), f"S = {value}", "a number"))


def _groups(v: View) -> Iterator[Bad]:
    hq, hk = v.extent("q", "Hq"), v.extent("k", "Hk")
    if isinstance(hq, int) and isinstance(hk, int) and hq > 0 and hk > 0:
        yield from when(hq % hk != 0, Bad(v.label("q"), f"Hq = {hq}", f"a multiple of Hk = {hk}"))


def _packed_rows(v: View) -> Iterator[Bad]:
    q, k = v.extent("q", "Tq"), v.extent("k", "Tk")
    yield from when(v.packed and q is not None and k is not None and q != k, Bad(
        v.label("k"), f"{k} tokens", f"{q} as q: packed queries and keys share cu_seqlens"))


def _number_of_tokens(v: View) -> Iterator[Bad]:
    for name, axis in (("x", "T"), ("dcompressed", "N")):
        value = v.extent(name, axis)
        yield from when(value is not None and not isinstance(value, int), Bad(v.label(name), f"{axis} = {value}", "a number"))


def _compressed_rows(v: View) -> Iterator[Bad]:
    """Keys and gradients that come from a compression have its number of rows."""
    length, stride = v.attrs["block_len"], v.attrs["stride"]
    if not (is_count(length) and is_count(stride) and stride >= 1 and length >= 1):
        return
    if v.node.op in _COMPRESS:
        got, tokens, name = v.extent("dcompressed", "N"), v.extent("x", "T"), "dcompressed"
    else:
        got, name = v.extent("k", "Tk"), "k"
        tokens = v.extent("q", "Tq") if v.packed else v.attrs["seqlen_kv"]
    if not is_count(tokens, 2**62) or not isinstance(got, int) or not isinstance(tokens, int):
        return
    want = packed_compressed_blocks(tokens, stride) if v.packed else compressed_blocks(tokens, length, stride)
    yield from when(got != want, Bad(
        v.label(name), f"{got} compressed blocks (shape {_shape(v.desc(name))})",
        f"{want}: blocks of {length} tokens every {stride} of {tokens}"))


def _block_count(v: View) -> Iterator[Bad]:
    m, size, tokens = v.extent("importance", "M"), v.attrs["block_size"], v.attrs["seqlen_kv"]
    if is_count(size) and size >= 1 and is_count(tokens) and m is not None:
        want = -(-tokens // size)
        yield from when(m != want, Bad(v.label("importance"), f"M = {m} (shape {_shape(v.desc('importance'))})",
                                       f"M = {want}: blocks of {size} in {tokens} tokens"))


def _weights(v: View) -> Iterator[Bad]:
    weights, d, length = v.desc("weights"), v.extent("x", "D"), v.attrs["block_len"]
    if weights is None:
        yield from when("weights" in v.attrs.get("grads", ()), Bad("grads", "'weights'", "weights to take the gradient of"))
        return
    width = weights.shape[1:2]
    fine = (weights.rank == 2 and width[0] in (1, d) or weights.rank == 3 and width[0] == d) and weights.shape[0] == length
    yield from when(not fine, Bad(v.label("weights"), f"shape {_shape(weights)}",
                                  f"[{length}, 1 or {d}] or [{length}, {d}, D']"))


def _gradient_width(v: View) -> Iterator[Bad]:
    got, d, weights = v.extent("dcompressed", "Do"), v.extent("x", "D"), v.desc("weights")
    want = weights.shape[-1] if weights is not None and weights.rank == 3 else d
    yield from when(got is not None and want is not None and got != want, Bad(
        v.label("dcompressed"), f"head dim {got}", f"{want}"))


# ---- dtypes


def _io_dtype(v: View) -> Iterator[Bad]:
    first = "q" if "q" in v.node.inputs else "x"
    io = v.node.inputs[first].desc.dtype
    yield from when(not io.is_floating, Bad(v.label(first), f"dtype {io}", "a floating dtype"))
    for name in ("k", "v", "o", "do", "dcompressed"):
        desc = v.desc(name)
        if desc is not None and desc.dtype is not io:
            yield Bad(v.label(name), f"dtype {desc.dtype}", f"{io} as {first}")


def _typed(names: tuple[str, ...], allowed: Callable[[View], tuple[DType, ...]]) -> Callable[[View], Iterator[Bad]]:
    def check(v: View) -> Iterator[Bad]:
        for name in names:
            desc = v.desc(name)
            wanted = allowed(v)
            if desc is not None and desc.dtype not in wanted:
                yield Bad(v.label(name), f"dtype {desc.dtype}", " or ".join(map(str, dict.fromkeys(wanted))))
    return check


def _index(v: View) -> tuple[DType, ...]:
    return (DType.I32, DType.I64)


def _stats(v: View) -> tuple[DType, ...]:
    return (stats_dtype(v.node.inputs["q"].desc.dtype),)


def _weight_types(v: View) -> tuple[DType, ...]:
    return (v.node.inputs["x"].desc.dtype, DType.F32)


def _importance_types(v: View) -> tuple[DType, ...]:
    return (DType.F32, DType.F64)


# ---- the table


def _rule(name: str, check: Callable[[View], Iterator[Bad]], hint: str = "", ops: frozenset[str] = _ALL) -> Rule:
    def on_node(node: Any) -> Iterator[Bad]:
        return check(View(node))
    return Rule(name, ops, on_node, hint)


NSA_RULES: tuple[Rule, ...] = (
    _rule("nsa_flags", _flags),
    _rule("nsa_scale", _scale, ops=_ATTENTION),
    _rule("nsa_sizes", _sizes),
    _rule("nsa_overlap", _overlap, "blocks must leave no token out", _COMPRESS | _COMPRESSED),
    _rule("nsa_forced", _forced, "forced blocks take places of the chosen ones", _TOPK),
    _rule("nsa_grads", _grads, ops=_BACKWARD),
    _rule("nsa_nothing_asked", _nothing_asked, ops=_BACKWARD),
    _rule("nsa_lse", _has_lse, "make the forward with stats=True and pass its lse", _ATTENTION & _BACKWARD),
    _rule("nsa_rank", _rank, "the packed layout needs cu_seqlens, the dense one has no such option"),
    _rule("nsa_some_offset", _some_offset),
    *(_rule(name, _agreement(axis, source, followers)) for name, axis, source, followers in _AGREE),
    _rule("nsa_positive", _positive),
    _rule("nsa_slots", _slots, ops=_SELECTION),
    _rule("nsa_groups", _groups, ops=_ATTENTION),
    _rule("nsa_packed_rows", _packed_rows, ops=_SELECTION),
    _rule("nsa_number_of_tokens", _number_of_tokens, "how many blocks there are must be known", _COMPRESS),
    _rule("nsa_compressed_rows", _compressed_rows, "use the block_len, stride and seqlen_kv of the compression",
          _COMPRESSED | _COMPRESS),
    _rule("nsa_block_count", _block_count, "use the block_size and seqlen_kv of the importance", _TOPK),
    _rule("nsa_weights", _weights, ops=_COMPRESS),
    _rule("nsa_gradient_width", _gradient_width, ops=_COMPRESS),
    _rule("nsa_io_dtype", _io_dtype, "cast them to one dtype first", _ATTENTION | _COMPRESS),
    _rule("nsa_stats_dtype", _typed(("lse", "dlse"), _stats), ops=_ATTENTION),
    _rule("nsa_index_dtype", _typed(("block_indices", "block_counts", "cu_seqlens"), _index)),
    _rule("nsa_weights_dtype", _typed(("weights",), _weight_types), ops=_COMPRESS),
    _rule("nsa_importance_dtype", _typed(("importance",), _importance_types), ops=_TOPK),
)
