"""What becomes of a graph before lowering: attention patterns fused, dead ops dropped, slots and steps."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from descriptors import MaskDesc, PointwiseDesc, SdpaDesc, TensorDesc, sym
from frost.fuse import fuse
from frost.graph import Graph

B, H, S, D, DV = 2, 3, 5, 8, 4


class Pattern:
    """softmax(options(q kᵀ)) v, with `order` naming the options from the inside out: s(cale), b(ias), m(ask)."""

    def __init__(self, order="", *, kv_heads=H, value=0.5, dtype="fp32", bias_shape=(H, S, S), mask_shape=(S, S)):
        self.g = g = Graph("pattern")
        self.q = g.tensor("q", (B, H, S, D), dtype=dtype)
        self.k = g.tensor("k", (B, kv_heads, S, D), dtype=dtype)
        self.v = g.tensor("v", (B, kv_heads, S, DV), dtype=dtype)
        self.tensors = {}
        s = self.scores()
        for i, option in enumerate(order):
            if option == "s":
                s = g.scale(s, value)
            elif option == "b":
                bias = self.tensors[f"b{i}"] = g.tensor(f"b{i}", bias_shape, dtype=dtype)
                s = g.add(s, bias) if i % 2 else g.add(bias, s)
            else:
                mask = self.tensors[f"m{i}"] = g.tensor(f"m{i}", mask_shape, dtype="bool")
                s = g.where(mask, s, -math.inf)
        self.s = s
        self.p = self.softmax(s)
        self.o = g.matmul(self.p, self.v)
        g.output(self.o, name="o")

    def scores(self):
        return self.g.matmul(self.q, self.g.transpose(self.k, (0, 1, 3, 2)))

    def softmax(self, s):
        return self.g.softmax(s)

    def program(self):
        self.g.validate()
        return fuse(self.g)

    def ops(self):
        return [step.desc.op for step in self.program().steps]


ORDERS = ["".join(o) for n in range(4) for o in itertools.permutations("sbm", n)]
# A scale over a bias would scale the bias too.
LEGAL = [o for o in ORDERS if not ("b" in o and "s" in o and o.index("b") < o.index("s"))]


@pytest.mark.parametrize("order", LEGAL)
def test_the_pattern_becomes_one_sdpa_in_any_legal_order(order):
    pattern = Pattern(order)
    program = pattern.program()
    [step] = program.steps
    assert isinstance(step.desc, SdpaDesc) and step.desc.scale == (0.5 if "s" in order else 1.0)
    assert step.desc.band == MaskDesc() and step.desc.lse is None and step.desc.softcap is None
    given = {f: program.slots[i].name for f, i in step.inputs}
    expected = {"q": "q", "k": "k", "v": "v"}
    expected.update({"bias" if n[0] == "b" else "mask": n for n in pattern.tensors})
    assert given == expected
    assert not [s for s in program.slots if s.kind == "intermediate"]


@pytest.mark.parametrize("order", [o for o in ORDERS if o not in LEGAL])
def test_a_bias_under_a_scale_is_not_attention(order):
    assert "sdpa" not in Pattern(order).ops()


def test_bias_and_mask_have_four_dims_in_the_record():
    """Slots keep the rank that was declared; engines always see four dims."""
    program = Pattern("bm").program()
    desc = program.steps[0].desc
    assert (desc.bias.shape, desc.mask.shape) == ((1, H, S, S), (1, 1, S, S))
    shapes = {f: program.slots[i].desc.shape for f, i in program.steps[0].inputs}
    assert (shapes["bias"], shapes["mask"]) == ((H, S, S), (S, S))


def test_a_declared_stride_of_a_low_rank_bias_is_kept():
    g = Graph()
    q = g.tensor("q", (B, H, S, D), dtype="bf16")
    bias = g.tensor("bias", (S, S), stride=(1, 7), dtype="bf16")
    g.output(g.sdpa(q, q, q, bias=bias)[0])
    assert fuse(g).steps[0].desc.bias == TensorDesc.make((1, 1, S, S), "bf16", (0, 0, 1, 7))


@pytest.mark.parametrize("order, value, fuses", [
    ("ms", 0.5, True), ("ms", -0.5, False), ("ms", 0.0, False), ("sm", -0.5, True), ("ss", 3.0, True),
    ("mm", 1.0, False), ("bb", 1.0, False), ("s", 0.0, True)])
def test_masks_under_a_scale_and_repeated_options(order, value, fuses):
    """-inf under a scale that is not positive is no mask any more; two biases or masks do not fit one sdpa."""
    assert (Pattern(order, value=value).ops() == ["sdpa"]) == fuses


def test_scales_multiply_wherever_they_stand():
    class Scaled(Pattern):
        def scores(self):
            g = self.g
            keys = g.scale(g.transpose(g.scale(self.k, 3.0), (0, 1, -1, -2)), 5.0)
            return g.scale(g.matmul(g.scale(self.q, 2.0), keys), 7.0)
    [step] = Scaled("s").program().steps
    assert step.desc.op == "sdpa" and step.desc.scale == 2 * 3 * 5 * 7 * 0.5


def test_a_product_of_scales_beyond_the_finite_is_left_alone():
    assert "sdpa" not in Pattern("ss", value=1e200).ops()


def test_one_kv_head_for_all_is_attention_and_a_broadcast_batch_is_not():
    assert Pattern(kv_heads=1).ops() == ["sdpa"]

    class Batch(Pattern):
        def scores(self):
            self.k = self.g.tensor("one_k", (1, H, S, D), dtype="fp32")
            self.g.inputs.remove(next(t for t in self.g.inputs if t.name == "k"))
            return super().scores()
    assert "sdpa" not in Batch().ops()


@pytest.mark.parametrize("shape, fuses", [((S,), True), ((), True), ((B, 1, 1, S), True), ((1, B, H, S, S), False)])
def test_only_a_bias_that_broadcasts_onto_the_scores(shape, fuses):
    pattern = Pattern("b", bias_shape=shape)
    assert (pattern.ops() == ["sdpa"]) == fuses


@pytest.mark.parametrize("which", ["p", "s"])
def test_what_somebody_else_reads_is_not_fused_away(which):
    handed_out, read = Pattern("s"), Pattern("s")
    handed_out.g.output(getattr(handed_out, which), name="seen")
    read.g.output(read.g.tanh(getattr(read, which)), name="seen")
    assert "sdpa" not in handed_out.ops() and "sdpa" not in read.ops()


def test_a_dead_reader_is_no_reader():
    pattern = Pattern("s")
    pattern.g.tanh(pattern.p)
    assert pattern.ops() == ["sdpa"]


def test_a_transposed_k_that_is_read_elsewhere_stays_beside_the_sdpa():
    pattern = Pattern()
    pattern.g.output(next(n for n in pattern.g.ops if n.op == "transpose").outputs["out"], name="kt")
    assert sorted(pattern.ops()) == ["sdpa", "transpose"]


@pytest.mark.parametrize("change", ["axis", "perm", "no softmax"])
def test_what_only_looks_like_attention_runs_as_written(change):
    class Odd(Pattern):
        def scores(self):
            if change == "perm":
                return self.g.matmul(self.q, self.g.reshape(self.k, (B, H, D, S)))
            return super().scores()

        def softmax(self, s):
            return self.g.tanh(s) if change == "no softmax" else self.g.softmax(s, axis=2 if change == "axis" else -1)
    ops = Odd("s").ops()
    assert "sdpa" not in ops and ops.count("matmul") == 2


def test_two_patterns_in_one_graph_both_fuse():
    g = Graph()
    x = g.tensor("x", (B, H, S, D), dtype="fp32")
    for _ in range(2):
        x = g.matmul(g.softmax(g.matmul(x, g.transpose(x, (0, 1, 3, 2)))), x)
    g.output(x, name="y")
    assert [s.desc.op for s in fuse(g).steps] == ["sdpa", "sdpa"]


# ---- programs


def test_dead_ops_and_unread_results_are_dropped():
    g = Graph()
    q, k, v, do = (g.tensor(n, (B, H, S, D), dtype="bf16") for n in ("q", "k", "v", "do"))
    o, lse = g.sdpa(q, k, v, stats=True)
    g.tanh(g.sigmoid(o))
    g.sdpa(q, k, v, stats=True)
    grads = g.sdpa_backward(q, k, v, o, do, lse)
    g.output(grads.dv, name="dv")
    forward, backward = fuse(g).steps
    assert forward.desc.lse is not None
    assert (backward.desc.dq, backward.desc.dk) == (None, None) and dict(backward.outputs).keys() == {"dv"}
    h = Graph()
    q = h.tensor("q", (B, H, S, D), dtype="bf16")
    h.output(h.sdpa(q, q, q, stats=True)[1])
    [step] = fuse(h).steps
    assert step.desc.o is not None and [name for name, _ in step.outputs] == ["o", "lse"]


def test_slots_are_inputs_then_outputs_then_intermediates():
    g = Graph()
    x, y = g.tensor("x", (3, 4), dtype="fp32"), g.tensor("y", (3, 4), dtype="fp32")
    t = g.tanh(x)
    g.output(g.mul(g.sigmoid(t), y), name="b")
    g.output(t, name="a", stride=(1, 3))
    program = fuse(g)
    assert [(s.index, s.name, s.kind) for s in program.slots] == [
        (0, "x", "input"), (1, "y", "input"), (2, "b", "output"), (3, "a", "output"), (4, "sigmoid", "intermediate")]
    assert (program.inputs, program.outputs) == ({"x": 0, "y": 1}, {"b": 2, "a": 3})
    assert [(s.name, s.inputs, s.outputs) for s in program.steps] == [
        ("tanh", (("x", 0),), (("out", 3),)), ("sigmoid", (("x", 3),), (("out", 4),)),
        ("mul", (("x", 4), ("y", 1)), (("out", 2),))]


def test_readers_of_an_output_read_it_with_its_declared_strides():
    g = Graph()
    t = g.tanh(g.tensor("x", (3, 4), dtype="fp32"))
    g.output(t, name="t", stride=(1, 3))
    g.output(g.sigmoid(t), name="u")
    first, second = fuse(g).steps
    assert first.desc.out.stride == second.desc.x.stride == (1, 3) and second.desc.out.stride is None


def test_equal_masks_are_equal_records():
    """flash-attention#1133: causal and a window that ends at the diagonal are one thing."""
    def band(**options):
        g = Graph()
        q = g.tensor("q", (B, H, S, D), dtype="bf16")
        g.output(g.sdpa(q, q, q, **options)[0])
        g.validate()
        return fuse(g).steps[0].desc.band
    assert band(causal=True) == band(window=(None, 0)) == band(causal=True, window=(None, 0)) == MaskDesc(causal=True)
    assert band(causal=True, window=(3, None)) == band(window=(3, 0)) == MaskDesc(causal=True, left=3)
    assert band(window=(0, 2)) == MaskDesc(left=0, right=2)


def test_a_zero_softcap_is_off_and_a_zero_scale_is_zero():
    g = Graph()
    q = g.tensor("q", (B, H, S, D), dtype="bf16")
    g.output(g.sdpa(q, q, q, softcap=0, scale=0)[0])
    desc = fuse(g).steps[0].desc
    assert desc.softcap is None and desc.scale_value == 0.0


@pytest.mark.parametrize("total_q, total_kv", [(7, 9), (11, 11)])
def test_primitives_beside_packed_attention_know_the_totals(total_q, total_kv):
    g = Graph()
    q, k = g.tensor("q", (total_q, H, D), dtype="bf16"), g.tensor("k", (total_kv, H, D), dtype="bf16")
    cu_q, cu_kv = g.tensor("cu_q", (3,), dtype="int32"), g.tensor("cu_kv", (3,), dtype="int32")
    o, _ = g.sdpa(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    g.output(g.mul(o, g.sigmoid(o)), name="y")
    program = fuse(g)
    primitives = [s.desc for s in program.steps if isinstance(s.desc, PointwiseDesc)]
    assert {total for total, _ in primitives[0].packed_totals} == {total_q, total_kv}
    assert str(total_q) not in str([p.key() for p in primitives])


def test_a_symbolic_total_is_no_number_to_keep_out():
    g = Graph()
    q, cu = g.tensor("q", (sym("T", 64), H, D), dtype="bf16"), g.tensor("cu", (3,), dtype="int32")
    g.output(g.tanh(g.sdpa(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu)[0]))
    assert fuse(g).steps[1].desc.packed_totals == ()


# ---- numbers


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kv_heads", [1, H])
def test_the_program_computes_what_was_written(order, kv_heads):
    """Fused or not, the numbers are those of the primitives, empty rows included."""
    torch.manual_seed(0)
    pattern = Pattern(order, kv_heads=kv_heads, dtype="fp64")
    given = {t.name: torch.randn(t.shape, dtype=torch.float64) for t in pattern.g.inputs if t.dtype.is_floating}
    given |= {n: torch.arange(S)[:, None] > torch.arange(S) for n in pattern.tensors if n[0] == "m"}
    s = given["q"] @ given["k"].mT
    for i, option in enumerate(order):
        if option == "m":
            s = s.masked_fill(~given[f"m{i}"], -math.inf)
        else:
            s = s * 0.5 if option == "s" else s + given[f"b{i}"]
    expected = s.softmax(-1).nan_to_num(0.0) @ given["v"]
    plan = pattern.g.compile("cpu", engines=["reference"])
    torch.testing.assert_close(plan.execute(given)["o"], expected, atol=1e-12, rtol=0)
