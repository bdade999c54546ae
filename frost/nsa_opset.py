"""The ops of native sparse attention as rows of the op table, and their records from validated nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from descriptors import (
    NSA_TYPES,
    Dim,
    DType,
    NsaCompressBwdDesc,
    NsaCompressDesc,
    NsaCompressedBwdDesc,
    NsaCompressedDesc,
    NsaSelectionBwdDesc,
    NsaSelectionDesc,
    NsaTopkDesc,
    OpDesc,
    TensorDesc,
)
from descriptors.nsa_ops import compressed_blocks, packed_compressed_blocks

Descs = Mapping[str, TensorDesc]
Made = dict[str, TensorDesc]

NSA_OPS = tuple(NSA_TYPES)
# Ops with a softmax over keys: (forward, backward) by their records' names.
NSA_ATTENTION = (NsaSelectionDesc.OP, NsaSelectionBwdDesc.OP, NsaCompressedDesc.OP, NsaCompressedBwdDesc.OP)


def _stats(io: DType) -> DType:
    return DType.F64 if io is DType.F64 else DType.F32


def _count(value: object) -> int:
    """An option as a number for inference, which is lenient; validation judges it."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _attention(d: Descs, attrs: Mapping[str, Any]) -> Made:
    q, v = d["q"], d["v"]
    made = {"o": TensorDesc((*q.shape[:-1], *v.shape[-1:]), q.dtype)}
    if attrs["stats"]:
        made["lse"] = TensorDesc(q.shape[:-1], _stats(q.dtype))
    return made


def _compressed(d: Descs, attrs: Mapping[str, Any]) -> Made:
    made = _attention(d, attrs)
    if attrs["importance"]:
        q, k = d["q"].shape, d["k"].shape
        blocks = -(-_count(attrs["seqlen_kv"]) // _count(attrs["block_size"])) if attrs["seqlen_kv"] != 0 else 0
        heads = k[1:2]
        shape = (*q[:1], *heads, blocks) if "cu_seqlens" in d else (*q[:1], *heads, *q[2:3], blocks)
        made["importance"] = TensorDesc(shape, _stats(d["q"].dtype))
    return made


def _gradients(d: Descs, attrs: Mapping[str, Any]) -> Made:
    return {"d" + n: TensorDesc(d[n].shape, d[n].dtype) for n in ("q", "k", "v") if n in attrs["grads"]}


def _compress(d: Descs, attrs: Mapping[str, Any]) -> Made:
    x, weights, packed = d["x"], d.get("weights"), "cu_seqlens" in d
    length, stride = _count(attrs["block_len"]), _count(attrs["stride"])
    axis = 0 if packed else 2
    rows: Dim = x.shape[axis] if x.rank > axis else 0
    if isinstance(rows, int):
        rows = packed_compressed_blocks(rows, stride) if packed else compressed_blocks(rows, length, stride)
    shape = list(x.shape)
    if x.rank > axis:
        shape[axis] = rows
    if weights is not None and weights.rank == 3:
        shape[-1:] = weights.shape[-1:]
    return {"compressed": TensorDesc(tuple(shape), x.dtype)}


def _compress_backward(d: Descs, attrs: Mapping[str, Any]) -> Made:
    return {"d" + n: TensorDesc(d[n].shape, d[n].dtype) for n in ("x", "weights") if n in attrs["grads"] and n in d}


def _topk(d: Descs, attrs: Mapping[str, Any]) -> Made:
    return {"block_indices": TensorDesc((*d["importance"].shape[:-1], _count(attrs["n_blocks"])), DType.I32)}


_SELECTION: dict[str, Any] = {"block_size": 64, "scale": None}
_COMPRESSED: dict[str, Any] = {"block_len": 32, "stride": 16, "block_size": 64, "seqlen_kv": 0, "scale": None}
_BACKWARD: dict[str, Any] = {"grads": ("q", "k", "v"), "deterministic": False}
_COMPRESS: dict[str, Any] = {"block_len": 32, "stride": 16}

Row = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], dict[str, Any], Callable[[Descs, Mapping[str, Any]], Made]]

# op -> required operands, optional operands, results, attributes, inference
NSA_ROWS: dict[str, Row] = {
    NsaSelectionDesc.OP: (
        ("q", "k", "v", "block_indices"), ("block_counts", "cu_seqlens"), NsaSelectionDesc.OUTPUTS,
        {**_SELECTION, "stats": False}, _attention),
    NsaSelectionBwdDesc.OP: (
        ("q", "k", "v", "o", "do", "block_indices"), ("lse", "block_counts", "cu_seqlens", "dlse"),
        NsaSelectionBwdDesc.OUTPUTS, {**_SELECTION, **_BACKWARD}, _gradients),
    NsaCompressDesc.OP: (("x",), ("weights", "cu_seqlens"), NsaCompressDesc.OUTPUTS, _COMPRESS, _compress),
    NsaCompressBwdDesc.OP: (
        ("x", "dcompressed"), ("weights", "cu_seqlens"), NsaCompressBwdDesc.OUTPUTS, {**_COMPRESS, "grads": ("x",)},
        _compress_backward),
    NsaCompressedDesc.OP: (
        ("q", "k", "v"), ("cu_seqlens",), NsaCompressedDesc.OUTPUTS,
        {**_COMPRESSED, "stats": False, "importance": False}, _compressed),
    NsaCompressedBwdDesc.OP: (
        ("q", "k", "v", "o", "do"), ("lse", "cu_seqlens", "dlse"), NsaCompressedBwdDesc.OUTPUTS,
        {**_COMPRESSED, **_BACKWARD}, _gradients),
    NsaTopkDesc.OP: (
        ("importance",), ("cu_seqlens",), NsaTopkDesc.OUTPUTS,
        {"block_size": 64, "n_blocks": 16, "n_init": 1, "n_local": 2, "seqlen_kv": 0}, _topk),
}


def nsa_desc(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any]) -> OpDesc:
    """The record of an op. `tensors`: descriptors of the operands and of the results that are wanted."""
    cls = NSA_TYPES[op]
    given: dict[str, Any] = dict(tensors)
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in attrs and f.name not in given and f.name not in cls.OUTPUTS:
            given[f.name] = attrs[f.name]
    if given.get("scale") is not None:
        given["scale"] = float(given["scale"])
    return cls(**given)
