"""The data of an equivalence gate of selection attention: operands, the fp64 oracle's answer, the plain composition's.

Selection is attention under a boolean mask, so oracle and yardstick are those of dense attention with the mask that the
block entries make. A packed batch is one dense problem whose mask is block-diagonal.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from descriptors import DType
from engines.reference.nsa import Places, selection_mask
from engines.reference.plain import plain_composition
from engines.reference.sdpa import sdpa_backward, sdpa_forward

from .gate_matrix_nsa import NsaConfig, make_block_idx

if TYPE_CHECKING:
    from .graph import Graph

_OPTIONAL = ("block_counts", "cu_seqlens", "dlse")
_ROWS = ("q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv")


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, DType.parse(name).torch_name)


def nsa_operands(c: NsaConfig) -> dict[str, Tensor]:
    """Seeded by the configuration's name. NaN in keys that no row sees and in rows that see nothing."""
    gen = torch.Generator().manual_seed(zlib.crc32(c.name.encode()))
    io, index, (hk, group), (tq, tk), (d, dv) = (
        _torch_dtype(c.dtype), _torch_dtype(c.index_dtype), c.heads, c.seqlen, c.head_dim)

    def rows(heads: int, seqlen: int, *width: int) -> Tensor:
        shape = (seqlen, heads, *width) if c.packed else (c.batch, heads, seqlen, *width)
        return torch.randn(shape, generator=gen)

    out = {"q": (rows(hk * group, tq, d) * c.gain).to(io), "k": rows(hk, tk, d).to(io), "v": rows(hk, tk, dv).to(io)}
    if c.op.endswith("_backward"):
        out["do"] = rows(hk * group, tq, dv).to(io)
        if c.dlse:
            out["dlse"] = rows(hk * group, tq)
    entries = _entries(c, gen)
    out["block_indices"] = (entries[0].transpose(0, 1).contiguous() if c.packed else entries).to(index)
    if c.counts:
        shape = out["block_indices"].shape[:-1]
        out["block_counts"] = torch.randint(0, c.slots + 1, shape, generator=gen, dtype=torch.int32)
    if c.packed:
        out["cu_seqlens"] = torch.tensor(c.packed, dtype=index)
    keep = _mask(c, out)
    unseen_keys, empty_rows = ~keep.any(2), ~keep.any(3).repeat_interleave(group, 1)
    for names, where in ((("k", "v"), unseen_keys), (("q", "do"), empty_rows)):
        for name in names:
            if name in out:
                view = out[name].transpose(0, 1)[None] if c.packed else out[name]
                view[where] = math.nan
    return out


def _entries(c: NsaConfig, gen: torch.Generator) -> Tensor:
    """[B, Hk, Tq, S]."""
    (hk, _), (tq, tk), seed = c.heads, c.seqlen, zlib.crc32(c.name.encode()) % 2**31
    batch = 1 if c.packed else c.batch
    if c.hostile:
        blocks = -(-tk // c.block_size)
        return torch.randint(-3, blocks + 4, (batch, hk, tq, c.slots), generator=gen, dtype=torch.int32)
    if c.packed is None:
        return make_block_idx(batch, hk, tq, c.block_size, c.slots, "cpu", seed, off=tk - tq)
    out = torch.full((1, hk, tq, c.slots), -1, dtype=torch.int32)
    for lo, hi in zip(c.packed[:-1], c.packed[1:]):
        out[:, :, lo:hi] = make_block_idx(1, hk, hi - lo, c.block_size, c.slots, "cpu", seed + lo)
    return out


def _dense(c: NsaConfig, x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None] if c.packed else x


def _mask(c: NsaConfig, operands: Mapping[str, Tensor]) -> Tensor:
    """Boolean [B, Hk, Tq, Tk]."""
    tq, tk = c.seqlen
    cu = operands.get("cu_seqlens")
    places = Places.dense(tq, tk, torch.device("cpu")) if cu is None else Places.packed(cu, tq)
    counts = operands.get("block_counts")
    return selection_mask(_dense(c, operands["block_indices"]), None if counts is None else _dense(c, counts), places,
                          c.block_size)


def nsa_answers(c: NsaConfig, operands: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the oracle's results in fp64, the plain composition's), in the layout of the operands."""
    low = {n: _dense(c, x) for n, x in operands.items() if n in _ROWS}
    wide = {n: x.double() for n, x in low.items()}
    mask = _mask(c, operands).repeat_interleave(c.heads[1], 1)
    options: dict[str, Any] = {"mask": mask, "scale": c.scale}
    o, lse = sdpa_forward(wide["q"], wide["k"], wide["v"], **options)
    answer = {"o": o, "lse": lse}
    # The plain composition multiplies what is masked by 0, so it may not see what nobody may read.
    clean: dict[str, Any] = {n: torch.nan_to_num(x) for n, x in low.items() if n in ("q", "k", "v", "do", "dlse")}
    plain = plain_composition(**clean, **options)
    if c.op.endswith("_backward"):
        grads = sdpa_backward(wide["q"], wide["k"], wide["v"], o, wide["do"], lse, dlse=wide.get("dlse"), **options)
        answer.update(zip(("dq", "dk", "dv"), grads))  # type: ignore[arg-type]

    def back(made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: x[0].transpose(0, 1).contiguous() if c.packed else x for n, x in made.items() if x is not None}

    return back(answer), back(plain)


def nsa_results(c: NsaConfig, g: Graph, t: Mapping[str, Any]) -> dict[str, Any]:
    """Record the op of a configuration; its results by name."""
    options: dict[str, Any] = {n: t[n] for n in _OPTIONAL if n in t}
    options.update(block_size=c.block_size, scale=c.scale)
    if c.op == "nsa_selection":
        o, lse = g.nsa_selection(t["q"], t["k"], t["v"], t["block_indices"], stats=True, **options)
        return {"o": o, "lse": lse}
    return g.nsa_selection_backward(t["q"], t["k"], t["v"], t["o"], t["do"], t["lse"], t["block_indices"],
                                    deterministic=c.deterministic, **options)._asdict()
