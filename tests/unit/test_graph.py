"""Building a graph: names, declared and derived strides, handles, options, drawings."""

from __future__ import annotations

import shutil

import networkx as nx
import numpy as np
import pytest
import torch

from descriptors import DType, sym
from frost.errors import GraphError, NotSupportedError
from frost.graph import Graph, OpNode, Tensor


def qkv(g, shape=(2, 4, 5, 8), dtype="bf16"):
    return [g.tensor(n, shape, dtype=dtype) for n in "qkv"]


def test_one_dag_of_op_nodes_and_tensor_nodes():
    g = Graph("demo")
    q, k, v = qkv(g)
    o, lse = g.sdpa(q, k, v, stats=True)
    y = g.mul(o, g.sigmoid(o))
    assert nx.is_directed_acyclic_graph(g.dag)
    assert [n.op for n in g.dag if isinstance(n, OpNode)] == ["sdpa", "sigmoid", "mul"]
    assert nx.ancestors(g.dag, lse) == {q, k, v, o.producer}
    assert set(g.dag.successors(o)) == {n for n in g.ops if n.op != "sdpa"}
    assert y.producer.inputs["x"] is o


def test_sdpa_is_always_a_pair_and_its_backward_five_named_results():
    g = Graph()
    q, k, v = qkv(g)
    assert g.sdpa(q, k, v)[1] is None
    o, lse = g.sdpa(q, k, v, stats=True)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), DType.F32)
    bias = g.tensor("bias", (5, 5), dtype="fp16")
    grads = g.sdpa_backward(q, k, v, o, o, lse, bias=bias, dbias=True, grads=("k",))
    assert grads._fields == ("dq", "dk", "dv", "dbias", "dsink")
    assert [t is not None for t in grads] == [False, True, False, True, False]
    assert (grads.dbias.shape, grads.dbias.dtype) == ((5, 5), DType.F16)
    dq, dk, dv, dbias, dsink = g.sdpa_backward(q, k, v, o, o, lse)
    assert dbias is None and dsink is None and dq.shape == q.shape and dv.shape == v.shape and dk is not None


def test_packed_statistics_are_tokens_by_heads():
    g = Graph()
    q, k, v = qkv(g, (sym("T", 64), 4, 8), "fp64")
    cu = g.tensor("cu", (3,), dtype="int32")
    o, lse = g.sdpa(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, stats=True)
    assert lse.shape == (sym("T", 64), 4) and lse.dtype is DType.F64 and o.shape == q.shape


@pytest.mark.parametrize("call, nearest", [
    (lambda g, q: g.sdpa(q, q, q, casual=True), "causal"),
    (lambda g, q: g.sdpa(q, q, q, soft_cap=1.0), "softcap"),
    (lambda g, q: g.sdpa_backward(q, q, q, q, q, q, determinstic=True), "deterministic"),
    (lambda g, q: g.tensor("t", (1,), dtpye="fp32"), "dtype"),
    (lambda g, q: g.output(q, strides=(1,)), "stride"),
    (lambda g, q: g.sdpa(q, q, q, seqlen_q=q), "seq_len_q"), (lambda g, q: g.softmax(q, axes=1), "axis"),
    (lambda g, q: g.compile(engine=["reference"]), "engines")])
def test_a_misspelt_option_is_a_type_error_with_the_nearest_name(call, nearest):
    g = Graph()
    with pytest.raises(TypeError, match=f"did you mean '{nearest}'"):
        call(g, g.tensor("q", (2, 4, 5, 8), dtype="bf16"))


@pytest.mark.parametrize("call", [
    lambda g, x: g.add(x, 2.0), lambda g, x: g.mul(3, x), lambda g, x: g.matmul(x, np.ones((3, 3))),
    lambda g, x: g.sdpa(x, x, None), lambda g, x: g.output("x"), lambda g, x: g.sdpa(x, x, x, bias=1.0),
    lambda g, x: g.transpose(None, (0,)), lambda g, x: g.where(x, x, -1e4)])
def test_what_is_no_tensor_is_a_type_error_on_the_spot(call):
    g = Graph()
    with pytest.raises(TypeError, match="given .*, expected"):
        call(g, g.tensor("x", (3, 3), dtype="fp32"))
    assert not g.ops and not g.outputs


def test_a_number_beside_a_tensor_points_to_scale():
    g = Graph()
    with pytest.raises(TypeError, match=r"scale\(x, s\)"):
        g.mul(g.tensor("x", (3,), dtype="fp32"), 2.0)


@pytest.mark.parametrize("kwargs, error", [
    ({"shape": (2, 1.5)}, TypeError), ({"dtype": "flaot32"}, TypeError), ({"stride": (1,)}, GraphError),
    ({"alignment": 3}, GraphError), ({"shape": (1,) * 9}, GraphError)])
def test_a_declaration_that_makes_no_descriptor_names_its_tensor(kwargs, error):
    with pytest.raises(error, match="tensor 'x'.*given"):
        Graph().tensor("x", **{"shape": (2, 3), "dtype": "fp32", **kwargs})


def test_a_new_shape_re_derives_every_stride_that_was_not_declared():
    """flash-attention PR#2351, FlagGems#5235: results follow their operands, declared strides stay."""
    g = Graph()
    q, k, v = qkv(g)
    o, lse = g.sdpa(q, k, v, stats=True)
    y = g.tanh(o)
    g.output(y, name="y")
    g.output(lse, name="lse", stride=(400, 1, 40))
    assert y.stride == (160, 40, 8, 1)
    q.set_shape((2, 4, 7, 8))
    assert q.stride == (224, 56, 8, 1) and y.shape == (2, 4, 7, 8) and y.stride == (224, 56, 8, 1)
    assert g.outputs[0].desc.strides == (224, 56, 8, 1)
    assert g.outputs[1].desc.shape == (2, 4, 7) and g.outputs[1].desc.strides == (400, 1, 40)
    g.validate()


def test_a_declared_stride_survives_a_new_shape():
    g = Graph()
    x = g.tensor("x", (2, 3), stride=(50, 1), dtype="fp32")
    x.set_shape((4, 9))
    assert x.stride == (50, 1)
    with pytest.raises(GraphError, match="'x'.*2 strides"):
        x.set_shape((4, 9, 1))


def test_a_result_cannot_be_given_a_shape():
    g = Graph()
    with pytest.raises(GraphError, match="result of 'tanh'"):
        g.tanh(g.tensor("x", (2,), dtype="fp32")).set_shape((3,))


def test_tensor_like_takes_shape_strides_dtype_and_alignment():
    g = Graph()
    flat = torch.zeros(65, dtype=torch.bfloat16)
    t = g.tensor_like("t", flat[:64].view(4, 16).t())
    assert (t.shape, t.stride, t.dtype, t.desc.alignment) == ((16, 4), (1, 16), DType.BF16, 16)
    assert g.tensor_like("u", flat[1:]).desc.alignment == 2
    assert g.tensor_like("e", torch.zeros(2, 1).expand(2, 7)).stride == (1, 0)


def test_results_are_named_after_their_field_and_never_twice():
    g = Graph()
    q, k, v = qkv(g)
    first, second = g.sdpa(q, k, v)[0], g.sdpa(q, k, v)[0]
    named = g.sdpa(q, k, v, stats=True, name="attn")
    assert [t.name for t in (first, second, *named)] == ["o", "o_1", "attn.o", "attn.lse"]
    assert [n.name for n in g.ops] == ["sdpa", "sdpa_1", "attn"]


def test_an_output_in_another_dtype_is_cast_and_a_second_one_is_copied():
    g = Graph()
    x = g.tensor("x", (2, 3), dtype="bf16")
    y = g.tanh(x)
    assert g.output(y, name="a") is y
    wide = g.output(y, name="b", dtype=torch.float32)
    again = g.output(y, name="c", stride=(1, 2))
    assert wide.dtype is DType.F32 and wide.producer.op == again.producer.op == "cast" and again.dtype is DType.BF16
    assert [(out.name, out.desc.dtype, out.desc.strides) for out in g.outputs] == [
        ("a", DType.BF16, (3, 1)), ("b", DType.F32, (3, 1)), ("c", DType.BF16, (1, 2))]
    g.validate()


def test_an_output_is_named_after_its_tensor_by_default():
    g = Graph()
    q, k, v = qkv(g)
    o, lse = g.sdpa(q, k, v, stats=True)
    g.output(o)
    g.output(lse)
    assert [out.name for out in g.outputs] == ["o", "lse"]


@pytest.mark.parametrize("call, shape", [
    (lambda g, x, m: g.matmul(x, g.transpose(x, (0, -1, 1))), (2, 3, 3)),
    (lambda g, x, m: g.softmax(x, axis=1), (2, 3, 4)),
    (lambda g, x, m: g.reshape(x, (3, -1)), (3, 8)), (lambda g, x, m: g.where(m, x, 0), (2, 3, 4)),
    (lambda g, x, m: g.where(m, x, float("-inf")), (2, 3, 4)), (lambda g, x, m: g.sub(x, g.scale(x, 2)),
     (2, 3, 4)),
    (lambda g, x, m: g.add(g.reshape(x, (2, 1, 3, 4)), x), (2, 2, 3, 4)), (lambda g, x, m: g.cast(m, "fp16"),
     (3, 4))])
def test_shapes_of_primitives(call, shape):
    g = Graph()
    x, m = g.tensor("x", (2, 3, 4), dtype="fp32"), g.tensor("m", (3, 4), dtype="bool")
    assert call(g, x, m).shape == shape


def test_symbolic_shapes_flow_through_reshape():
    g = Graph()
    t, n = sym("T", 64), sym("N", 3)
    x = g.tensor("x", (t, 4, 8), dtype="bf16")
    assert g.reshape(x, (t, -1)).shape == (t, 32) and g.reshape(x, (-1, 8)).shape == (t * 4, 8)
    assert g.reshape(x, (n, -1)).shape == (n, 1)  # no extent fits: left for validation to report


def test_where_with_minus_infinity_is_a_mask():
    g = Graph()
    x, m = g.tensor("x", (3, 4), dtype="fp32"), g.tensor("m", (3, 4), dtype="bool")
    assert g.where(m, x, float("-inf")).producer.op == "mask_fill"
    assert g.where(m, x, x).producer.op == "where"


def test_a_bad_graph_still_gets_shapes():
    """Whatever is wrong is for validation to say, all at once."""
    g = Graph()
    q, k = g.tensor("q", (5,), dtype="int32"), g.tensor("k", (2, 3), dtype="bool")
    o, lse = g.sdpa(q, k, k, stats=True, window="everything", align=None, bias=q)
    results = [o, lse, g.matmul(q, k), g.add(q, k), g.transpose(q, (3, 4)), g.reshape(k, (4, -1)),
               g.softmax(q, axis="x"), *g.sdpa_backward(q, k, k, o, o, lse, dbias="yes", grads=("q", "w"))]
    assert all(isinstance(t, Tensor) for t in results[:7])
    g.output(results[3])
    with pytest.raises(GraphError):
        g.validate()


def test_numpy_scalars_are_plain_options():
    def build(number, count):
        g = Graph()
        g.output(g.sdpa(*qkv(g), scale=number(0.5), window=[count(3), None])[0])
        g.validate()
        return g
    assert build(np.float32, np.int64).same_as(build(float, int))


# ---- drawings


def drawn():
    g = Graph('a "quoted" name')
    q, k, v = qkv(g)
    o, _ = g.sdpa(q, k, v, causal=True)
    g.output(g.mul(o, g.sigmoid(o)), name="y")
    return g


def test_dot_has_every_node_and_edge():
    text = drawn().to_dot()
    assert text.count("->") == drawn().dag.number_of_edges() and text.count("[shape=box") == 3
    assert r'digraph "a \"quoted\" name" {' in text and "causal=True" in text and text.rstrip().endswith("}")


def test_svg_or_a_way_out(monkeypatch):
    if shutil.which("dot"):
        assert "<svg" in drawn().to_svg()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotSupportedError, match="graphviz.*to_dot"):
        drawn().to_svg()


def test_a_failing_dot_is_reported(monkeypatch, tmp_path):
    fake = tmp_path / "dot"
    fake.write_text("#!/bin/sh\ncat > /dev/null\necho syntax error >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NotSupportedError, match="syntax error"):
        drawn().to_svg()


def test_the_text_tree_shows_every_tensor_once_in_full():
    text = str(drawn())
    assert text == drawn().to_text()
    lines = text.splitlines()
    assert lines[1].strip().startswith("y = mul: bf16[2, 4, 5, 8] <- mul")
    assert sum("<- sdpa, causal=True" in x for x in lines) == 1 and sum("of sdpa, above" in x for x in lines) == 1
    assert "no outputs" in str(Graph())


def test_a_deep_graph_is_no_problem():
    """Nothing recurses once per node."""
    g = Graph()
    t = g.tensor("x", (2,), dtype="fp32")
    for _ in range(2000):
        t = g.scale(t, 0.5)
    g.output(t, name="y")
    g.validate()
    assert len(g.to_text().splitlines()) == 2002
    assert Graph.from_bytes(g.to_bytes()).same_as(g)
