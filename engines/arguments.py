"""Host side of attention kernels' arguments, as far as engines have it in common: extents, strides and option values of one
launch, from its bound descriptor.

Everything here is plan-time arithmetic on descriptors; nothing reads device memory.
"""

from __future__ import annotations

from descriptors import SdpaBwdDesc, SdpaDesc, TensorDesc
from descriptors.dims import bind_dim

UNLIMITED = 2**31 - 1
FP32_TINY = 2.0**-126
# Positions, window widths and their sums stay far inside int32.
MAX_POSITIONS = 2**28

Attention = SdpaDesc | SdpaBwdDesc


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def extents(t: TensorDesc) -> tuple[int, ...]:
    return tuple(bind_dim(d, None) for d in t.shape)


def used_strides(t: TensorDesc) -> tuple[int, ...]:
    """Strides in elements, 0 for extents of 1: such a stride is never used and may hold any number."""
    return tuple(bind_dim(s, None) if d != 1 else 0 for d, s in zip(extents(t), t.strides, strict=True))


def main_strides(t: TensorDesc | None, packed: bool) -> tuple[int, int, int, int]:
    """(batch, head, sequence, head_dim) strides of q, k, v, o or a gradient. [T, H, D] has batch stride 0."""
    if t is None:
        return 0, 0, 0, 0
    if packed:
        s, h, d = used_strides(t)
        return 0, h, s, d
    b, h, s, d = used_strides(t)
    return b, h, s, d


def row_strides(t: TensorDesc | None, packed: bool) -> tuple[int, int, int]:
    """(batch, head, sequence) strides of lse or dlse, [B, H, S] or [T, H]."""
    if t is None:
        return 0, 0, 0
    if packed:
        s, h = used_strides(t)
        return 0, h, s
    b, h, s = used_strides(t)
    return b, h, s


def score_layout(t: TensorDesc | None) -> tuple[tuple[int, int, int, int], int, int]:
    """Strides of a bias or mask broadcastable to [B, H, Sq, Sk] (2 to 4 dims), and how many rows and columns it holds: a
    broadcast axis has stride 0 and no limit."""
    shape, stride = ((), ()) if t is None else (extents(t), used_strides(t))
    pad = 4 - len(shape)
    b, h, q, k = (*(0,) * pad, *stride)
    rows, columns = (*(1,) * pad, *shape)[2:]
    return (b, h, q, k), UNLIMITED if rows == 1 else rows, UNLIMITED if columns == 1 else columns


def band_widths(desc: Attention, unbounded_right: int) -> tuple[int, int]:
    """(left, right) window widths in positions. An unbounded left one is 0, an unbounded right one `unbounded_right`."""
    band = desc.band
    # No position differs by more than Sq + Sk: wider windows mean the same and could wrap in 32 bits.
    far = bind_dim(desc.seqlen_q, None) + bind_dim(desc.seqlen_kv, None)
    return (0 if band.left is None else min(band.left, far),
            unbounded_right if band.band_right is None else min(band.band_right, far))


def scalars(desc: Attention) -> dict[str, float]:
    """scale and softcap (1 without one) as fp32 kernels can use them. Below fp32's normal range a scale is 0 to any score, and
    a cap as good as the smallest normal number."""
    scale = desc.scale_value
    return {"scale": scale if abs(scale) >= FP32_TINY else 0.0,
            "softcap": 1.0 if desc.softcap is None else max(float(desc.softcap), FP32_TINY)}


def tiles(extent: int, sequences: int, packed: bool, block: int) -> int:
    """Tiles of `block` positions that cover one side of one head: one sequence's tiles, or all sequences' slots when packed
    (packed_slot in the engines' kernels)."""
    if packed:
        return extent // block + sequences + 2 if extent else 0
    return cdiv(extent, block)
