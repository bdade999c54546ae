"""Host side of the kernel arguments: strides, windows and counts of one launch, from its bound descriptor.

Everything here is plan-time arithmetic on descriptors and pointers; nothing reads device memory.
"""

from __future__ import annotations

from typing import Any

from descriptors import SdpaBwdDesc, SdpaDesc, TensorDesc
from descriptors.dims import bind_dim

UNLIMITED = 2**31 - 1
FP32_TINY = 2.0**-126
# Positions, window widths and their sums stay far inside int32.
MAX_POSITIONS = 2**28

Attention = SdpaDesc | SdpaBwdDesc

_OPTIONS = {"bias": "bias", "mask": "mask", "sink": "sink", "len_q": "seq_len_q", "len_kv": "seq_len_kv",
            "cu_q": "cu_seqlens_q", "cu_kv": "cu_seqlens_kv"}


def extents(t: TensorDesc) -> tuple[int, ...]:
    return tuple(bind_dim(d, None) for d in t.shape)


def used_strides(t: TensorDesc) -> tuple[int, ...]:
    """Strides in elements, 0 for extents of 1: such a stride is never used and may hold any number."""
    return tuple(bind_dim(s, None) if d != 1 else 0 for d, s in zip(extents(t), t.strides))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def main_values(name: str, t: TensorDesc | None, packed: bool) -> dict[str, int]:
    """(batch, head, sequence, head_dim) strides of q, k, v, o or a gradient. [T, H, D] has batch stride 0."""
    if t is None:
        b = h = s = d = 0
    elif packed:
        (s, h, d), b = used_strides(t), 0
    else:
        b, h, s, d = used_strides(t)
    if t is not None and extents(t)[-1] == 1:
        d = 1  # compiled in as 1 where every last stride is 1 or unused
    return {f"stride_{name}b": b, f"stride_{name}h": h, f"stride_{name}s": s, f"stride_{name}d": d}


def row_values(name: str, t: TensorDesc | None, packed: bool) -> dict[str, int]:
    """(batch, head, sequence) strides of lse or dlse, [B, H, S] or [T, H]."""
    if t is None:
        b = h = s = 0
    elif packed:
        (s, h), b = used_strides(t), 0
    else:
        b, h, s = used_strides(t)
    return {f"stride_{name}_b": b, f"stride_{name}_h": h, f"stride_{name}_s": s}


def score_values(name: str, t: TensorDesc | None) -> dict[str, int]:
    """Strides of a bias or mask broadcastable to [B, H, Sq, Sk] (2 to 4 dims), and the positions it holds: a
    broadcast axis has stride 0 and no limit."""
    shape, stride = ((), ()) if t is None else (extents(t), used_strides(t))
    pad = 4 - len(shape)
    b, h, q, k = (*(0,) * pad, *stride)
    rows, cols = (*(1,) * pad, *shape)[2:]
    return {f"stride_{name}_b": b, f"stride_{name}_h": h, f"stride_{name}_q": q, f"stride_{name}_k": k,
            f"{name}_rows": UNLIMITED if rows == 1 else rows,
            f"{name}_cols": UNLIMITED if cols == 1 else cols}


def option_values(desc: Attention) -> dict[str, Any]:
    """Every number that the forward and the backward kernels share, apart from main strides."""
    sq, sk = bind_dim(desc.seqlen_q, None), bind_dim(desc.seqlen_kv, None)
    far = sq + sk
    band = desc.band
    out: dict[str, Any] = {
        "n_seqs": bind_dim(desc.batch, None), "heads_q": bind_dim(desc.heads_q, None),
        "group": max(desc.group, 1),
        "sq_max": sq, "sk_max": sk, "d": desc.head_dim, "dv": desc.head_dim_v,
        # No position differs by more than Sq + Sk: wider windows mean the same and could wrap in 32 bits.
        "window_left": 0 if band.left is None else min(band.left, far),
        "window_right": 0 if band.band_right is None else min(band.band_right, far),
        "align_br": int(band.align == "bottom_right"),
        # Below fp32's normal range a scale is 0 to any score, and a cap as good as the smallest normal number.
        "scale": desc.scale_value if abs(desc.scale_value) >= FP32_TINY else 0.0,
        "softcap": 1.0 if desc.softcap is None else max(float(desc.softcap), FP32_TINY),
        **score_values("bias", desc.bias), **score_values("mask", desc.mask),
    }
    for short, field in list(_OPTIONS.items())[2:]:
        t = getattr(desc, field)
        out[f"stride_{short}"] = 0 if t is None else used_strides(t)[0]
    return out


def option_operands() -> dict[str, str]:
    """Pointer argument -> operand field, for the optional operands."""
    return {f"{short}_ptr": field for short, field in _OPTIONS.items()}


def row_tiles(desc: Attention, block: int) -> int:
    """Tiles of `block` rows that cover the query side of one head: all sequences' slots when packed, one
    sequence's tiles otherwise (docs in kernels/common.py, packed_slot)."""
    return tiles(bind_dim(desc.seqlen_q, None), bind_dim(desc.batch, None), desc.packed, block)


def key_tiles(desc: Attention, block: int) -> int:
    """The same for the key side."""
    return tiles(bind_dim(desc.seqlen_kv, None), bind_dim(desc.batch, None), desc.packed, block)


def tiles(extent: int, sequences: int, packed: bool, block: int) -> int:
    if packed:
        return extent // block + sequences + 2 if extent else 0
    return cdiv(extent, block)
