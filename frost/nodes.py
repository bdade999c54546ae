"""From a validated op node to its record: options normalised, optional operands in their canonical rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from descriptors import MaskDesc, PointwiseDesc, SdpaBwdDesc, SdpaDesc, TensorDesc

# Fields whose record always has four dims: [B, H, Sq, Sk], missing leading ones as extent 1, stride 0.
_FOUR_DIMS = ("bias", "mask", "dbias")


def four_dims(desc: TensorDesc) -> TensorDesc:
    """The same elements seen with rank 4."""
    missing = 4 - desc.rank
    if missing <= 0:
        return desc
    stride = None if desc.stride is None else (0,) * missing + desc.stride
    return replace(desc, shape=(1,) * missing + desc.shape, stride=stride)


def band(attrs: Mapping[str, Any]) -> MaskDesc:
    """causal and window in one form: a right bound of 0 is `causal`, so that equal masks are equal records."""
    left, right = attrs["window"]
    causal = attrs["causal"] or right == 0
    return MaskDesc(causal, attrs["align"], left, None if causal else right)


def attention_desc(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any]) -> SdpaDesc | SdpaBwdDesc:
    """The record of an attention op. `tensors`: descriptors of the operands and of the results that are wanted."""
    fields: dict[str, Any] = {f: four_dims(d) if f in _FOUR_DIMS else d for f, d in tensors.items()}
    scale, softcap = attrs["scale"], attrs["softcap"]
    fields.update(
        band=band(attrs), scale=None if scale is None else float(scale), softcap=float(softcap) if softcap else None,
        max_seqlen_q=attrs["max_seqlen_q"], max_seqlen_kv=attrs["max_seqlen_kv"])
    if op == "sdpa":
        return SdpaDesc(**fields)
    return SdpaBwdDesc(**fields, deterministic=attrs["deterministic"])


def pointwise_desc(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any],
                   packed_totals: tuple[tuple[int, str], ...] = ()) -> PointwiseDesc:
    """The record of a primitive op."""
    axis = attrs.get("axis")
    rank = tensors["x"].rank
    value = attrs.get("value")
    return PointwiseDesc(
        op, tensors["x"], tensors.get("y"), tensors.get("z"), tensors["out"],
        axis=None if axis is None else axis % rank, perm=attrs.get("perm"),
        value=None if value is None else float(value), packed_totals=packed_totals)
