"""The cases. Each states what it is there for; sizes are small because one engine is interpreted.

The interpreted kernels use 32 x 32 tiles, so extents around 32 and 64 meet every tile edge.
"""

from __future__ import annotations

from collections.abc import Iterator

from cases.model import Case, Recipe

BR = "bottom_right"

# What PyTorch's attention would get wrong, so that its engine has to decline, naming the field.
NO_CORNER, NO_PACKED = ("align",), ("cu_seqlens_q",)
NO_LEFT, NO_RIGHT = ("window_left",), ("window_right",)


def _sizes() -> Iterator[Case]:
    """Extents around tile edges, empty ones included; Sq and Sk differ so that mixed-up extents show."""
    small = Case("small", batch=1, heads=(1, 1), dims=(8, 8))
    for sq, sk in (
        (1, 1),
        (1, 4),
        (3, 3),
        (2, 17),
        (16, 15),
        (31, 33),
        (33, 31),
        (32, 64),
        (65, 63),
        (1, 129),
        (129, 2),
    ):
        yield small.with_(f"size {sq}x{sk}", seqlens=(sq, sk))
    for sq, sk, b, empty in (
        (0, 5, 2, "seqlen_q"),
        (5, 0, 2, "seqlen_kv"),
        (0, 0, 2, "seqlen_kv"),
        (3, 3, 0, "batch"),
    ):
        yield small.with_(
            f"empty {sq}x{sk} batch {b}",
            seqlens=(sq, sk),
            batch=b,
            heads=(2, 1),
            dlse=True,
            torch_sdpa=(empty,),
            torch_sdpa_backward=(empty, "dlse"),
        )


def _head_dims() -> Iterator[Case]:
    """Head dims that are no powers of two, 1, the largest, and D != Dv."""
    base = Case("dims", batch=1, heads=(2, 1), seqlens=(18, 35))
    for d, dv, dtype in (
        (1, 1, "fp32"),
        (8, 8, "fp16"),
        (40, 40, "bf16"),
        (64, 64, "bf16"),
        (80, 80, "fp16"),
        (96, 96, "bf16"),
        (128, 128, "bf16"),
        (160, 160, "fp16"),
        (256, 256, "fp32"),
        (40, 24, "fp32"),
        (3, 70, "fp32"),
        (192, 128, "bf16"),
    ):
        yield base.with_(f"dims {d}/{dv} {dtype}", dims=(d, dv), dtype=dtype)


def _groups() -> Iterator[Case]:
    """Query heads per K/V head, powers of two or not."""
    base = Case("groups", batch=2, seqlens=(9, 20), dims=(8, 8))
    for hq, hk in ((2, 2), (2, 1), (6, 2), (6, 1), (7, 1), (16, 2), (12, 1), (24, 1)):
        yield base.with_(f"groups {hq}/{hk}", heads=(hq, hk))


def _dtypes() -> Iterator[Case]:
    base = Case("dtype", heads=(4, 2), seqlens=(40, 70), dims=(32, 32))
    for dtype in ("fp16", "bf16", "fp32"):
        yield base.with_(f"dtype {dtype}", dtype=dtype)
        yield base.with_(f"dtype {dtype} causal", dtype=dtype, causal=True, seqlens=(70, 40))
    yield base.with_("dtype fp64", dtype="fp64", triton=("dtype",))
    yield base.with_(
        "dtype fp64 options",
        dtype="fp64",
        causal=True,
        align=BR,
        softcap=2.0,
        bias=(1, 4, 1, 70),
        sink="fp64",
        dlse=True,
        triton=("dtype",),
        torch_sdpa=("softcap", "sink", "align"),
        torch_sdpa_backward=("softcap", "sink", "dlse", "dbias", "dsink"),
    )
    yield base.with_(
        "head_dim 512", dims=(512, 512), batch=1, heads=(1, 1), seqlens=(5, 6), triton=("head_dim",)
    )


def _masks() -> Iterator[Case]:
    """Both corners, windows, boolean masks, alone and together; rows that see nothing."""
    base = Case("mask", heads=(2, 1), dims=(16, 8))
    for sq, sk in ((1, 4), (4, 2), (2, 5), (5, 5), (33, 70), (70, 33)):
        unseen = ("causal",) if sq < sk else ()
        yield base.with_(
            f"causal top_left {sq}x{sk}",
            seqlens=(sq, sk),
            causal=True,
            torch_sdpa=unseen,
            torch_sdpa_backward=unseen,
        )
        corner = () if sq == sk else NO_CORNER
        yield base.with_(
            f"causal bottom_right {sq}x{sk}",
            seqlens=(sq, sk),
            causal=True,
            align=BR,
            torch_sdpa=corner,
            torch_sdpa_backward=corner,
        )
    for left, right, align, causal in (
        (5, 3, "top_left", False),
        (5, 3, BR, False),
        (20, None, BR, True),
        (None, 2, BR, False),
        (0, 0, "top_left", False),
        (10**6, 10**6, BR, False),
    ):
        fields = (NO_LEFT if left is not None else ()) + (NO_RIGHT if right else ())
        for sq, sk in ((40, 70), (70, 34)):
            yield base.with_(
                f"window {left},{right} {align} {sq}x{sk}",
                seqlens=(sq, sk),
                causal=causal,
                align=align,
                window=(left, right),
                torch_sdpa=fields,
                torch_sdpa_backward=fields,
            )
    no_mask = {"torch_sdpa": ("mask",), "torch_sdpa_backward": ("mask",)}
    for shape in ((33, 34), (2, 1, 1, 34), (1, 2, 33, 1), (2, 2, 33, 34), (2, 33, 34)):
        yield base.with_(
            f"bool mask {list(shape)}",
            seqlens=(33, 34),
            mask=shape,
            **no_mask,
            recipe=Recipe(masked_rows=(0, 20) if shape[-2] > 1 else ()),
        )
    yield base.with_(
        "bool mask and causal",
        seqlens=(33, 40),
        mask=(33, 40),
        causal=True,
        align=BR,
        dtype="bf16",
        recipe=Recipe(masked_rows=(3,)),
        **no_mask,
    )


def _scores() -> Iterator[Case]:
    """scale, softcap, bias in every broadcast form, sinks; with masks, since masked cells must contribute
    nothing."""
    base = Case("scores", heads=(4, 2), seqlens=(33, 38), dims=(16, 16))
    for scale in (0.3, 0.0, -0.7):
        yield base.with_(f"scale {scale}", scale=scale)
    no_cap = {"torch_sdpa": ("softcap",), "torch_sdpa_backward": ("softcap",)}
    yield base.with_("softcap", softcap=3.0, recipe=Recipe(q_scale=6.0), **no_cap)
    yield base.with_(
        "softcap bf16 causal",
        softcap=15.0,
        causal=True,
        align=BR,
        seqlens=(38, 33),
        dtype="bf16",
        recipe=Recipe(q_scale=6.0),
        **no_cap,
    )
    yield base.with_(
        "softcap bias mask",
        softcap=3.0,
        bias=(1, 4, 33, 38),
        mask=(33, 38),
        recipe=Recipe(q_scale=6.0, masked_rows=(1,)),
        **no_cap,
    )
    no_dbias = {"torch_sdpa": ("bias",), "torch_sdpa_backward": ("dbias",)}
    for shape in (
        (1, 1, 1, 38),
        (1, 4, 1, 38),
        (1, 1, 33, 38),
        (3, 1, 1, 1),
        (1, 1, 1, 1),
        (3, 4, 33, 38),
        (3, 1, 33, 1),
        (33, 38),
        (4, 1, 38),
    ):
        yield base.with_(f"bias {list(shape)}", batch=3, bias=shape, **no_dbias)
    yield base.with_(
        "bias fp32 under bf16",
        batch=3,
        dtype="bf16",
        bias=(1, 4, 33, 38),
        bias_dtype="fp32",
        causal=True,
        **no_dbias,
    )
    yield base.with_("bias of -inf rows", bias=(33, 38), recipe=Recipe(bias_inf_rows=(0, 32)), **no_dbias)
    yield base.with_(
        "bias bf16 window", dtype="bf16", bias=(1, 4, 33, 38), window=(6, 2), align=BR, **no_dbias
    )
    no_sink = {"torch_sdpa": ("sink",), "torch_sdpa_backward": ("sink", "dsink")}
    yield base.with_("sink fp32", sink="fp32", dlse=True, **no_sink)
    yield base.with_("sink bf16 io", dtype="bf16", sink="bf16", causal=True, **no_sink)
    yield base.with_(
        "sink and empty rows", sink="fp32", causal=True, align=BR, seqlens=(38, 20), dlse=True, **no_sink
    )
    yield base.with_(
        "sinks of inf", sink="fp32", sink_values=(float("inf"), float("-inf"), 0.0, 3.0), **no_sink
    )


def _statistics() -> Iterator[Case]:
    """The gradient that comes in through lse, and statistics of extreme size."""
    base = Case("lse", heads=(2, 1), seqlens=(33, 34), dims=(16, 16))
    no_dlse = {"torch_sdpa_backward": ("dlse",)}
    yield base.with_("dlse", dlse=True, **no_dlse)
    yield base.with_(
        "dlse with empty rows",
        dlse=True,
        causal=True,
        align=BR,
        seqlens=(34, 17),
        torch_sdpa=NO_CORNER,
        torch_sdpa_backward=("align", "dlse"),
    )
    yield base.with_(
        "dlse bf16 softcap",
        dlse=True,
        dtype="bf16",
        softcap=5.0,
        torch_sdpa=("softcap",),
        torch_sdpa_backward=("softcap", "dlse"),
    )
    # k = -c with q = 1 makes scores of about -1e3 and -1e4 in a batch of one row: its tile's other rows are
    # padding.
    for name, offset in (("-1e3", -125.0), ("-1e4", -1250.0)):
        for sk in (127, 128, 129):
            yield base.with_(
                f"lse near {name} keys {sk}",
                dtype="bf16",
                batch=1,
                heads=(2, 2),
                seqlens=(1, sk),
                dims=(64, 64),
                recipe=Recipe(q_scale=0.0, k_scale=0.0, k_offset=offset),
            )
    # q.k has a standard deviation of 78,400 here; fp16 ends at 65,504. With scores as large as that P = exp(s
    # - lse) hangs on the last bit of lse, so a backward from another engine's lse says nothing.
    large = Recipe(q_scale=140.0, k_scale=140.0)
    yield base.with_("fp16 products beyond fp16", dtype="fp16", scale=1e-3, recipe=large)
    yield base.with_("fp16 scores beyond fp16", dtype="fp16", scale=1.0, recipe=large, ops=("sdpa",))


def _lengths() -> Iterator[Case]:
    """Padding lengths: either side alone, both, zero, both index types, with corners taken from the
    lengths."""
    base = Case("lengths", batch=3, heads=(4, 2), seqlens=(40, 37), dims=(16, 16))
    q, kv = (40, 7, 0), (5, 37, 12)
    cases = (
        ("q alone", {"len_q": q}),
        ("kv alone", {"len_kv": kv}),
        ("both", {"len_q": q, "len_kv": kv}),
        ("int64", {"len_q": q, "len_kv": (0, 37, 1), "index_dtype": "int64"}),
        ("causal bottom_right", {"len_q": (40, 7, 20), "len_kv": kv, "causal": True, "align": BR}),
        ("causal top_left", {"len_q": (40, 7, 20), "len_kv": kv, "causal": True}),
        ("window bf16", {"len_q": q, "len_kv": kv, "window": (9, 4), "align": BR, "dtype": "bf16"}),
        (
            "sink dlse bias",
            {"len_q": q, "len_kv": (5, 37, 0), "sink": "fp32", "dlse": True, "bias": (3, 1, 40, 37)},
        ),
        ("mask", {"len_q": q, "len_kv": kv, "mask": (3, 1, 40, 37)}),
    )
    for name, options in cases:
        fields = tuple(
            f for f, given in (("seq_len_q", "len_q"), ("seq_len_kv", "len_kv")) if given in options
        )
        yield base.with_(f"lengths {name}", **options, torch_sdpa=fields, torch_sdpa_backward=fields)


def _packed() -> Iterator[Case]:
    """Packed sequences: empty ones on either side, gaps before and after, more heads than keys."""
    base = Case(
        "packed",
        heads=(4, 2),
        seqlens=(45, 50),
        dims=(16, 16),
        cu_q=(0, 33, 33, 38, 45),
        cu_kv=(0, 20, 24, 24, 50),
        torch_sdpa=NO_PACKED,
        torch_sdpa_backward=NO_PACKED,
    )
    gaps = {"seqlens": (50, 60), "cu_q": (2, 35, 35, 40, 47), "cu_kv": (3, 23, 27, 27, 53)}
    yield base.with_("packed")
    yield base.with_("packed bf16 gaps", dtype="bf16", **gaps)
    yield base.with_("packed fp16 int64", dtype="fp16", index_dtype="int64")
    yield base.with_("packed causal top_left", causal=True, **gaps)
    yield base.with_("packed causal bottom_right", causal=True, align=BR, dlse=True, **gaps)
    yield base.with_("packed window", window=(6, 3), align=BR)
    yield base.with_(
        "packed group 3", heads=(9, 3), seqlens=(2, 3), cu_q=(0, 1, 1, 2), cu_kv=(0, 1, 2, 3), dims=(8, 8)
    )
    yield base.with_(
        "packed leading empties", heads=(2, 1), seqlens=(5, 11), cu_q=(0, 0, 3, 5, 5), cu_kv=(0, 4, 6, 7, 11)
    )
    yield base.with_("packed all keys empty", heads=(2, 1), seqlens=(5, 0), cu_q=(0, 2, 5), cu_kv=(0, 0, 0))
    yield base.with_("packed no queries", heads=(2, 1), seqlens=(0, 5), cu_q=(0, 0, 0), cu_kv=(0, 2, 5))
    yield base.with_("packed no sequences", heads=(2, 1), seqlens=(4, 5), cu_q=(0,), cu_kv=(0,))
    yield base.with_(
        "packed sink softcap dlse", sink="fp32", softcap=4.0, dlse=True, recipe=Recipe(q_scale=4.0), **gaps
    )
    yield base.with_("packed bias", bias=(4, 4, 33, 26))
    yield base.with_("packed bias shared", bias=(1, 1, 33, 26), causal=True)
    yield base.with_("packed bias rows", bias=(1, 4, 1, 26), dtype="bf16")
    yield base.with_("packed mask", mask=(4, 1, 33, 26), recipe=Recipe(masked_rows=(0,)))
    head_major = tuple((name, "swapped") for name in ("lse", "dlse"))
    yield base.with_("packed head-major lse", dlse=True, layouts=head_major, **gaps)
    yield base.with_(
        "packed slices of qkv",
        heads=(2, 2),
        dims=(16, 16),
        cu_kv=(0, 33, 33, 38, 45),
        seqlens=(45, 45),
        layouts=tuple((n, "packed_qkv") for n in ("q", "k", "v", "dq", "dk", "dv")),
    )


def _layouts() -> Iterator[Case]:
    """Layouts one would meet; the pairwise sweep is in test_layouts."""
    base = Case("layout", heads=(4, 2), seqlens=(33, 38), dims=(16, 16))
    swapped = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
    yield base.with_("layout BSHD", layouts=tuple((n, "swapped") for n in swapped))
    yield base.with_(
        "layout BSHD bf16 causal",
        dtype="bf16",
        causal=True,
        seqlens=(38, 33),
        layouts=tuple((n, "swapped") for n in swapped),
    )
    yield base.with_(
        "layout packed qkv",
        heads=(2, 2),
        seqlens=(33, 33),
        layouts=tuple((n, "packed_qkv") for n in ("q", "k", "v", "dq", "dk", "dv")),
    )
    odd = {"torch_sdpa": ("q.stride[-1]",), "torch_sdpa_backward": ("q.stride[-1]",)}
    yield base.with_(
        "layout last stride 2", layouts=tuple((n, "last_stride_2") for n in (*swapped, "lse")), **odd
    )
    yield base.with_("layout transposed q", layouts=(("q", "last_dim_outer"), ("o", "last_dim_outer")), **odd)
    yield base.with_(
        "layout offset by one", dtype="bf16", layouts=tuple((n, "offset_1") for n in (*swapped, "lse"))
    )
    yield base.with_(
        "layout shared heads",
        layouts=(("k", "stride_0_head"), ("v", "stride_0_head"), ("do", "stride_0_batch")),
    )
    ones = base.with_("ones", batch=1, heads=(1, 1), seqlens=(1, 17), dims=(8, 8))
    yield ones.with_(
        "layout nonsense strides of size 1",
        bias=(1, 1, 1, 17),
        mask=(1, 1, 1, 17),
        torch_sdpa=("mask",),
        torch_sdpa_backward=("mask",),
        layouts=tuple((n, "nonsense_size_1") for n in (*swapped, "lse", "bias", "mask", "dbias")),
    )


CASES: tuple[Case, ...] = tuple(
    case
    for group in (
        _sizes,
        _head_dims,
        _groups,
        _dtypes,
        _masks,
        _scores,
        _statistics,
        _lengths,
        _packed,
        _layouts,
    )
    for case in group()
)
BY_NAME = {case.name: case for case in CASES}
if len(BY_NAME) != len(CASES):
    raise ValueError("two cases share a name")
