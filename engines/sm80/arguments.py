"""Host side of the kernel arguments: strides, windows and counts of one launch, from its bound descriptor.

Everything here is plan-time arithmetic on descriptors; nothing reads device memory.
"""

from __future__ import annotations

from typing import Any

from descriptors import DType, SdpaBwdDesc, SdpaDesc, TensorDesc
from descriptors.dims import bind_dim

UNLIMITED = 2**31 - 1
# Positions, window widths and their sums stay far inside int32.
MAX_POSITIONS = 2**28

Attention = SdpaDesc | SdpaBwdDesc

# Optional operands: argument name -> descriptor field.
INDEX_OPERANDS = {"cu_q": "cu_seqlens_q", "cu_kv": "cu_seqlens_kv", "len_q": "seq_len_q", "len_kv": "seq_len_kv"}
# How a kernel is told the type of a sink: load_float in kernels/common.cuh.
FLOAT_CODES = {DType.F32: 0, DType.F16: 1, DType.BF16: 2}


def extents(t: TensorDesc) -> tuple[int, ...]:
    return tuple(bind_dim(d, None) for d in t.shape)


def used_strides(t: TensorDesc) -> tuple[int, ...]:
    """Strides in elements, 0 for extents of 1: such a stride is never used and may hold any number."""
    return tuple(bind_dim(s, None) if d != 1 else 0 for d, s in zip(extents(t), t.strides, strict=True))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def main_values(name: str, t: TensorDesc | None, packed: bool) -> dict[str, int]:
    """(batch, head, sequence) strides of q, k, v, o or a gradient, whose last stride is 1. [T, H, D] has batch
    stride 0."""
    if t is None:
        b = h = s = 0
    elif packed:
        (s, h, _), b = used_strides(t), 0
    else:
        b, h, s, _ = used_strides(t)
    return {f"{name}_b": b, f"{name}_h": h, f"{name}_s": s}


def row_values(name: str, t: TensorDesc | None, packed: bool) -> dict[str, int]:
    """(batch, head, sequence) strides of lse or dlse, [B, H, S] or [T, H]."""
    if t is None:
        b = h = s = 0
    elif packed:
        (s, h), b = used_strides(t), 0
    else:
        b, h, s = used_strides(t)
    return {f"{name}_b": b, f"{name}_h": h, f"{name}_s": s}


def score_values(name: str, t: TensorDesc | None) -> dict[str, int]:
    """Strides of a bias or mask broadcastable to [B, H, Sq, Sk] (2 to 4 dims), and the positions it holds: a
    broadcast axis has stride 0 and no limit."""
    shape, stride = ((), ()) if t is None else (extents(t), used_strides(t))
    pad = 4 - len(shape)
    b, h, q, k = (*(0,) * pad, *stride)
    rows, columns = (*(1,) * pad, *shape)[2:]
    return {f"{name}_b": b, f"{name}_h": h, f"{name}_q": q, f"{name}_k": k,
            f"{name}_rows": UNLIMITED if rows == 1 else rows,
            f"{name}_columns": UNLIMITED if columns == 1 else columns}


def option_values(desc: Attention) -> dict[str, Any]:
    """Every number that the forward and the backward kernels share, apart from main strides."""
    sq, sk = bind_dim(desc.seqlen_q, None), bind_dim(desc.seqlen_kv, None)
    far = sq + sk
    band = desc.band
    out: dict[str, Any] = {
        "n_seqs": bind_dim(desc.batch, None), "heads": bind_dim(desc.heads_q, None), "group": max(desc.group, 1),
        "sq_max": sq, "sk_max": sk, "d": desc.head_dim, "dv": desc.head_dim_v,
        # No position differs by more than Sq + Sk: wider windows mean the same and could wrap in 32 bits.
        "left": 0 if band.left is None else min(band.left, far),
        "right": far if band.band_right is None else min(band.band_right, far),
        "align_br": int(band.align == "bottom_right"),
        "scale": desc.scale_value, "softcap": 1.0 if desc.softcap is None else float(desc.softcap),
        **score_values("bias", desc.bias), **score_values("mask", desc.mask),
        "sink_s": 0 if desc.sink is None else used_strides(desc.sink)[0],
        "sink_type": 0 if desc.sink is None else FLOAT_CODES[desc.sink.dtype],
        "int64_mask": 0,
    }
    for bit, (name, field) in enumerate(INDEX_OPERANDS.items()):
        t = getattr(desc, field)
        out[f"{name}_s"] = 0 if t is None else used_strides(t)[0]
        out["int64_mask"] |= int(t is not None and t.dtype is DType.I64) << bit
    return out


def tiles(extent: int, sequences: int, packed: bool, block: int) -> int:
    """Tiles of `block` rows that cover one side of one head: all sequences' slots when packed, one sequence's tiles
    otherwise (packed_slot in kernels/common.cuh)."""
    if packed:
        return extent // block + sequences + 2 if extent else 0
    return cdiv(extent, block)


def head_pack(desc: Attention, block: int) -> int:
    """How many query heads of a K/V group share a tile's rows: all of them where that takes clearly fewer tiles.

    Packed sequences are judged by their mean length. The result divides the group, and times the rows stays in 32 bits.
    """
    rows, group = bind_dim(desc.seqlen_q, None), max(desc.group, 1)
    n = bind_dim(desc.batch, None)
    if group == 1 or rows * group >= 2**30:
        return 1
    mean = cdiv(rows, max(n, 1)) if desc.packed else rows
    return group if 4 * cdiv(mean * group, block) <= 3 * group * cdiv(mean, block) else 1


def head_section(desc: Attention, heads_per_kv: int, l2_bytes: int) -> int:
    """How many (batch, head) pairs are walked side by side: those whose keys and values fit `l2_bytes` together."""
    keys = bind_dim(desc.seqlen_kv, None)
    of_one = max(keys * (desc.head_dim + desc.head_dim_v) * desc.q.dtype.itemsize, 1)
    return max(l2_bytes // of_one, 1) * heads_per_kv
