"""What the SM80 engine decides from descriptors alone: support, specialisation, arguments."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from descriptors import DType, MaskDesc, SdpaDesc, TensorDesc, sym
from engines.base import Target
from engines.sm80 import ENGINE, arguments, compiler, configs
from engines.sm80.adapter_fwd import SdpaFwdDslSm80, forward_arguments, forward_params
from engines.sm80.params import FLAVORS, FWD_ARGS, FwdParams, Tile, flavor_for, shared_facts, vector_bytes

HOPPER, ADA = Target.cuda((9, 0)), Target.cuda((8, 9))


def tensor(*shape: Any, dtype: str = "bf16", stride: Any = None, alignment: int = 16) -> TensorDesc:
    return TensorDesc.make(shape, dtype, stride, alignment)


def dense(b: int = 2, hq: int = 4, hk: int = 2, sq: int = 64, sk: int = 96, d: int = 64, dv: int | None = None,
          dtype: str = "bf16", **more: Any) -> SdpaDesc:
    dv = d if dv is None else dv
    parts = {"q": tensor(b, hq, sq, d, dtype=dtype), "k": tensor(b, hk, sk, d, dtype=dtype),
             "v": tensor(b, hk, sk, dv, dtype=dtype), "o": tensor(b, hq, sq, dv, dtype=dtype)}
    return SdpaDesc(**{**parts, **more})


def packed(tq: Any = 100, tk: Any = 120, hq: int = 4, hk: int = 2, d: int = 64, n: int = 3, **more: Any) -> SdpaDesc:
    return SdpaDesc(q=tensor(tq, hq, d), k=tensor(tk, hk, d), v=tensor(tk, hk, d), o=tensor(tq, hq, d),
                    cu_seqlens_q=tensor(n + 1, dtype="int32"), cu_seqlens_kv=tensor(n + 1, dtype="int64"), **more)


def refused(desc: SdpaDesc, target: Target = HOPPER) -> set[str]:
    return {r.field for r in SdpaFwdDslSm80().check_support(desc, target).reasons}


# ---- support -------------------------------------------------------------------------------------------------------


def test_what_is_served() -> None:
    for desc in (dense(), dense(dtype="fp16"), dense(d=1), dense(d=256), dense(d=40, dv=72), packed(),
                 dense(hq=6, hk=2, band=MaskDesc(causal=True, align="bottom_right"), softcap=3.0),
                 dense(bias=tensor(1, 4, 64, 96, dtype="fp32"), mask=tensor(64, 96, dtype="bool"))):
        assert refused(desc) == set()


@pytest.mark.parametrize(("desc", "fields"), [
    (dense(dtype="fp32"), {"dtype"}),
    (dense(d=257, dv=64), {"head_dim"}),
    (dense(q=tensor(2, 4, 64, 64, stride=(16384, 4096, 1, 64)), v=tensor(2, 2, 96, 64, stride=(12288, 6144, 1, 96))),
     {"q.stride[-1]", "v.stride[-1]"}),
    (dense(bias=tensor(64, 96, dtype="fp64")), {"bias.dtype"}),
    (dense(bias=tensor(64, 96, dtype="fp16")), {"bias.dtype"}),
    (dense(sink=tensor(4, dtype="fp64")), {"sink.dtype"}),
    (dense(lse=tensor(2, 4, 64, dtype="fp64")), {"lse.dtype"}),
    (dense(k=tensor(2, 2, 96, 64, alignment=1)), {"k.alignment"}),
    (dense(b=1, hq=1, hk=1, sq=2**29), {"q.shape"}),
    (dense(dtype="fp32", d=300, dv=300), {"dtype", "head_dim", "head_dim_v"}),
], ids=lambda x: "+".join(sorted(x)) if isinstance(x, set) else None)
def test_declines_name_every_field(desc: SdpaDesc, fields: set[str]) -> None:
    assert refused(desc) == fields


def test_older_cards_and_other_devices_decline() -> None:
    assert refused(dense(), Target.cuda((7, 5))) == {"arch"}
    assert refused(dense(), Target.cpu()) == {"device"}
    assert ENGINE.unavailable(Target.cpu()) is not None


def test_import_needs_no_cuda_packages() -> None:
    code = ("import sys\nclass No:\n def find_spec(self, name, *a):\n"
            "  if name.split('.')[0] == 'cuda': raise ImportError(name)\nsys.meta_path.insert(0, No())\n"
            "import engines.sm80 as e\nfrom engines.base import Target\n"
            "r = e.ENGINE.unavailable(Target.cuda((9, 0)))\nassert 'cuda-core' in str(r), r\nassert e.ENGINE.toolchain() == {}\n"
            "assert e.ENGINE.source_digest()")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- which specialisation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dims", "flavor"), [
    ((1, 1), (64, 64)), ((64, 64), (64, 64)), ((65, 8), (96, 96)), ((80, 80), (96, 96)), ((96, 96), (96, 96)),
    ((97, 97), (128, 128)), ((64, 128), (128, 128)), ((129, 128), (192, 128)), ((192, 128), (192, 128)),
    ((192, 129), (256, 256)), ((160, 160), (256, 256)), ((256, 256), (256, 256)), ((257, 1), None), ((1, 257), None),
])
def test_flavor_is_exact_or_the_smallest_that_covers(dims: tuple[int, int], flavor: Any) -> None:
    assert flavor_for(*dims) == flavor


@pytest.mark.parametrize("flavor", FLAVORS, ids=str)
@pytest.mark.parametrize("make", [lambda d, dv: dense(d=d, dv=dv), lambda d, dv: dataclasses.replace(
    packed(d=d), v=tensor(120, 2, dv), o=tensor(100, 4, dv))], ids=["dense", "packed"])
def test_kernel_head_dims_come_from_the_flavor(flavor: tuple[int, int], make: Any) -> None:
    exact = forward_params(make(*flavor), HOPPER)
    assert (exact.head_dim, exact.head_dim_v, exact.exact) == (*flavor, True)
    less = forward_params(make(flavor[0] - 3, flavor[1]), HOPPER)
    assert (less.head_dim, less.head_dim_v, less.exact) == (*flavor, False)
    assert less.macros()["HEAD_DIM"] == flavor[0] and less.macros()["HEAD_DIM_V"] == flavor[1]


def test_sizes_make_no_new_kernel() -> None:
    same = [dense(), dense(b=7, sq=1, sk=5000), dense(hq=6, hk=2), packed(), packed(tq=999, tk=7, n=20),
            dense(seq_len_kv=tensor(2, dtype="int64")), dense(lse=tensor(2, 4, 64, dtype="fp32")),
            dense(sink=tensor(4)), dense(scale=-2.0)]
    assert len({forward_params(d, HOPPER) for d in same}) == 1
    windows = [dense(band=MaskDesc(left=n, right=n + 3, align=a)) for n in (0, 5) for a in ("top_left", "bottom_right")]
    assert len({forward_params(d, HOPPER) for d in windows}) == 1


def test_a_window_open_to_the_right_ends_past_every_key() -> None:
    desc = dense(band=MaskDesc(left=3))
    assert forward_params(desc, HOPPER) == forward_params(dense(band=MaskDesc(left=9, right=2)), HOPPER)
    assert values(desc)[1]["right"] == 64 + 96


def test_options_that_change_code_make_another_kernel() -> None:
    other = [dense(), dense(dtype="fp16"), dense(d=128), dense(band=MaskDesc(causal=True)), dense(band=MaskDesc(left=3)),
             dense(softcap=2.0), dense(mask=tensor(64, 96, dtype="bool")), dense(bias=tensor(64, 96)),
             dense(bias=tensor(64, 96, dtype="fp32")), dense(k=tensor(2, 2, 96, 64, alignment=2))]
    assert len({forward_params(d, HOPPER) for d in other}) == len(other)


@pytest.mark.parametrize(("t", "expected"), [
    (tensor(2, 4, 64, 64), 16), (tensor(2, 4, 64, 64, alignment=8), 8), (tensor(2, 4, 64, 64, alignment=2), 2),
    (tensor(2, 4, 64, 41), 2), (tensor(2, 4, 64, 44), 8), (tensor(2, 4, 64, 42), 4), (tensor(1, 1, 1, 41), 16),
    (tensor(2, 4, 64, 40, stride=(4 * 64 * 48, 64 * 48, 48, 1)), 16),
    (tensor(2, 1, 64, 64, stride=(4096, 3, 64, 1)), 16),
    (tensor(2, 4, 64, 64, stride=(0, 0, 64, 1)), 16),
    (tensor(2, 4, sym("S", 512), 24), 16), (tensor(2, 4, sym("S", 512), 20), 8),
])
def test_vector_width_follows_alignment_and_pitch(t: TensorDesc, expected: int) -> None:
    assert vector_bytes(t, False) == expected


def test_vector_width_does_not_trust_a_packed_total() -> None:
    """Heads outermost: the stride between heads is the token total times the pitch, and the total changes."""
    even, odd = (TensorDesc.make((t, 4, 4), "bf16", (4, t * 4, 1)) for t in (100, 101))
    assert vector_bytes(even, True) == vector_bytes(odd, True) == 8


def test_params_reject_nonsense() -> None:
    good = forward_params(dense(), HOPPER)
    for field, value in (("dtype", "fp32"), ("head_dim", 80), ("vec", 3), ("bias", "fp64"), ("tile", Tile(3, 1, 64, 2, True, 1)),
                         ("tile", Tile(4, 2, 48, 2, True, 1)), ("tile", Tile(4, 2, 64, 3, True, 1))):
        with pytest.raises(ValueError, match="expected"):
            dataclasses.replace(good, **{field: value})
    with pytest.raises(ValueError, match="has_right"):
        dataclasses.replace(good, has_left=True)
    with pytest.raises(ValueError, match="exact"):
        dataclasses.replace(good, vec=8)


def test_params_are_host_scalars() -> None:
    for _, value in forward_params(dense(band=MaskDesc(causal=True), bias=tensor(64, 96)), HOPPER).items():
        assert value is None or isinstance(value, (bool, int, str))


@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_every_tile_fits_its_card(cc: tuple[int, int]) -> None:
    reserved = 1024  # of each block, by the hardware
    limit = configs.SHARED_LIMIT[configs.arch_class(cc)] + reserved
    facts = shared_facts(dense(), ("q", "k", "v"))
    for flavor in FLAVORS:
        for more in ({}, {"mask": True}, {"exact": False}, {"has_left": True, "has_right": True}):
            asked = {**facts, "head_dim": flavor[0], "head_dim_v": flavor[1], **more}
            params = FwdParams(**asked, tile=configs.pick(configs.FWD, cc, asked))
            assert (params.shared_bytes + reserved) * params.tile.min_blocks <= limit
            assert params.tile.threads * 32 <= 65536 // params.tile.min_blocks


def test_warps_that_share_rows_serve_plain_scores_only() -> None:
    good = forward_params(dense(), HOPPER)
    shared = dataclasses.replace(good.tile, row_tiles=2, q_in_registers=False, block_n=64, d_split=2)
    assert shared.block_m == good.tile.warps * 16
    with pytest.raises(ValueError, match="d_split 2: expected q in shared memory"):
        dataclasses.replace(good, head_dim=256, head_dim_v=256, tile=dataclasses.replace(shared, q_in_registers=True))
    with pytest.raises(ValueError, match="d_split 2: expected neither mask nor bias"):
        dataclasses.replace(good, head_dim=256, head_dim_v=256, mask=True, tile=shared)
    with pytest.raises(ValueError, match="halves of o in multiples of 64"):
        dataclasses.replace(good, head_dim=96, head_dim_v=96, tile=shared)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("heads", "sharing"), [(1, 1), (32, 1), (33, 1), (32, 4), (7, 7), (128, 8), (1000, 5)])
def test_sections_of_heads(heads: int, sharing: int, uneven: bool) -> None:
    """Sections are of even size, whole groups, and no smaller than a card of uneven tiles needs."""
    one, l2 = 4 << 20, 24 << 20
    section = arguments.head_section(heads, one, sharing, l2, uneven)
    wanted = max(l2 // one * sharing, arguments.UNEVEN_HEADS if uneven else 1)
    assert section % sharing == 0 or section == heads
    count = -(-heads // section)
    assert count <= -(-heads // wanted)                    # none more than the budget asks for
    assert heads - (count - 1) * section > section - count * sharing  # the last is hardly smaller
    assert section <= heads
    assert arguments.head_section(0, 0, sharing, l2, uneven) == 1


# ---- arguments -----------------------------------------------------------------------------------------------------


def values(desc: SdpaDesc) -> tuple[int, dict[str, Any], FwdParams]:
    params = forward_params(desc, HOPPER)
    return (*forward_arguments(params, desc, 1 << 20), params)


def test_every_argument_has_a_value() -> None:
    for desc in (dense(), packed(), dense(bias=tensor(96), mask=tensor(2, 1, 64, 1, dtype="bool"))):
        _, given, _ = values(desc)
        missing = {n for n, kind in FWD_ARGS if kind != "ptr"} - set(given) - {"n_programs"}
        assert not missing


def test_programs_cover_every_tile() -> None:
    for desc, rows in ((dense(sq=300), 300), (dense(sq=1), 1), (dense(sq=0), 0)):
        programs, given, params = values(desc)
        pack = given["pack"]
        assert programs == given["n_tiles"] * (4 // pack) * 2
        assert given["n_tiles"] * params.tile.block_m >= rows * pack


def test_short_queries_share_a_tile() -> None:
    assert values(dense(sq=1, hq=8, hk=2))[1]["pack"] == 4
    assert values(dense(sq=16, hq=8, hk=1))[1]["pack"] == 8
    assert values(dense(sq=4096, hq=8, hk=2))[1]["pack"] == 1
    assert values(dense(sq=1, hq=4, hk=4))[1]["pack"] == 1
    assert values(packed(tq=6, hq=8, hk=2))[1]["pack"] == 4


def test_broadcast_axes_have_no_stride_and_no_limit() -> None:
    given = arguments.score_values("bias", tensor(4, 1, 96, dtype="fp32"))
    assert given == {"bias_b": 0, "bias_h": 96, "bias_q": 0, "bias_k": 1, "bias_rows": arguments.UNLIMITED,
                     "bias_columns": 96}


def test_output_stores_end_with_the_row() -> None:
    assert values(dense(d=64, dv=64))[1]["o_vec"] == 16
    assert values(dense(d=64, dv=60))[1]["o_vec"] == 8
    wide_rows = TensorDesc.make((2, 4, 64, 41), "bf16", (4 * 64 * 48, 64 * 48, 48, 1))
    assert values(dense(d=64, dv=41, o=wide_rows))[1]["o_vec"] == 2


def test_index_types_are_run_time_facts() -> None:
    assert values(packed())[1]["int64_mask"] == 0b10
    assert values(dense(seq_len_q=tensor(2, dtype="int64"), seq_len_kv=tensor(2, dtype="int32")))[1]["int64_mask"] == 0b100
    assert values(dense(sink=tensor(4, dtype="bf16")))[1]["sink_type"] == arguments.FLOAT_CODES[DType.BF16]


def test_the_struct_is_the_table() -> None:
    assert compiler.struct_text("A", (("p", "ptr"), ("n", "i64"), ("i", "i32"), ("x", "fp32"))) == \
        "struct A { void* p; long long n; int i; float x; };"
    assert len({n for n, _ in FWD_ARGS}) == len(FWD_ARGS)
