"""Which descriptors the Hopper kernels take, and that what they compile to spills nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from descriptors import MaskDesc, SdpaBwdDesc, SdpaDesc, TensorDesc, sym
from engines.base import Target
from engines.triton import configs_hopper, hopper, runtime
from engines.triton.params_hopper import HopperBwdTile, HopperFwdParams, HopperTile

SM90 = Target.cuda((9, 0))
compiled = pytest.mark.skipif(runtime.unavailable_reason() is not None or not hopper._compiles(),
                              reason="Triton's compiler with Gluon is needed")


def tensor(*shape: Any, dtype: str = "bf16", strides: Any = None, alignment: int = 16) -> TensorDesc:
    return TensorDesc.make(shape, dtype, strides, alignment)


def dense(d: int = 64, s: int = 100, heads: tuple[int, int] = (4, 2), dtype: str = "bf16", **more: Any) -> SdpaDesc:
    hq, hk = heads
    q, k = tensor(2, hq, s, d, dtype=dtype), tensor(2, hk, s, d, dtype=dtype)
    return SdpaDesc(**{"q": q, "k": k, "v": k, "o": q, "lse": tensor(2, hq, s, dtype="fp32"), **more})


CAUSAL = MaskDesc(causal=True)
BSHD = (100 * 4 * 64, 64, 4 * 64, 1)
SERVED = {
    "d64": dense(), "d128": dense(128), "d256": dense(256), "fp16": dense(dtype="fp16"), "mha": dense(heads=(4, 4)),
    "no statistics": dense(lse=None), "causal": dense(band=CAUSAL),
    "causal, other corner of a square": dense(band=replace(CAUSAL, align="bottom_right")),
    "BSHD": dense(q=tensor(2, 4, 100, 64, strides=BSHD), o=tensor(2, 4, 100, 64, strides=BSHD)),
    "long keys": dense(k=tensor(2, 2, 300, 64), v=tensor(2, 2, 300, 64)),
    "nonsense stride of an extent of 1": dense(
        q=tensor(1, 4, 100, 64, strides=(3, 6400, 64, 1)), k=tensor(1, 2, 100, 64), v=tensor(1, 2, 100, 64),
        o=tensor(1, 4, 100, 64), lse=tensor(1, 4, 100, dtype="fp32")),
    "negative scale": dense(scale=-2.0),
}
NOT_SERVED = {
    "fp32": dense(dtype="fp32"), "d40": dense(40), "d32": dense(32),
    "d != dv": dense(v=tensor(2, 2, 100, 128), o=tensor(2, 4, 100, 128)),
    "softcap": dense(softcap=20.0), "sink": dense(sink=tensor(4, dtype="fp32")),
    "bias": dense(bias=tensor(1, 1, 100, 100)), "mask": dense(mask=tensor(1, 1, 100, 100, dtype="bool")),
    "lengths": dense(seq_len_kv=tensor(2, dtype="int32")),
    "window": dense(band=MaskDesc(left=10)), "right edge as a width": dense(band=MaskDesc(right=0)), "causal window": dense(band=MaskDesc(causal=True, left=10)),
    "causal, not square": dense(k=tensor(2, 2, 300, 64), v=tensor(2, 2, 300, 64), band=CAUSAL),
    "a byte off": dense(q=tensor(2, 4, 100, 64, alignment=2)),
    "pitch of 72 bytes": dense(q=tensor(2, 4, 100, 64, strides=(100 * 4 * 68, 100 * 68, 68, 1))),
    "rows that overlap": dense(k=tensor(2, 2, 100, 64, strides=(100 * 2 * 64, 100 * 64, 8, 1))),
    "last stride 2": dense(q=tensor(2, 4, 100, 64, strides=(100 * 4 * 128, 100 * 128, 128, 2))),
    "broadcast batch": dense(k=tensor(2, 2, 100, 64, strides=(0, 6400, 64, 1))),
    "no keys": dense(k=tensor(2, 2, 0, 64), v=tensor(2, 2, 0, 64)),
    "symbolic batch": dense(**{n: tensor(sym("b", 8), 4, 100, 64) for n in "qkvo"}, lse=None),
}


@pytest.mark.parametrize("name", list(SERVED))
def test_served(name: str) -> None:
    assert hopper.serves_forward(SERVED[name], SM90)


@pytest.mark.parametrize("name", list(NOT_SERVED))
def test_left_to_the_kernels_that_serve_everything(name: str) -> None:
    assert not hopper.serves_forward(NOT_SERVED[name], SM90)


@pytest.mark.parametrize("cc", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_cards_keep_the_other_kernels(cc: tuple[int, int]) -> None:
    assert not hopper.serves_forward(SERVED["d64"], Target.cuda(cc))
    assert not hopper.serves_forward(SERVED["d64"], Target.cpu())


def test_a_map_never_sees_a_stride_that_is_not_used() -> None:
    shape, strides = hopper.extents(SERVED["nonsense stride of an extent of 1"].q)
    assert shape == (1, 4, 100, 64) and strides[0] % 8 == 0 and strides[0] > 0 and strides[1:] == (6400, 64, 1)


def test_params_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="d: given 40.*block_m: given 100"):
        HopperFwdParams("bf16", 40, False, True, HopperTile(100, 128, 2, False))


@compiled
def test_parameters_are_packed_where_the_kernel_reads_them() -> None:
    """A tensor map's alignment counts from the constant bank's start, so its offset is not a multiple of 64; a map that is
    read elsewhere is an illegal instruction."""
    kernel = hopper.HopperFwdExecutable(hopper.forward_params(dense(128)), SM90).kernel
    assert kernel.bundle is not None
    assert kernel.pack.offsets == runtime.parameter_offsets(kernel.bundle.code)


FORWARD_TILES = [(row.d, tile) for row in configs_hopper.FWD_HOPPER for tile in (row.tile, row.few) if tile is not None]
BACKWARD_TILES = [(row.d, tile) for row in configs_hopper.BWD_HOPPER for tile in (row.tile, row.few) if tile is not None]
# Addresses of staging buffers and descriptors, a few per tile and none of an accumulator: the warpgroups' cap of 240
# registers is all that two of them can have (read in the machine code).
BACKWARD_SPILLS = 160


@compiled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, tile", FORWARD_TILES, ids=str)
def test_forward_compiles_without_spills(d: int, tile: HopperTile, causal: bool) -> None:
    kernel = hopper.HopperFwdExecutable(HopperFwdParams("bf16", d, causal, True, tile), SM90).kernel
    assert kernel.bundle is not None
    assert kernel.bundle.meta["shared"] <= 227 * 1024
    assert runtime.resource_usage(kernel.bundle.code)["spill_bytes"] == 0


def backward(d: int = 64, s: int = 100, **more: Any) -> SdpaBwdDesc:
    q, k = tensor(2, 4, s, d), tensor(2, 2, s, d)
    return SdpaBwdDesc(**{"q": q, "k": k, "v": k, "o": q, "lse": tensor(2, 4, s, dtype="fp32"), "do": q, "dq": q, "dk": k,
                          "dv": k, **more})


@pytest.mark.parametrize("changes", [{}, {"band": CAUSAL}, {"dlse": tensor(2, 4, 100, dtype="fp32")}, {"d": 128}, {"s": 32}],
                         ids=["full", "causal", "dlse", "d128", "32 rows"])
def test_backward_served(changes: dict[str, Any]) -> None:
    assert hopper.serves_backward(backward(**changes), SM90)


@pytest.mark.parametrize("changes", [{"deterministic": True}, {"dk": None}, {"d": 40}, {"softcap": 3.0},
                                     {"dq": tensor(2, 4, 100, 64, alignment=8)}, {"s": 31}],
                         ids=["deterministic", "no dk", "d40", "softcap", "dq is not aligned", "few rows"])
def test_backward_left_to_the_others(changes: dict[str, Any]) -> None:
    """A deterministic backward needs sums in a fixed order, which dQ's is not here."""
    assert not hopper.serves_backward(backward(**changes), SM90)


def test_rings_of_the_backward_are_two_or_four_long() -> None:
    """The kernel walks them with masks and shifts; another length would wait for ever."""
    assert {tile.stages for _, tile in BACKWARD_TILES} <= {2, 4}


@compiled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, tile", BACKWARD_TILES, ids=str)
def test_backward_compiles(d: int, tile: HopperBwdTile, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs_hopper, "BWD_HOPPER", (configs_hopper.HopperRow(d, None, tile, "this one"),))
    executable = hopper.HopperBwdExecutable(backward(d, band=CAUSAL if causal else MaskDesc()), SM90)
    assert executable.main.bundle is not None
    assert executable.main.bundle.meta["shared"] <= 227 * 1024
    allowed = {executable.main: BACKWARD_SPILLS, executable.pre: 0, executable.cast: 0}
    for kernel, limit in allowed.items():
        assert kernel.bundle is not None
        assert runtime.resource_usage(kernel.bundle.code)["spill_bytes"] <= limit, kernel.name


@pytest.mark.parametrize("batch, rows, small", [(1, 1024, True), (8, 2048, False), (1, 16, True), (16, 1024, False)])
def test_small_problems_get_small_tiles(batch: int, rows: int, small: bool) -> None:
    """Where large tiles would leave multiprocessors without work; a function of the declared extents."""
    q = tensor(batch, 8, rows, 64)
    forward = hopper.forward_params(SdpaDesc(q=q, k=q, v=q, o=q))
    back = hopper.backward_params(SdpaBwdDesc(q=q, k=q, v=q, o=q, do=q, lse=tensor(batch, 8, rows, dtype="fp32"), dq=q, dk=q, dv=q))
    assert (forward.tile.block_m == 64) is small
    assert (back.tile.block_n == 64) is small


def test_backward_scratch_is_the_sum_of_dq_and_two_numbers_per_row() -> None:
    desc = backward(128)
    executable = hopper.HopperBwdExecutable.__new__(hopper.HopperBwdExecutable)
    executable.params = hopper.backward_params(desc)
    rows = 2 * 4 * 128  # the backward of 100 rows works on whole tiles
    assert {r.name: r.nbytes for r in executable.workspace(desc)} == {"row_stats": 8 * rows, "dq_sums": 4 * rows * 128}


def test_tiles_from_the_command_line_are_those_of_the_general_kernels() -> None:
    """A benchmark of `--blocks fwd=…` must not time the Hopper kernels instead."""
    from tools.bench import overrides

    with overrides.tiles({"fwd": (64, 64, 4, 2)}):
        assert not hopper.serves_forward(SERVED["d64"], SM90)
    assert hopper.serves_forward(SERVED["d64"], SM90)


@compiled
def test_compiles_in_a_process_that_has_interpreted() -> None:
    """Interpreting patches Triton's language; what Gluon copies from it must not be a patched name."""
    script = ("import torch, frost\n"
              "from engines.base import Target\n"
              "q = torch.randn(1, 1, 16, 16)\n"
              "frost.attention(q, q, q, engines=['triton'])\n"
              "g = frost.Graph('after')\n"
              "t = [g.tensor(n, (1, 1, 64, 64), dtype='bf16') for n in 'qkv']\n"
              "g.output(g.sdpa(*t)[0], name='o')\n"
              "print(g.compile(Target.cuda((9, 0)), engines=['triton'], gates='off').explain())\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, env={
        **os.environ, "FROST_CACHE_DIR": tempfile.mkdtemp(), "PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "sdpa_fwd_hopper" in done.stdout
