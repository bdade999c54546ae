"""The SM80 engine alone: torch tensors in, attention and its gradients out, without a graph, routing or gates.

Semantics are docs/design.md's, shapes those of `frost.attention`: q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] in any
strides with last stride 1; packed q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] with cu_seqlens [B + 1]. fp16 or bf16.
Both raise ValueError for operands that do not fit together, and `Decline` with every reason for what the engine does not
serve. Compiled kernels are kept: another size compiles nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from descriptors import ALIGNMENTS, DType, MaskDesc, SdpaBwdDesc, SdpaDesc, TensorDesc
from engines.base import Adapter, Decline, Launch, Target, Workspace

from . import ENGINE
from .adapter_bwd import SdpaBwdDslSm80, SdpaBwdExecutable, backward_params
from .adapter_fwd import SdpaFwdDslSm80, SdpaFwdExecutable, forward_params
from .params import FwdParams, TemplateParams

if TYPE_CHECKING:
    from torch import Tensor

_REGION_ALIGNMENT = 256


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_side(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31)


# option -> (default, whether a value means something, what was expected). No graph is validated here, so nobody else asks.
_OPTIONS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "causal": (False, lambda x: isinstance(x, bool), "True or False"),
    "align": ("top_left", lambda x: x in ALIGNMENTS, " or ".join(map(repr, ALIGNMENTS))),
    "window": ((None, None), lambda x: isinstance(x, tuple) and len(x) == 2 and all(map(_is_side, x)),
               "a pair (left, right), each None or an int in 0..2147483647"),
    "scale": (None, lambda x: x is None or _is_number(x), "None or a finite number"),
    "softcap": (None, lambda x: x is None or (_is_number(x) and x >= 0), "None or a finite number >= 0"),
}
_TENSOR_OPTIONS = ("bias", "mask", "sink", "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv")


class SdpaGradients(NamedTuple):
    """Gradients in their operands' dtypes; None where not asked for."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsink: Tensor | None


def sdpa_fwd_wrapper_sm80(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(o, lse): o [B, Hq, Sq, Dv] or [Tq, Hq, Dv] in q's dtype, lse [B, Hq, Sq] or [Tq, Hq], natural log, fp32.

    options: scale, causal, align, window, softcap, bias, mask, sink, seq_len_q, seq_len_kv, cu_seqlens_q, cu_seqlens_kv,
    as in `frost.attention`.
    """
    import torch

    operands, facts = _operands(q, k, v, options)
    o = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    operands |= {"o": o, "lse": lse}
    desc = SdpaDesc(**_descs(operands), **facts)
    target = _target(q)
    _check_support(SdpaFwdDslSm80(), desc, target)
    with _on(q):
        _forward(forward_params(desc, target), target).execute(Launch(desc, operands), Workspace(None, {}), _stream(q))
    return o, lse


def sdpa_bwd_wrapper_sm80(q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, *, dlse: Tensor | None = None,
                          grads: tuple[str, ...] = ("q", "k", "v"), dbias: bool = False, dsink: bool = False,
                          deterministic: bool = False, **options: Any) -> SdpaGradients:
    """Gradients of `sdpa_fwd_wrapper_sm80` from its operands, its o and lse, and the gradients do (o's shape and dtype) and
    dlse (lse's, fp32). `grads` names which of q, k and v get one. Bit-equal from run to run with `deterministic`; without
    it dq of plain scores is summed by atomic additions.
    """
    import torch

    operands, facts = _operands(q, k, v, options)
    rows, stats = (*q.shape[:-1], v.shape[-1]), torch.float32
    given = {"o": (o, rows, q.dtype), "do": (do, rows, q.dtype), "lse": (lse, q.shape[:-1], stats)}
    if dlse is not None:
        given["dlse"] = (dlse, q.shape[:-1], stats)
    for name, (tensor, shape, dtype) in given.items():
        _check_shape(name, tensor, shape)
        if tensor.dtype != dtype or tensor.device != q.device:
            raise ValueError(f"{name}: given {tensor.dtype} on {tensor.device}, expected {dtype} on {q.device}")
        operands[name] = tensor
    unknown = set(grads) - {"q", "k", "v"}
    if unknown:
        raise ValueError(f"grads: given {sorted(unknown)}, expected some of q, k, v")
    wanted = [*grads, *(n for n, on in (("bias", dbias), ("sink", dsink)) if on)]
    for name in wanted:
        if name not in operands:
            raise ValueError(f"d{name}: given True, expected a {name} with it")
        operands[f"d{name}"] = torch.empty(operands[name].shape, dtype=operands[name].dtype, device=q.device)
    desc = SdpaBwdDesc(**_descs(operands), **facts, deterministic=deterministic)
    target = _target(q)
    _check_support(SdpaBwdDslSm80(), desc, target)
    with _on(q):
        executable = _backward(tuple(backward_params(desc, target).items()), target)
        executable.execute(Launch(desc, operands), _workspace(desc, q), _stream(q))
    return SdpaGradients(*(operands.get(f"d{n}") for n in ("q", "k", "v", "bias", "sink")))


# ---- operands ------------------------------------------------------------------------------------------------------


def _operands(q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Operands by field name, and the descriptor's other fields. Raises TypeError for an unknown option, ValueError for
    shapes that do not fit together."""
    rest = dict(options)
    operands = {"q": q, "k": k, "v": v}
    operands |= {n: t for n in _TENSOR_OPTIONS if (t := rest.pop(n, None)) is not None}
    value = {name: rest.pop(name, default) for name, (default, _, _) in _OPTIONS.items()}
    for name, (_, meant, expected) in _OPTIONS.items():
        if not meant(value[name]):
            raise ValueError(f"{name}: given {value[name]!r}, expected {expected}")
    left, right = value["window"]
    if value["causal"] and right not in (None, 0):
        raise ValueError(f"window right: given {right}, expected None or 0 beside causal=True")
    band = MaskDesc(causal=value["causal"], align=value["align"], left=left, right=right)
    facts: dict[str, Any] = {"band": band, "scale": value["scale"], "softcap": value["softcap"] or None}  # 0 is off
    if rest:
        raise TypeError(f"unknown options {sorted(rest)}")
    for name, tensor in operands.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: given device {tensor.device}, expected {q.device} as q")
    packed = "cu_seqlens_q" in operands
    if packed != ("cu_seqlens_kv" in operands):
        raise ValueError("cu_seqlens_q and cu_seqlens_kv: given one, expected both or neither")
    _check_main(q, k, v, packed)
    _check_options(operands, packed)
    return operands, facts


def _check_main(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    rank, head_axis = (3, 1) if packed else (4, 1)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != rank:
            raise ValueError(f"{name}: given shape {list(t.shape)}, expected {rank} dims{'' if packed else ' without cu_seqlens'}")
        if t.dtype != q.dtype:
            raise ValueError(f"{name}: given dtype {t.dtype}, expected {q.dtype} as q")
    batch = () if packed else (q.shape[0],)
    _check_shape("k", k, (*batch, *k.shape[len(batch):-1], q.shape[-1]))
    _check_shape("v", v, (*k.shape[:-1], v.shape[-1]))
    heads_q, heads_kv = q.shape[head_axis], k.shape[head_axis]
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(f"k: given {heads_kv} heads, expected a divisor of q's {heads_q}")


def _check_options(operands: Mapping[str, Tensor], packed: bool) -> None:
    q, k = operands["q"], operands["k"]
    sequences = operands["cu_seqlens_q"].shape[0] - 1 if packed else q.shape[0]
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "seq_len_q", "seq_len_kv"):
        if name in operands:
            _check_shape(name, operands[name], (sequences + name.startswith("cu"),))
            if str(operands[name].dtype) not in ("torch.int32", "torch.int64"):
                raise ValueError(f"{name}: given dtype {operands[name].dtype}, expected int32 or int64")
    if "sink" in operands:
        _check_shape("sink", operands["sink"], (q.shape[1],))
    for name in ("bias", "mask"):
        if name in operands:
            shape = (1,) * (4 - operands[name].dim()) + tuple(operands[name].shape)
            # Positions a packed bias does not hold are not read, so its last two extents are the caller's choice.
            whole = (sequences, q.shape[1], *((None, None) if packed else (q.shape[2], k.shape[2])))
            if len(shape) != 4 or any(n not in (1, w) for n, w in zip(shape, whole, strict=True) if w is not None):
                raise ValueError(f"{name}: given shape {list(operands[name].shape)}, expected 2 to 4 dims that broadcast to "
                                 f"{['B', 'Hq', 'Sq', 'Sk']}")


def _check_shape(name: str, t: Tensor, expected: Any) -> None:
    if tuple(t.shape) != tuple(expected):
        raise ValueError(f"{name}: given shape {list(t.shape)}, expected {list(expected)}")


def _descs(operands: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: TensorDesc.make(tuple(t.shape), DType.parse(t.dtype), t.stride(), math.gcd(16, t.data_ptr()) or 16)
            for name, t in operands.items()}


# ---- running -------------------------------------------------------------------------------------------------------


def _check_support(adapter: Adapter, desc: Any, target: Target) -> None:
    missing = ENGINE.unavailable(target)
    reasons = (missing,) if missing is not None else adapter.check_support(desc, target).reasons
    if reasons:
        raise Decline(*reasons)


@lru_cache(maxsize=256)
def _forward(params: FwdParams, target: Target) -> SdpaFwdExecutable:
    return SdpaFwdExecutable(params, target)


@lru_cache(maxsize=256)
def _backward(params: tuple[tuple[str, TemplateParams], ...], target: Target) -> SdpaBwdExecutable:
    return SdpaBwdExecutable(dict(params), target)


def _workspace(desc: SdpaBwdDesc, like: Tensor) -> Workspace:
    import torch

    offsets, size = {}, 0
    for region in SdpaBwdDslSm80().workspace(desc):
        offsets[region.name] = (size, region.nbytes)
        size += -(-region.nbytes // _REGION_ALIGNMENT) * _REGION_ALIGNMENT
    return Workspace(torch.empty(size, dtype=torch.uint8, device=like.device), offsets)


def _target(t: Tensor) -> Target:
    import torch

    if t.device.type != "cuda":
        return Target(t.device.type)
    return Target.cuda(torch.cuda.get_device_capability(t.device), t.device.index)


def _on(t: Tensor) -> Any:
    import torch

    return torch.cuda.device_of(t)


def _stream(t: Tensor) -> int:
    import torch

    return torch.cuda.current_stream(t.device).cuda_stream if t.device.type == "cuda" else 0
