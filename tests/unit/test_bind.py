"""Buffers that do not fit: a BindError that names the tensor, what was given and what was expected; nothing
is launched and no output is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.small import Spec
from torch import Tensor

from descriptors import sym
from engines.base import Target
from frost import values
from frost.errors import BindError, GraphError
from frost.graph import Graph
from frost.plan import Plan

UNTOUCHED = 7.0
Tensors = dict[str, Any]


def buffers(plan: Plan, *, outputs: bool = True) -> Tensors:
    """Operands that fit, outputs filled with `UNTOUCHED`."""
    torch.manual_seed(0)
    made: Tensors = {}
    for names, filled in ((plan.program.inputs, False), (plan.program.outputs, True)):
        for name, slot in names.items():
            desc = plan.program.slots[slot].desc.bound(
                {s.name: min(3, s.max) for s in plan.program.slots[slot].desc.syms}
            )
            if filled and not outputs:
                continue
            dtype = getattr(torch, desc.dtype.torch_name)
            t = torch.empty_strided(desc.shape, desc.strides, dtype=dtype)
            made[name] = t.fill_(UNTOUCHED) if filled or not dtype.is_floating_point else t.normal_()
    return made


def refused(plan: Plan, tensors: Tensors, *words: str, workspace: Any = None) -> None:
    """`execute` raises a BindError with all the words and leaves every output as it was."""
    with pytest.raises(BindError) as caught:
        plan.execute(tensors, workspace=workspace)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    if isinstance(tensors, dict):
        for name in plan.program.outputs:
            out = tensors.get(name)
            if isinstance(out, Tensor) and out.device.type == "cpu" and out.layout is torch.strided:
                assert bool((out == UNTOUCHED).all()), f"{name} was written"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """q [2, 4, 6, 8], k and v [2, 2, 8, 8]; o is BSHD, lse row-major."""
    return Spec(strides={"o": (6 * 4 * 8, 8, 4 * 8, 1)}).build().compile("cpu", engines=["reference"])


def shifted(t: Tensor) -> Tensor:
    """The same layout one element further on."""
    flat = torch.empty(t.numel() + 1, dtype=t.dtype)
    return flat[1:].view(t.shape).copy_(t)


CHANGES: dict[str, tuple[str, Callable[[Any], Any], tuple[str, ...]]] = {
    "input dtype": ("q", lambda t: t.double(), ("'q'", "fp64", "fp32")),
    "input dtype that we have no name for": (
        "q",
        lambda t: t.to(torch.complex64),
        ("'q'", "complex64", "fp32"),
    ),
    "output dtype": ("o", lambda t: t.half(), ("'o'", "fp16", "fp32")),
    "fewer keys": ("k", lambda t: t[:, :, :7].contiguous(), ("'k'", "(2, 2, 7, 8)", "(2, 2, 8, 8)")),
    "rank": ("q", lambda t: t[0], ("'q'", "(4, 6, 8)", "(2, 4, 6, 8)")),
    "output shape": ("lse", lambda t: t[:, :, :5].contiguous(), ("'lse'", "(2, 4, 5)", "(2, 4, 6)")),
    "input stride": (
        "v",
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        ("'v'", "(128, 8, 16, 1)", "(128, 64, 8, 1)"),
    ),
    "expanded input": ("q", lambda t: t[:1].expand(2, 4, 6, 8), ("'q'", "(0, 48, 8, 1)", "(192, 48, 8, 1)")),
    "output stride": ("o", lambda t: t.contiguous(), ("'o'", "(192, 48, 8, 1)", "(192, 8, 32, 1)")),
    "device": ("k", lambda t: t.to("meta"), ("'k'", "meta", "cpu")),
    "output device": ("lse", lambda t: t.to("meta"), ("'lse'", "meta", "cpu")),
    "sparse": ("k", lambda t: t.to_sparse(), ("'k'", "sparse", "strided")),
    "alignment": ("q", shifted, ("'q'", "16-byte", "alignment=4")),
    "list": ("q", lambda t: t.tolist(), ("'q'", "list", "torch.Tensor")),
    "None": ("v", lambda t: None, ("'v'", "NoneType", "torch.Tensor")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_buffer_that_does_not_match(what: str, plan: Plan) -> None:
    name, change, words = CHANGES[what]
    tensors = buffers(plan)
    tensors[name] = change(tensors[name])
    refused(plan, tensors, *words)


def test_a_fitting_set_of_buffers_is_taken(plan: Plan) -> None:
    """What the refusals above start from, so that none of them is refused for another reason."""
    tensors = buffers(plan)
    assert plan.execute(tensors)["o"] is tensors["o"]
    assert not bool((tensors["o"] == UNTOUCHED).any())


def test_a_missing_input_and_a_misspelt_name(plan: Plan) -> None:
    tensors = buffers(plan)
    k = tensors.pop("k")
    refused(plan, tensors, "'k'", "not given")
    refused(plan, {**tensors, "k": k, "lsee": tensors["lse"]}, "'lsee'", "did you mean 'lse'")
    refused(plan, list(tensors.values()), "list", "mapping")  # type: ignore[arg-type]


def test_a_plan_for_a_gpu_refuses_cpu_tensors() -> None:
    """A pointer of the wrong kind would fault in the kernel."""
    made = Spec().build().compile(Target.cuda((9, 0)), engines=["reference"])
    refused(made, buffers(made), "'q'", "cpu", "cuda", "sm_90")


def test_nothing_is_left_half_done_when_the_last_check_fails(plan: Plan) -> None:
    """Outputs that were not given must not be allocated either before everything is known to fit."""
    tensors = buffers(plan, outputs=False)
    refused(plan, {**tensors, "lse": torch.full((2, 4, 6), UNTOUCHED, dtype=torch.float64)}, "'lse'", "fp64")


# ---- alignment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["reference", "triton"])
def test_aligned_first_then_misaligned_with_the_same_shapes(engine: str) -> None:
    """pytorch PR#187506: alignment known at compile time and then reused for another pointer."""
    aligned = Spec(dtype="fp16", heads=(1, 1)).build().compile("cpu", engines=[engine], gates="off")
    tensors = buffers(aligned)
    expected = {n: t.clone() for n, t in aligned.execute(tensors).items()}
    tensors["q"] = shifted(tensors["q"])
    tensors["o"].fill_(UNTOUCHED), tensors["lse"].fill_(UNTOUCHED)
    refused(aligned, tensors, "'q'", "16-byte aligned", "alignment=2")
    declared = (
        Spec(dtype="fp16", heads=(1, 1), alignments={"q": 2})
        .build()
        .compile("cpu", engines=[engine], gates="off")
    )
    assert declared.key != aligned.key
    for name, got in declared.execute(tensors).items():
        assert torch.equal(got, expected[name])


@pytest.mark.parametrize("offset", range(9))
def test_every_element_offset_with_its_declared_alignment(offset: int) -> None:
    spec = Spec(dtype="bf16", heads=(1, 1), batch=1, alignments=dict.fromkeys(("q", "k", "v", "o", "lse"), 2))
    made = spec.build().compile("cpu", engines=["triton"], gates="off")
    tensors = buffers(made)
    expected = {n: t.clone() for n, t in made.execute(tensors).items()}
    moved = {
        n: torch.zeros(t.numel() + offset, dtype=t.dtype)[offset:].view(t.shape).copy_(t)
        for n, t in tensors.items()
    }
    for name, got in made.execute(moved).items():
        assert torch.equal(got, expected[name])


# ---- overlap ---------------------------------------------------------------------------------------------


def overlap_plan(op: str = "sdpa", **changes: Any) -> Plan:
    """All operands [2, 2, 8, 8], so that any of them can stand in for another."""
    return Spec(op=op, heads=(2, 2), seqlens=(8, 8), **changes).build().compile("cpu", engines=["reference"])


OVERLAPS: dict[str, tuple[str, Callable[[Tensors], Tensors], tuple[str, str]]] = {
    "o is q": ("sdpa", lambda t: {"o": t["q"]}, ("'o'", "'q'")),
    "o is v": ("sdpa", lambda t: {"o": t["v"]}, ("'o'", "'v'")),
    "lse inside o": ("sdpa", lambda t: {"lse": t["o"].view(-1)[16:48].view(2, 2, 8)}, ("'o'", "'lse'")),
    "lse inside k": ("sdpa", lambda t: {"lse": t["k"].view(-1)[-32:].view(2, 2, 8)}, ("'lse'", "'k'")),
    "dk is dv": ("sdpa_backward", lambda t: {"dk": t["dv"]}, ("'dk'", "'dv'")),
    "dq is do": ("sdpa_backward", lambda t: {"dq": t["do"]}, ("'dq'", "'do'")),
    "dq is q": ("sdpa_backward", lambda t: {"dq": t["q"]}, ("'dq'", "'q'")),
}


@pytest.mark.parametrize("what", OVERLAPS)
def test_an_output_that_overlaps_another_operand(what: str) -> None:
    """flash-attention PR#2351: both tensors are named."""
    op, change, words = OVERLAPS[what]
    made = overlap_plan(op)
    tensors = buffers(made)
    for t in tensors.values():
        t.fill_(UNTOUCHED)
    refused(made, {**tensors, **change(tensors)}, *words)


def test_an_output_that_overlaps_itself_is_refused_in_the_graph() -> None:
    """o.expand(...): stride 0 along a dim of 2."""
    with pytest.raises(GraphError, match="'o'"):
        overlap_plan(strides={"o": (0, 64, 8, 1)})


def test_interleaved_but_disjoint_outputs_are_fine() -> None:
    """dq, dk and dv as three slices of one dqkv, inputs as three slices of one qkv; B = 2, since with one
    batch a wrong batch stride goes unseen."""
    b, h, s, d = 2, 2, 8, 8
    stride = (s * 3 * h * d, d, 3 * h * d, 1)
    names = ("q", "k", "v", "dq", "dk", "dv")
    # In fp64 a wrong address can't hide behind another order of summation.
    sliced = overlap_plan("sdpa_backward", dtype="fp64", strides=dict.fromkeys(names, stride))
    plain = overlap_plan("sdpa_backward", dtype="fp64")
    tensors = buffers(plain)
    expected = plain.execute(tensors)
    qkv, dqkv = torch.empty(b, s, 3, h, d).double(), torch.full((b, s, 3, h, d), float("nan")).double()
    views = {n: qkv[:, :, i].transpose(1, 2) for i, n in enumerate(("q", "k", "v"))}
    outs = {n: dqkv[:, :, i].transpose(1, 2) for i, n in enumerate(("dq", "dk", "dv"))}
    for n, view in views.items():
        view.copy_(tensors[n])
    got = sliced.execute({**{n: tensors[n] for n in ("o", "do", "lse")}, **views, **outs})
    for n in ("dq", "dk", "dv"):
        torch.testing.assert_close(got[n], expected[n], rtol=1e-11, atol=1e-11)
        assert got[n] is outs[n]
    assert not bool(dqkv.isnan().any())


def test_a_zero_size_output_overlaps_nothing() -> None:
    made = Spec(seqlens=(0, 8), heads=(2, 2)).build().compile("cpu", engines=["reference"])
    tensors = buffers(made)
    tensors["o"] = tensors["q"]
    made.execute(tensors)


# ---- workspace -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_steps() -> Plan:
    """y = tanh(sigmoid(x)), 64 floats: one intermediate in the workspace."""
    g = Graph()
    x = g.tensor("x", (8, 8), dtype="fp32")
    g.output(g.tanh(g.sigmoid(x)), name="y")
    return g.compile("cpu", engines=["reference"])


WORKSPACES: dict[str, tuple[Callable[[int], Any], tuple[str, ...]]] = {
    "too small": (lambda n: torch.zeros(n - 1, dtype=torch.uint8), ("255", "256")),
    "empty": (lambda n: torch.zeros(0, dtype=torch.uint8), ("0 bytes", "256")),
    "floats": (lambda n: torch.zeros(n, dtype=torch.float32), ("float32", "uint8")),
    "two dims": (lambda n: torch.zeros(2, n, dtype=torch.uint8), ("[2, 256]", "1-D")),
    "every other byte": (lambda n: torch.zeros(2 * n, dtype=torch.uint8)[::2], ("contiguous",)),
    "misaligned": (lambda n: torch.zeros(n + 1, dtype=torch.uint8)[1:], ("16-byte",)),
    "another device": (lambda n: torch.zeros(n, dtype=torch.uint8, device="meta"), ("meta", "cpu")),
    "no tensor": (lambda n: bytearray(n), ("bytearray",)),
}


@pytest.mark.parametrize("what", WORKSPACES)
def test_a_workspace_that_does_not_fit(what: str, two_steps: Plan) -> None:
    make, words = WORKSPACES[what]
    assert two_steps.workspace_size == 256
    refused(two_steps, buffers(two_steps), "workspace", *words, workspace=make(256))


def test_a_workspace_that_overlaps_an_operand(two_steps: Plan) -> None:
    tensors = buffers(two_steps)
    for name in ("x", "y"):
        refused(
            two_steps, tensors, "workspace", repr(name), workspace=tensors[name].view(-1).view(torch.uint8)
        )


def test_a_larger_workspace_serves_and_no_workspace_is_allocated_for(two_steps: Plan) -> None:
    tensors = buffers(two_steps)
    expected = torch.tanh(torch.sigmoid(tensors["x"]))
    for workspace in (torch.full((1000,), 255, dtype=torch.uint8), None):
        torch.testing.assert_close(two_steps.execute(tensors, workspace=workspace)["y"], expected)


# ---- symbols ---------------------------------------------------------------------------------------------

S = sym("S", max=16)


def symbolic() -> Plan:
    return Spec(seqlens=(S, S), heads=(2, 2), dims=(8, 8)).build().compile("cpu", engines=["reference"])


def sized(plan: Plan, n: int, **others: int) -> Tensors:
    out: Tensors = {}
    for name in (*plan.program.inputs, *plan.program.outputs):
        size = others.get(name, n)
        shape = (2, 2, size) if name == "lse" else (2, 2, size, 8)
        out[name] = torch.full(shape, UNTOUCHED) if name in plan.program.outputs else torch.randn(shape)
    return out


def test_a_symbol_takes_any_value_up_to_its_maximum() -> None:
    plan = symbolic()
    for n in (1, 7, 16, 0, 7):
        out = plan.execute(sized(plan, n))
        assert out["o"].shape == (2, 2, n, 8) and not bool((out["o"] == UNTOUCHED).any())


def test_a_symbol_past_its_maximum() -> None:
    plan = symbolic()
    refused(plan, sized(plan, 17), "'q'", "S=17", "maximum 16", "frost.sym('S'")


@pytest.mark.parametrize("name", ["k", "v", "o", "lse"])
def test_one_symbol_with_two_values(name: str) -> None:
    plan = symbolic()
    refused(plan, sized(plan, 8, **{name: 9}), repr(name), "S=9", "expected 8", "'q'")


def test_strides_that_follow_from_a_symbol_are_checked() -> None:
    plan = symbolic()
    tensors = sized(plan, 8)
    tensors["q"] = tensors["q"].transpose(1, 2).contiguous().transpose(1, 2)
    refused(plan, tensors, "'q'", "(128, 8, 16, 1)", "(128, 64, 8, 1)")


# ---- values ----------------------------------------------------------------------------------------------

BAD_OFFSETS: dict[str, tuple[list[int], list[int], str]] = {
    "falling": ([0, 5, 3, 9], [0, 3, 6, 9], "cu_seqlens_q[2]"),
    "beyond the tokens": ([0, 5, 6, 10], [0, 3, 6, 9], "cu_seqlens_q[3]"),
    "negative": ([-1, 5, 6, 9], [0, 3, 6, 9], "cu_seqlens_q[0]"),
    "keys": ([0, 3, 6, 9], [0, 3, 2, 9], "cu_seqlens_kv[2]"),
    "longer than declared": ([0, 3, 6, 9], [0, 9, 9, 9], "cu_seqlens_kv[1]"),
}


@pytest.mark.parametrize("engine", ["reference", "triton"])
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets_on_a_cpu(what: str, engine: str) -> None:
    """The first bad one is named, and an execute after a good one is checked again."""
    plan = (
        Spec(packed=True, heads=(2, 2), seqlens=(9, 9), options={"max_seqlen_kv": 7})
        .build()
        .compile("cpu", engines=[engine], gates="off")
    )
    tensors = buffers(plan)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        tensors[name] = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    call = plan.bind(tensors)
    call()
    q, kv, word = BAD_OFFSETS[what]
    tensors["cu_seqlens_q"].copy_(torch.tensor(q)), tensors["cu_seqlens_kv"].copy_(torch.tensor(kv))
    tensors["o"].fill_(UNTOUCHED), tensors["lse"].fill_(UNTOUCHED)
    refused(plan, tensors, word)
    with pytest.raises(BindError, match=word.replace("[", r"\[")):
        call()
    assert bool((tensors["o"] == UNTOUCHED).all())


@pytest.mark.parametrize(
    ("side", "given"), [("seq_len_q", [7, 1]), ("seq_len_q", [1, -1]), ("seq_len_kv", [9, 0])]
)
def test_bad_lengths_on_a_cpu(side: str, given: list[int]) -> None:
    plan = Spec(lengths="int64").build().compile("cpu", engines=["reference"])
    tensors = buffers(plan)
    tensors["seq_len_q"], tensors["seq_len_kv"] = torch.tensor([6, 0]), torch.tensor([8, 3])
    plan.execute(tensors)
    tensors["o"].fill_(UNTOUCHED), tensors["lse"].fill_(UNTOUCHED)
    refused(plan, {**tensors, side: torch.tensor(given)}, side, "expected")


@pytest.mark.parametrize("offsets", [[0, 5, 3, 9], [-100, 2**30, 9, -5], [9, 0, 9, 0], [2**31 - 1] * 4])
def test_wrong_offsets_that_nobody_checks_stay_inside_the_buffers(
    offsets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU values are not read: whatever they are, only the declared outputs are written."""
    from layouts import check_canaries, output_like

    monkeypatch.setattr(values, "wanted", lambda on_cpu: False)
    for op in ("sdpa", "sdpa_backward"):
        plan = (
            Spec(op=op, packed=True, heads=(2, 2), seqlens=(9, 9))
            .build()
            .compile("cpu", engines=["triton"], gates="off")
        )
        tensors = buffers(plan)
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            tensors[name] = torch.tensor(offsets, dtype=torch.int32)
        outs = [output_like(tensors[n].shape, torch.float32, name=n) for n in plan.program.outputs]
        plan.execute({**tensors, **{o.name: o.tensor for o in outs}})
        check_canaries(*outs)


def test_value_checks_can_be_switched_on_and_off() -> None:
    """On a CPU reading is free, so they always run; elsewhere `frost.debug` decides, and restores."""
    assert values.wanted(True)
    assert not values.wanted(False)
    with values.debug(check_values=True):
        assert values._forced is True
        with values.debug(check_values=False):
            assert values._forced is False and values.wanted(True)
        assert values._forced is True
    assert values._forced is None


def test_overlap_is_judged_without_the_strides_of_size_one_dims() -> None:
    """Such a stride is never used and may be a number that no index type holds."""
    from descriptors import may_share_memory

    giant = (4096, (1, 4), (2**62, 1), 8)
    assert may_share_memory(giant, (4096 + 24, (2,), (1,), 8))
    assert not may_share_memory(giant, (4096 + 32, (2,), (1,), 8))
