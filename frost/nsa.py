"""Native sparse attention on torch tensors, with gradients, over plans.

    selection_attn(q, k, v, block_indices, block_size)   attention of each query over the blocks that its row names
    compress(x), compressed_attn(q, k, v), choose_blocks(importance)   what chooses them
    nsa(q, k, v, g_cmp, g_slc, g_win)                    all three branches: compressed, selected, sliding window
    selection_forward_reference(...)                     the specification, in plain differentiable torch

After "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention" (arXiv 2502.11089). Layouts:
q [B, Hq, T, D], k [B, Hk, T, D], v [B, Hk, T, Dv] in any strides, queries at the end of the keys where there are fewer;
packed with `cu_seqlens` [B + 1] (int32 or int64) q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engines.reference.nsa import selection_forward_reference

from ._nsa_autograd import Compress, Compressed, Selection, _attend
from ._nsa_plans import Call, run
from .errors import GraphError
from .functional import _engines, _flag, _lowered, _number, attention
from .options import named_options

__all__ = ["choose_blocks", "compress", "compressed_attn", "nsa", "selection_attn", "selection_forward_reference"]


@named_options
def selection_attn(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, *, block_counts: Tensor | None = None,
    scale: float | None = None, cu_seqlens: Tensor | None = None, return_lse: bool = False,
    engines: Sequence[str] | None = None, gates: str | None = None, deterministic: bool = False,
) -> Any:
    """Selection attention: each query sees, causally, the blocks of `block_size` keys that its row of indices names.

    block_indices [B, Hk, Tq, S] (packed [T, Hk, S]), int32 or int64: a row is a set in any order, duplicates count once,
    an entry < 0 or past the last block is no block. block_counts [B, Hk, Tq] (packed [T, Hk]): only a row's first n
    entries count. scale: None means D ** -0.5. Any group size Hq / Hk.

    Returns o [B, Hq, Tq, Dv] (packed [T, Hq, Dv]), laid out in memory like q, or with `return_lse` (o, lse), lse
    [B, Hq, Tq], natural log, fp32 (fp64 for fp64 inputs). A row without blocks has o = 0, lse = -inf and zero gradients.
    q, k and v get gradients, through lse too; the indices get none. engines, gates, deterministic: as in
    `frost.attention`. Raises TypeError, GraphError, NotSupportedError, BindError and ValueError as there.
    """
    given = {"q": q, "k": k, "v": v, "block_indices": block_indices, "block_counts": block_counts,
             "cu_seqlens": cu_seqlens}
    _check("selection_attn", given, ("block_counts", "cu_seqlens"))
    call = Call((("block_size", _size("selection_attn", "block_size", block_size)), ("scale", _number("scale", scale))),
                _engines(engines), gates, _flag("deterministic", deterministic))
    q, k, v = _cast(q, k, v)
    if _tracked(q, k, v):
        o, lse = Selection.apply(q, k, v, block_indices, block_counts, cu_seqlens, call)
    else:
        operands = {n: t for n, t in given.items() if t is not None} | {"q": q, "k": k, "v": v}
        made = _attend("nsa_selection", operands, call, return_lse)
        o, lse = made["o"], made.get("lse")
    return (o, lse) if return_lse else o


@named_options
def compress(x: Tensor, *, block_len: int = 32, stride: int = 16, weights: Tensor | None = None,
             cu_seqlens: Tensor | None = None, engines: Sequence[str] | None = None, gates: str | None = None) -> Tensor:
    """Pool keys or values x [B, Hk, T, D] into [B, Hk, N, D'], N = (T - block_len) // stride + 1 (0 if shorter).

    weights: None for the mean; [block_len, 1 | D] for a weighted sum; [block_len, D, D'] for a linear map of the block.
    Packed: [T, Hk, D] -> [T // stride, Hk, D'], block c of the sequence at offset s in row s // stride + c, other rows
    zero. x and weights get gradients.
    """
    _check("compress", {"x": x, "weights": weights, "cu_seqlens": cu_seqlens}, ("weights", "cu_seqlens"))
    attrs = (("block_len", _size("compress", "block_len", block_len)), ("stride", _size("compress", "stride", stride)))
    return Compress.apply(x, weights, cu_seqlens, Call(attrs, _engines(engines), gates))


@named_options
def compressed_attn(
    q: Tensor, k: Tensor, v: Tensor, *, seqlen_kv: int, block_len: int = 32, stride: int = 16, block_size: int = 64,
    scale: float | None = None, cu_seqlens: Tensor | None = None, engines: Sequence[str] | None = None,
    gates: str | None = None, deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over compressed keys and values: (o, lse, importance).

    k and v as `compress` makes them. A query sees the blocks whose last token is at or before its own. `seqlen_kv`: the
    number of tokens behind them; packed: the longest sequence. importance [B, Hk, Tq, ceil(seqlen_kv / block_size)]
    (packed [T, Hk, ..]), fp32: probabilities summed over the group's heads and over the compressed blocks that overlap
    each block of `block_size` tokens; without gradient. q, k and v get gradients through o and lse.
    """
    _check("compressed_attn", {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens}, ("cu_seqlens",))
    attrs = (*((n, _size("compressed_attn", n, x)) for n, x in (
        ("block_len", block_len), ("stride", stride), ("block_size", block_size), ("seqlen_kv", seqlen_kv))),
        ("scale", _number("scale", scale)))
    q, k, v = _cast(q, k, v)
    call = Call(attrs, _engines(engines), gates, _flag("deterministic", deterministic))
    return Compressed.apply(q, k, v, cu_seqlens, call)


@named_options
def choose_blocks(importance: Tensor, *, seqlen_kv: int, block_size: int = 64, n_blocks: int = 16, n_init: int = 1,
                  n_local: int = 2, cu_seqlens: Tensor | None = None, engines: Sequence[str] | None = None,
                  gates: str | None = None) -> Tensor:
    """The `n_blocks` blocks of each row, int32 [B, Hk, Tq, n_blocks] (packed [T, Hk, n_blocks]), ascending, then -1.

    The first `n_init` and the last `n_local` up to the row's own are always in, then the most important; equal
    importance goes to the lower number. No gradient passes.
    """
    _check("choose_blocks", {"importance": importance, "cu_seqlens": cu_seqlens}, ("cu_seqlens",))
    attrs = tuple((n, _size("choose_blocks", n, x)) for n, x in (
        ("block_size", block_size), ("n_blocks", n_blocks), ("n_init", n_init), ("n_local", n_local),
        ("seqlen_kv", seqlen_kv)))
    operands = {"importance": importance.detach()} | ({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens})
    return run("nsa_topk", operands, {"block_indices": None}, Call(attrs, _engines(engines), gates))["block_indices"]


@named_options
def nsa(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_win: Tensor, *, block_size: int = 64,
    n_blocks: int = 16, window: int = 512, compress_len: int = 32, compress_stride: int = 16, n_init: int = 1,
    n_local: int = 2, k_weights: Tensor | None = None, v_weights: Tensor | None = None, scale: float | None = None,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, engines: Sequence[str] | None = None,
    gates: str | None = None, deterministic: bool = False,
) -> Tensor:
    """The three-branch module: g_cmp * compressed + g_slc * selected + g_win * sliding window.

    q [B, Hq, T, D], k [B, Hk, T, D], v [B, Hk, T, Dv] in any strides; gates [B, Hq, T], multiplied as given (apply the
    sigmoid yourself). Packed: q [T, Hq, D] and so on, gates [T, Hq], `cu_seqlens` [B + 1]; `max_seqlen` bounds the
    longest sequence (None: the total), which sizes the importance of blocks. window: keys that the window branch sees,
    the query's own included. k_weights, v_weights: learned pooling, see `compress`; None is the mean. A row sees nothing
    in the compressed branch before its first whole block. Everything but the choice of blocks is differentiable.
    engines, gates: for the attention ops; pooling and the choice of blocks run on any engine that serves them.
    """
    what = {"q": q, "k": k, "v": v, "g_cmp": g_cmp, "g_slc": g_slc, "g_win": g_win, "k_weights": k_weights,
            "v_weights": v_weights, "cu_seqlens": cu_seqlens}
    _check("nsa", what, ("k_weights", "v_weights", "cu_seqlens"))
    packed = cu_seqlens is not None
    for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_win", g_win)):
        if gate.shape != q.shape[:-1]:
            raise GraphError(f"nsa: {name}: given shape {list(gate.shape)}, expected {list(q.shape[:-1])}, one gate per "
                             "query and head")
    width = _size("nsa", "window", window)
    if width < 1:
        raise GraphError(f"nsa: window: given {width}, expected at least 1 (the query's own key)")
    tokens = k.shape[0] if packed else k.shape[2]
    seqlen_kv = tokens if not packed or max_seqlen is None else _size("nsa", "max_seqlen", max_seqlen)
    where: dict[str, Any] = {"engines": engines, "gates": gates, "deterministic": deterministic}
    pool: dict[str, Any] = {"block_len": compress_len, "stride": compress_stride, "cu_seqlens": cu_seqlens}
    k_cmp, v_cmp = compress(k, weights=k_weights, **pool), compress(v, weights=v_weights, **pool)
    o_cmp, _, importance = compressed_attn(q, k_cmp, v_cmp, seqlen_kv=seqlen_kv, block_size=block_size, scale=scale,
                                           **pool, **where)
    indices = choose_blocks(importance, seqlen_kv=seqlen_kv, block_size=block_size, n_blocks=n_blocks, n_init=n_init,
                            n_local=n_local, cu_seqlens=cu_seqlens)
    o_slc = selection_attn(q, k, v, indices, block_size, scale=scale, cu_seqlens=cu_seqlens, **where)
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens} if packed else {}
    o_win = attention(q, k, v, causal=True, align="bottom_right", window=(width - 1, None), scale=scale, **lengths, **where)
    return g_cmp[..., None] * o_cmp + g_slc[..., None] * o_slc + g_win[..., None] * o_win


# ---- arguments: types only; what the values mean is judged by validation


def _check(what: str, tensors: dict[str, Tensor | None], optional: Sequence[str]) -> None:
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what}: {name}: given {type(tensor).__name__}, expected torch.Tensor")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{what}: {name}: given layout {tensor.layout}, expected a strided tensor")


def _size(what: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
        raise GraphError(f"{what}: {name}: given {value!r}, expected an int")
    return int(value)


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast casts."""
    device = tensors[0].device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return tuple(_lowered(t, torch.get_autocast_dtype(device)) for t in tensors)
    return tensors


def _tracked(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
