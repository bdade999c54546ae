"""What the SM80 engine's backward decides from descriptors alone: support, specialisation, workspace, launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from descriptors import MaskDesc, SdpaBwdDesc, TensorDesc, sym
from engines.base import Target
from engines.sm80 import ENGINE, configs, configs_bwd, launching
from engines.sm80.adapter_bwd import (
    BIAS_SUMS,
    DQ_SUMS,
    SINK_SUMS,
    STATS,
    SdpaBwdDslSm80,
    SdpaBwdExecutable,
    backward_params,
    backward_values,
    kept_axes,
    launches,
)
from engines.sm80.params import FLAVORS
from engines.sm80.params_bwd import BWD_ARGS, REDUCE_ARGS, BiasParams, BwdTile, DkdvParams, DqParams

HOPPER = Target.cuda((9, 0))


def tensor(*shape: Any, dtype: str = "bf16", stride: Any = None, alignment: int = 16) -> TensorDesc:
    return TensorDesc.make(shape, dtype, stride, alignment)


def dense(b: int = 2, hq: int = 4, hk: int = 2, sq: Any = 64, sk: Any = 96, d: int = 64, d_v: int | None = None,
          dtype: str = "bf16", **more: Any) -> SdpaBwdDesc:
    d_v = d if d_v is None else d_v
    q, k, v, o = (tensor(b, h, s, n, dtype=dtype) for h, s, n in ((hq, sq, d), (hk, sk, d), (hk, sk, d_v), (hq, sq, d_v)))
    parts = {"q": q, "k": k, "v": v, "o": o, "do": o, "lse": tensor(b, hq, sq, dtype="fp32"), "dq": q, "dk": k, "dv": v}
    return SdpaBwdDesc(**{**parts, **more})


def packed(tq: int = 100, tk: int = 120, hq: int = 4, hk: int = 2, d: int = 64, n: int = 3, **more: Any) -> SdpaBwdDesc:
    q, k = tensor(tq, hq, d), tensor(tk, hk, d)
    parts = {"q": q, "k": k, "v": k, "o": q, "do": q, "lse": tensor(tq, hq, dtype="fp32"), "dq": q, "dk": k, "dv": k,
             "cu_seqlens_q": tensor(n + 1, dtype="int32"), "cu_seqlens_kv": tensor(n + 1, dtype="int64")}
    return SdpaBwdDesc(**{**parts, **more})


def with_bias(*shape: Any, dtype: str = "bf16", **more: Any) -> SdpaBwdDesc:
    bias = tensor(*shape, dtype=dtype)
    return dense(bias=bias, dbias=bias, **more)


def refused(desc: SdpaBwdDesc) -> set[str]:
    return {r.field for r in SdpaBwdDslSm80().check_support(desc, HOPPER).reasons}


def chain(desc: SdpaBwdDesc) -> list[tuple[str, int, dict[str, Any]]]:
    return launches(backward_params(desc, HOPPER), desc, 1 << 20)


# ---- support -------------------------------------------------------------------------------------------------------


def test_what_is_served() -> None:
    sink = tensor(4, dtype="fp32")
    for desc in (dense(), dense(dtype="fp16", d=40, d_v=72), packed(), dense(deterministic=True), packed(deterministic=True),
                 dense(sink=sink, dsink=sink, dlse=tensor(2, 4, 64, dtype="fp32")), with_bias(64, 96, dtype="fp32"),
                 dense(band=MaskDesc(left=3, right=4, align="bottom_right"), softcap=3.0, mask=tensor(64, 96, dtype="bool"))):
        assert refused(desc) == set()
    assert isinstance(ENGINE.adapters()[1], SdpaBwdDslSm80)


@pytest.mark.parametrize(("desc", "fields"), [
    (dense(dtype="fp32"), {"dtype"}),
    (dense(do=tensor(2, 4, 64, 64, stride=(0, 0, 0, 0))), {"do.stride[-1]"}),
    (dense(dq=tensor(2, 4, 64, 64, stride=(16384, 4096, 1, 64))), {"dq.stride[-1]"}),
    (dense(dlse=tensor(2, 4, 64, dtype="fp64")), {"dlse.dtype"}),
    (dense(bias=tensor(64, 96), dbias=tensor(64, 96, dtype="fp32")), {"dbias.dtype"}),
    (dense(sink=tensor(4), dsink=tensor(4, dtype="fp64")), {"dsink.dtype"}),
    (dense(do=tensor(2, 4, 64, 64, alignment=1)), {"do.alignment"}),
], ids=lambda x: "+".join(sorted(x)) if isinstance(x, set) else None)
def test_declines_name_every_field(desc: SdpaBwdDesc, fields: set[str]) -> None:
    assert refused(desc) == fields


# ---- which specialisation ------------------------------------------------------------------------------------------


def test_sizes_make_no_new_kernel() -> None:
    sink = tensor(4, dtype="fp32")
    same = [dense(), dense(b=7, sq=1, sk=5000), dense(hq=6, hk=2), packed(), packed(tq=999, tk=7, n=20),
            dense(dlse=tensor(2, 4, 64, dtype="fp32")), dense(sink=sink), dense(scale=-2.0)]
    assert len({tuple(backward_params(d, HOPPER).items()) for d in same}) == 1


def test_only_wanted_kernels_are_built() -> None:
    sink, sure = tensor(4), {"deterministic": True}
    for desc, kernels in ((dense(), {"pre", "dkdv", "cast"}), (dense(**sure), {"pre", "dkdv", "dq"}),
                          (dense(dq=None), {"pre", "dkdv"}), (dense(dk=None, dv=None), {"pre", "dq"}),
                          (dense(dk=None, **sure), {"pre", "dkdv", "dq"}), (dense(dk=None), {"pre", "dkdv", "cast"}),
                          (dense(d=96), {"pre", "dkdv", "dq"}), (dense(softcap=2.0), {"pre", "dkdv", "dq"}),
                          (with_bias(64, 96), {"pre", "dkdv", "dq", "bias"}),
                          (with_bias(1, 96), {"pre", "dkdv", "dq", "bias", "reduce"}),
                          (dense(sink=sink, dsink=sink), {"pre", "dkdv", "cast", "reduce"})):
        assert set(backward_params(desc, HOPPER)) == kernels


@pytest.mark.parametrize("flavor", FLAVORS, ids=str)
@pytest.mark.parametrize("make", [lambda d, dv: dense(d=d, d_v=dv), lambda d, dv: dataclasses.replace(
    packed(d=d), v=tensor(120, 2, dv), dv=tensor(120, 2, dv), o=tensor(100, 4, dv), do=tensor(100, 4, dv))],
    ids=["dense", "packed"])
def test_kernel_head_dims_come_from_the_flavor(flavor: tuple[int, int], make: Any) -> None:
    for less in (0, 3):
        params = backward_params(make(flavor[0] - less, flavor[1]), HOPPER)
        for p in (p for p in params.values() if isinstance(p, (DkdvParams, DqParams))):
            macros = p.macros()
            assert (macros["HEAD_DIM"], macros["HEAD_DIM_V"], macros["EXACT"]) == (*flavor, int(less == 0))


def test_statistics_are_shared_by_what_does_not_reach_them() -> None:
    made = [backward_params(d, HOPPER)["pre"] for d in (dense(), dense(d=128), dense(band=MaskDesc(causal=True)),
                                                         dense(mask=tensor(64, 96, dtype="bool")))]
    assert len(set(made)) == 1
    natural = [backward_params(d, HOPPER)["pre"] for d in (dense(softcap=2.0), with_bias(64, 96))]
    assert len(set(natural)) == 1 and natural[0] != made[0]


@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("flavor", FLAVORS, ids=str)
def test_every_tile_fits_its_card(flavor: tuple[int, int], cc: tuple[int, int]) -> None:
    target, limit = Target.cuda(cc), configs.SHARED_LIMIT[configs.arch_class(cc)]
    for desc in (dense(d=flavor[0], d_v=flavor[1]), dense(d=flavor[0], d_v=flavor[1], deterministic=True), with_bias(64, 96, d=flavor[0], d_v=flavor[1])):
        for name, p in backward_params(desc, target).items():
            if isinstance(p, (DkdvParams, DqParams, BiasParams)):
                assert p.shared_bytes * p.tile.min_blocks <= limit, name
                assert p.tile.threads * p.tile.min_blocks * 32 <= 65536


def test_params_reject_nonsense() -> None:
    good = backward_params(dense(), HOPPER)["dkdv"]
    for tile in (BwdTile(3, 1, 1, 64, 2, 1), BwdTile(4, 1, 1, 48, 2, 1), BwdTile(4, 1, 2, 64, 2, 1),
                 BwdTile(4, 1, 2, 16, 2, 1)):
        with pytest.raises(ValueError, match="expected"):
            dataclasses.replace(good, tile=tile)


def test_a_packed_sequence_has_room_for_its_last_block_of_sums() -> None:
    """Sequence s starts at block start / 16 + s, whatever the lengths before it."""
    for lengths in ((1,) * 40, (17, 2, 0, 31, 16, 15), (5, 300, 1), (16, 16)):
        room = backward_values(packed(tq=sum(lengths), n=len(lengths)))["sum_blocks"]
        used, start = 0, 0
        for s, n in enumerate(lengths):
            assert start // 16 + s >= used
            used, start = start // 16 + s + -(-n // 16), start + n
        assert used <= room


# ---- workspace and launches ------------------------------------------------------------------------------------------


workspace = SdpaBwdDslSm80().workspace


def test_nothing_but_statistics_and_sums_of_dq_grows_with_the_sequence() -> None:
    found = {r.name: r.nbytes for r in workspace(dense(b=2, hq=16, hk=16, sq=8192, sk=8192, d=128))}
    assert found == {STATS: 8 * 2 * 16 * 8192, DQ_SUMS: 4 * 2 * 16 * 8192 * 128}
    fixed = {r.name: r.nbytes for r in workspace(dense(b=2, hq=16, hk=16, sq=8192, sk=8192, d=128, deterministic=True))}
    assert fixed == {STATS: 8 * 2 * 16 * 8192}
    sink = tensor(4)
    assert {r.name for r in workspace(dense(sink=sink, dsink=sink, deterministic=True))} == {STATS, SINK_SUMS}
    assert {r.name: r.nbytes for r in workspace(with_bias(1, 96))}[BIAS_SUMS] == 4 * 2 * 4 * 96
    assert {r.name: r.nbytes for r in workspace(with_bias(1, 1))}[BIAS_SUMS] == 4 * 2 * 4 * configs_bwd.BIAS_CHUNKS
    assert {r.name for r in workspace(with_bias(64, 96))} == {STATS}
    assert all(r.nbytes > 0 for r in workspace(dense(sq=0)))


def test_every_argument_has_a_value() -> None:
    sink = tensor(4)
    for desc in (dense(), packed(), with_bias(96), with_bias(2, 1, 64, 1), with_bias(64, 96), dense(sink=sink, dsink=sink)):
        shared = backward_values(desc)
        for name, _, own in chain(desc):
            table = REDUCE_ARGS if name == "reduce" else BWD_ARGS
            assert not {n for n, kind in table if kind != "ptr"} - set(shared) - set(own) - {"n_programs"}, name


def test_programs_cover_every_tile() -> None:
    for desc in (dense(sq=300, sk=500, deterministic=True), dense(sq=1, sk=1), dense(sq=0), packed(tq=999, tk=500)):
        params = backward_params(desc, HOPPER)
        for name, programs, own in chain(desc):
            if name in ("dkdv", "dq"):
                values = backward_values(desc)
                extent, heads = (values["sk_max"], 2) if name == "dkdv" else (values["sq_max"], 4)
                assert programs == own["n_tiles"] * heads * (1 if desc.packed else 2)
                assert own["n_tiles"] * params[name].tile.own >= extent  # type: ignore[attr-defined]


def test_bias_kernels_follow_the_declared_axes() -> None:
    s = sym("S", 64)
    for shape, kept in (((2, 1, 64, 96), (True, True)), ((96,), (False, True)), ((4, 64, 1), (True, False)),
                        ((1, 1), (False, False))):
        assert kept_axes(with_bias(*shape)) == kept
    assert kept_axes(with_bias(s, 96, sq=s)) == (True, True)


def test_stores_end_with_the_row() -> None:
    assert backward_values(dense(d=60))["gq_vec"] == 8
    assert backward_values(dense(d=41))["gk_vec"] == 2
    assert backward_values(dense())["gv_vec"] == 16


# ---- compiling a chain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "shown"), [(0.01, []), (1.0, [(3, 1)])], ids=["cached", "slow"])
def test_a_bar_shows_once_compiling_takes_a_while(seconds: float, shown: list[tuple[int, int]],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[int, int]] = []
    names: list[str] = []

    def progress(stack: Any, total: int, done: int) -> Any:
        bars.append((total, done))
        return names.append

    now = [0.0]

    def make(name: str) -> Any:
        now[0] += seconds
        return name

    monkeypatch.setattr(launching, "_progress", progress)
    makers: Any = {n: (lambda n=n: make(n)) for n in ("pre", "dkdv", "cast")}
    assert launching.compile_chain(makers, lambda: now[0]) == {n: n for n in makers}
    assert bars == shown
    assert names == (["dkdv", "cast"] if shown else [])


def test_the_bar_goes_to_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def chain() -> str:
        clock = iter(range(100))
        launching.compile_chain({n: (lambda: None) for n in ("pre", "dkdv", "cast")}, lambda: float(next(clock)))  # type: ignore[misc]
        return capsys.readouterr().err

    assert chain() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "compiling cast" in chain()


def test_workspace_at_the_maxima_holds_every_binding() -> None:
    """What a caller gives is sized once, at the declared maxima."""
    rows, keys = sym("Sq", 64), sym("Sk", 96)
    for shape in ((1, 4, rows, 1), (1, 4, 1, keys), (1, 4, rows, keys)):
        bias = TensorDesc.make(shape, "fp32")
        desc = dense(b=2, sq=rows, sk=keys, bias=bias, dbias=bias)
        made = SdpaBwdExecutable.__new__(SdpaBwdExecutable)  # the kernels themselves are not asked
        made.params = backward_params(desc, Target.cuda((9, 0)))
        most = {r.name: r.nbytes for r in made.workspace(desc.bound({"Sq": 64, "Sk": 96}))}
        for binding in ({"Sq": 1, "Sk": 96}, {"Sq": 64, "Sk": 1}, {"Sq": 1, "Sk": 1}):
            found = {r.name: r.nbytes for r in made.workspace(desc.bound(binding))}
            assert found.keys() == most.keys() and all(found[n] <= most[n] for n in found), (shape, binding)
