"""Attention as Hugging Face's models call it: tiny random models, and every call of their eager attention
on record.

A call is told to FROST by what the model says it means (its scale, softcap, window, sinks, position bias,
whether it is causal), never by the mask that it made; of that only which keys are padding is read. So a
window or a corner that meant something else would show.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 64
_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 8}


@dataclass(frozen=True)
class Family:
    """A kind of model: where its attention function lives, its configuration, and what is particular to
    it."""

    module: str
    model: str
    config: str
    particular: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")

    def build(self) -> torch.nn.Module:
        torch.manual_seed(0)
        given = {n: x for n, x in {**_SHARED, **self.particular}.items() if x is not None}
        implementation = given.pop("attn_implementation")
        config = getattr(transformers, self.config)(**given)
        config._attn_implementation = implementation
        model = getattr(transformers, self.model)(config).eval()
        for name, weight in model.named_parameters():
            if "sinks" in name or "norm" not in name:
                torch.nn.init.normal_(weight, std=0.3)
        return model


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", "LlamaConfig"),
    "mistral": Family("mistral", "MistralForCausalLM", "MistralConfig", {"sliding_window": 5, "head_dim": 8}),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_BOTH, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    ),
    "gpt_oss": Family("gpt_oss", "GptOssForCausalLM", "GptOssConfig", {**_BOTH, **_EXPERTS}),
    "deepseek_v3": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "t5": Family(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
            "decoder_start_token_id": 0,
            **dict.fromkeys(
                (
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "max_position_embeddings",
                )
            ),
        },
    ),
}


# ---- what the models are asked ---------------------------------------------------------------------------------------


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(rows: int, length: int) -> Tensor:
    """[rows, length] of 1 and 0: the first row starts with four tokens of padding, the last one ends with
    five."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :4] = 0
    mask[-1, length - 5 :] = 0
    return mask


def _whole(model: Any, t5: bool) -> Tensor:
    if t5:
        return model(input_ids=_tokens(2, 17), decoder_input_ids=_tokens(2, 11, seed=1)).logits
    return model(input_ids=_tokens(2, 17), use_cache=False).logits


def _padded(model: Any, t5: bool) -> Tensor:
    """Logits of the tokens that are none."""
    mask = padded(3, 13)
    if t5:
        own = padded(3, 11)
        return model(
            input_ids=_tokens(3, 13),
            attention_mask=mask,
            decoder_input_ids=_tokens(3, 11, seed=1),
            decoder_attention_mask=own,
        ).logits[own.bool()]
    return model(input_ids=_tokens(3, 13), attention_mask=mask, use_cache=False).logits[mask.bool()]


def _continued(model: Any, t5: bool) -> Tensor:
    """A first part fills the cache, the rest attends to both: fewer queries than keys."""
    if t5:
        ids, own = _tokens(2, 9), _tokens(2, 11, seed=1)
        first = model(input_ids=ids, decoder_input_ids=own[:, :7], use_cache=True)
        return model(
            encoder_outputs=(first.encoder_last_hidden_state,),
            decoder_input_ids=own[:, 7:],
            use_cache=True,
            **_cached(model, first),
        ).logits
    ids = _tokens(2, 17)
    first = model(input_ids=ids[:, :12], use_cache=True)
    return model(input_ids=ids[:, 12:], use_cache=True, **_cached(model, first)).logits


def _cached(model: Any, first: Any) -> dict[str, Any]:
    """The cache that a first part left, under the name that this release gives the argument."""
    known = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": first.past_key_values}


SCENES: dict[str, Callable[[Any, bool], Tensor]] = {
    "whole": _whole,
    "padded": _padded,
    "continued": _continued,
}


def logits(family: str, model: torch.nn.Module, scene: str) -> Tensor:
    return SCENES[scene](model, family == "t5")


# ---- what they call ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a model's eager attention: its arguments, and the function itself."""

    eager: Callable[..., Any]
    module: torch.nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    named: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """FROST's options for the same call, tensors among them."""
        window, softcap = self.named.get("sliding_window"), self.named.get("softcap")
        causal = bool(getattr(self.module, "is_causal", False))
        given: dict[str, Any] = {
            "scale": self.named["scaling"],
            "softcap": softcap,
            "causal": causal,
            "align": "bottom_right",
            "bias": self.named.get("position_bias"),
            "sink": getattr(self.module, "sinks", None),
            "mask": self.valid_keys(),
        }
        if window is not None:
            given["window"] = (window - 1, None)  # a window of W tokens holds the query itself
        return {n: x for n, x in given.items() if x is not None}

    @property
    def kind(self) -> tuple[Any, ...]:
        """Calls of one kind differ in their values alone."""
        given = {n: tuple(x.shape) if isinstance(x, Tensor) else x for n, x in self.options.items()}
        return tuple(self.q.shape), tuple(self.k.shape), tuple(sorted(given.items()))

    def seen(self) -> Tensor | None:
        """[B, 1, Sq, Sk]: the model's own mask, as what a row sees."""
        return None if self.mask is None else self.mask > torch.finfo(self.mask.dtype).min / 2

    def valid_keys(self) -> Tensor | None:
        """[B, 1, 1, Sk], None where no key is padding: padding is what no row sees."""
        seen = self.seen()
        keys = None if seen is None else seen.any(-2, keepdim=True)
        return None if keys is None or bool(keys.all()) else keys


@contextlib.contextmanager
def attention_of(family: str, function: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile the family's modules call `function(eager, module, q, k, v, mask, **named)` for their
    attention."""
    code = FAMILIES[family].code
    eager = code.eager_attention_forward

    def called(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **named: Any) -> Any:
        return function(eager, module, q, k, v, mask, **named)

    code.eager_attention_forward = called
    try:
        yield
    finally:
        code.eager_attention_forward = eager


def record(family: str, scene: str) -> list[Call]:
    """Every attention call of a fresh model in a scene."""
    calls: list[Call] = []

    def keep(
        eager: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **named: Any
    ) -> Any:
        calls.append(Call(eager, module, q, k, v, mask, named))
        return eager(module, q, k, v, mask, **named)

    with torch.no_grad(), attention_of(family, keep):
        logits(family, FAMILIES[family].build(), scene)
    return calls
