"""Graphs as bytes: equal after a round trip, and nothing but typed errors for bytes of any kind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descriptors import WireError, pack, sym, unpack
from frost.errors import GraphError
from frost.fuse import fuse
from frost.graph import Graph


def attention():
    g = Graph("saved")
    b, s = sym("B", 4), sym("S", 64)
    q, k, v = (g.tensor(n, (b, 2, s, 8), dtype="bf16", alignment=2) for n in "qkv")
    bias = g.tensor("bias", (s, s), stride=(64, 1), dtype="fp32")
    o, lse = g.sdpa(q, k, v, causal=True, window=(3, None), bias=bias, scale=0.5, softcap=2.0, stats=True, name="attn")
    g.output(g.reshape(g.transpose(o, (0, 2, 1, 3)), (b, s, -1)), name="y", dtype="fp32")
    g.output(lse, stride=(128, 64, 1))
    return g


def backward():
    g = Graph("backward")
    q, k, v, o, do = (g.tensor(n, (7, 2, 8), dtype="fp16") for n in ("q", "k", "v", "o", "do"))
    lse, sink = g.tensor("lse", (7, 2), dtype="fp32"), g.tensor("sink", (2,), dtype="fp16")
    cu = g.tensor("cu", (3,), dtype="int64")
    grads = g.sdpa_backward(q, k, v, o, do, lse, sink=sink, dsink=True, cu_seqlens_q=cu, cu_seqlens_kv=cu,
                            max_seqlen_q=4, max_seqlen_kv=4, deterministic=True, grads=("q",))
    g.output(grads.dq)
    g.output(grads.dsink)
    return g


def primitives():
    g = Graph("primitives")
    x, m = g.tensor("x", (3, 4), dtype="fp32"), g.tensor("m", (4,), dtype="bool")
    p = g.softmax(g.where(m, g.scale(x, -2.5), float("-inf")), axis=0)
    g.output(g.matmul(g.transpose(g.where(m, p, 0), (1, 0)), g.tanh(g.sub(p, x))), name="y")
    g.output(g.mul(g.sigmoid(p), g.add(p, x)), name="z")
    return g


GRAPHS = {f.__name__: f for f in (attention, backward, primitives)}
WHOLE = {name: unpack(f().to_bytes()) for name, f in GRAPHS.items()}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_survives_the_wire(name):
    g = GRAPHS[name]()
    g.validate()
    back = Graph.from_bytes(g.to_bytes())
    back.validate()
    assert back.same_as(g) and fuse(back) == fuse(g) and str(back) == str(g)
    assert set(map(type, back.dag)) == set(map(type, g.dag)) and back.dag.number_of_edges() == g.dag.number_of_edges()


def test_a_graph_that_was_read_can_be_built_on():
    g = Graph.from_bytes(attention().to_bytes())
    more = g.tanh(g.outputs[0].tensor)
    g.output(more)
    g.validate()
    names = [n.name for n in g.ops]
    assert len(names) == len(set(names))


def test_names_strides_and_options_make_a_difference():
    def other(**kwargs):
        g = Graph("saved")
        x = g.tensor("x", (2, 3), **{"dtype": "fp32", **kwargs})
        g.output(g.tanh(x))
        return g
    assert other().same_as(other())
    assert not other().same_as(other(stride=(3, 1))) and not other().same_as(other(alignment=4))


def test_a_cycle_can_be_read_and_is_reported():
    whole = unpack(primitives().to_bytes())
    scale = next(op for op in whole["ops"] if op["op"] == "scale")
    scale["inputs"]["x"] = whole["ops"][-1]["outputs"]["out"][0]
    g = Graph.from_bytes(pack(whole))
    with pytest.raises(GraphError, match="cycle through"):
        g.validate()


@pytest.mark.parametrize("change, message", [
    (lambda w: w.update(schema=2), "schema 2"), (lambda w: w.pop("ops"), "given fields"),
    (lambda w: w.update(extra=1), "given fields"),
    (lambda w: w["ops"][0].update(op="exp"), "expected one of"),
    (lambda w: w["ops"][0]["inputs"].update(x=999), "given tensor 999"),
    (lambda w: w["ops"][0]["inputs"].pop("x"), "given operands"),
    (lambda w: w["ops"][0]["attrs"].update(casual=True), "given fields"),
    (lambda w: w["ops"][1]["outputs"].update(out=[0, "t"]), "there already"),
    (lambda w: w["ops"][0]["outputs"].update(b=[50, "t"]), "result 'b'"),
    (lambda w: w["ops"][0]["outputs"].update(out=[2, "t", 0]), "result 'out'"),
    (lambda w: w["tensors"][0]["desc"].update(dtype="fp128"), "fp128"),
    (lambda w: w["outputs"][0].update(tensor="y"), "expected int"),
    (lambda w: w.update(tensors=[w["tensors"][0]] * 20_001), "at most")])
def test_what_is_no_graph_says_why(change, message):
    whole = unpack(primitives().to_bytes())
    change(whole)
    with pytest.raises(WireError, match=message):
        Graph.from_bytes(pack(whole))


def test_results_that_the_options_do_not_give_are_refused():
    whole = unpack(backward().to_bytes())
    whole["ops"][0]["attrs"]["grads"] = ["q", "k"]
    with pytest.raises(WireError, match="given results"):
        Graph.from_bytes(pack(whole))


@pytest.mark.parametrize("op, change", [
    ("transpose", {"perm": 3}), ("transpose", {"perm": ["x", 0]}), ("reshape", {"shape": [2, None]}),
    ("cast", {"dtype": "fp32"})], ids=str)
def test_options_that_shapes_follow_from_must_have_their_type(op, change):
    whole = unpack(attention().to_bytes())
    next(row for row in whole["ops"] if row["op"] == op)["attrs"].update(change)
    with pytest.raises(WireError, match=f"{op}.*given {next(iter(change))}"):
        Graph.from_bytes(pack(whole))


def test_a_graph_that_cannot_be_written_says_why():
    g = Graph()
    x = g.tensor("x", (2,), dtype="fp32")
    g.output(g.add(x, Graph("other").tensor("far", (2,), dtype="fp32")))
    with pytest.raises(GraphError, match="'far' of graph 'other'"):
        g.to_bytes()
    h = Graph()
    h.output(h.scale(h.tensor("x", (2,), dtype="fp32"), object()))
    with pytest.raises(GraphError, match="value"):
        h.to_bytes()


def test_trailing_and_truncated_bytes_are_refused():
    data = attention().to_bytes()
    for bad in (data + b"\0", data[:-1], b"", data[1:]):
        with pytest.raises(WireError):
            Graph.from_bytes(bad)
    with pytest.raises(WireError):
        Graph.from_bytes("text")


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2**63, 2**63 - 1), st.integers(-3, 12), st.floats(),
              st.text(max_size=4), st.sampled_from(["x", "q", "sdpa", "tanh", "fp32", "bool"])),
    lambda x: st.one_of(st.lists(x, max_size=4), st.dictionaries(st.text(max_size=4), x, max_size=3)), max_leaves=5)


@st.composite
def damaged(draw, whole):
    def spoil(tree):
        if isinstance(tree, dict) and tree and draw(st.integers(0, 9)):
            name = draw(st.sampled_from(sorted(tree)))
            return {**tree, name: spoil(tree[name])}
        if isinstance(tree, list) and tree and draw(st.integers(0, 9)):
            i = draw(st.integers(0, len(tree) - 1))
            return [*tree[:i], spoil(tree[i]), *tree[i + 1:]]
        return draw(JUNK)
    for _ in range(draw(st.integers(1, 3))):
        whole = spoil(whole)
    return whole


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(sorted(GRAPHS)))
def test_damaged_graphs_give_typed_errors_or_programs(data, name):
    """Reading, validating and fusing: whatever the bytes say, a typed error or a program."""
    try:
        g = Graph.from_bytes(pack(data.draw(damaged(WHOLE[name]))))
        g.to_text(), g.to_dot()
        g.validate()
    except (GraphError, WireError):
        return
    fuse(g)
    assert Graph.from_bytes(g.to_bytes()).same_as(g)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(sorted(GRAPHS)))
def test_flipped_bytes_give_typed_errors_or_programs(data, name):
    raw = bytearray(GRAPHS[name]().to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        g = Graph.from_bytes(bytes(raw))
        g.validate()
    except (GraphError, WireError):
        return
    fuse(g)
