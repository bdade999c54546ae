"""The plan key: what re-keys a plan, what must not, and that nothing but host scalars is in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from cases.small import Spec

from descriptors import MaskDesc, SdpaBwdDesc, SdpaDesc, TensorDesc, sym
from descriptors.ops import OP_TYPES
from engines import registry
from engines.base import Target
from frost import gates
from frost.fuse import fuse
from frost.lowering import Policy
from frost.plan_key import key_text, plan_key
from frost.validate import validate

SM90 = Target.cuda((9, 0))
OFF = Policy(gates="off")


def key_of(spec: Spec, target: Target = SM90, policy: Policy = OFF) -> tuple:
    g = spec.build()
    validate(g)
    return plan_key(fuse(g), target, policy)


# ---- every field is in one list ----------------------------------------------------------------------------


@pytest.mark.parametrize("record", [*OP_TYPES.values(), MaskDesc], ids=lambda c: c.__name__)
def test_every_field_is_either_in_the_key_or_run_time(record: Any) -> None:
    """A field that somebody adds has to be put into one of the two lists."""
    names = [f.name for f in fields(record)]
    key, runtime = list(record.KEY), list(record.RUNTIME)
    assert sorted(key + runtime) == sorted(names)
    assert len(set(key + runtime)) == len(names)
    assert set(record.PRESENCE) <= set(runtime)


@pytest.mark.parametrize("record", OP_TYPES.values(), ids=lambda c: c.__name__)
def test_every_operand_and_result_is_in_the_key(record: Any) -> None:
    """Dtypes and declared strides of all of them decide code: statistics' and bias' too."""
    assert set(record.INPUTS) | set(record.OUTPUTS) <= set(record.KEY)


# ---- what does and what does not re-key -----------------------------------------------------------------

DENSE = Spec()
BACKWARD = Spec(op="sdpa_backward")
PACKED = Spec(packed=True, seqlens=(40, 50))
PACKED_BACKWARD = PACKED.but(op="sdpa_backward", deterministic=True)
WINDOW = Spec(options={"window": (5, 3)})
CAPPED = Spec(options={"softcap": 3.0})
BIASED = Spec(bias=(1, 4, 6, 8))


def head_major(tokens: Any) -> tuple[Any, ...]:
    return (1, tokens)


def swapped(tokens: Any) -> dict[str, tuple[Any, ...]]:
    """Packed q and its statistics stored head by head: a stride is the token total."""
    return {"q": (8, tokens * 8, 1), "lse": head_major(tokens)}


T, U = sym("T", max=65536), sym("U", max=65536)

SAME: dict[str, tuple[Spec, Spec]] = {
    "scale value": (Spec(options={"scale": 0.1}), Spec(options={"scale": 0.2})),
    "scale left out": (DENSE, Spec(options={"scale": 0.2})),
    "softcap value": (CAPPED, Spec(options={"softcap": 30.0})),
    "softcap of 0 is off": (DENSE, Spec(options={"softcap": 0.0})),
    "window widths": (WINDOW, Spec(options={"window": (50, 30)})),
    "window of right 0 is causal": (Spec(options={"window": (None, 0)}), Spec(options={"causal": True})),
    "causal stated twice": (
        Spec(options={"causal": True}),
        Spec(options={"causal": True, "window": (None, 0)}),
    ),
    "corner without a mask": (DENSE, Spec(options={"align": "bottom_right"})),
    "tensor names": (DENSE, DENSE.but(prefix="layer7_")),
    "node name": (DENSE, Spec(options={"name": "attention"})),
    "graph name": (DENSE, DENSE.but(graph="other")),
    "symbol names": (Spec(seqlens=(T, U)), Spec(seqlens=(sym("A", max=65536), sym("B", max=65536)))),
    "row-major stride declared": (DENSE, Spec(strides={"q": (4 * 6 * 8, 6 * 8, 8, 1)})),
    "stride of a size-1 dim": (BIASED, BIASED.but(strides={"bias": (987, 48, 8, 1)})),
    "packed totals": (PACKED, PACKED.but(seqlens=(41, 7))),
    "packed totals, backward": (PACKED_BACKWARD, PACKED_BACKWARD.but(seqlens=(1, 9000))),
    "packed total of 0": (PACKED, PACKED.but(seqlens=(0, 50))),
    "packed total as a symbol": (PACKED, PACKED.but(seqlens=(T, U))),
    "packed total under another bound": (
        PACKED.but(seqlens=(T, U)),
        PACKED.but(seqlens=(sym("T", max=99), U)),
    ),
    "number of sequences": (PACKED, PACKED.but(sequences=17)),
    "number of sequences as a symbol": (PACKED, PACKED.but(sequences=sym("N", max=64))),
    "declared longest sequence": (PACKED, PACKED.but(options={"max_seqlen_q": 12, "max_seqlen_kv": 30})),
    "head-major totals": (PACKED.but(strides=swapped(40)), PACKED.but(seqlens=(77, 50), strides=swapped(77))),
    "head-major total as a symbol": (
        PACKED.but(strides=swapped(40)),
        PACKED.but(seqlens=(T, 50), strides=swapped(T)),
    ),
    "packed bias batches": (PACKED.but(bias=(3, 4, 9, 9)), PACKED.but(sequences=5, bias=(5, 4, 9, 9))),
}

OTHER: dict[str, tuple[Spec, Spec]] = {
    "op": (DENSE, BACKWARD),
    "dtype": (DENSE, Spec(dtype="bf16")),
    "batch": (DENSE, Spec(batch=3)),
    "query heads": (DENSE, Spec(heads=(2, 2))),
    "key heads": (DENSE, Spec(heads=(4, 4))),
    "query length": (DENSE, Spec(seqlens=(7, 8))),
    "key length": (DENSE, Spec(seqlens=(6, 9))),
    "head dim": (DENSE, Spec(dims=(16, 8))),
    "value head dim": (DENSE, Spec(dims=(8, 16))),
    "symbol or number": (DENSE, Spec(seqlens=(T, 8))),
    "symbol bound": (Spec(seqlens=(T, 8)), Spec(seqlens=(sym("T", max=128), 8))),
    "one symbol or two": (Spec(seqlens=(T, T)), Spec(seqlens=(T, U))),
    "packing": (Spec(seqlens=(40, 50)), PACKED),
    "query stride": (DENSE, Spec(strides={"q": (4 * 6 * 9, 6 * 9, 9, 1)})),
    "output stride": (DENSE, Spec(strides={"o": (6 * 4 * 8, 8, 4 * 8, 1)})),
    "lse stride": (DENSE, Spec(strides={"lse": (24, 1, 4)})),
    "lse stride, packed": (PACKED, PACKED.but(strides={"lse": head_major(40)})),
    "bias stride": (BIASED, BIASED.but(strides={"bias": (0, 48, 1, 6)})),
    "alignment": (DENSE, Spec(alignments={"q": 4})),
    "output alignment": (DENSE, Spec(alignments={"o": 4})),
    "output dtype": (DENSE, Spec(output_dtype="bf16")),
    "stats": (DENSE, Spec(stats=False)),
    "softcap": (DENSE, CAPPED),
    "causal": (DENSE, Spec(options={"causal": True})),
    "corner": (Spec(options={"causal": True}), Spec(options={"causal": True, "align": "bottom_right"})),
    "left bound": (WINDOW, Spec(options={"window": (None, 3)})),
    "right bound": (WINDOW, Spec(options={"window": (5, None)})),
    "bias": (DENSE, BIASED),
    "bias broadcast": (BIASED, Spec(bias=(1, 1, 6, 8))),
    "bias dtype": (BIASED, BIASED.but(bias_dtype="bf16")),
    "mask": (DENSE, Spec(mask=(6, 8))),
    "sink": (DENSE, Spec(sink="fp32")),
    "sink dtype": (Spec(dtype="bf16", sink="fp32"), Spec(dtype="bf16", sink="bf16")),
    "lengths": (DENSE, Spec(lengths="int32")),
    "length dtype": (Spec(lengths="int32"), Spec(lengths="int64")),
    "offset dtype": (PACKED, PACKED.but(offsets="int64")),
    "dlse": (BACKWARD, BACKWARD.but(dlse=True)),
    "deterministic": (BACKWARD, BACKWARD.but(deterministic=True)),
    "which gradients": (BACKWARD, BACKWARD.but(grads=("q",))),
    "dbias": (BACKWARD.but(bias=(6, 8)), BACKWARD.but(bias=(6, 8), dbias=True)),
    "dsink": (BACKWARD.but(sink="fp32"), BACKWARD.but(sink="fp32", dsink=True)),
    "dq stride": (BACKWARD, BACKWARD.but(strides={"dq": (6 * 4 * 8, 8, 4 * 8, 1)})),
}


@pytest.mark.parametrize("what", SAME)
def test_does_not_re_key(what: str) -> None:
    a, b = SAME[what]
    assert key_of(a) == key_of(b)


@pytest.mark.parametrize("what", OTHER)
def test_re_keys(what: str) -> None:
    a, b = OTHER[what]
    assert key_of(a) != key_of(b)


@pytest.mark.parametrize("tokens", [2**28 - 1, sym("T", max=2**28 - 1)], ids=["number", "symbol"])
def test_a_packed_total_re_keys_only_where_a_stride_leaves_32_bits(tokens: Any) -> None:
    """Head-major q of 2**28 tokens: the head's stride is 2**31, an argument of another type."""
    below = PACKED.but(seqlens=(tokens, 50), strides=swapped(tokens))
    assert key_of(below) == key_of(PACKED.but(strides=swapped(40)))
    beyond = PACKED.but(seqlens=(2**28, 50), strides=swapped(2**28))
    assert key_of(beyond) != key_of(below)
    assert key_of(beyond) == key_of(PACKED.but(seqlens=(2**28 + 9, 50), strides=swapped(2**28 + 9)))


POLICIES: dict[str, tuple[tuple[Target, Policy], tuple[Target, Policy]]] = {
    "arch": ((SM90, OFF), (Target.cuda((8, 0)), OFF)),
    "device": ((SM90, OFF), (Target.cpu(), OFF)),
    "gates": ((SM90, OFF), (SM90, Policy(gates="require"))),
    "engines": ((SM90, OFF), (SM90, Policy(("triton", "reference"), "off"))),
    "engine order": (
        (SM90, Policy(("reference", "triton"), "off")),
        (SM90, Policy(("triton", "reference"), "off")),
    ),
    "default order or the same by name": ((SM90, OFF), (SM90, Policy(registry.names(), "off"))),
}


@pytest.mark.parametrize("what", POLICIES)
def test_policy_and_target_re_key(what: str) -> None:
    a, b = POLICIES[what]
    assert key_of(DENSE, *a) != key_of(DENSE, *b)


def test_the_device_index_does_not_re_key() -> None:
    """flashinfer#452: a plan belongs to an arch; which card of that arch is a run-time fact."""
    assert key_of(DENSE, Target.cuda((9, 0), 0)) == key_of(DENSE, Target.cuda((9, 0), 3))


@pytest.mark.parametrize("method", ["source_digest", "toolchain"])
def test_kernel_source_and_compiler_re_key(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """triton#7322: a plan made before an edit of the kernels is not used after it."""
    before = key_of(DENSE)
    other: Any = "0" * 64 if method == "source_digest" else {"triton": "99.1"}
    monkeypatch.setattr(registry.get("triton"), method, lambda: other)
    assert key_of(DENSE) != before


def test_a_gate_that_comes_to_hold_re_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running the missing gate takes effect on the next compile of the same graph, in the same process."""
    keys = []
    for held in (False, True):
        monkeypatch.setattr(gates, "holds", lambda *a, held=held, **k: held)
        keys.append(key_of(DENSE, SM90, Policy(gates="require")))
    assert keys[0] != keys[1]


# ---- what a key is made of -----------------------------------------------------------------------------


def assert_host_scalars(node: object) -> None:
    if isinstance(node, tuple):
        for part in node:
            assert_host_scalars(part)
    else:
        assert node is None or type(node) in (str, int, float, bool), (
            f"{type(node).__name__} in the key: {node!r}"
        )


ALL_SPECS = list(
    dict.fromkeys(
        f"{group}:{what}:{i}"
        for group, table in (("same", SAME), ("other", OTHER))
        for what in table
        for i in (0, 1)
    )
)


@pytest.mark.parametrize("which", ALL_SPECS)
def test_a_key_is_made_of_host_scalars(which: str) -> None:
    """cudnn-frontend#604: a 0-d tensor inside a key never equals the last one."""
    group, what, i = which.rsplit(":", 1)[0].split(":", 1) + [which.rsplit(":", 1)[1]]
    key = key_of((SAME if group == "same" else OTHER)[what][int(i)])
    assert_host_scalars(key)
    assert key == key_of((SAME if group == "same" else OTHER)[what][int(i)])
    hash(key)


def numbers(node: object) -> set[int]:
    if isinstance(node, tuple):
        return set().union(*map(numbers, node)) if node else set()
    return {node} if type(node) is int else set()


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
@pytest.mark.parametrize("declare", [lambda n: n, lambda n: sym("T", max=n)], ids=["number", "symbol"])
def test_no_packed_total_is_anywhere_in_a_key(op: str, declare: Callable[[int], Any]) -> None:
    """Nor a stride that was made from one."""
    tokens, keys = declare(7919), 6007
    spec = PACKED.but(
        op=op, seqlens=(tokens, keys), strides=swapped(tokens), deterministic=op == "sdpa_backward"
    )
    found = numbers(key_of(spec))
    assert not any(n and n % 7919 == 0 or n and n % 6007 == 0 for n in found), found


def test_no_packed_total_through_a_primitive_beside_the_attention() -> None:
    """Gating a packed output adds elementwise nodes of the same token total."""
    from frost.graph import Graph

    def gated(tokens: int) -> tuple:
        g = Graph()
        q, k, v = (g.tensor(n, (tokens, 2, 8), dtype="fp32") for n in "qkv")
        gate = g.tensor("gate", (tokens, 2, 8), dtype="fp32")
        cu = g.tensor("cu", (4,), dtype="int32")
        o, _ = g.sdpa(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        g.output(g.mul(o, g.sigmoid(gate)), name="y")
        validate(g)
        return plan_key(fuse(g), SM90, OFF)

    assert gated(4001) == gated(5003)


def test_key_text_is_short_and_tells_keys_apart() -> None:
    a, b = key_text(key_of(DENSE)), key_text(key_of(BACKWARD))
    assert a != b and len(a) == len(b) == 16 and a == key_text(key_of(DENSE))


@pytest.mark.parametrize(("pitch", "base"), [(52, "aligned"), (2**25, "wide"), (2**31 + 16, "wide")])
@pytest.mark.parametrize("totals", [(1, 8), (8, 1), (0, 8), (1, 300)])
@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
def test_a_packed_total_of_one_promises_nothing_that_others_do_not(
    op: str, totals: tuple[int, int], pitch: int, base: str,
) -> None:
    """A size-1 extent's stride is never used, but a packed total is a run-time fact: plans of totals 1 and N share a key,
    so they have to share what their kernels are specialised on."""
    from engines.triton.adapter_bwd import backward_params
    from engines.triton.adapter_fwd import forward_params

    found = []
    for total in totals:
        def packed(heads: int = 2, total: int = total) -> TensorDesc:
            return TensorDesc.make((total, heads, 16), "fp16", (pitch, 24, 1))

        lse = TensorDesc.make((total, 2), "fp32")
        cu = TensorDesc.make((2,), "int32")
        common = {"q": packed(), "k": packed(), "v": packed(), "o": packed(), "lse": lse, "cu_seqlens_q": cu,
                  "cu_seqlens_kv": cu}
        if op == "sdpa":
            found.append((SdpaDesc(**common).key(), forward_params(SdpaDesc(**common), Target.cuda((9, 0)))))
        else:
            desc = SdpaBwdDesc(**common, do=packed(), dq=packed(), dk=packed(), dv=packed())
            found.append((desc.key(), backward_params(desc, Target.cuda((9, 0)))))
    (key, params), (key2, params2) = found
    assert params == params2 or key != key2
    assert getattr(params, base) is (base == "wide")
