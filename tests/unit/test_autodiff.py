"""Backward graphs: every rule against torch's autograd in fp64, and the shape of the graphs themselves."""

from __future__ import annotations

import math

import pytest
import torch

from frost.autodiff import RULES, backward_graph
from frost.errors import GraphError
from frost.fuse import fuse
from frost.graph import Graph
from frost.nsa_autodiff import NSA_RULES
from frost.opset import OPS

F64 = torch.float64


def gradients(g, given, wrt, seeds=None, **options):
    """Run forward and backward on the reference engine; returns (outputs, {input: gradient}, seeds)."""
    torch.manual_seed(1)
    outputs = g.compile("cpu", engines=["reference"]).execute(given)
    seeds = seeds or {f"d_{n}": torch.randn_like(t) for n, t in outputs.items() if t.is_floating_point()}
    plan = backward_graph(g, wrt, **options).compile("cpu", engines=["reference"])
    everything = {**given, **outputs, **seeds}
    got = plan.execute({n: everything[n] for n in plan.program.inputs})
    return outputs, {n: got[f"d_{n}"] for n in wrt}, seeds


def check(build, shapes, forward, wrt=None, masks=()):
    """`build(g, *tensors)` against `forward(*tensors)`: outputs and the gradients of all floating inputs."""
    torch.manual_seed(0)
    g = Graph("case")
    names = [f"t{i}" for i in range(len(shapes))]
    given = {n: torch.rand(s) > 0.3 if i in masks else torch.randn(s, dtype=F64)
             for i, (n, s) in enumerate(zip(names, shapes))}
    results = build(g, *(g.tensor(n, s, dtype=given[n].dtype) for n, s in zip(names, shapes)))
    results = results if isinstance(results, tuple) else (results,)
    for i, t in enumerate(results):
        g.output(t, name=f"y{i}")
    wrt = wrt or [n for n in names if given[n].is_floating_point()]
    outputs, got, seeds = gradients(g, given, wrt)
    leaves = {n: t.clone().requires_grad_(n in wrt) for n, t in given.items()}
    expected = forward(*leaves.values())
    expected = expected if isinstance(expected, tuple) else (expected,)
    loss = sum((y * seeds[f"d_y{i}"]).sum() for i, y in enumerate(expected) if f"d_y{i}" in seeds)
    grads = torch.autograd.grad(loss, [leaves[n] for n in wrt], allow_unused=True)
    for i, y in enumerate(expected):
        torch.testing.assert_close(outputs[f"y{i}"], y.detach(), atol=1e-10, rtol=0)
    for n, want in zip(wrt, grads):
        torch.testing.assert_close(got[n], torch.zeros_like(given[n]) if want is None else want, atol=1e-10, rtol=0)


def attention(q, k, v, bias=None, mask=None, scale=None):
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    s = s if mask is None else s.masked_fill(~mask, -math.inf)
    lse = s.logsumexp(-1)
    return (s - lse[..., None]).exp() @ v, lse


SHAPE = (2, 3, 5, 4)
# op -> (graph, input shapes, torch, which inputs are masks)
RULE_CASES = {
    "matmul": (lambda g, a, b: g.matmul(a, b), [(2, 1, 3, 4), (5, 4, 2)], torch.matmul, ()),
    "scale": (lambda g, a: g.scale(a, -2.5), [(3, 4)], lambda a: a * -2.5, ()),
    "add": (lambda g, a, b: g.add(a, b), [(2, 3), (3,)], torch.add, ()),
    "sub": (lambda g, a, b: g.sub(a, b), [(1, 3), (2, 1)], torch.sub, ()),
    "mul": (lambda g, a, b: g.mul(a, b), [(2, 1, 3), (4, 1)], torch.mul, ()),
    "softmax": (lambda g, a: g.softmax(a, axis=1), [(2, 3, 4)], lambda a: a.softmax(1), ()),
    "sigmoid": (lambda g, a: g.sigmoid(a), [(2, 3)], torch.sigmoid, ()),
    "tanh": (lambda g, a: g.tanh(a), [(2, 3)], torch.tanh, ()),
    "where": (lambda g, m, a, b: g.where(m, a, b), [(3, 1), (2, 3, 4), (4,)], torch.where, (0,)),
    "mask_fill": (lambda g, a, m: g.softmax(g.where(m, a, -math.inf)), [(2, 3, 9), (3, 9)],
                  lambda a, m: a.masked_fill(~m, -math.inf).softmax(-1), (1,)),
    "transpose": (lambda g, a: g.transpose(a, (2, 0, 1)), [(2, 3, 4)], lambda a: a.permute(2, 0, 1), ()),
    "reshape": (lambda g, a: g.reshape(a, (4, -1)), [(2, 3, 4)], lambda a: a.reshape(4, 6), ()),
    "cast": (lambda g, a: g.cast(g.cast(a, "fp32"), "fp64"), [(2, 3)], lambda a: a.float().double(), ()),
    "sum_to": (lambda g, a: g._primitive("sum_to", x=a, attrs={"shape": (3, 1)}), [(2, 3, 4)],
               lambda a: a.sum((0, 2)).reshape(3, 1), ()),
    "zeros_like": (lambda g, m, a: g.add(g.where(m, a, 0), a), [(4,), (3, 4)],
                   lambda m, a: torch.where(m, a, 0.0) + a, (0,)),
    "sdpa": (lambda g, q, k, v, b: g.sdpa(q, k, v, bias=b, stats=True), [SHAPE, SHAPE, SHAPE, (5, 5)],
             lambda q, k, v, b: attention(q, k, v, b), ()),
}


@pytest.mark.parametrize("op", RULE_CASES)
def test_rule(op):
    build, shapes, forward, masks = RULE_CASES[op]
    check(build, shapes, forward, masks=masks)


def test_every_rule_has_a_case_and_every_op_a_rule_or_a_refusal():
    assert set(RULE_CASES) == set(RULES) - set(NSA_RULES)  # those have cases in test_nsa_graph.py
    assert set(OPS) - set(RULES) == {op for op in OPS if op.endswith("_backward")}


@pytest.mark.parametrize("wrt", [["t0"], ["t1"], ["t2"], ["t3"], ["t0", "t3"], ["t3", "t1", "t2", "t0"]], ids="-".join)
def test_any_subset_of_inputs(wrt):
    """pytorch#116350: gradients that nobody asked for are not computed."""
    def build(g, q, k, v, b):
        o, lse = g.sdpa(q, k, v, bias=b, stats=True)
        return g.mul(o, g.sigmoid(q)), lse

    def forward(q, k, v, b):
        o, lse = attention(q, k, v, b)
        return o * q.sigmoid(), lse
    check(build, [SHAPE, SHAPE, SHAPE, (3, 1, 5)], forward, wrt=wrt)


def test_an_operand_used_more_than_once_gets_the_sum():
    check(lambda g, x: g.mul(g.add(x, x), g.tanh(g.mul(x, x))), [(3, 4)], lambda x: (x + x) * (x * x).tanh())
    check(lambda g, x: g.sdpa(x, x, x)[0], [SHAPE], lambda x: attention(x, x, x)[0])


def test_gated_attention_with_a_mask_and_an_output_that_is_read_again():
    def build(g, q, k, v, gate, mask):
        o, _ = g.sdpa(q, k, v, bias=gate, mask=mask, scale=0.3)
        y = g.mul(o, g.sigmoid(gate))
        return y, g.tanh(y)

    def forward(q, k, v, gate, mask):
        y = attention(q, k, v, bias=gate, mask=mask, scale=0.3)[0] * gate.sigmoid()
        return y, y.tanh()
    check(build, [SHAPE, SHAPE, SHAPE, (3, 1, 1), (5, 5)], forward, masks=(4,))


def test_attention_written_with_primitives():
    def build(g, q, k, v, m):
        s = g.where(m, g.scale(g.matmul(q, g.transpose(k, (0, 1, 3, 2))), 0.25), -math.inf)
        return g.matmul(g.softmax(s), v)

    def forward(q, k, v, m):
        s = (q @ k.mT * 0.25).masked_fill(~m, -math.inf)
        # An empty row gives zeros here, and NaN in a plain softmax.
        return s.masked_fill(~m.any(-1, keepdim=True), 0.0).softmax(-1).masked_fill(~m, 0.0) @ v
    check(build, [SHAPE, SHAPE, SHAPE, (5, 5)], forward, masks=(3,))


def test_sink_gradients_come_through_output_and_statistics():
    """flash-attention PR#2706: the sink's gradient includes that of the LSE."""
    def forward(q, k, v, sink):
        s = torch.cat([q @ k.mT * 0.5, sink[None, :, None, None].expand(2, 3, 5, 1)], -1)
        return s.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)
    check(lambda g, q, k, v, s: g.sdpa(q, k, v, sink=s, scale=0.5, stats=True), [SHAPE, SHAPE, SHAPE, (3,)], forward)


def test_a_loss_on_the_statistics_alone():
    """flash-attention#889: the gradient of the LSE is not ignored, and v, which it does not see, gets zeros."""
    check(lambda g, q, k, v: g.sdpa(q, k, v, stats=True)[1], [SHAPE] * 3, lambda q, k, v: attention(q, k, v)[1])


# ---- the graphs


def forward_graph(outputs="y"):
    g = Graph("net")
    q, k, v = (g.tensor(n, SHAPE, dtype="bf16", alignment=2) for n in "qkv")
    o, lse = g.sdpa(q, k, v, causal=True, stats=True)
    y = g.mul(o, g.sigmoid(o))
    for name, t in (("y", y), ("o", o), ("lse", lse)):
        if name in outputs:
            g.output(t, name=name, stride=(1, 2, 6, 30) if name == "o" else None)
    return g


def ops(g):
    return [s.desc.op for s in fuse(g).steps]


def test_statistics_that_were_handed_out_are_inputs_of_the_backward_graph():
    b = backward_graph(forward_graph(["y", "o", "lse"]), ["q", "k"])
    assert {t.name for t in b.inputs} == {"q", "k", "v", "o", "lse", "d_y", "d_o", "d_lse"}
    assert [out.name for out in b.outputs] == ["d_q", "d_k"] and b.name == "net_backward"
    assert "sdpa" not in ops(b) and "sdpa_backward" in ops(b)
    declared = {t.name: t.desc for t in b.inputs}
    assert declared["o"].stride == declared["d_o"].stride == (1, 2, 6, 30) and declared["q"].alignment == 2


@pytest.mark.parametrize("outputs", [["y"], ["y", "o"], ["y", "lse"]], ids="-".join)
def test_attention_is_made_again_unless_both_its_results_are_there(outputs):
    b = backward_graph(forward_graph(outputs), ["q"])
    assert ops(b).count("sdpa") == 1
    assert {"d_" + n for n in outputs} <= {t.name for t in b.inputs}


def test_an_input_that_no_gradient_reaches_gets_zeros():
    g = Graph()
    x, y = (g.tensor(n, (2, 3), dtype="fp32") for n in "xy")
    g.output(g.where(g.cast(y, "bool"), x, x), name="z")
    b = backward_graph(g, ["x", "y"])
    b.validate()
    assert [out.tensor.producer.op for out in b.outputs] == ["add", "zeros_like"]


def test_a_gradient_that_is_the_output_s_own_is_a_copy():
    g = Graph()
    x, y = (g.tensor(n, (2, 3), dtype="fp32") for n in "xy")
    g.output(g.add(x, y), name="z")
    b = backward_graph(g, ["x", "y"])
    b.validate()
    assert [out.tensor.producer.op for out in b.outputs] == ["cast", "cast"]


def test_an_output_that_depends_on_nothing_asked_for_needs_no_gradient():
    g = Graph()
    x, y = (g.tensor(n, (2, 3), dtype="fp32") for n in "xy")
    g.output(g.tanh(x), name="a")
    g.output(g.tanh(y), name="b")
    assert {t.name for t in backward_graph(g, ["x"]).inputs} == {"a", "d_a"}


def test_deterministic_reaches_every_attention():
    for flag in (False, True):
        b = backward_graph(forward_graph(), ["v"], deterministic=flag)
        assert [s.desc.deterministic for s in fuse(b).steps if s.desc.op == "sdpa_backward"] == [flag]


def test_options_are_those_of_the_forward():
    g = Graph()
    q = g.tensor("q", (7, 2, 8), dtype="bf16")
    cu = g.tensor("cu", (3,), dtype="int32")
    o, _ = g.sdpa(q, q, q, causal=True, align="bottom_right", window=(3, None), softcap=5.0, scale=0.1, cu_seqlens_q=cu,
                  cu_seqlens_kv=cu, max_seqlen_q=4, max_seqlen_kv=5)
    g.output(o)
    forward, backward = (next(s.desc for s in fuse(x).steps if s.desc.op == op) for x, op in (
        (g, "sdpa"), (backward_graph(g, ["q"]), "sdpa_backward")))
    for name in ("band", "scale", "softcap", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q"):
        assert getattr(forward, name) == getattr(backward, name)


@pytest.mark.parametrize("wrt, message", [
    (["mask_"], "'mask_'.*did you mean 'mask'"), ([], "no name"), (["q", "q"], "twice"), (["mask"], "bool"),
    (["y"], "expected one of the inputs"), ("q", r"the string 'q', expected a list of names such as \['q'\]")])
def test_names_that_cannot_be_differentiated(wrt, message):
    g = Graph()
    q, m = g.tensor("q", SHAPE, dtype="fp32"), g.tensor("mask", (5, 5), dtype="bool")
    g.output(g.sdpa(q, q, q, mask=m)[0], name="y")
    with pytest.raises(GraphError, match=message):
        backward_graph(g, wrt)


def test_an_op_without_a_derivative_is_named():
    """pytorch#116350: a second derivative is refused where it is asked for."""
    first = backward_graph(forward_graph(), ["q"])
    with pytest.raises(GraphError, match="sdpa_backward.*no derivative"):
        backward_graph(first, ["q"])


def test_a_misspelt_option_and_an_invalid_graph_are_refused():
    with pytest.raises(TypeError, match="did you mean 'deterministic'"):
        backward_graph(forward_graph(), ["q"], determinstic=True)
    with pytest.raises(GraphError, match="at least one"):
        backward_graph(Graph(), ["q"])


def test_names_that_collide_are_reported():
    g = Graph()
    g.output(g.add(g.tensor("y", (2,), dtype="fp32"), g.tensor("d_z", (2,), dtype="fp32")), name="z")
    b = backward_graph(g, ["y"])
    assert [t.name for t in b.inputs] == ["d_z"]
    h = Graph()
    h.output(h.mul(h.tensor("y", (2,), dtype="fp32"), h.tensor("d_z", (2,), dtype="fp32")), name="z")
    with pytest.raises(GraphError, match="'d_z'.*name of its own"):
        backward_graph(h, ["y"])


def test_a_deep_graph_is_no_problem():
    """Making intermediates again does not recurse."""
    g = Graph()
    t = g.tensor("x", (2,), dtype="fp32")
    for _ in range(1500):
        t = g.tanh(t)
    g.output(t, name="y")
    assert len(backward_graph(g, ["x"]).ops) > 2500
