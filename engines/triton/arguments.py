"""Host side of the kernel arguments: strides, windows and counts of one launch, from its bound descriptor.

Everything here is plan-time arithmetic on descriptors and pointers; nothing reads device memory. What other
engines need too is in `engines.arguments`.
"""

from __future__ import annotations

from typing import Any

from descriptors import TensorDesc
from descriptors.dims import bind_dim
from engines.arguments import (
    MAX_POSITIONS,
    Attention,
    band_widths,
    cdiv,
    extents,
    main_strides,
    row_strides,
    scalars,
    score_layout,
    tiles,
    used_strides,
)

__all__ = ["MAX_POSITIONS", "Attention", "cdiv", "extents", "key_tiles", "main_values", "option_operands",
           "option_values", "row_tiles", "row_values", "score_values", "tiles", "used_strides"]

_OPTIONS = {"bias": "bias", "mask": "mask", "sink": "sink", "len_q": "seq_len_q", "len_kv": "seq_len_kv",
            "cu_q": "cu_seqlens_q", "cu_kv": "cu_seqlens_kv"}


def main_values(name: str, t: TensorDesc | None, packed: bool) -> dict[str, int]:
    """Strides of q, k, v, o or a gradient, all four."""
    b, h, s, d = main_strides(t, packed)
    if t is not None and extents(t)[-1] == 1:
        d = 1  # compiled in as 1 where every last stride is 1 or unused
    return {f"stride_{name}b": b, f"stride_{name}h": h, f"stride_{name}s": s, f"stride_{name}d": d}


def row_values(name: str, t: TensorDesc | None, packed: bool) -> dict[str, int]:
    """Strides of lse or dlse."""
    return {f"stride_{name}_{axis}": stride for axis, stride in zip("bhs", row_strides(t, packed))}


def score_values(name: str, t: TensorDesc | None) -> dict[str, int]:
    """Strides and extents of a bias or mask."""
    strides, rows, cols = score_layout(t)
    return {f"stride_{name}_{axis}": stride for axis, stride in zip("bhqk", strides)} | {
        f"{name}_rows": rows, f"{name}_cols": cols}


def option_values(desc: Attention) -> dict[str, Any]:
    """Every number that the forward and the backward kernels share, apart from main strides."""
    left, right = band_widths(desc, 0)
    out: dict[str, Any] = {
        "n_seqs": bind_dim(desc.batch, None), "heads_q": bind_dim(desc.heads_q, None),
        "group": max(desc.group, 1),
        "sq_max": bind_dim(desc.seqlen_q, None), "sk_max": bind_dim(desc.seqlen_kv, None),
        "d": desc.head_dim, "dv": desc.head_dim_v, "window_left": left, "window_right": right,
        "align_br": int(desc.band.align == "bottom_right"), **scalars(desc),
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
