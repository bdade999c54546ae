"""Every validation rule by a pair of graphs: one that breaks the rule, and the nearest one that keeps it."""

from __future__ import annotations

import math

import pytest

from descriptors import DType, sym
from frost.errors import GraphError
from frost.graph import Graph, Output
from frost.validate import RULES, validate, violations

DENSE = {
    "q": (2, 4, 5, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, 16), "o": (2, 4, 5, 16), "do": (2, 4, 5, 16), "lse": (2, 4, 5),
    "dlse": (2, 4, 5), "bias": (1, 4, 5, 6), "mask": (5, 6), "sink": (4,), "seq_len_q": (2,), "seq_len_kv": (2,),
}
PACKED = {
    "q": (7, 4, 8), "k": (9, 2, 8), "v": (9, 2, 16), "o": (7, 4, 16), "do": (7, 4, 16), "lse": (7, 4), "dlse": (7, 4),
    "bias": (2, 4, 3, 5), "mask": (1, 1, 3, 1), "sink": (4,), "cu_seqlens_q": (3,), "cu_seqlens_kv": (3,),
    "seq_len_q": (2,), "seq_len_kv": (2,),
}
DTYPES = {"lse": "fp32", "dlse": "fp32", "mask": "bool", "bias": "fp32", "sink": "fp32", "seq_len_q": "int32",
          "seq_len_kv": "int64", "cu_seqlens_q": "int32", "cu_seqlens_kv": "int64"}
OPTIONAL = ("bias", "mask", "sink", "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv", "dlse")


def attention(give=(), *, packed=False, backward=False, shapes=None, dtypes=None, io="bf16", without=(), **options):
    """An attention graph with the optional operands `give`, and shapes and dtypes changed as said."""
    g = Graph("case")
    table = {**(PACKED if packed else DENSE), **(shapes or {})}
    types = {**dict.fromkeys(("q", "k", "v", "o", "do"), io), **DTYPES, **(dtypes or {})}
    names = ["q", "k", "v", *give]
    names += ["o", "do", "lse"] if backward else []
    names += ["cu_seqlens_q", "cu_seqlens_kv"] if packed else []
    tensors = {n: g.tensor(n, table[n], dtype=types[n]) for n in names if n not in without}
    extra = {n: tensors[n] for n in OPTIONAL if n in tensors}
    if backward:
        operands = [tensors.get(n) for n in ("q", "k", "v", "o", "do", "lse")]
        results = g.sdpa_backward(*operands, **extra, **options)
    else:
        results = g.sdpa(*(tensors[n] for n in ("q", "k", "v")), **extra, **options)
    for t in results:
        if t is not None:
            g.output(t)
    return g


def A(*args, **kwargs):
    return lambda: attention(*args, **kwargs)


def primitive(method, *shapes, dtypes=None, args=()):
    """One primitive op on inputs of these shapes."""
    def build():
        g = Graph("case")
        given = [g.tensor(f"t{i}", s, dtype=(dtypes or ["fp32"] * len(shapes))[i]) for i, s in enumerate(shapes)]
        g.output(getattr(g, method)(*given, *args), name="out")
        return g
    return build


def recorded(op, *shapes, dtypes=None, **attrs):
    """One op that only backward graphs use."""
    def build():
        g = Graph("case")
        given = {f: g.tensor(f, s, dtype=(dtypes or ["fp32"] * 3)[i]) for i, (f, s) in enumerate(zip("xyz", shapes))}
        g.output(g._primitive(op, attrs=attrs, **given), name="out")
        return g
    return build


def graph(edit=None, shape=(2, 3), **declared):
    """tanh(x), with something done to it."""
    def build():
        g = Graph("case")
        x = g.tensor("x", shape, **{"dtype": "fp32", **declared})
        t = g.tanh(x)
        if edit is None or edit(g, x, t) is None:
            g.output(t, name="y")
        return g
    return build


def foreign(g, x, t):
    other = Graph("other").tensor("far", (2, 3), dtype="fp32")
    g.output(g.add(t, other), name="z")


def foreign_output(g, x, t):
    g.output(Graph("other").tensor("far", (2, 3), dtype="fp32"), name="z")


def cycle(g, x, t):
    node = t.producer
    g.dag.add_edge(t, node)
    node.inputs["x"] = t
    g.inputs.remove(x)
    g.dag.remove_node(x)


def output(**kwargs):
    def edit(g, x, t):
        g.outputs.append(Output(**{"name": "y", "tensor": t, **kwargs}))
        return g
    return edit


def two_symbols(a, b):
    def build():
        g = Graph("case")
        g.output(g.matmul(g.tensor("a", (2, a), dtype="fp32"), g.tensor("b", (a, b), dtype="fp32")), name="y")
        return g
    return build


BACKWARD, PACK = {"backward": True}, {"packed": True}
S, T = sym("S", 9), sym("T", 9)

# (rule, breaks it, keeps it)
CASES = [
    # the graph itself
    ("names", graph(lambda g, x, t: g.tensor("", (1,), dtype="fp32") and None), graph()),
    ("names", graph(output(name=7)), graph(output(name="7"))),
    ("duplicates", graph(lambda g, x, t: g.output(t, name="x")),
     graph(lambda g, x, t: g.output(t, name="z"))),
    ("duplicates", graph(lambda g, x, t: g.output(g.tanh(t), name="y") and None),
     graph(lambda g, x, t: g.output(g.tanh(t)) and None)),
    ("duplicates", graph(lambda g, x, t: g.output(g.add(t, g.tensor("x", (2, 3), dtype="fp32")))),
     graph(lambda g, x, t: g.output(g.add(t, g.tensor("z", (2, 3), dtype="fp32"))))),
    ("extents", graph(shape=(2, -3)), graph(shape=(2, 0))),
    ("strides", graph(stride=(3, -1)), graph(stride=(3, 0))),
    ("strides", graph(output(stride=(-3, 1))), graph(output(stride=(4, 1)))),
    ("reach", graph(shape=(2**31, 2**31)), graph(shape=(2**30, 2**30))),
    ("output_stride_count", graph(output(stride=(3,))), graph(output(stride=(3, 1)))),
    ("output_overlap", graph(output(stride=(2, 1))), graph(output(stride=(1, 2)))),
    ("output_overlap", graph(output(stride=(0, 1))), graph(output(stride=(0, 1)), shape=(1, 3))),
    ("output_alignment", graph(output(alignment=12)), graph(output(alignment=4))),
    ("no_output", graph(lambda g, x, t: g), graph()),
    ("output_is_input", graph(lambda g, x, t: g.output(x, name="z")),
     graph(lambda g, x, t: g.output(g.cast(x, "fp32"), name="z"))),
    ("foreign", graph(foreign), graph()),
    ("foreign", graph(foreign_output), graph()),
    ("cycle", graph(cycle), graph()),
    ("unused", graph(lambda g, x, t: g.tensor("z", (1,), dtype="fp32") and None), graph()),
    ("unused", graph(lambda g, x, t: g.tanh(g.tensor("z", (1,), dtype="fp32")) and None),
     graph(lambda g, x, t: g.sigmoid(t) and None)),
    ("symbol_bounds", two_symbols(sym("S", 9), sym("S", 8)), two_symbols(sym("S", 9), sym("S", 9))),
    ("symbol_bound", graph(shape=(S * 2, 3)), graph(shape=(S, 3))),
    ("symbol_bound", graph(shape=(2, 3), stride=(S, 1)), graph(shape=(2, S), stride=(S, 1))),
    # attention: options
    ("flags", A(causal=1), A(causal=True)),
    ("flags", A(stats="yes"), A(stats=True)),
    ("flags", A(**BACKWARD, deterministic=None), A(**BACKWARD, deterministic=True)),
    ("align", A(causal=True, align="middle"), A(causal=True, align="bottom_right")),
    ("align", A(align="top-left"), A(align="bottom_right")),  # a corner without a mask is harmless
    ("window", A(window=(-1, 0)), A(window=(None, 0))),
    ("window", A(window=(0, 2**31)), A(window=(0, 2**31 - 1))),
    ("window", A(window=3), A(window=(3, None))),
    ("window", A(window=(1.5, 0)), A(window=[1, 0])),
    ("window", A(window=(True, 0)), A(window=(1, 0))),
    ("causal_window", A(causal=True, window=(3, 1)), A(causal=True, window=(3, None))),
    ("causal_window", A(**BACKWARD, causal=True, window=(None, 1)),
     A(**BACKWARD, causal=True, window=(None, 0))),
    ("scale", A(scale=math.nan), A(scale=-0.5)),
    ("scale", A(scale=math.inf), A(scale=0)),
    ("scale", A(scale="0.1"), A(scale=0.1)),
    ("softcap", A(softcap=-1.0), A(softcap=0.0)),
    ("softcap", A(softcap=math.inf), A(softcap=30)),
    ("max_seqlen", A(**PACK, max_seqlen_q=-1), A(**PACK, max_seqlen_q=0)),
    ("max_seqlen", A(**PACK, max_seqlen_kv=4.0), A(**PACK, max_seqlen_kv=4)),
    ("max_seqlen_packed", A(max_seqlen_q=5), A(**PACK, max_seqlen_q=5)),
    ("grads", A(**BACKWARD, grads=("q", "bias")), A(**BACKWARD, grads=("q", "v"))),
    ("nothing_asked", A(**BACKWARD, grads=()), A(["bias"], **BACKWARD, grads=(), dbias=True)),
    ("dbias", A(**BACKWARD, dbias=True), A(["bias"], **BACKWARD, dbias=True)),
    ("dsink", A(**BACKWARD, dsink=True), A(["sink"], **BACKWARD, dsink=True)),
    ("lse", A(**BACKWARD, without=["lse"]), A(**BACKWARD)),
    # attention: packing and padding
    ("both_offsets", A(**PACK, without=["cu_seqlens_kv"]), A(**PACK)),
    ("both_offsets", A(**PACK, without=["cu_seqlens_q"]), A(**PACK)),
    ("packed_padding", A(["seq_len_kv"], **PACK), A(["seq_len_kv"])),
    ("some_offset", A(**PACK, shapes={"cu_seqlens_q": (0,), "cu_seqlens_kv": (0,)}),
     A(**PACK, shapes={"cu_seqlens_q": (1,), "cu_seqlens_kv": (1,)})),
    ("offsets_length", A(**PACK, shapes={"cu_seqlens_kv": (4,)}), A(**PACK)),
    # attention: shapes
    ("rank", A(shapes={"q": (7, 4, 8)}), A()),
    ("rank", A(**PACK, shapes={"v": (2, 2, 6, 16)}), A(**PACK)),
    ("other_rank", A(["sink"], shapes={"sink": (1, 4)}), A(["sink"])),
    ("other_rank", A(["seq_len_q"], shapes={"seq_len_q": (2, 1)}), A(["seq_len_q"])),
    ("other_rank", A(**PACK, shapes={"cu_seqlens_q": (3, 1)}), A(**PACK)),
    ("other_rank", A(**BACKWARD, shapes={"lse": (2, 4, 5, 1)}), A(**BACKWARD)),
    ("batch", A(shapes={"k": (3, 2, 6, 8)}), A()),
    ("batch", A(["seq_len_q"], shapes={"seq_len_q": (3,)}), A(["seq_len_q"])),
    ("batch", A(shapes={"q": (S, 4, 5, 8)}),
     A(shapes={"q": (S, 4, 5, 8), "k": (S, 2, 6, 8), "v": (S, 2, 6, 16)})),
    ("head_dim", A(shapes={"k": (2, 2, 6, 9)}), A()),
    ("kv_seqlen", A(shapes={"v": (2, 2, 7, 16)}), A()),
    ("kv_seqlen", A(**PACK, shapes={"v": (8, 2, 16)}), A(**PACK)),
    ("kv_heads", A(shapes={"v": (2, 1, 6, 16)}), A()),
    ("query_heads", A(["sink"], shapes={"sink": (2,)}), A(["sink"])),
    ("query_heads", A(**BACKWARD, shapes={"o": (2, 2, 5, 16)}), A(**BACKWARD)),
    ("query_seqlen", A(**BACKWARD, shapes={"do": (2, 4, 6, 16)}), A(**BACKWARD)),
    ("query_seqlen", A(["dlse"], **BACKWARD, **PACK, shapes={"dlse": (8, 4)}),
     A(["dlse"], **BACKWARD, **PACK)),
    ("head_dim_v", A(**BACKWARD, shapes={"do": (2, 4, 5, 8)}), A(**BACKWARD)),
    ("positive", A(shapes={"q": (2, 4, 5, 0), "k": (2, 2, 6, 0)}), A(shapes={"q": (2, 4, 0, 8)})),
    ("positive", A(shapes={"k": (2, 0, 6, 8), "v": (2, 0, 6, 16)}),
     A(shapes={"k": (2, 2, 0, 8), "v": (2, 2, 0, 16)})),
    ("positive", A(shapes={"v": (2, 2, 6, 0)}),
     A(shapes={"q": (0, 4, 5, 8), "k": (0, 2, 6, 8), "v": (0, 2, 6, 16)})),
    ("positive", A(shapes={"q": (2, S, 5, 8)}), A(shapes={"q": (2, 4, S, 8)})),
    ("groups", A(shapes={"q": (2, 5, 5, 8)}), A(shapes={"q": (2, 6, 5, 8)})),
    ("bias_shape", A(["bias"], shapes={"bias": (1, 2, 5, 6)}), A(["bias"], shapes={"bias": (2, 1, 1, 6)})),
    ("bias_shape", A(["bias"], shapes={"bias": (6,)}), A(["bias"], shapes={"bias": (5, 1)})),
    ("bias_shape", A(["bias"], shapes={"bias": (1, 1, 1, 5, 6)}), A(["bias"], shapes={"bias": (4, 5, 6)})),
    ("bias_shape", A(["bias"], **PACK, max_seqlen_q=3, max_seqlen_kv=4),
     A(["bias"], **PACK, max_seqlen_q=3, max_seqlen_kv=5)),
    ("bias_shape", A(["bias"], **PACK, shapes={"bias": (3, 4, 3, 5)}), A(["bias"], **PACK)),
    ("mask_shape", A(["mask"], shapes={"mask": (6, 5)}), A(["mask"], shapes={"mask": (2, 1, 5, 6)})),
    # attention: dtypes
    ("io_floating", A(io="int32"), A(io="fp16")),
    ("io_dtype", A(dtypes={"v": "fp16"}), A()),
    ("io_dtype", A(**BACKWARD, dtypes={"do": "fp32"}), A(**BACKWARD)),
    ("stats_dtype", A(**BACKWARD, dtypes={"lse": "bf16"}), A(**BACKWARD)),
    ("stats_dtype", A(**BACKWARD, io="fp64"), A(**BACKWARD, io="fp64", dtypes={"lse": "fp64"})),
    ("length_dtype", A(["seq_len_q"], dtypes={"seq_len_q": "fp32"}), A(["seq_len_q"])),
    ("length_dtype", A(**PACK, dtypes={"cu_seqlens_q": "bool"}), A(**PACK)),
    ("bias_dtype", A(["bias"], dtypes={"bias": "bool"}), A(["bias"], dtypes={"bias": "fp16"})),
    ("bias_dtype", A(["bias"], dtypes={"bias": "fp64"}), A(["bias"], io="fp64", dtypes={"bias": "fp64"})),
    ("mask_dtype", A(["mask"], dtypes={"mask": "uint8"}), A(["mask"])),
    ("sink_dtype", A(["sink"], dtypes={"sink": "fp16"}), A(["sink"], dtypes={"sink": "bf16"})),
    # primitives
    ("floating", primitive("tanh", (2, 3), dtypes=["int32"]), primitive("tanh", (2, 3))),
    ("equal_dtypes", primitive("add", (2,), (2,), dtypes=["fp32", "bf16"]), primitive("add", (2,), (2,))),
    ("equal_dtypes", primitive("where", (2,), (2,), (2,), dtypes=["bool", "fp32", "bf16"]),
     primitive("where", (2,), (2,), (2,), dtypes=["bool", "bf16", "bf16"])),
    ("mask_operand", primitive("where", (2,), (2,), (2,)), primitive("where", (2,), (2,),
     (2,), dtypes=["bool", "fp32", "fp32"])),
    ("mask_operand", primitive("mask_fill", (2,), (2,)), primitive("mask_fill", (2,),
     (2,), dtypes=["fp32", "bool"])),
    ("broadcasts", primitive("mul", (2, 3), (2,)), primitive("mul", (2, 3), (2, 1))),
    ("broadcasts", primitive("sub", (S, 3), (T, 3)), primitive("sub", (S, 3), (S, 3))),
    ("matmul_rank", primitive("matmul", (3,), (3, 2)), primitive("matmul", (1, 3), (3, 2))),
    ("matmul_inner", primitive("matmul", (2, 3), (4, 5)), primitive("matmul", (2, 4), (4, 5))),
    ("matmul_batch", primitive("matmul", (2, 1, 3), (3, 3, 4)), primitive("matmul", (2, 1, 3), (1, 3, 4))),
    ("axis", primitive("softmax", (2, 3), args=(2,)), primitive("softmax", (2, 3), args=(-2,))),
    ("axis", primitive("softmax", (), args=(0,)), primitive("softmax", (1,), args=(0,))),
    ("factor", primitive("scale", (2,), args=(math.inf,)), primitive("scale", (2,), args=(-3,))),
    ("factor", primitive("scale", (2,), args=("2",)), primitive("scale", (2,), args=(2,))),
    ("perm", primitive("transpose", (2, 3), args=((0, 0),)), primitive("transpose", (2, 3), args=((1, 0),))),
    ("perm", primitive("transpose", (2, 3), args=((0,),)), primitive("transpose", (2, 3), args=((-1, 0),))),
    ("reshape", primitive("reshape", (2, 3), args=((4, -1),)), primitive("reshape", (2, 3), args=((3, -1),))),
    ("reshape", primitive("reshape", (2, 3), args=((-1, -1),)), primitive("reshape", (2, 3), args=((6,),))),
    ("reshape", primitive("reshape", (0, 3), args=((0, -1),)), primitive("reshape", (0, 3), args=((0, 7),))),
    ("reshape", primitive("reshape", (S, 6), args=((T, 6),)),
     primitive("reshape", (S, 6), args=((S, 2, -1),))),
    ("sum_to", recorded("sum_to", (2, 3), shape=(2, 2)), recorded("sum_to", (2, 3), shape=(3,))),
    ("same_shapes", recorded("tanh_backward", (2, 3), (3,)), recorded("tanh_backward", (2, 3), (2, 3))),
]


def broken(build):
    return {v.rule for v in violations(build())}


@pytest.mark.parametrize("rule, bad, good", CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_rule(rule, bad, good):
    assert rule in broken(bad)
    with pytest.raises(GraphError, match="given .*, expected "):
        validate(bad())
    assert broken(good) == set()


def test_every_rule_has_a_case():
    names = [r.name for r in RULES]
    assert len(names) == len(set(names))
    assert set(names) == {rule for rule, _, _ in CASES}


@pytest.mark.parametrize("stride", [(2**62, 2**62), (2**70, 1), (2**80, 2**80)])
def test_strides_beyond_64_bits_are_reported_not_computed_with(stride):
    """flash-linear-attention#1080: an offset that wraps is refused before anything adds it up."""
    assert broken(graph(output(stride=stride), shape=(2, 2))) == {"reach"}


def test_one_wrong_thing_is_one_violation():
    """Rules do not repeat each other, so that a message points at one cause."""
    alone = [A(shapes={"v": (2, 2, 7, 16)}), A(scale=math.nan), A(["bias"], shapes={"bias": (6,)}),
             A(window=(-1, None)), A(dtypes={"v": "fp16"}), A(dtypes={"q": "int32"}), A(["sink"], shapes={"sink": (1, 4)}), primitive("matmul", (2, 3), (4, 5)), graph(output(stride=(2, 1)))]
    assert [len(violations(build())) for build in alone] == [1] * len(alone)


def test_all_violations_come_in_one_error():
    bad = attention(["bias", "mask"], shapes={"k": (3, 3, 6, 9), "v": (2, 2, 7, 8), "bias": (6,)},
                    dtypes={"mask": "fp32"}, scale=math.nan, causal=True, window=(-1, 3), align="centre")
    bad.tensor("spare", (1, -1), dtype="fp32")
    with pytest.raises(GraphError) as caught:
        validate(bad)
    found = {v.rule for v in violations(bad)}
    assert found == {"extents", "unused", "align", "window", "causal_window", "scale", "batch", "head_dim", "kv_seqlen",
                     "kv_heads", "groups", "bias_shape", "mask_dtype"}
    assert str(caught.value).splitlines() == list(caught.value.violations)
    assert len(caught.value.violations) >= len(found)


def test_a_violation_names_node_tensor_given_and_expected():
    """pytorch#193728: key and value of different length are refused in one set of words that names both shapes."""
    g = Graph("demo")
    q, k, v = (g.tensor(n, (1, 1, s, 8), dtype="bf16") for n, s in (("query", 5), ("key", 5), ("value", 6)))
    g.output(g.sdpa(q, k, v, name="attn")[0])
    [text] = [str(v) for v in violations(g)]
    for part in ("sdpa (node 'attn')", "'value'", "'key'", "Sk = 6", "[1, 1, 6, 8]", "Sk = 5", "[1, 1, 5, 8]"):
        assert part in text


@pytest.mark.parametrize("build, part, absent", [
    (A(window=5), "expected a pair (left, right) such as (5, None)", None),
    (A(window="5"), "expected a pair (left, right) such as (5, None)", None),
    (A(io="int32"), "q: given dtype int32, expected a floating dtype", "cast"),
    (A(["sink"], shapes={"sink": (1, 4)}), "sink: given shape [1, 4], expected [Hq]", "packed"),
    (A(shapes={"q": (2, 3, 5, 8)}), "q: given Hq = 3 (shape [2, 3, 5, 8]), expected a multiple of Hk = 2 as in k (shape [2, 2, 6, 8])",
     None),
    (graph(lambda g, x, t: g.output(g.add(t, g.tensor("x", (2, 3), dtype="fp32")))), "'x': given two inputs of that name", "and of"),
    (graph(lambda g, x, t: g.output(t, name="x")), "'x': given an input and an output of that name", "and of"),
    (graph(lambda g, x, t: g.output(g.tanh(t), name="y") and None), "'y': given two outputs of that name", "and of"),
])
def test_messages_give_the_way_out_that_fits(build, part, absent):
    text = "\n".join(map(str, violations(build())))
    assert part in text and (absent is None or absent not in text)


@pytest.mark.parametrize("options", [
    {"causal": True, "window": (3, 1)}, {"window": (-1, 0)}, {"scale": math.nan}, {"align": "centre"},
    {"softcap": -1.0}, {"shapes": {"v": (2, 2, 7, 16)}}, {"shapes": {"q": (2, 5, 5, 8)}},
    {"packed": True, "without": ["cu_seqlens_kv"]}], ids=str)
def test_backward_refuses_what_forward_refuses(options):
    """cudnn-frontend PR#901: one validator for both directions, in the same words."""
    forward, backward = (violations(attention(**options, backward=b)) for b in (False, True))
    said = {(v.rule, v.what, v.given, v.expected) for v in backward}
    assert forward and {(v.rule, v.what, v.given, v.expected) for v in forward} <= said


@pytest.mark.parametrize("axis", ["Sq", "Sk", "B"])
def test_a_size_of_zero_that_means_something_is_valid(axis):
    sizes = {"B": 2, "Sq": 5, "Sk": 6, axis: 0}
    b, sq, sk = sizes.values()
    shapes = {"q": (b, 4, sq, 8), "k": (b, 2, sk, 8), "v": (b, 2, sk, 16), "bias": (b, 4, sq, sk), "seq_len_q": (b,)}
    validate(attention(["bias", "seq_len_q"], shapes=shapes))


def test_symbolic_extents_are_valid_where_a_length_or_a_count_stands():
    b, s, t = sym("B", 4), sym("S", 128), sym("T", 256)
    validate(attention(["bias", "seq_len_kv"], shapes={
        "q": (b, 4, s, 8), "k": (b, 2, t, 8), "v": (b, 2, t, 16), "bias": (b, 1, s, t), "seq_len_kv": (b,)}))
    n = sym("N", 9)
    validate(attention(packed=True, shapes={
        "q": (s, 4, 8), "k": (t, 2, 8), "v": (t, 2, 16), "cu_seqlens_q": (n,), "cu_seqlens_kv": (n,)}))


def test_dtypes_of_results_follow_the_operands():
    g = attention(["bias", "sink"], backward=True, io="bf16", dtypes={"bias": "fp16"}, dbias=True, dsink=True)
    assert [out.desc.dtype for out in g.outputs] == [DType.BF16, DType.BF16, DType.BF16, DType.F16, DType.F32]
    assert [out.desc.shape for out in g.outputs] == [DENSE[n] for n in ("q", "k", "v", "bias", "sink")]
