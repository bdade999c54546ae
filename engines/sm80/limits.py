"""Limits that a capability row cannot express, judged on descriptors at plan time."""

from __future__ import annotations

from collections.abc import Iterable

from descriptors import DType, SdpaBwdDesc, SdpaDesc, TensorDesc
from descriptors.dims import dim_max
from engines.base import Reason, Target

from . import compiler
from .arguments import FLOAT_CODES, MAX_POSITIONS, tiles
from .params import vector_bytes

MAX_PROGRAMS = 2**31 - 1
_SMALLEST_TILE = 16


def unavailable(target: Target) -> Reason | None:
    """Why no kernel of this engine can run on the target."""
    if target.device != "cuda":
        return Reason("device", target.device, "cuda", "sm80's kernels run on NVIDIA GPUs only")
    why = compiler.unavailable_reason()
    return None if why is None else Reason("cuda-core", "unavailable", "cuda-core and NVRTC", why)


def reasons(desc: SdpaDesc | SdpaBwdDesc) -> Iterable[Reason]:
    """Sizes past 32-bit positions, types and alignment of operands, and more tiles than a grid holds."""
    for name, extent in (("q", desc.seqlen_q), ("k", desc.seqlen_kv)):
        if dim_max(extent) > MAX_POSITIONS:
            yield Reason(f"{name}.shape", f"sequence extent {dim_max(extent)}", f"at most {MAX_POSITIONS}")
    for tensor, sequences, field in ((desc.q, desc.seqlen_q, "q"), (desc.k, desc.seqlen_kv, "k")):
        per_head = tiles(dim_max(sequences), dim_max(desc.batch), desc.packed, _SMALLEST_TILE)
        programs = per_head * dim_max(tensor.shape[1]) * (1 if desc.packed else dim_max(desc.batch))
        if programs > MAX_PROGRAMS:
            yield Reason(f"{field}.shape", f"{programs} tiles of {_SMALLEST_TILE}", f"at most {MAX_PROGRAMS}")
    for name in ("lse", "dlse"):
        stats = getattr(desc, name, None)
        if stats is not None and stats.dtype is not DType.F32:
            yield Reason(f"{name}.dtype", str(stats.dtype), "fp32")
    if desc.mask is not None and desc.mask.dtype not in (DType.BOOL, DType.U8):
        yield Reason("mask.dtype", str(desc.mask.dtype), "bool")
    if desc.bias is not None and desc.bias.dtype not in (desc.q.dtype, DType.F32):
        yield Reason("bias.dtype", str(desc.bias.dtype), f"{desc.q.dtype} or fp32")
    for name in ("sink", "dsink"):
        logits: TensorDesc | None = getattr(desc, name, None)
        if logits is not None and logits.dtype not in FLOAT_CODES:
            yield Reason(f"{name}.dtype", str(logits.dtype), " or ".join(map(str, FLOAT_CODES)))
    dbias: TensorDesc | None = getattr(desc, "dbias", None)
    if dbias is not None and desc.bias is not None and dbias.dtype is not desc.bias.dtype:
        yield Reason("dbias.dtype", str(dbias.dtype), str(desc.bias.dtype))
    for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
        main: TensorDesc | None = getattr(desc, name, None)
        if main is not None and vector_bytes(main, desc.packed) < 2:
            yield Reason(f"{name}.alignment", str(main.alignment), "at least 2 bytes")
