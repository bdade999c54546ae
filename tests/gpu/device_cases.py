"""Cases at the size of a GPU's tiles, on top of the shared table: several tiles along both axes, no extent a
multiple of a tile, the head dims and dtypes that matter on a device."""

from __future__ import annotations

from collections.abc import Iterator

from cases.model import Case, Recipe
from cases.table import CASES

BR = "bottom_right"
_BASE = Case("device", dtype="bf16", batch=2, heads=(4, 2), seqlens=(300, 515), dims=(64, 64))
_MAIN = ("q", "k", "v", "o", "do", "dq", "dk", "dv")


def _plain() -> Iterator[Case]:
    for dtype in ("bf16", "fp16", "fp32"):
        for d in (64, 128, 256):
            yield _BASE.with_(f"device {dtype} d{d} full", dtype=dtype, dims=(d, d))
            yield _BASE.with_(
                f"device {dtype} d{d} causal", dtype=dtype, dims=(d, d), causal=True, seqlens=(515, 515)
            )
    for d, dv in ((40, 40), (80, 80), (96, 96), (192, 128), (72, 200)):
        yield _BASE.with_(f"device d{d}/{dv} causal", dims=(d, dv), causal=True, align=BR)
    for heads in ((1, 1), (3, 1), (7, 1), (24, 2), (12, 12)):
        yield _BASE.with_(f"device heads {heads[0]}/{heads[1]}", heads=heads, batch=1, causal=True, align=BR)
    for sq, sk in ((1, 1023), (1023, 1), (128, 128), (129, 257), (64, 192), (799, 3), (113, 203)):
        yield _BASE.with_(f"device {sq}x{sk} bottom_right", seqlens=(sq, sk), causal=True, align=BR)


def _options() -> Iterator[Case]:
    yield _BASE.with_("device window", window=(100, 20), align=BR, causal=False)
    yield _BASE.with_(
        "device window causal", window=(130, None), causal=True, seqlens=(515, 515), dims=(128, 128)
    )
    yield _BASE.with_(
        "device softcap", softcap=15.0, recipe=Recipe(q_scale=6.0), causal=True, seqlens=(300, 300)
    )
    for shape in ((1, 1, 300, 515), (2, 4, 300, 515), (1, 4, 1, 515), (2, 1, 300, 1), (1, 1, 1, 1)):
        yield _BASE.with_(f"device bias {list(shape)}", bias=shape)
    yield _BASE.with_(
        "device bias fp32", bias=(1, 4, 300, 515), bias_dtype="fp32", causal=True, align=BR, dims=(128, 128)
    )
    yield _BASE.with_("device mask", mask=(2, 1, 300, 515), recipe=Recipe(masked_rows=(0, 150)))
    yield _BASE.with_("device sink dlse", sink="fp32", dlse=True, causal=True, align=BR, seqlens=(515, 300))
    yield _BASE.with_(
        "device lengths", batch=3, len_q=(300, 77, 0), len_kv=(5, 515, 260), causal=True, align=BR
    )
    yield _BASE.with_("device deterministic", deterministic=True, heads=(8, 2), window=(200, 0))
    yield _BASE.with_(
        "device everything",
        softcap=8.0,
        bias=(1, 4, 300, 515),
        mask=(300, 515),
        sink="bf16",
        dlse=True,
        window=(400, 60),
        align=BR,
        recipe=Recipe(q_scale=3.0, masked_rows=(7,)),
    )


def _packed() -> Iterator[Case]:
    base = _BASE.with_(
        "packed", seqlens=(700, 900), cu_q=(3, 303, 303, 431, 690), cu_kv=(10, 400, 528, 528, 880)
    )
    for dtype in ("bf16", "fp16", "fp32"):
        yield base.with_(f"device packed {dtype}", dtype=dtype)
    yield base.with_("device packed causal", causal=True, align=BR, dims=(128, 128))
    yield base.with_(
        "device packed window sink int64", window=(90, 10), sink="fp32", dlse=True, index_dtype="int64"
    )
    yield base.with_("device packed bias", bias=(4, 1, 300, 390))
    yield base.with_("device packed head-major lse", layouts=(("lse", "swapped"),), causal=True)


def _layouts() -> Iterator[Case]:
    yield _BASE.with_("device BSHD", layouts=tuple((n, "swapped") for n in _MAIN), causal=True, align=BR)
    yield _BASE.with_(
        "device packed qkv",
        heads=(4, 4),
        seqlens=(300, 300),
        dims=(128, 128),
        layouts=tuple((n, "packed_qkv") for n in ("q", "k", "v", "dq", "dk", "dv")),
    )
    for layout in ("offset_1", "padded_pitch", "padded_pitch_8", "last_stride_2", "last_dim_outer"):
        yield _BASE.with_(
            f"device {layout}", layouts=tuple((n, layout) for n in _MAIN), causal=True, align=BR
        )
    yield _BASE.with_(
        "device mixed layouts",
        layouts=(
            ("q", "last_stride_2"),
            ("k", "swapped"),
            ("v", "offset_1"),
            ("o", "swapped"),
            ("do", "stride_0_batch"),
            ("lse", "padded_pitch"),
            ("dk", "last_dim_outer"),
        ),
    )


# The shared table, as far as the engine serves it; interpreter-sized cases marked slow are quick on a device.
DEVICE_CASES: tuple[Case, ...] = tuple(c for group in (_plain, _options, _packed, _layouts) for c in group())
ALL_CASES: tuple[Case, ...] = (*(c for c in CASES if not c.triton), *DEVICE_CASES)
