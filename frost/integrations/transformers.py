"""Hugging Face models on FROST: `register()`, then `attn_implementation="frost"`, or `"frost:<engine>"` for
one engine only.

    from frost.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="frost")

Grouped heads, sliding windows, softcap, sinks, padding masks, packed position ids, caches and training go
to `frost.attention` as what they are; a mask is built in full only where it has no simpler form. Rows that
see nothing (queries of padding) give 0.

The mask that transformers asks for is the truth. A model that does not tell its mask about position ids
(gpt-oss) is packed through `cu_seq_lens_q` and `cu_seq_lens_k`, which
`DataCollatorWithFlattening(return_flash_attn_kwargs=True)` adds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engines import registry

from ..errors import NotSupportedError
from ..functional import attention
from ._hf_masks import Visible, mark, marked, read

__all__ = ["PREFIX", "attention_forward", "attention_mask", "register"]

PREFIX = "frost"
_MIN_TRANSFORMERS = "5.0"
# Arguments of other attention functions that change the scores; leaving one out silently would change the
# model.
_REFUSED = ("head_mask", "layer_head_mask", "position_bias", "alibi", "relative_position_bias")


def register(engines: Iterable[str] | None = None) -> tuple[str, ...]:
    """Add "frost" and a "frost:<engine>" for each engine (default: every one there is) to transformers'
    attention and mask functions. Returns the names. May be called again.

    Raises ImportError where transformers is missing or too old, ValueError for an unknown engine.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as e:
        raise ImportError(
            f"frost.integrations.transformers needs transformers {_MIN_TRANSFORMERS} or newer ({e}); "
            "install it "
            f"with `pip install 'transformers>={_MIN_TRANSFORMERS}'`"
        ) from e
    del sdpa_mask
    names = registry.names() if engines is None else tuple(registry.get(name).name for name in engines)
    table: dict[str, tuple[str, ...] | None] = {
        PREFIX: None,
        **{f"{PREFIX}:{name}": (name,) for name in names},
    }
    for name, wanted in table.items():
        AttentionInterface.register(name, functools.partial(attention_forward, engines=wanted))
        AttentionMaskInterface.register(name, attention_mask)
    return tuple(table)


# ---- the mask --------------------------------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int | None = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function that goes with `attention_forward` (transformers' AttentionMaskInterface).

    Returns None (plainly causal), a [B | 1, kv_length] boolean mask of valid keys, [B, kv_length] integers
    (each token's packed sequence), both of which carry the band, or the whole [B, 1, q_length, kv_length]
    boolean mask.
    """
    from transformers import masking_utils as masks

    if mask_function is None:
        mask_function = masks.causal_mask_function
    common: dict[str, Any] = {
        "batch_size": batch_size,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
    }
    if "cache_position" in kwargs:  # older ones: where the queries are is on the device
        common["cache_position"] = kwargs["cache_position"]
    else:
        common.update(q_length=q_length, q_offset=q_offset)
    if device is not None:
        common["device"] = device
    visible = None
    if _aligned(q_length, kv_length, q_offset, kv_offset):
        if not _tracing(attention_mask):
            visible = read(mask_function, masks)
        elif attention_mask is None and mask_function is masks.causal_mask_function:
            visible = Visible(causal=True)
    segments = None if visible is None else visible.segments
    if (
        visible is None
        or kv_length is None
        or (
            segments is not None
            and (attention_mask is not None or tuple(segments.shape) != (batch_size, kv_length))
        )
        or (attention_mask is not None and attention_mask.shape[-1] not in (kv_length, kv_length + kv_offset))
    ):
        return masks.sdpa_mask(
            **common, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **_of_sdpa(kwargs)
        )
    if visible.window is not None and visible.window >= kv_length - 1:
        visible.window = None
    if segments is not None:
        return mark(segments, visible)
    keys = _valid_keys(attention_mask, kv_length)
    if keys is None:
        if allow_is_causal_skip and visible == Visible(causal=True):
            return None
        return mark(torch.ones(1, kv_length, dtype=torch.bool, device=device), visible)
    visible.padded = True
    return mark(keys, visible)


def _of_sdpa(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of the other arguments that say how the mask is built, not for whom."""
    return {name: kwargs[name] for name in ("use_vmap", "local_size", "config", "dtype") if name in kwargs}


def _aligned(q_length: Any, kv_length: Any, q_offset: Any, kv_offset: Any) -> bool:
    """Whether the last query is at the position of the last key: the bottom right corner is the causal one
    then. Not so in a cache of fixed size.
    """
    numbers = (q_length, kv_length, q_offset, kv_offset)
    return all(type(n) is int for n in numbers) and q_offset + q_length == kv_offset + kv_length


def _tracing(mask: Tensor | None) -> bool:
    return torch.compiler.is_compiling() or isinstance(mask, FakeTensor)


def _valid_keys(mask: Tensor | None, kv_length: int) -> Tensor | None:
    """[B, kv_length], or None where every key is valid. `mask` says it of every token so far, or is an
    answer of ours that a model hands in again (generate does): from the right both are the same.
    """
    if mask is None:
        return None
    if mask.dim() != 2:
        raise NotSupportedError(
            f"attention_mask: given {mask.dim()} dims, expected [batch, length], or a whole one of 4 dims"
        )
    keys = mask[:, mask.shape[1] - kv_length :].to(torch.bool)
    return (
        None if bool(keys.all()) else keys.clone()
    )  # its own tensor: the caller's must not carry our structure


# ---- the attention ---------------------------------------------------------------------------------------


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    *,
    engines: tuple[str, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function (transformers' AttentionInterface): query [B, Hq, Sq, D], key and value [B,
    Hk, Sk, D | Dv] to ([B, Sq, Hq, Dv], None).

    Raises NotSupportedError for what FROST has no form of (dropout, attention weights as a result, additive
    position biases).
    """
    _refuse(dropout, kwargs)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or None, "engines": engines}
    if s_aux is not None:
        options["sink"] = s_aux if s_aux.dtype in (query.dtype, torch.float32) else s_aux.to(query.dtype)
    visible = marked(attention_mask)
    if visible is None:
        visible = _of_the_layer(module, attention_mask, sliding_window, is_causal)
    offsets = _offsets(query, attention_mask, visible, kwargs)
    if offsets is not None:
        return _packed(query, key, value, visible, offsets, options), None
    if attention_mask is not None and attention_mask.dim() == 4:
        options.update(_whole(attention_mask, key.shape[2]))
    else:
        options.update(_band(visible, query.shape[2], key.shape[2]))
        if visible.padded and attention_mask is not None:
            options["mask"] = _key_mask(attention_mask, key.shape[2])
    return attention(query, key, value, **options).transpose(1, 2), None


def _of_the_layer(
    module: Any, mask: Tensor | None, sliding_window: int | None, is_causal: bool | None
) -> Visible:
    """Without structure (a caller's own mask, or none; a copy of ours) the layer's own options count, as in
    FlashAttention.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    whole = mask is not None and mask.dim() == 4
    window = None if sliding_window is None or whole else int(sliding_window) - 1
    if window is not None and not causal:
        raise NotSupportedError(
            f"sliding_window: given {sliding_window} with is_causal=False and no mask that says what "
            "it means, "
            f"expected a mask of 4 dims"
        )
    segments = mask if mask is not None and mask.dim() == 2 and mask.dtype != torch.bool else None
    return Visible(causal, window, segments, padded=mask is not None and segments is None)


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise NotSupportedError(
            f"dropout: given {dropout}, expected 0: FROST has no attention dropout; set the model's "
            f"attention_dropout to 0, or use another attn_implementation"
        )
    if kwargs.get("output_attentions"):
        raise NotSupportedError(
            "output_attentions: given True, expected False: the weights are never made; use "
            "attn_implementation='eager' to look at them"
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotSupportedError(
                f"{name}: given, expected None: FROST's transformers attention does not take it; use "
                f"attn_implementation='eager' for this model"
            )


def _band(visible: Visible, sq: int, sk: int) -> dict[str, Any]:
    window = None if visible.window is not None and visible.window >= sk - 1 else visible.window
    if not visible.causal:
        return {} if window is None else {"window": (window, window)}
    # One query at the end sees everything: the plain form, which every engine has.
    if window is None and sq == 1:
        return {}
    corner = "top_left" if sq == sk else "bottom_right"
    return {"causal": True, "align": corner, "window": (window, None)}


def _key_mask(mask: Tensor, sk: int) -> Tensor:
    if mask.dim() != 2 or mask.shape[1] != sk:
        raise NotSupportedError(
            f"attention_mask: given shape {list(mask.shape)}, expected [batch, {sk}], or a whole one "
            "of 4 dims"
        )
    return mask.to(torch.bool)[:, None, None, :]


def _whole(mask: Tensor, sk: int) -> dict[str, Tensor]:
    """A mask of 4 dims is the whole truth. A float one is added; its most negative number stands for -inf."""
    mask = mask[..., :sk]
    if mask.dtype == torch.bool:
        return {"mask": mask}
    lowest = torch.finfo(mask.dtype).min
    return {"bias": mask.masked_fill(mask <= lowest, float("-inf"))}


_Offsets = tuple[Tensor, Tensor, "int | None", "int | None"]


def _offsets(query: Tensor, mask: Tensor | None, visible: Visible, kwargs: dict[str, Any]) -> _Offsets | None:
    """cu_seqlens of queries and keys and the longest of each, where the batch is packed sequences."""
    if mask is not None and mask.dim() == 4:
        return None
    cu_q, cu_kv = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_q is not None and cu_kv is not None and query.shape[0] == 1:
        if visible.padded:
            raise NotSupportedError(
                "cu_seq_lens_q: given together with an attention_mask that has padding, expected one of them"
            )
        return cu_q, cu_kv, kwargs.get("max_length_q"), kwargs.get("max_length_k")
    if visible.segments is None:
        return None
    cu, longest = visible.offsets()
    return cu, cu, longest, longest


def _packed(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, offsets: _Offsets, options: dict[str, Any]
) -> Tensor:
    cu_q, cu_kv, longest_q, longest_kv = offsets
    batch, _, sq, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    how: dict[str, Any] = {
        "causal": visible.causal,
        "align": "bottom_right" if visible.causal else "top_left",
    }
    if visible.window is not None:
        how["window"] = (visible.window, None if visible.causal else visible.window)
    o = attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        max_seqlen_q=_number(longest_q),
        max_seqlen_kv=_number(longest_kv),
        **how,
        **options,
    )
    return o.unflatten(0, (batch, sq))


def _number(longest: Any) -> int | None:
    """A length on the device stays there: nobody needs to read it."""
    return None if longest is None or isinstance(longest, Tensor) else int(longest)
