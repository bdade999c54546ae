"""Descriptors of whole ops under hypothesis: the wire, keys, overlap and reach against brute force.

Single tensors are in tests/unit/test_descriptors.py; here records of every option, drawn as graphs make them.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from descriptors import (
    DType,
    MaskDesc,
    SdpaBwdDesc,
    SdpaDesc,
    TensorDesc,
    may_share_memory,
    op_from_wire,
    op_to_wire,
    pack,
    sym,
    unpack,
)

EXTENTS = st.integers(0, 3)
IO = st.sampled_from([DType.F16, DType.BF16, DType.F32])
INDEX = st.sampled_from([DType.I32, DType.I64])
ALIGNMENT = st.sampled_from([2, 4, 8, 16])


@st.composite
def laid_out(draw, shape, dtype):
    """A tensor of a shape, its strides declared or not, of any order, with gaps, nonsense where an extent is 1."""
    alignment = draw(ALIGNMENT)
    if any(not isinstance(n, int) for n in shape) or draw(st.booleans()):
        return TensorDesc.make(shape, dtype, None, alignment)
    order, strides, reach = draw(st.permutations(range(len(shape)))), [0] * len(shape), 1
    for axis in order:
        strides[axis] = draw(st.integers(0, 10**9)) if shape[axis] == 1 else reach + draw(st.sampled_from([0, 0, 1, 7]))
        reach = max(reach, strides[axis] * shape[axis]) if shape[axis] != 1 else reach
    return TensorDesc.make(shape, dtype, strides, alignment)


@st.composite
def attention(draw):
    """A forward or a backward with any options, dense or packed, some extents symbolic."""
    io, index, packed, backward = draw(IO), draw(INDEX), draw(st.booleans()), draw(st.booleans())
    hk, b = draw(st.integers(1, 2)), draw(EXTENTS)
    hq = hk * draw(st.integers(1, 3))
    sq, sk = (draw(st.one_of(EXTENTS, st.just(sym(n, 64)))) for n in ("Sq", "Sk"))
    d, dv = draw(st.integers(1, 5)), draw(st.integers(1, 5))

    def rows(heads, s, *width):
        return (s, heads, *width) if packed else (b, heads, s, *width)

    stats = draw(laid_out(rows(hq, sq), DType.F32))
    made = {"q": draw(laid_out(rows(hq, sq, d), io)), "k": draw(laid_out(rows(hk, sk, d), io)),
            "v": draw(laid_out(rows(hk, sk, dv), io)), "o": draw(laid_out(rows(hq, sq, dv), io))}
    if backward or draw(st.booleans()):
        made["lse"] = stats
    scores = (draw(st.sampled_from([1, b])), draw(st.sampled_from([1, hq])), draw(EXTENTS), draw(EXTENTS))
    optional = {"bias": (scores, draw(IO)), "mask": (scores[draw(st.integers(0, 2)):], DType.BOOL), "sink": ((hq,), DType.F32)}
    if packed:
        made |= {n: draw(laid_out((b + 1,), index)) for n in ("cu_seqlens_q", "cu_seqlens_kv")}
    else:
        optional |= {"seq_len_q": ((b,), index), "seq_len_kv": ((b,), index)}
    made |= {n: draw(laid_out(*parts)) for n, parts in optional.items() if draw(st.booleans())}
    causal = draw(st.booleans())
    made["band"] = MaskDesc(causal, draw(st.sampled_from(["top_left", "bottom_right"])), draw(st.one_of(st.none(), EXTENTS)),
                            None if causal else draw(st.one_of(st.none(), EXTENTS)))
    made["scale"] = draw(st.one_of(st.none(), st.floats(-2, 2)))
    made["softcap"] = draw(st.one_of(st.none(), st.floats(0.5, 50)))
    if packed:
        made["max_seqlen_q"] = draw(st.one_of(st.none(), EXTENTS))
    if not backward:
        return SdpaDesc(**made)
    made |= {"do": draw(laid_out(rows(hq, sq, dv), io)), "dq": made["q"], "deterministic": draw(st.booleans())}
    made |= {n: made[n[1:]] for n in ("dk", "dv", "dbias", "dsink") if n[1:] in made and draw(st.booleans())}
    if draw(st.booleans()):
        made["dlse"] = stats
    return SdpaBwdDesc(**made)


def addresses(t: TensorDesc) -> list[int]:
    """The offset of every element, in the order of its index."""
    return [sum(i * s for i, s in zip(index, t.strides)) for index in itertools.product(*map(range, t.shape))]


# ---- the wire


@settings(max_examples=100)
@given(attention())
def test_a_record_survives_the_wire(desc):
    back = op_from_wire(unpack(pack(op_to_wire(desc))))
    assert back == desc and back.key() == desc.key() and hash(back) == hash(desc)
    assert back.set_fields() == desc.set_fields()


# ---- keys


@settings(max_examples=100)
@given(attention(), st.data())
def test_a_run_time_value_is_in_no_key_and_its_presence_where_it_matters(desc, data):
    name = data.draw(st.sampled_from(["scale", "max_seqlen_q", "max_seqlen_kv", "left", "right", "softcap"]))
    value = data.draw(st.integers(1, 99))
    if name == "right" and desc.band.causal:  # causal is a right bound already, and excludes another
        assert replace(desc, band=replace(desc.band, causal=False, right=0)).key() != desc.key()
    elif name in ("left", "right"):
        if getattr(desc.band, name) is not None:  # another width, still a width
            assert replace(desc, band=replace(desc.band, **{name: value})).key() == desc.key()
        other = replace(desc.band, **{name: None if getattr(desc.band, name) is not None else value})
        assert replace(desc, band=other).key() != desc.key()
    elif name == "softcap":
        assert (replace(desc, softcap=float(value)).key() == desc.key()) == (desc.softcap is not None)
        assert (replace(desc, softcap=None).key() == desc.key()) == (desc.softcap is None)
    else:
        assert replace(desc, **{name: value}).key() == replace(desc, **{name: None}).key() == desc.key()


@settings(max_examples=100)
@given(attention(), st.data())
def test_what_a_kernel_may_see_of_a_tensor_is_in_the_key(desc, data):
    """Another dtype, alignment or presence of any operand or result is another key."""
    name, t = data.draw(st.sampled_from(list(desc.tensors())))
    other_dtype = DType.F64 if t.dtype is not DType.F64 else DType.F32
    for changed in (replace(t, dtype=other_dtype), replace(t, alignment=2 * t.alignment)):
        assert replace(desc, **{name: changed}).key() != desc.key()
    optional = {f.name for f in fields(desc) if f.default is None}
    if name in optional:
        without = {name: None, **({"d" + name: None} if hasattr(desc, "d" + name) and name in ("bias", "sink") else {})}
        assert replace(desc, **without).key() != desc.key()


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=4).map(tuple), st.data())
def test_equal_keys_are_equal_addresses(shape, data):
    """Two dense tensors of a shape have one key exactly where every element has one address (dtype and alignment alike)."""
    a, b = (replace(data.draw(laid_out(shape, DType.F16)), alignment=16) for _ in "ab")
    assert (a.key() == b.key()) == (addresses(a) == addresses(b)), (a, b)


@settings(max_examples=60)
@given(attention(), attention())
def test_equal_records_and_only_those_have_one_key(a, b):
    """Up to run-time values, nonsense strides and packed totals, which no key holds."""
    assert a.key() == replace(a).key()
    if a.OP == b.OP and a.key() == b.key():
        assert [n for n, _ in a.tensors()] == [n for n, _ in b.tensors()]
        assert [t.dtype for _, t in a.tensors()] == [t.dtype for _, t in b.tensors()]


@settings(max_examples=200)
@given(st.integers(2, 50), st.integers(2, 50), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_packed_totals_and_sequences_are_in_no_key(total, other, seqs, more, head_major):
    def record(t, n):
        stats = TensorDesc.make((t, 2), "fp32", (1, t) if head_major else None)
        return SdpaDesc(q=TensorDesc.make((t, 2, 8), "bf16"), k=TensorDesc.make((t + 3, 2, 8), "bf16"),
                        v=TensorDesc.make((t + 3, 2, 8), "bf16"), o=TensorDesc.make((t, 2, 8), "bf16"), lse=stats,
                        cu_seqlens_q=TensorDesc.make((n + 1,), "int32"), cu_seqlens_kv=TensorDesc.make((n + 1,), "int32"))

    assert record(total, seqs).key() == record(other, more).key()


# ---- reach and overlap


@settings(max_examples=100)
@given(attention(), st.integers(0, 4), st.integers(0, 4))
def test_reach_and_overlap_of_every_operand_against_brute_force(desc, sq, sk):
    for name, t in desc.bound({"Sq": sq, "Sk": sk}).tensors():
        found = addresses(t)
        assert t.max_offset == max(found, default=-1), name
        assert t.span == t.max_offset + 1 and t.nbytes == t.span * t.dtype.itemsize
        assert t.overlaps_itself() == (len(set(found)) != len(found)), (name, t)
        assert t.is_row_major == (found == list(range(len(found)))), (name, t)


@settings(max_examples=300)
@given(st.data(), st.integers(0, 60))
def test_two_buffers_share_memory_exactly_where_some_byte_is_in_both(data, shift):
    shapes = [data.draw(st.lists(st.integers(0, 3), max_size=3).map(tuple)) for _ in "ab"]
    a, b = (data.draw(laid_out(s, data.draw(IO))) for s in shapes)

    def touched(t, start):
        return {start + at * t.dtype.itemsize + byte for at in addresses(t) for byte in range(t.dtype.itemsize)}

    spans = [(start, t.shape, t.strides, t.dtype.itemsize) for t, start in ((a, 1000), (b, 1000 + shift))]
    expected = bool(touched(a, 1000) & touched(b, 1000 + shift))
    assert may_share_memory(*spans) == may_share_memory(*reversed(spans)) == expected
