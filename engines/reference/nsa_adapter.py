"""The reference engine's cells for native sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from descriptors import (
    NsaCompressBwdDesc,
    NsaCompressDesc,
    NsaCompressedBwdDesc,
    NsaCompressedDesc,
    NsaSelectionBwdDesc,
    NsaSelectionDesc,
    NsaTopkDesc,
    OpDesc,
)
from engines import base
from engines.base import Adapter, Capabilities, Executable, Launch, Target

from . import nsa, nsa_compress
from .capabilities import ALL_FLOATS, NOTE
from .torch_call import TorchCall

_GRADS = ("dq", "dk", "dv")
Call = Callable[[], Any]


def _selection(launch: Launch) -> Call:
    desc, x = cast(NsaSelectionDesc, launch.desc), launch.operands
    return lambda: nsa.selection_forward(
        x["q"], x["k"], x["v"], x["block_indices"], desc.block_size, block_counts=x.get("block_counts"),
        scale=desc.scale_value, cu_seqlens=x.get("cu_seqlens"), out=(x["o"], x.get("lse")))


def _selection_backward(launch: Launch) -> Call:
    desc, x = cast(NsaSelectionBwdDesc, launch.desc), launch.operands
    out = {n: x[n] for n in _GRADS if n in x}
    return lambda: nsa.selection_backward(
        x["q"], x["k"], x["v"], x["o"], x["do"], x["lse"], x["block_indices"], desc.block_size,
        block_counts=x.get("block_counts"), scale=desc.scale_value, cu_seqlens=x.get("cu_seqlens"),
        dlse=x.get("dlse"), want=tuple(out), out=out)


def _compress(launch: Launch) -> Call:
    desc, x = cast(NsaCompressDesc, launch.desc), launch.operands
    return lambda: nsa_compress.compress(x["x"], x["compressed"], desc.block_len, desc.stride, x.get("weights"),
                                         x.get("cu_seqlens"))


def _compress_backward(launch: Launch) -> Call:
    desc, x = cast(NsaCompressBwdDesc, launch.desc), launch.operands
    out = {n: x[n] for n in ("dx", "dweights") if n in x}
    return lambda: nsa_compress.compress_backward(x["x"], x["dcompressed"], desc.block_len, desc.stride,
                                                  x.get("weights"), x.get("cu_seqlens"), out)


def _compressed(launch: Launch) -> Call:
    desc, x = cast(NsaCompressedDesc, launch.desc), launch.operands
    return lambda: nsa_compress.compressed_attention(
        x["q"], x["k"], x["v"], x["o"], x.get("lse"), x.get("importance"), block_len=desc.block_len,
        stride=desc.stride, block_size=desc.block_size, seqlen_kv=desc.seqlen_kv, scale=desc.scale_value,
        cu=x.get("cu_seqlens"))


def _compressed_backward(launch: Launch) -> Call:
    desc, x = cast(NsaCompressedBwdDesc, launch.desc), launch.operands
    out = {n: x[n] for n in _GRADS if n in x}
    return lambda: nsa_compress.compressed_attention_backward(
        x["q"], x["k"], x["v"], x["o"], x["do"], x["lse"], block_len=desc.block_len, stride=desc.stride,
        seqlen_kv=desc.seqlen_kv, scale=desc.scale_value, cu=x.get("cu_seqlens"), dlse=x.get("dlse"),
        want=tuple(out), out=out)


def _topk(launch: Launch) -> Call:
    desc, x = cast(NsaTopkDesc, launch.desc), launch.operands
    return lambda: nsa_compress.choose_blocks(
        x["importance"], x["block_indices"], block_size=desc.block_size, n_init=desc.n_init, n_local=desc.n_local,
        seqlen_kv=desc.seqlen_kv, cu=x.get("cu_seqlens"))


def _row(op: str, features: set[str]) -> tuple[Capabilities, ...]:
    return (Capabilities("reference", op, ("cpu", "cuda"), ALL_FLOATS, frozenset(features), allocates=True, note=NOTE),)


def _cell(parent: type[Adapter], name: str, make: Callable[[Launch], Call], features: set[str]) -> Adapter:
    """An adapter of this engine for the op of `parent`."""
    def compile(self: Adapter, desc: OpDesc, target: Target) -> Executable:
        return TorchCall(name, make)

    made = type(parent.__name__ + "Reference", (parent,), {
        "engine": "reference", "capabilities": _row(parent.op, features), "compile": compile, "__module__": __name__,
        "__doc__": parent.__doc__})
    return made()


_BACKWARD = {"cu_seqlens", "dlse", "deterministic"}
NSA_ADAPTERS: tuple[Adapter, ...] = (
    _cell(base.NsaSelectionFwdDsl, "selection_forward", _selection, {"lse", "block_counts", "cu_seqlens"}),
    _cell(base.NsaSelectionBwdDsl, "selection_backward", _selection_backward, {"block_counts", *_BACKWARD}),
    _cell(base.NsaCompressFwdDsl, "compress", _compress, {"weights", "cu_seqlens"}),
    _cell(base.NsaCompressBwdDsl, "compress_backward", _compress_backward, {"weights", "cu_seqlens", "dweights"}),
    _cell(base.NsaCompressedFwdDsl, "compressed_attention", _compressed, {"lse", "importance", "cu_seqlens"}),
    _cell(base.NsaCompressedBwdDsl, "compressed_attention_backward", _compressed_backward, _BACKWARD),
    _cell(base.NsaTopkDsl, "choose_blocks", _topk, {"cu_seqlens"}),
)
