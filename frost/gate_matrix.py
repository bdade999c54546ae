"""What an equivalence gate runs, as data: per op a table of configurations that together cover every option.

Sizes are small enough for the interpreter and odd enough to leave tails in every tile; a few large rows run
on GPUs only. Forward and backward share one table; the backward adds rows of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

Pair = tuple[int, int]


@dataclass(frozen=True)
class Config:
    """One attention call to prove. Pairs are (q side, k/v side), or (D, Dv).

    `bias` and `mask` are spelled by axis: "b1qk" is [B, 1, Sq, Sk], "qk" is two-dim. `packed_q` / `packed_kv`
    are cu_seqlens, `seqlen` then the packed totals. `gain` multiplies q, and so the scores; `opposed` makes
    all of them negative (q > 0 > k). `layout` is where the main operands lie (frost.equivalence.LAYOUTS).
    """

    name: str
    op: str = "sdpa"
    dtype: str = "bf16"
    batch: int = 2
    heads: Pair = (4, 2)
    seqlen: Pair = (150, 203)
    head_dim: Pair = (64, 64)
    causal: bool = False
    align: str = "top_left"
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    bias_holes: bool = False
    mask: str | None = None
    sink: str | None = None
    lens_q: tuple[int, ...] | None = None
    lens_kv: tuple[int, ...] | None = None
    packed_q: tuple[int, ...] | None = None
    packed_kv: tuple[int, ...] | None = None
    index_dtype: str = "int32"
    layout: str = "bhsd"
    gain: float = 1.0
    opposed: bool = False
    dlse: bool = False
    grads: tuple[str, ...] = ("q", "k", "v")
    deterministic: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")

    def describe(self) -> str:
        """The fields that say something, in one line."""
        base = Config("")
        said = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)
                if f.name not in ("name", "op", *_ALWAYS) and getattr(self, f.name) != getattr(base, f.name)]
        (hq, hk), (sq, sk), (d, dv) = self.heads, self.seqlen, self.head_dim
        sizes = f"{self.dtype} B{self.batch} H{hq}/{hk} S{sq}/{sk} D{d}/{dv}"
        return " ".join([f"{self.name}:", sizes, *said])


_ALWAYS = ("dtype", "batch", "heads", "seqlen", "head_dim")

GPU = ("cuda",)

# Sequences of 37, 0, 90 and 129 tokens with gaps before and after; keys of 64, 12, 0 and 150.
_GAPS: dict[str, Any] = {"batch": 4, "packed_q": (3, 40, 40, 130, 259), "packed_kv": (5, 69, 81, 81, 231),
                         "seqlen": (264, 240)}
# The same batch without a sequence whose keys are missing, so that both corners have rows to disagree on.
_UNEVEN: dict[str, Any] = {"batch": 3, "packed_q": (0, 70, 71, 160), "packed_kv": (0, 33, 161, 230),
                           "seqlen": (160, 230)}

_ROWS: tuple[Config, ...] = (
    # dtypes and head dims
    Config("bf16-d64"),
    Config("fp16-d64", dtype="fp16", dlse=True),
    Config("fp32-d64", dtype="fp32"),
    Config("fp32-d128-causal", dtype="fp32", head_dim=(128, 128), causal=True),
    Config("bf16-d128", head_dim=(128, 128)),
    Config("bf16-d128-causal", head_dim=(128, 128), causal=True, seqlen=(203, 203), dlse=True),
    Config("fp16-d40", dtype="fp16", head_dim=(40, 40), causal=True),
    Config("bf16-d96", head_dim=(96, 96)),
    Config("bf16-d80-dv48", head_dim=(80, 48), causal=True),
    Config("bf16-d192-dv128", head_dim=(192, 128), causal=True, seqlen=(140, 140)),
    Config("bf16-d256", head_dim=(256, 256), seqlen=(100, 140)),
    Config("fp32-d1-dv3", dtype="fp32", head_dim=(1, 3), seqlen=(35, 50)),
    # head groups
    Config("group-1", heads=(3, 3), causal=True),
    Config("group-3", heads=(6, 2), causal=True, dtype="fp16"),
    Config("group-7", heads=(7, 1), seqlen=(70, 90)),
    Config("group-8", heads=(16, 2), head_dim=(128, 128), causal=True, seqlen=(130, 130)),
    # lengths that leave tails
    Config("one-by-one", seqlen=(1, 1), causal=True),
    Config("one-query", seqlen=(1, 257), heads=(8, 2), head_dim=(128, 128)),
    Config("one-key", seqlen=(67, 1)),
    Config("one-below-a-tile", seqlen=(63, 127), causal=True),
    Config("one-above-a-tile", seqlen=(129, 65)),
    Config("long-keys", seqlen=(17, 1100), batch=1, causal=True, align="bottom_right"),
    Config("no-keys", seqlen=(33, 0)),
    # bands
    Config("causal-wide", causal=True, seqlen=(70, 203)),
    Config("causal-tall", causal=True, seqlen=(203, 70)),
    Config("causal-bottom-right-wide", causal=True, align="bottom_right", seqlen=(70, 203), dlse=True),
    Config("causal-bottom-right-tall", causal=True, align="bottom_right", seqlen=(203, 70), dtype="fp16"),
    Config("window-left", window=(31, None), causal=True, head_dim=(128, 128)),
    Config("window-both", window=(20, 45)),
    Config("window-right", window=(None, 17), dtype="fp16"),
    Config("window-left-only", window=(50, None)),
    Config("window-bottom-right", window=(40, 3), align="bottom_right", seqlen=(90, 203)),
    Config("window-diagonal", window=(0, 0), seqlen=(130, 130)),
    Config("window-wider-than-text", window=(1_000_000, 1_000_000), seqlen=(90, 40)),
    # scores
    Config("scale-negative", scale=-0.3),
    Config("scale-zero", scale=0.0),
    Config("softcap", softcap=5.0, gain=4.0, dlse=True),
    Config("softcap-causal-bias", softcap=3.0, gain=4.0, causal=True, bias="1hqk", dtype="fp16"),
    Config("large-logits", gain=25.0, scale=1.0, head_dim=(128, 128), seqlen=(90, 130)),
    # bias and mask
    Config("bias-full", bias="bhqk", bias_dtype="fp32"),
    Config("bias-heads", bias="1hqk", causal=True),
    Config("bias-keys", bias="b11k", dtype="fp16", batch=3),
    Config("bias-rows", bias="bhq1", seqlen=(70, 90)),
    Config("bias-two-dim", bias="qk", dtype="fp32"),
    Config("bias-one-number", bias="1111", batch=3, seqlen=(70, 90)),
    Config("bias-minus-inf", bias="b1qk", bias_holes=True),
    Config("mask-full", mask="bhqk", dlse=True),
    Config("mask-keys", mask="b11k", dtype="fp16", causal=True),
    Config("mask-and-bias", mask="qk", bias="1hqk", bias_dtype="fp32", head_dim=(128, 128)),
    # sinks
    Config("sink", sink="fp32", dlse=True),
    Config("sink-window", sink="bf16", window=(31, None), causal=True, heads=(8, 1)),
    Config("sink-empty-rows", sink="fp32", causal=True, align="bottom_right", seqlen=(203, 70), dtype="fp16"),
    # padding lengths
    Config("lengths", lens_q=(150, 31), lens_kv=(64, 203), causal=True),
    Config("lengths-keys", lens_kv=(0, 130), dtype="fp16"),
    Config("lengths-queries", lens_q=(77, 0), index_dtype="int64"),
    Config("lengths-bottom-right", lens_q=(150, 31), lens_kv=(100, 203), causal=True, align="bottom_right",
           sink="fp32", dlse=True),
    # packed sequences
    Config("packed", **_GAPS),
    Config("packed-causal", causal=True, head_dim=(128, 128), dlse=True, **_GAPS),
    Config("packed-bottom-right", causal=True, align="bottom_right", index_dtype="int64", dtype="fp16",
           **_UNEVEN),
    Config("packed-window-sink", window=(30, 0), sink="fp32", heads=(6, 2), **_GAPS),
    Config("packed-bias", bias="b1qk", softcap=6.0, gain=3.0, **_UNEVEN),
    Config("packed-pitch", layout="pitch", causal=True, dtype="fp32", **_UNEVEN),
    # layouts
    Config("layout-bshd", layout="bshd", causal=True, head_dim=(128, 128)),
    Config("layout-slice-of-qkv", layout="slice"),
    Config("layout-pitch", layout="pitch", head_dim=(40, 40), dtype="fp16"),
    Config("layout-last-stride-2", layout="last2", seqlen=(70, 90)),
    Config("layout-transposed", layout="transposed", dtype="fp32", seqlen=(70, 90)),
    Config("layout-offset-by-one", layout="offset", causal=True),
    Config("layout-offset-d128", layout="offset", head_dim=(128, 128), seqlen=(90, 130)),
    Config("layout-offset-d256", layout="offset", head_dim=(256, 256), seqlen=(90, 90), causal=True, devices=GPU),
    # dense attention without options, which cards with tensor maps run on kernels of its own
    Config("square-d64-causal", causal=True, seqlen=(333, 333), devices=GPU),
    Config("square-d64-fp16", causal=True, seqlen=(257, 257), heads=(6, 2), dtype="fp16", dlse=True, devices=GPU),
    Config("square-d64-slice", causal=True, seqlen=(321, 321), layout="slice", devices=GPU),
    Config("square-d64-large-logits", causal=True, seqlen=(200, 200), gain=25.0, scale=1.0, devices=GPU),
    Config("square-d128-bshd", causal=True, seqlen=(200, 200), heads=(7, 1), head_dim=(128, 128), layout="bshd",
           devices=GPU),
    Config("square-d128-pitch", causal=True, seqlen=(130, 130), head_dim=(128, 128), dtype="fp16", layout="pitch",
           devices=GPU),
    Config("square-d128-scale-negative", causal=True, seqlen=(250, 250), head_dim=(128, 128), scale=-0.2, devices=GPU),
    Config("square-d128-scale-zero", causal=True, seqlen=(190, 190), head_dim=(128, 128), scale=0.0, devices=GPU),
    Config("square-d256-causal", causal=True, seqlen=(130, 130), head_dim=(256, 256), dtype="fp16", dlse=True,
           devices=GPU),
    Config("full-d64-long-keys", seqlen=(65, 1030), dlse=True, devices=GPU),
    Config("full-d128-many-heads", seqlen=(300, 70), heads=(24, 3), head_dim=(128, 128), dtype="fp16", devices=GPU),
    Config("full-d256-scale-negative", seqlen=(140, 150), head_dim=(256, 256), scale=-0.05, devices=GPU),
    # what training runs
    Config("large-d64", batch=2, heads=(8, 8), seqlen=(2048, 2048), dtype="fp16", devices=GPU),
    Config("large-d128-causal-gqa", batch=1, heads=(16, 4), seqlen=(2048, 2048), head_dim=(128, 128),
           causal=True, devices=GPU),
    Config("large-d256-causal", batch=1, heads=(4, 4), seqlen=(1024, 1024), head_dim=(256, 256),
           causal=True, devices=GPU),
)

_BACKWARD_ONLY: tuple[Config, ...] = (
    Config("only-dq", grads=("q",), causal=True),
    Config("only-dk-dv", grads=("k", "v"), dtype="fp16"),
    Config("only-dbias", grads=(), bias="11qk", batch=3),
    Config("dlse-empty-rows", causal=True, align="bottom_right", seqlen=(203, 70), dlse=True),
    Config("dlse-sink-packed", sink="fp32", dlse=True, causal=True, **_GAPS),
    Config("very-negative-lse", seqlen=(1, 129), scale=1.0, gain=25.0, opposed=True),
    Config("deterministic-gqa-window", deterministic=True, heads=(8, 2), window=(40, None), causal=True),
    Config("deterministic-d64", deterministic=True, seqlen=(130, 203)),
    Config("deterministic-d128-causal", deterministic=True, causal=True, seqlen=(203, 203), head_dim=(128, 128),
           dlse=True),
    Config("deterministic-d256", deterministic=True, seqlen=(100, 90), head_dim=(256, 256), dtype="fp16", devices=GPU),
    Config("deterministic-packed", deterministic=True, sink="fp32", causal=True, **_GAPS),
    Config("deterministic-bias", deterministic=True, bias="11qk", batch=3),
    Config("deterministic-bias-row", deterministic=True, bias="111k", batch=3, dtype="fp16"),
)

MATRIX: dict[str, tuple[Config, ...]] = {
    "sdpa": tuple(replace(c, dlse=False) for c in _ROWS),
    "sdpa_backward": tuple(replace(c, op="sdpa_backward") for c in (*_ROWS, *_BACKWARD_ONLY)),
}
