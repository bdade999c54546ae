"""What the equivalence gates of selection attention run, as data, and the block choices they run on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class NsaConfig:
    """One selection call to prove. `heads`: (Hk, group). `seqlen`: (Tq, Tk); packed: the total, twice. `head_dim`: (D, Dv).

    `hostile`: entries in random order with duplicates, blocks of the future, numbers past the end and below 0. `layout`: where
    the main operands lie (frost.equivalence.LAYOUTS).
    """

    name: str
    op: str = "nsa_selection"
    dtype: str = "bf16"
    batch: int = 1
    heads: Pair = (2, 4)
    seqlen: Pair = (150, 150)
    head_dim: Pair = (64, 64)
    block_size: int = 32
    slots: int = 4
    counts: bool = False
    hostile: bool = False
    packed: tuple[int, ...] | None = None
    index_dtype: str = "int32"
    scale: float | None = None
    gain: float = 1.0
    layout: str = "bhsd"
    dlse: bool = False
    deterministic: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")

    def describe(self) -> str:
        """The fields that say something, in one line."""
        base = type(self)("")
        plain = ("name", "op", "dtype", "batch", "heads", "seqlen", "head_dim", "block_size", "slots", "devices")
        said = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)
                if f.name not in plain and getattr(self, f.name) != getattr(base, f.name)]
        (hk, group), (tq, tk), (d, dv) = self.heads, self.seqlen, self.head_dim
        sizes = f"{self.dtype} B{self.batch} H{hk * group}/{hk} T{tq}/{tk} D{d}/{dv} block {self.block_size} S{self.slots}"
        return " ".join([f"{self.name}:", sizes, *said])


GPU = ("cuda",)
_GAPS: dict[str, Any] = {"packed": (3, 40, 40, 130, 259), "seqlen": (264, 264)}
_C = NsaConfig

# Small enough for the interpreter, odd enough to leave tails in every tile; a few large ones on GPUs only.
_ROWS: tuple[NsaConfig, ...] = (
    # fp32 is the exact one: true fp32 products, told from TF32 by the floor of the tolerance rule
    _C("fp32-g1", dtype="fp32", heads=(2, 1), head_dim=(32, 32), block_size=16, seqlen=(97, 97)),
    _C("fp32-g3", dtype="fp32", heads=(2, 3), head_dim=(64, 64), block_size=16, seqlen=(131, 131)),
    _C("fp32-g4", dtype="fp32", heads=(1, 4), head_dim=(128, 128), block_size=32, seqlen=(129, 129)),
    _C("fp32-g16", dtype="fp32", heads=(1, 16), head_dim=(64, 64), block_size=64, seqlen=(200, 200)),
    _C("fp32-d192-dv128", dtype="fp32", heads=(1, 3), head_dim=(192, 128), block_size=32, seqlen=(70, 70)),
    _C("fp32-hostile", dtype="fp32", heads=(2, 2), head_dim=(32, 32), block_size=16, slots=9, hostile=True, counts=True,
       dlse=True),
    _C("bf16-g1", heads=(3, 1), head_dim=(32, 32), block_size=16),
    _C("bf16-g3", heads=(2, 3), head_dim=(64, 64), block_size=32, seqlen=(161, 161), dlse=True),
    _C("bf16-g4", heads=(2, 4), head_dim=(128, 128), block_size=64, seqlen=(257, 257)),
    _C("bf16-g16", heads=(1, 16), head_dim=(128, 128), block_size=64, seqlen=(193, 193)),
    _C("bf16-g7", heads=(1, 7), head_dim=(64, 64), block_size=16, seqlen=(101, 101)),
    _C("bf16-g5-fp16", dtype="fp16", heads=(1, 5), head_dim=(64, 64), block_size=32, seqlen=(99, 99), dlse=True),
    _C("bf16-d192-dv128", heads=(1, 4), head_dim=(192, 128), block_size=64, seqlen=(140, 140)),
    _C("bf16-d40-dv24", heads=(1, 2), head_dim=(40, 24), block_size=16, seqlen=(66, 66)),
    _C("bf16-block-24", heads=(1, 2), block_size=24, seqlen=(110, 110)),
    _C("bf16-block-128", heads=(1, 2), block_size=128, slots=2, seqlen=(300, 300)),
    _C("bf16-block-8", dtype="fp16", heads=(1, 3), block_size=8, slots=12, seqlen=(90, 90)),
    # S beyond what a row has, and one token
    _C("more-slots-than-blocks", heads=(2, 2), slots=16, seqlen=(70, 70)),
    _C("one-token", heads=(2, 3), seqlen=(1, 1), block_size=16),
    _C("one-block-short", heads=(1, 2), seqlen=(31, 31)),
    _C("many-slots", heads=(1, 2), slots=33, block_size=16, seqlen=(150, 150), hostile=True),
    # sets: order, duplicates, blocks that are none; counts
    _C("hostile", slots=9, hostile=True, batch=2, dlse=True),
    _C("hostile-counts", slots=9, hostile=True, counts=True, index_dtype="int64"),
    # queries at the end of the keys
    _C("fewer-queries", seqlen=(70, 203)),
    _C("one-query", seqlen=(1, 203), heads=(2, 16)),
    _C("more-queries", seqlen=(90, 50), hostile=True, slots=5),
    # packed
    _C("packed", heads=(2, 3), dlse=True, **_GAPS),
    _C("packed-hostile", heads=(1, 4), hostile=True, counts=True, slots=6, index_dtype="int64", **_GAPS),
    _C("packed-block-16", heads=(2, 1), block_size=16, dtype="fp16", head_dim=(40, 40), **_GAPS),
    # layouts, scales, scores
    _C("layout-bshd", layout="bshd", head_dim=(128, 128), batch=2, seqlen=(100, 100)),
    _C("layout-slice-of-qkv", layout="slice", seqlen=(80, 80)),
    _C("layout-pitch", layout="pitch", head_dim=(40, 40), dtype="fp16", seqlen=(80, 80)),
    _C("layout-last-stride-2", layout="last2", seqlen=(70, 70)),
    _C("layout-transposed", layout="transposed", dtype="fp32", seqlen=(70, 70)),
    _C("layout-offset-by-one", layout="offset", seqlen=(80, 80)),
    _C("scale-negative", scale=-0.3, seqlen=(80, 80)),
    _C("scale-zero", scale=0.0, seqlen=(80, 80)),
    _C("large-logits", gain=25.0, scale=1.0, head_dim=(128, 128), seqlen=(90, 90)),
    # what training runs
    _C("large-g16", heads=(2, 16), head_dim=(128, 128), block_size=64, slots=8, seqlen=(1100, 1100), devices=GPU),
    _C("large-g1", heads=(16, 1), head_dim=(128, 128), block_size=64, slots=8, seqlen=(1100, 1100), devices=GPU),
    _C("large-g3-packed", heads=(2, 3), head_dim=(64, 64), block_size=64, slots=16, packed=(0, 700, 701, 2048),
       seqlen=(2048, 2048), dtype="fp16", devices=GPU),
    _C("large-fp32", dtype="fp32", heads=(2, 4), head_dim=(128, 128), block_size=64, slots=8, seqlen=(1100, 1100),
       devices=GPU),
)
_DETERMINISTIC: tuple[NsaConfig, ...] = (
    _C("deterministic", deterministic=True, heads=(2, 3), hostile=True, slots=6),
    _C("deterministic-packed", deterministic=True, heads=(2, 2), **_GAPS),
)

CONFIGS: tuple[NsaConfig, ...] = _ROWS
NSA_MATRIX: dict[str, tuple[NsaConfig, ...]] = {
    "nsa_selection": tuple(replace(c, dlse=False) for c in _ROWS),
    "nsa_selection_backward": tuple(replace(c, op="nsa_selection_backward") for c in (*_ROWS, *_DETERMINISTIC)),
}


@dataclass(frozen=True)
class NsaBranchConfig(NsaConfig):
    """One call of compressed attention or of the choice of blocks to prove. `seqlen`: tokens, as in `NsaConfig`; `slots`:
    blocks that a choice takes; `forced`: first and local ones; `hostile`: scores that tie, NaN and infinities."""

    op: str = "nsa_compressed_attention"
    slots: int = 4
    block_len: int = 16
    stride: int = 8
    forced: Pair = (1, 2)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        cu = self.packed
        return self.seqlen[1] if cu is None else max(b - a for a, b in zip(cu[:-1], cu[1:]))

    @property
    def blocks(self) -> int:
        """Selection blocks of a row."""
        return -(-self.longest // self.block_size)


_B = NsaBranchConfig
_COMPRESSED_ROWS: tuple[NsaBranchConfig, ...] = (
    _B("cmp-fp32-g1", dtype="fp32", heads=(2, 1), head_dim=(32, 32), seqlen=(97, 97), block_size=16),
    _B("cmp-fp32-g3", dtype="fp32", heads=(2, 3), head_dim=(64, 64), seqlen=(131, 131), dlse=True),
    _B("cmp-fp32-g16", dtype="fp32", heads=(1, 16), head_dim=(64, 64), seqlen=(90, 90), block_len=32, stride=16),
    _B("cmp-fp32-d192-dv128", dtype="fp32", heads=(1, 3), head_dim=(192, 128), seqlen=(70, 70)),
    _B("cmp-bf16-g1", heads=(3, 1), head_dim=(32, 32), seqlen=(150, 150)),
    _B("cmp-bf16-g4", head_dim=(128, 128), block_size=64, block_len=32, stride=16, seqlen=(257, 257), dlse=True),
    _B("cmp-bf16-g16", heads=(1, 16), head_dim=(128, 128), block_size=64, block_len=32, stride=16, seqlen=(193, 193)),
    _B("cmp-bf16-g7", heads=(1, 7), block_size=16, seqlen=(101, 101)),
    _B("cmp-fp16-g5", dtype="fp16", heads=(1, 5), seqlen=(99, 99), dlse=True),
    _B("cmp-bf16-d40-dv24", heads=(1, 2), head_dim=(40, 24), block_size=16, seqlen=(66, 66)),
    _B("cmp-batch", batch=2, seqlen=(90, 90)),
    _B("cmp-length-is-stride", block_len=8, stride=8, seqlen=(130, 130)),
    _B("cmp-dense-stride", block_len=12, stride=4, block_size=16, seqlen=(80, 80)),
    _B("cmp-shorter-than-a-block", seqlen=(7, 7)),
    _B("cmp-one-block", seqlen=(17, 17), heads=(2, 3)),
    _B("cmp-one-query", seqlen=(1, 203), heads=(2, 16)),
    _B("cmp-fewer-queries", seqlen=(70, 203)),
    _B("cmp-more-queries", seqlen=(90, 50)),
    _B("cmp-packed", heads=(2, 3), dlse=True, **_GAPS),
    _B("cmp-packed-short", heads=(1, 4), index_dtype="int64", packed=(0, 5, 20, 21, 60, 66, 66), seqlen=(66, 66), block_size=16),
    _B("cmp-packed-fp16", dtype="fp16", heads=(2, 1), head_dim=(40, 40), **_GAPS),
    _B("cmp-layout-bshd", layout="bshd", head_dim=(128, 128), batch=2, seqlen=(100, 100)),
    _B("cmp-layout-pitch", layout="pitch", head_dim=(40, 40), dtype="fp16", seqlen=(80, 80)),
    _B("cmp-layout-last-stride-2", layout="last2", seqlen=(70, 70)),
    _B("cmp-layout-transposed", layout="transposed", dtype="fp32", seqlen=(70, 70)),
    _B("cmp-layout-offset-by-one", layout="offset", seqlen=(80, 80)),
    _B("cmp-scale-negative", scale=-0.3, seqlen=(80, 80)),
    _B("cmp-scale-zero", scale=0.0, seqlen=(80, 80)),
    _B("cmp-large-logits", gain=25.0, scale=1.0, head_dim=(128, 128), seqlen=(90, 90)),
    _B("cmp-large-g16", heads=(2, 16), head_dim=(128, 128), block_len=32, stride=16, block_size=64, seqlen=(1100, 1100),
       devices=GPU),
    _B("cmp-large-g1", heads=(16, 1), head_dim=(128, 128), block_len=32, stride=16, block_size=64, seqlen=(1100, 1100),
       devices=GPU),
    _B("cmp-large-packed", heads=(2, 4), head_dim=(64, 64), block_len=32, stride=16, block_size=64, dtype="fp16",
       packed=(0, 700, 701, 2048), seqlen=(2048, 2048), devices=GPU),
    _B("cmp-large-fp32", dtype="fp32", heads=(2, 4), head_dim=(128, 128), block_len=32, stride=16, block_size=64,
       seqlen=(1100, 1100), devices=GPU),
)
_COMPRESSED_DETERMINISTIC: tuple[NsaBranchConfig, ...] = (
    _B("cmp-deterministic", deterministic=True, heads=(2, 3)),
    _B("cmp-deterministic-packed", deterministic=True, heads=(2, 2), **_GAPS),
)
_CHOICES: tuple[NsaBranchConfig, ...] = tuple(replace(c, op="nsa_topk", dtype="fp32") for c in (
    _B("topk", block_size=16),
    _B("topk-ties", block_size=16, hostile=True, slots=5),
    _B("topk-nothing-forced", block_size=16, hostile=True, forced=(0, 0)),
    _B("topk-local-alone", block_size=16, forced=(0, 1), slots=3),
    _B("topk-nothing-but-forced", block_size=8, forced=(3, 4), slots=7),
    _B("topk-more-than-there-are", slots=16, hostile=True),
    _B("topk-one-block", slots=1, forced=(1, 0), block_size=16),
    _B("topk-one-token", seqlen=(1, 1), block_size=16),
    _B("topk-fewer-queries", seqlen=(30, 203), block_size=16, hostile=True),
    _B("topk-more-queries", seqlen=(90, 50), block_size=16),
    _B("topk-batch", batch=2, heads=(3, 1), block_size=24),
    _B("topk-packed", hostile=True, block_size=16, **_GAPS),
    _B("topk-packed-short", index_dtype="int64", packed=(0, 5, 20, 21, 60, 66, 66), seqlen=(66, 66), block_size=16),
    _B("topk-large", heads=(2, 16), slots=16, block_size=64, seqlen=(5000, 5000), hostile=True, devices=GPU),
    _B("topk-large-many", heads=(1, 1), slots=16, block_size=16, seqlen=(20000, 20000), devices=GPU),
))
NSA_BRANCH_MATRIX: dict[str, tuple[NsaBranchConfig, ...]] = {
    "nsa_compressed_attention": tuple(replace(c, dlse=False) for c in _COMPRESSED_ROWS),
    "nsa_compressed_attention_backward": tuple(replace(c, op="nsa_compressed_attention_backward")
                                               for c in (*_COMPRESSED_ROWS, *_COMPRESSED_DETERMINISTIC)),
    "nsa_topk": _CHOICES,
}


def make_block_idx(B: int, Hkv: int, T: int, block_size: int, S: int, device: Any = "cpu", seed: int = 0, *,
                   off: int = 0) -> Tensor:
    """int32 [B, Hkv, T, S]: each row's first and own block, then random different ones of its past, in random order.

    Row i stands at position i + off. A row that has fewer than S blocks is filled up with -1.
    """
    gen = torch.Generator(device=device).manual_seed(seed)
    own = ((torch.arange(T, device=device) + off) // block_size)
    blocks = max(1, int(own.max()) + 1 if T else 1)
    number = torch.arange(blocks, device=device)
    noise = torch.rand((B, Hkv, T, blocks), generator=gen, device=device)
    # The first and the own block rank before every random one, blocks of the future after all.
    rank = torch.where(number == own[:, None], 2.0, torch.where(number == 0, 1.5, noise))
    rank = torch.where(number <= own[:, None], rank, -1.0)
    taken = min(S, blocks)
    top = rank.topk(taken, -1)
    chosen = torch.where(top.values >= 0, top.indices, -1)
    out = torch.full((B, Hkv, T, S), -1, dtype=torch.int32, device=device)
    out[..., :taken] = chosen.to(torch.int32)
    order = torch.rand((B, Hkv, T, S), generator=gen, device=device).argsort(-1)
    return out.gather(-1, order)
