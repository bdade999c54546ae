"""Host side of the kernel arguments: strides, windows and counts of one launch, from its bound descriptor.

Everything here is plan-time arithmetic on descriptors; nothing reads device memory. What other engines need too is in
`engines.arguments`.
"""

from __future__ import annotations

from typing import Any

from descriptors import DType, TensorDesc
from descriptors.dims import bind_dim
from engines.arguments import (
    MAX_POSITIONS,
    UNLIMITED,
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

__all__ = ["FLOAT_CODES", "INDEX_OPERANDS", "MAX_POSITIONS", "UNLIMITED", "cdiv", "extents", "head_pack", "head_section", "main_values",
           "option_values", "row_values", "score_values", "tiles", "used_strides"]

# Still several tiles of each head on a large card at a time, which read the same keys at about the same time.
UNEVEN_HEADS = 32

# Optional operands: argument name -> descriptor field.
INDEX_OPERANDS = {"cu_q": "cu_seqlens_q", "cu_kv": "cu_seqlens_kv", "len_q": "seq_len_q", "len_kv": "seq_len_kv"}
# How a kernel is told the type of a sink: load_float in kernels/common.cuh.
FLOAT_CODES = {DType.F32: 0, DType.F16: 1, DType.BF16: 2}


def main_values(name: str, t: TensorDesc | None, packed: bool) -> dict[str, int]:
    """Strides of q, k, v, o or a gradient, whose last stride is 1."""
    return {f"{name}_{axis}": stride for axis, stride in zip("bhs", main_strides(t, packed))}


def row_values(name: str, t: TensorDesc | None, packed: bool) -> dict[str, int]:
    """Strides of lse or dlse."""
    return {f"{name}_{axis}": stride for axis, stride in zip("bhs", row_strides(t, packed))}


def score_values(name: str, t: TensorDesc | None) -> dict[str, int]:
    """Strides and extents of a bias or mask."""
    strides, rows, columns = score_layout(t)
    return {f"{name}_{axis}": stride for axis, stride in zip("bhqk", strides)} | {
        f"{name}_rows": rows, f"{name}_columns": columns}


def option_values(desc: Attention) -> dict[str, Any]:
    """Every number that the forward and the backward kernels share, apart from main strides."""
    sq, sk = bind_dim(desc.seqlen_q, None), bind_dim(desc.seqlen_kv, None)
    left, right = band_widths(desc, sq + sk)
    out: dict[str, Any] = {
        "n_seqs": bind_dim(desc.batch, None), "heads": bind_dim(desc.heads_q, None), "group": max(desc.group, 1),
        "sq_max": sq, "sk_max": sk, "d": desc.head_dim, "dv": desc.head_dim_v, "left": left, "right": right,
        "align_br": int(desc.band.align == "bottom_right"), **scalars(desc),
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


def head_section(heads: int, bytes_of_one: int, sharing: int, l2_bytes: int, uneven: bool) -> int:
    """How many of `heads` (batch, head) pairs are walked side by side.

    Those whose shared operands fit `l2_bytes` together; `sharing` of them share one operand's `bytes_of_one`. Where tiles
    are `uneven` (a causal mask), at least UNEVEN_HEADS: the longest tiles start first in each section, and a card must not
    be left with the long ones of a last, small section. Sections are of even size.
    """
    section = max(l2_bytes // max(bytes_of_one, 1), 1) * sharing
    if uneven:
        section = max(section, UNEVEN_HEADS)
    even = cdiv(max(heads, 1), cdiv(max(heads, 1), section))
    return min(cdiv(even, sharing) * sharing, max(heads, 1))
