"""The algebra of descriptors against brute force, their wire form, and what does and does not enter a key."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from descriptors import (
    LIMITS,
    OP_TYPES,
    DType,
    MaskDesc,
    PointwiseDesc,
    SdpaBwdDesc,
    SdpaDesc,
    TensorDesc,
    WireError,
    bind_dim,
    may_share_memory,
    op_from_wire,
    op_to_wire,
    pack,
    row_major,
    sym,
    unpack,
)
from descriptors.dims import dim_max, multiply, symbols

SYMS = st.builds(sym, st.sampled_from(["B", "S", "T"]), st.just(12))
DIMS = st.one_of(st.integers(0, 5), SYMS)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
DTYPES = st.sampled_from(list(DType))


@st.composite
def layouts(draw, most=4):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=most)))
    return shape, tuple(draw(st.lists(st.integers(0, 13), min_size=len(shape), max_size=len(shape))))


@st.composite
def tensors(draw):
    shape = draw(st.lists(DIMS, max_size=5).map(tuple))
    stride = draw(st.one_of(st.none(), st.lists(DIMS, min_size=len(shape), max_size=len(shape)).map(tuple)))
    return TensorDesc.make(shape, draw(DTYPES), stride, draw(st.sampled_from([1, 2, 4, 8, 16, 32])))


def offsets(shape, stride):
    """Every element's offset, one by one."""
    return [sum(i * s for i, s in zip(index, stride)) for index in itertools.product(*map(range, shape))]


# ---- dims


@given(st.lists(DIMS, max_size=5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_a_product_of_dims_binds_to_the_product_of_their_values(dims, b, s, t):
    values = {"B": b, "S": s, "T": t}
    expected = 1
    for d in dims:
        expected *= bind_dim(d, values)
    product = multiply(dims)
    assert product == 0 or bind_dim(product, values) == expected
    assert product != 0 or expected == 0
    assert multiply(reversed(dims)) == product


def test_symbols_multiply_into_one_normal_form():
    a, b = sym("A", 3), sym("B", 5)
    assert a * 2 * b == b * (2 * a)
    assert symbols(a * b * a) == (a, a, b)
    assert a * 1 is a or a * 1 == a
    assert dim_max(2 * a * b) == 30


@pytest.mark.parametrize("name, most", [("", 1), ("a b", 1), ("T", -1), ("T", 1.5), ("T", True), (3, 1)])
def test_a_bad_symbol_is_refused(name, most):
    with pytest.raises(ValueError, match="sym"):
        sym(name, most)


# ---- layouts against brute force


@given(layouts())
def test_self_overlap_is_exact_for_small_layouts(layout):
    shape, stride = layout
    found = offsets(shape, stride)
    assert TensorDesc.make(shape, "fp16", stride).overlaps_itself() == (len(set(found)) != len(found))


@given(layouts(), DTYPES)
def test_largest_offset_and_bytes(layout, dtype):
    desc = TensorDesc.make(layout[0], dtype, layout[1])
    assert desc.max_offset == max(offsets(*layout), default=-1)
    assert desc.span == desc.max_offset + 1
    assert desc.nbytes == desc.span * dtype.itemsize


@given(SHAPES)
def test_row_major_agrees_with_numpy(shape):
    strides = row_major(shape)
    assume(0 not in shape)
    assert strides == tuple(s // 8 for s in np.empty(shape, np.float64).strides)


@given(layouts())
def test_is_row_major_means_equal_addresses(layout):
    shape, stride = layout
    desc = TensorDesc.make(shape, "fp32", stride)
    assert desc.is_row_major == (offsets(shape, stride) == offsets(shape, row_major(shape)))


@given(layouts(most=3), layouts(most=3), st.integers(0, 40), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_shared_memory_is_exact(a, b, shift, size_a, size_b):
    def touched(base, layout, size):
        return {base + size * o + byte for o in offsets(*layout) for byte in range(size)}
    base = 4096
    expected = bool(touched(base, a, size_a) & touched(base + shift, b, size_b))
    assert may_share_memory((base, *a, size_a), (base + shift, *b, size_b)) == expected
    assert may_share_memory((base + shift, *b, size_b), (base, *a, size_a)) == expected


def test_three_slices_of_one_packed_qkv_are_disjoint():
    """flash-attention PR#2351: interleaved but disjoint outputs are fine, real overlap is not."""
    shape, stride = (2, 3, 4), (36, 12, 1)
    slices = [(1 << 16) + 2 * 4 * i for i in range(3)]
    assert not any(may_share_memory((x, shape, stride, 2), (y, shape, stride, 2))
                   for x, y in itertools.combinations(slices, 2))
    assert may_share_memory((slices[0], shape, stride, 2), (slices[0] + 2, shape, stride, 2))


def test_a_big_stride_alone_needs_64_bit_offsets():
    """flash-linear-attention#1080: no 2**31 elements are needed for an offset beyond 2**31."""
    step = 2**30 + 16
    assert TensorDesc.make((1, 1, 3, 8), "fp16", (0, 0, step, 1)).needs_int64
    assert not TensorDesc.make((1, 1, 2, 8), "fp16", (0, 0, step, 1)).needs_int64
    assert TensorDesc.make((sym("T", 2**31 + 1),), "fp16").needs_int64
    assert not TensorDesc.make((sym("T", 2**31),), "fp16").needs_int64


@pytest.mark.parametrize("shape, stride, expected", [
    ((4, 8), (8, 1), True), ((4, 8), (1, 4), False), ((8, 1), (1, 77), True), ((8, 0), (1, 77), True), ((), (), True)])
def test_unit_last_stride(shape, stride, expected):
    assert TensorDesc.make(shape, "fp16", stride).unit_last_stride is expected


def test_overlap_of_a_huge_layout_that_does_not_nest_counts_as_overlap():
    assert TensorDesc.make((2048, 2048), "fp16", (3, 2)).overlaps_itself()
    assert not TensorDesc.make((2**20, 2**20), "fp16", (2**20, 1)).overlaps_itself()


@given(tensors(), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_binding_commutes_with_row_major(desc, b, s, t):
    values = {"B": b, "S": s, "T": t}
    bound = desc.bound(values)
    assert not bound.is_symbolic
    if desc.stride is None and 0 not in bound.shape:
        assert bound.strides == tuple(bind_dim(d, values) for d in desc.strides)


@pytest.mark.parametrize("kwargs, error", [
    ({"shape": (1.5,)}, TypeError), ({"shape": (True,)}, TypeError), ({"shape": (1,) * 9}, ValueError),
    ({"shape": (2, 3), "stride": (1,)}, ValueError), ({"alignment": 12}, ValueError), ({"alignment": 0}, ValueError),
    ({"dtype": "bfloat"}, TypeError), ({"dtype": None}, TypeError)])
def test_parts_that_make_no_descriptor_are_refused(kwargs, error):
    with pytest.raises(error, match="given"):
        TensorDesc.make(**{"shape": (2, 3), "dtype": "fp32", **kwargs})


@pytest.mark.parametrize("value, expected", [
    ("bf16", DType.BF16), ("torch.bfloat16", DType.BF16), (np.float32, DType.F32), ("half", DType.F16),
    ("int64", DType.I64), (DType.BOOL, DType.BOOL), (np.dtype("float64"), DType.F64)])
def test_dtype_spellings(value, expected):
    assert DType.parse(value) is expected


def test_a_misspelt_dtype_names_the_nearest():
    with pytest.raises(TypeError, match="did you mean 'bfloat16'"):
        DType.parse("bflaot16")


@pytest.mark.parametrize("value", ["float8_e4m3fn", "float8", "fp8", "int8", "int16", "uint16", "complex64", "tf32", "bfloat"])
def test_another_format_is_not_taken_for_a_misspelling(value):
    with pytest.raises(TypeError, match=f"given '{value}'.*known: fp64, fp32, fp16, bf16, int64, int32, bool, uint8"):
        DType.parse(value)


# ---- keys


def plain_data(tree):
    if isinstance(tree, tuple):
        return all(map(plain_data, tree))
    return tree is None or type(tree) in (str, int, bool, float)


@given(tensors())
def test_keys_are_made_of_host_scalars(desc):
    """cudnn-frontend#604: a 0-d tensor in a key never equals the last one."""
    assert plain_data(desc.key()) and hash(desc.key()) is not None


@given(SHAPES, st.integers(0, 1000))
def test_a_declared_row_major_stride_is_no_other_key(shape, nonsense):
    default = TensorDesc.make(shape, "bf16")
    strides = tuple(nonsense if d == 1 else s for d, s in zip(shape, row_major(shape)))
    assert TensorDesc.make(shape, "bf16", strides).key() == default.key()


@given(st.integers(2, 999), st.integers(2, 999), st.sampled_from(["declared", "default", "head_major", "pitch"]))
def test_no_packed_total_enters_a_key(one, other, layout):
    """cudnn-frontend#604: derived strides must not smuggle the total in."""
    def key(total):
        stride = {"declared": (3, 1), "default": None, "head_major": (1, total), "pitch": (7, 1)}[layout]
        return TensorDesc.make((total, 3), "fp32", stride).key({0: "packed_q"})
    assert key(one) == key(other)


@given(layouts(), st.data())
def test_equal_keys_mean_equal_addresses(layout, data):
    shape, stride = layout
    changed = tuple(data.draw(st.sampled_from([s, s + 1, r])) for s, r in zip(stride, row_major(shape)))
    one, other = (TensorDesc.make(shape, "fp16", s) for s in (stride, changed))
    if one.key() == other.key():
        assert offsets(shape, stride) == offsets(shape, changed)
    else:
        assert stride != changed


def t(*shape, dtype="bf16", stride=None):
    return TensorDesc.make(shape, dtype, stride)


def dense(**changes):
    q = t(2, 4, 5, 8)
    return SdpaDesc(**{"q": q, "k": t(2, 2, 6, 8), "v": t(2, 2, 6, 16), "o": t(2, 4, 5, 16), **changes})


def packed(total_q=7, total_kv=9, seqs=2, **changes):
    cu = t(seqs + 1, dtype="int32")
    made = {"q": t(total_q, 4, 8), "k": t(total_kv, 2, 8), "v": t(total_kv, 2, 16), "o": t(total_q, 4, 16),
            "lse": t(total_q, 4, dtype="fp32"), "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    return SdpaDesc(**{**made, **changes})


@pytest.mark.parametrize("cls", OP_TYPES.values(), ids=lambda c: c.OP)
def test_every_field_is_either_in_the_key_or_a_run_time_value(cls):
    names = [f.name for f in fields(cls)]
    assert sorted((*cls.KEY, *cls.RUNTIME)) == sorted(names)
    assert set(cls.PRESENCE) <= set(cls.RUNTIME)
    assert {*cls.INPUTS, *cls.OUTPUTS} <= set(cls.KEY)


def test_every_field_of_a_mask_is_either_in_the_key_or_a_run_time_value():
    assert sorted((*MaskDesc.KEY, *MaskDesc.RUNTIME)) == sorted(f.name for f in fields(MaskDesc))


SAME_KEY = {
    "scale": lambda d: replace(d, scale=0.25), "softcap value": lambda d: replace(d, softcap=2.0),
    "window widths": lambda d: replace(d, band=MaskDesc(left=9, right=1)),
}
OTHER_KEY = {
    "dtype": lambda d: replace(d, q=t(2, 4, 5, 8, dtype="fp16")), "shape": lambda d: replace(d, q=t(2, 4, 6, 8)),
    "stride": lambda d: replace(d, k=t(2, 2, 6, 8, stride=(96, 8, 16, 1))),
    "stats": lambda d: replace(d, lse=t(2, 4, 5, dtype="fp32")),
    "stats' strides": lambda d: replace(d, lse=t(2, 4, 5, dtype="fp32", stride=(20, 1, 4))),
    "bias": lambda d: replace(d, bias=t(1, 1, 5, 6)),
    "bias dtype": lambda d: replace(d, bias=t(1, 1, 5, 6, dtype="fp32")),
    "bias broadcast": lambda d: replace(d, bias=t(1, 4, 5, 6)), "softcap": lambda d: replace(d, softcap=None),
    "causal": lambda d: replace(d, band=MaskDesc(causal=True)),
    "corner": lambda d: replace(d, band=replace(d.band, align="bottom_right")),
    "alignment": lambda d: replace(d, q=replace(d.q, alignment=2)),
}
BASE = dense(softcap=1.0, scale=0.5, band=MaskDesc(left=3, right=4))


@pytest.mark.parametrize("change", SAME_KEY)
def test_what_does_not_re_key(change):
    assert SAME_KEY[change](BASE).key() == BASE.key()


def test_what_re_keys():
    keys = {name: change(BASE).key() for name, change in OTHER_KEY.items()}
    assert len({BASE.key(), *keys.values()}) == len(keys) + 1, keys


@given(st.integers(2, 99), st.integers(2, 99), st.integers(1, 9))
def test_packed_totals_and_counts_do_not_re_key(total_q, total_kv, seqs):
    assert packed(total_q, total_kv, seqs).key() == packed().key()
    assert packed(total_q, total_kv, seqs, lse=t(total_q, 4, dtype="fp32", stride=(1, total_q))).key() == packed(
        lse=t(7, 4, dtype="fp32", stride=(1, 7))).key()


def test_a_primitive_beside_packed_attention_keeps_the_total_out_of_its_key():
    def key(total):
        x = t(total, 4, 16)
        return PointwiseDesc("tanh", x, None, None, x, packed_totals=((total, "packed_q"),)).key()
    assert key(7) == key(11)


def test_keys_of_masks_tell_families_and_corners_apart_where_there_is_a_mask():
    """Engines route on the family, so causal and a right bound of 0 are two keys although they are one set of pairs;
    graphs say both as causal (test_fuse)."""
    assert MaskDesc(causal=True).key() != MaskDesc(right=0).key()
    assert MaskDesc(causal=True).key() != MaskDesc(causal=True, align="bottom_right").key()
    assert MaskDesc(align="bottom_right").key() == MaskDesc().key()
    assert MaskDesc(causal=True).band_right == MaskDesc(right=0).band_right == 0
    families = [MaskDesc().family, MaskDesc(causal=True).family, MaskDesc(causal=True, left=3).family]
    assert families == ["none", "causal", "window"]


# ---- records


def test_what_a_record_says():
    d = dense(scale=None)
    assert (d.group, d.head_dim, d.head_dim_v, d.seqlen_q, d.seqlen_kv, d.batch) == (2, 8, 16, 5, 6, 2)
    assert d.scale_value == 8**-0.5 and not d.packed
    p = packed()
    assert p.packed and (p.batch, p.seqlen_q, p.seqlen_kv, p.heads_q, p.heads_kv) == (2, 7, 9, 4, 2)


def test_set_fields_are_those_that_an_adapter_must_consume():
    assert dense().set_fields() == frozenset()
    said = dense(softcap=1.0, bias=t(1, 1, 5, 6), band=MaskDesc(True, "bottom_right", 3), scale=2.0).set_fields()
    assert said == {"softcap", "bias", "causal", "align", "window_left"}


def test_binding_a_record_binds_its_tensors():
    s = sym("S", 9)
    d = dense(q=t(2, 4, s, 8), o=t(2, 4, s, 16))
    assert d.bound({"S": 5}) == dense() and d.bound(None).q.shape == (2, 4, 9, 8)
    assert dense().bound({}) == dense()


RECORDS = [
    BASE, packed(max_seqlen_q=4, max_seqlen_kv=5),
    dense(band=MaskDesc(True, "bottom_right", 3), mask=t(1, 1, 5, 6, dtype="bool")),
    SdpaBwdDesc(**{**{f: getattr(dense(), f) for f in ("q", "k", "v", "o")}, "do": t(2, 4, 5, 16), "dq": t(2, 4, 5, 8),
                   "lse": t(2, 4, 5, dtype="fp32"), "deterministic": True}),
    PointwiseDesc("transpose", t(2, sym("S", 4)), None, None, t(sym("S", 4), 2), perm=(1, 0)),
    PointwiseDesc("scale", t(2), None, None, t(2), value=0.5, packed_totals=((2, "packed_q"),)),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.op)
def test_a_record_survives_the_wire(record):
    assert op_from_wire(unpack(pack(op_to_wire(record)))) == record


@given(tensors())
def test_a_tensor_survives_the_wire(desc):
    assert TensorDesc.from_wire(unpack(pack(desc.to_wire()))) == desc


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2**63, 2**63 - 1), st.floats(), st.text(max_size=5),
              st.binary(max_size=5)),
    lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(st.text(max_size=5), x, max_size=3)), max_leaves=6)


@st.composite
def damaged(draw, whole):
    """`whole` with one random part replaced by junk."""
    def spoil(tree):
        if isinstance(tree, dict) and tree and draw(st.integers(0, 3)):
            name = draw(st.sampled_from(sorted(tree)))
            return {**tree, name: spoil(tree[name])}
        if isinstance(tree, list) and tree and draw(st.integers(0, 3)):
            i = draw(st.integers(0, len(tree) - 1))
            return [*tree[:i], spoil(tree[i]), *tree[i + 1:]]
        return draw(JUNK)
    return spoil(whole)


@given(st.data(), st.sampled_from(RECORDS))
def test_a_damaged_record_is_a_wire_error_or_a_record(data, record):
    try:
        made = op_from_wire(data.draw(damaged(op_to_wire(record))))
    except WireError:
        return
    assert type(made) in OP_TYPES.values()


@given(st.binary(max_size=40))
def test_random_bytes_are_a_wire_error_or_a_message(data):
    try:
        unpack(data)
    except WireError:
        pass


def test_trailing_truncated_oversized_and_deep_bytes_are_refused():
    whole = pack({"a": [1, 2, 3]})
    for bad in (whole + b"\0", whole[:-1], b"", "text", b"\x91" * 100_000):
        with pytest.raises(WireError):
            unpack(bad)
    with pytest.raises(WireError, match="at most 4"):
        unpack(whole, replace(LIMITS["message"], max_bytes=4))


@pytest.mark.parametrize("change", [{"shape": [True, 2]}, {"stride": [1, False]}, {"shape": 4}, {"dtype": True}, {"alignment": "16"}])
def test_a_bool_is_no_extent_and_a_number_no_list(change):
    with pytest.raises(WireError, match="given"):
        TensorDesc.from_wire({**t(2, 2, stride=(2, 1)).to_wire(), **change})


def test_a_bool_is_no_number_of_a_record():
    whole = op_to_wire(BASE)
    whole["fields"]["scale"] = True
    with pytest.raises(WireError, match="scale: given bool"):
        op_from_wire(whole)
