"""What this engine's cells can do, as data."""

from __future__ import annotations

from descriptors import DType, SdpaBwdDesc, SdpaDesc
from engines.base import Capabilities

ENGINE = "sm80"
MIN_CC = (8, 0)

_DTYPES = (DType.F16, DType.BF16)
_SHARED_FEATURES = frozenset({
    "bias", "mask", "sink", "softcap", "causal", "window_left", "window_right", "align",
    "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv", "lse"})

FORWARD = (
    Capabilities(engine=ENGINE, op=SdpaDesc.OP, devices=("cuda",), dtypes=_DTYPES, features=_SHARED_FEATURES,
                 min_cc=MIN_CC, head_dim=(1, 256), head_dim_v=(1, 256), unit_last_stride=True,
                 note="CUDA C++ templates, compiled by NVRTC (extra `cuda`)"),
)

BACKWARD = (
    Capabilities(engine=ENGINE, op=SdpaBwdDesc.OP, devices=("cuda",), dtypes=_DTYPES,
                 features=_SHARED_FEATURES | {"dlse", "dbias", "dsink", "deterministic"},
                 min_cc=MIN_CC, head_dim=(1, 256), head_dim_v=(1, 256), unit_last_stride=True,
                 note="CUDA C++ templates, compiled by NVRTC (extra `cuda`)"),
)
