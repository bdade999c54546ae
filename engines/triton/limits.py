"""Limits that a capability row cannot express, judged on descriptors at plan time."""

from __future__ import annotations

from collections.abc import Iterable

from descriptors import SdpaBwdDesc, SdpaDesc, TensorDesc
from descriptors.dims import dim_max
from engines.base import Reason, Target

from . import interpret, runtime
from .arguments import MAX_POSITIONS, tiles

MAX_PROGRAMS = 2**31 - 1
_SMALLEST_TILE = 16


def unavailable(target: Target) -> Reason | None:
    """Why no kernel of this engine can run on the target."""
    cpu = target.device == "cpu"
    why = interpret.unavailable_reason() if cpu else runtime.unavailable_reason()
    if why is None:
        return None
    what = "Triton's interpreter" if cpu else "Triton's compiler"
    return Reason("triton", "unavailable", what, f"{what} is unavailable: {why}")


def reasons(desc: SdpaDesc | SdpaBwdDesc) -> Iterable[Reason]:
    """Sizes past 32-bit positions, types of optional operands, and more tiles than a grid holds."""
    for name, extent in (("q", desc.seqlen_q), ("k", desc.seqlen_kv)):
        if dim_max(extent) > MAX_POSITIONS:
            yield Reason(f"{name}.shape", f"sequence extent {dim_max(extent)}", f"at most {MAX_POSITIONS}")
    for tensor, sequences, field in ((desc.q, desc.seqlen_q, "q"), (desc.k, desc.seqlen_kv, "k")):
        heads = dim_max(tensor.shape[1])
        per_head = tiles(dim_max(sequences), dim_max(desc.batch), desc.packed, _SMALLEST_TILE)
        programs = per_head * heads * (1 if desc.packed else dim_max(desc.batch))
        if programs > MAX_PROGRAMS:
            yield Reason(f"{field}.shape", f"{programs} tiles of {_SMALLEST_TILE}", f"at most {MAX_PROGRAMS}")
    for name in ("lse", "dlse"):
        stats: TensorDesc | None = getattr(desc, name, None)
        if stats is not None and str(stats.dtype) != "fp32":
            yield Reason(f"{name}.dtype", str(stats.dtype), "fp32")
    if desc.mask is not None and str(desc.mask.dtype) not in ("bool", "uint8"):
        yield Reason("mask.dtype", str(desc.mask.dtype), "bool")
