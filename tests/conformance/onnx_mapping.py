"""From a vector of ONNX's `Attention` to a FROST graph, declared as ONNX lays its tensors out.

What ONNX says differently:
- 3-D tensors [B, S, H·D] are views: q is declared [B, H, S, D] with the strides of that buffer, and so is
  o.
- The past is joined to the keys outside; FROST has no cache of its own.
- `is_causal` puts its diagonal at the past length P, whatever Sk - Sq is: key j ≤ row i + P. From FROST's
  top-left corner that is a window with P keys to the right; without a past it is plain `causal`.
- `attn_mask` is a boolean mask or, in floats, a bias; shorter than the keys, it shuts out the rest.
- `nonpad_kv_seqlen` is `seq_len_kv`.
- `qk_matmul_output` is an intermediate: a second branch of the graph makes it with primitives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import closeness
import oracle
import torch
from cases.graphs import declare
from onnx_vectors import Vector
from torch import Tensor

from frost.graph import Graph

ATTRIBUTES = frozenset(
    {"scale", "is_causal", "q_num_heads", "kv_num_heads", "softcap", "qk_matmul_output_mode"}
)
INPUTS = frozenset({"Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"})
OUTPUTS = frozenset({"Y", "present_key", "present_value", "qk_matmul_output"})
SCORES = "qk_matmul_output"


class Unmapped(ValueError):
    """A vector that asks for something this mapping has no word for."""


@dataclass(frozen=True)
class Call:
    """One vector in FROST's words. `tensors`: q, k, v [B, H, S, D] and the tensor options; `options`: the
    host values.

    `mode`: which intermediate is asked for as `qk_matmul_output` (ONNX's number), None where none is.
    `folded`: Y is [B, S, H·Dv].
    """

    vector: Vector
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    past: int = 0
    mode: int | None = None
    folded: bool = False
    presents: dict[str, Tensor] = field(default_factory=dict)

    @property
    def seqlens(self) -> tuple[int, int]:
        return self.tensors["q"].shape[2], self.tensors["k"].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["q"].dtype

    def widened(self) -> Call:
        """The same call in fp64."""
        wide = {n: t.double() if t.is_floating_point() else t for n, t in self.tensors.items()}
        return Call(self.vector, wide, self.options, self.past, self.mode, self.folded, self.presents)


def call_of(vector: Vector) -> Call:
    """Raises Unmapped for an attribute, input or output that has no meaning here."""
    a = vector.attributes
    for kind, given, known in (
        ("attribute", a, ATTRIBUTES),
        ("input", vector.inputs, INPUTS),
        ("output", vector.outputs, OUTPUTS),
    ):
        if set(given) - known:
            raise Unmapped(
                f"{vector}: {kind} {sorted(set(given) - known)} has no mapping, known: {sorted(known)}"
            )
    folded = vector.inputs["Q"].ndim == 3
    tensors = {n.lower(): _heads_first(vector, n, folded) for n in ("Q", "K", "V")}
    presents = {}
    for name, now in (("key", "k"), ("value", "v")):
        past = vector.tensor(f"past_{name}")
        if past is not None:
            presents[f"present_{name}"] = tensors[now] = torch.cat([past, tensors[now]], dim=2)
    past_length = tensors["k"].shape[2] - vector.inputs["K"].shape[1 if folded else 2]
    options: dict[str, Any] = {"scale": a.get("scale"), "softcap": a.get("softcap")}
    if a.get("is_causal"):
        options.update({"window": (None, past_length)} if past_length else {"causal": True})
    mask = vector.tensor("attn_mask")
    if mask is not None:
        boolean = mask.dtype == torch.bool
        short = tensors["k"].shape[2] - mask.shape[-1]
        tensors["mask" if boolean else "bias"] = torch.nn.functional.pad(
            mask, (0, short), value=False if boolean else -math.inf
        )
    lengths = vector.tensor("nonpad_kv_seqlen")
    if lengths is not None:
        tensors["seq_len_kv"] = lengths
    mode = a.get("qk_matmul_output_mode", 0) if SCORES in vector.outputs else None
    return Call(vector, tensors, options, past_length, mode, folded, presents)


def _heads_first(vector: Vector, name: str, folded: bool) -> Tensor:
    """[B, H, S, D], a view of the buffer as ONNX has it."""
    x = vector.tensor(name)
    assert x is not None
    if not folded:
        return x
    heads = vector.attributes["q_num_heads" if name == "Q" else "kv_num_heads"]
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# ---- the graph ------------------------------------------------------------------------------------------------------


def build(call: Call, device: str = "cpu") -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    """(graph, tensors to execute it on, results by ONNX's names). Results start as NaN."""
    g, tensors = Graph(call.vector.name), {n: x.to(device) for n, x in call.tensors.items()}
    t = {name: declare(g, name, x) for name, x in tensors.items()}
    extra = {name: t[name] for name in ("bias", "mask", "seq_len_kv") if name in t}
    o, _ = g.sdpa(t["q"], t["k"], t["v"], **extra, **call.options)
    results = {"Y": torch.full(call.vector.outputs["Y"].shape, math.nan, dtype=call.dtype, device=device)}
    tensors["o"] = (
        results["Y"].unflatten(-1, (o.shape[1], -1)).transpose(1, 2) if call.folded else results["Y"]
    )
    g.output(o, name="o", stride=tensors["o"].stride())
    if call.mode is not None:
        handle = _scores(g, t, call, tensors)
        tensors["scores"] = results[SCORES] = torch.full(
            call.vector.outputs[SCORES].shape, math.nan, dtype=call.dtype, device=device
        )
        g.output(handle, name="scores")
    return g, tensors, results


def _scores(g: Graph, t: dict[str, Any], call: Call, tensors: dict[str, Tensor]) -> Any:
    """The intermediate that `mode` names, made of primitives: product, softcap, masks, softmax, each on the
    last."""
    if call.tensors["q"].shape[1] != call.tensors["k"].shape[1] or "seq_len_kv" in t:
        raise Unmapped(f"{call.vector}: {SCORES} with grouped heads or lengths")
    scale, cap = call.options["scale"], call.options["softcap"]
    s = g.matmul(t["q"], g.transpose(t["k"], (0, 1, 3, 2)))
    s = g.scale(s, call.tensors["q"].shape[-1] ** -0.5 if scale is None else scale)
    for stage in STAGES[: call.mode]:
        s = stage(g, s, t, call, tensors, cap)
    return s


def _capped(
    g: Graph, s: Any, t: dict[str, Any], call: Call, tensors: dict[str, Tensor], cap: float | None
) -> Any:
    return s if not cap else g.scale(g.tanh(g.scale(s, 1 / cap)), cap)


def _masked(
    g: Graph, s: Any, t: dict[str, Any], call: Call, tensors: dict[str, Tensor], cap: float | None
) -> Any:
    s = g.add(s, t["bias"]) if "bias" in t else s
    s = g.mask_fill(s, t["mask"]) if "mask" in t else s
    if not {"causal", "window"} & set(call.options):
        return s
    rows, keys = (torch.arange(n) for n in call.seqlens)
    tensors["diagonal"] = (keys[None, :] <= rows[:, None] + call.past).to(tensors["q"].device)
    return g.mask_fill(s, declare(g, "diagonal", tensors["diagonal"]))


def _weights(
    g: Graph, s: Any, t: dict[str, Any], call: Call, tensors: dict[str, Tensor], cap: float | None
) -> Any:
    return g.softmax(s)


STAGES: tuple[Callable[..., Any], ...] = (_capped, _masked, _weights)


# ---- who declines ---------------------------------------------------------------------------------------------------

# Engine -> the field that it names, and when. The reference serves everything.
Rule = tuple[str, Callable[[Call], bool]]
_SCORES_RULE: Rule = ("op", lambda c: c.mode is not None)
DECLINES: dict[str, tuple[Rule, ...]] = {
    "reference": (),
    "triton": (_SCORES_RULE,),
    "torch_sdpa": (
        _SCORES_RULE,
        ("bias", lambda c: "bias" in c.tensors),
        ("mask", lambda c: "mask" in c.tensors),
        ("seq_len_kv", lambda c: "seq_len_kv" in c.tensors),
        ("softcap", lambda c: bool(c.options["softcap"])),
        ("window_right", lambda c: c.options.get("window") is not None),
        ("causal", lambda c: bool(c.options.get("causal")) and c.seqlens[0] < c.seqlens[1]),
        ("head_dim_v", lambda c: c.tensors["q"].shape[-1] != c.tensors["v"].shape[-1]),
    ),
}


def declines(call: Call, engine: str) -> set[str]:
    """The fields that `engine` must name when it declines a node of this call; empty: it serves all of
    them."""
    return {name for name, applies in DECLINES[engine] if applies(call)}


# ---- how near ------------------------------------------------------------------------------------------------------


def rule(call: Call, output: str) -> Tensor:
    """What the tolerance rule allows an engine against fp64, in the output's shape. `qk_matmul_output` is
    plain fp32 arithmetic and has no lse: the rule's second term alone."""
    if output == SCORES:
        return 2e-5 * call.vector.expected(output).double().abs().clamp(min=1)
    extra = {n: t for n, t in call.tensors.items() if n not in ("q", "k", "v")}
    problem = oracle.Problem(*(call.tensors[n] for n in ("q", "k", "v")), options={**extra, **call.options})
    allowed = closeness.engine_error(problem)
    return allowed.transpose(1, 2).flatten(2) if call.folded else allowed
