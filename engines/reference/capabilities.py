"""What the reference engine can do, as data: every op and option, on every device."""

from __future__ import annotations

from descriptors import DType
from descriptors.ops import PRIMITIVES
from engines.base import Capabilities

_OPTIONS = frozenset({
    "bias", "mask", "sink", "softcap", "causal", "window_left", "window_right", "align",
    "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv",
})
ALL_FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)
NOTE = "plain torch in fp32 (fp64 for fp64); scratch through torch's allocator"

FORWARD = (
    Capabilities("reference", "sdpa", ("cpu", "cuda"), ALL_FLOATS, _OPTIONS | {"lse"}, allocates=True, note=NOTE),
)
BACKWARD = (
    Capabilities("reference", "sdpa_backward", ("cpu", "cuda"), ALL_FLOATS,
                 _OPTIONS | {"dlse", "dbias", "dsink", "deterministic"}, allocates=True, note=NOTE),
)
POINTWISE = (
    Capabilities("reference", "pointwise", ("cpu", "cuda"), (*ALL_FLOATS, DType.I64, DType.I32, DType.BOOL, DType.U8),
                 frozenset({"y", "z"}), allocates=True, note=f"{len(PRIMITIVES)} primitives; {NOTE}"),
)
