"""The data of the equivalence gates of compressed attention and of the choice of blocks.

Compressed attention is attention under a boolean mask over compressed keys, so oracle and yardstick are those of dense
attention with that mask; the importance's are the reference engine's sums, in fp64 and in the io dtype. A choice of blocks
is right or wrong: there the reference is the answer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from descriptors import DType
from descriptors.nsa_ops import compressed_blocks, packed_compressed_blocks
from engines.reference.nsa_compress import choose_blocks, compressed_attention, compressed_mask
from engines.reference.plain import plain_composition
from engines.reference.sdpa import sdpa_backward, sdpa_forward

from .gate_matrix_nsa import NsaBranchConfig

if TYPE_CHECKING:
    from .graph import Graph

FORWARD, CHOICE = "nsa_compressed_attention", "nsa_topk"


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, DType.parse(name).torch_name)


def _dense(c: NsaBranchConfig, x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None] if c.packed else x


def branch_operands(c: NsaBranchConfig) -> dict[str, Tensor]:
    """Seeded by the configuration's name. NaN in compressed keys that no row sees and in rows that see none."""
    gen = torch.Generator().manual_seed(zlib.crc32(c.name.encode()))
    (hk, group), (tq, tk), (d, dv) = c.heads, c.seqlen, c.head_dim
    out: dict[str, Tensor] = {}

    def rows(heads: int, count: int, *width: int) -> Tensor:
        return torch.randn((count, heads, *width) if c.packed else (c.batch, heads, count, *width), generator=gen)

    if c.packed:
        out["cu_seqlens"] = torch.tensor(c.packed, dtype=_torch_dtype(c.index_dtype))
    if c.op == CHOICE:
        out["importance"] = _scores(c, rows(hk, tq, c.blocks), gen)
        return out
    io = _torch_dtype(c.dtype)
    count = packed_compressed_blocks(tk, c.stride) if c.packed else int(compressed_blocks(tk, c.block_len, c.stride))
    out |= {"q": (rows(hk * group, tq, d) * c.gain).to(io), "k": rows(hk, count, d).to(io), "v": rows(hk, count, dv).to(io)}
    if c.op.endswith("_backward"):
        out["do"] = rows(hk * group, tq, dv).to(io)
        if c.dlse:
            out["dlse"] = rows(hk * group, tq)
    keep = _mask(c, out)[0, 0]
    for names, where in ((("k", "v"), ~keep.any(0)), (("q", "do"), ~keep.any(1))):
        for name in names:
            if name in out:
                _dense(c, out[name])[:, :, where] = math.nan
    return out


def _scores(c: NsaBranchConfig, normal: Tensor, gen: torch.Generator) -> Tensor:
    """Hostile: few different values, so that most tie, and NaN, infinities and negative zeros among them."""
    if not c.hostile:
        return normal
    odd = torch.tensor([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf])
    return odd[torch.randint(0, odd.numel(), normal.shape, generator=gen)]


def _mask(c: NsaBranchConfig, t: Mapping[str, Tensor]) -> Tensor:
    """Boolean [1, 1, Tq, N]."""
    return compressed_mask(_dense(c, t["q"]), _dense(c, t["k"]), t.get("cu_seqlens"), seqlen_kv=c.seqlen[1],
                           block_len=c.block_len, stride=c.stride)


def branch_answers(c: NsaBranchConfig, operands: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the oracle's results in fp64, the plain composition's), in the layout of the operands."""
    if c.op == CHOICE:
        shape = (*operands["importance"].shape[:-1], c.slots)
        chosen = torch.empty(shape, dtype=torch.int32)
        choose_blocks(operands["importance"], chosen, block_size=c.block_size, n_init=c.forced[0], n_local=c.forced[1],
                      seqlen_kv=c.longest, cu=operands.get("cu_seqlens"))
        return {"block_indices": chosen}, {"block_indices": chosen}
    low = {n: _dense(c, x) for n, x in operands.items() if n in ("q", "k", "v", "do", "dlse")}
    wide = {n: x.double() for n, x in low.items()}
    options: dict[str, Any] = {"mask": _mask(c, operands), "scale": c.scale}
    o, lse = sdpa_forward(wide["q"], wide["k"], wide["v"], **options)
    answer = {"o": o, "lse": lse}
    # The plain composition multiplies what is masked by 0, so it may not see what nobody may read.
    clean: dict[str, Any] = {n: torch.nan_to_num(x) for n, x in low.items()}
    plain = plain_composition(**clean, **options)
    if c.op.endswith("_backward"):
        grads = sdpa_backward(wide["q"], wide["k"], wide["v"], o, wide["do"], lse, dlse=wide.get("dlse"), **options)
        answer.update(zip(("dq", "dk", "dv"), grads))  # type: ignore[arg-type]

    def back(made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: x[0].transpose(0, 1).contiguous() if c.packed else x for n, x in made.items() if x is not None}

    answer, plain = back(answer), back(plain)
    if c.op == FORWARD:
        for made, dtype in ((answer, torch.float64), (plain, _torch_dtype(c.dtype))):
            made["importance"] = _importance(c, operands, dtype)
    return answer, plain


def _importance(c: NsaBranchConfig, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    q, k, v = (operands[n].to(dtype) for n in "qkv")
    shape = (*q.shape[:-2], c.heads[0], c.blocks) if c.packed else (c.batch, c.heads[0], c.seqlen[0], c.blocks)
    out = torch.empty(shape, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    compressed_attention(q, k, v, q.new_empty(*q.shape[:-1], v.shape[-1]), None, out, block_len=c.block_len, stride=c.stride,
                         block_size=c.block_size, seqlen_kv=c.longest, scale=c.scale, cu=operands.get("cu_seqlens"))
    return out


def branch_results(c: NsaBranchConfig, g: Graph, t: Mapping[str, Any]) -> dict[str, Any]:
    """Record the op of a configuration; its results by name."""
    options: dict[str, Any] = {"block_size": c.block_size, "seqlen_kv": c.longest, "cu_seqlens": t.get("cu_seqlens")}
    if c.op == CHOICE:
        n_init, n_local = c.forced
        return {"block_indices": g.nsa_topk(t["importance"], n_blocks=c.slots, n_init=n_init, n_local=n_local, **options)}
    options |= {"block_len": c.block_len, "stride": c.stride, "scale": c.scale}
    if c.op == FORWARD:
        made = g.nsa_compressed_attention(t["q"], t["k"], t["v"], stats=True, importance=True, **options)
        return dict(zip(("o", "lse", "importance"), made))
    return g.nsa_compressed_attention_backward(t["q"], t["k"], t["v"], t["o"], t["do"], t["lse"], dlse=t.get("dlse"),
                                               deterministic=c.deterministic, **options)._asdict()
