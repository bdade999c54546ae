"""Derivatives of native sparse attention in backward graphs: rules for the table of `autodiff`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frost.autodiff import _Backward
    from frost.graph import OpNode, Tensor

# Operands that results depend on smoothly.
NSA_SMOOTH: dict[str, tuple[str, ...]] = {
    "nsa_selection": ("q", "k", "v"), "nsa_compressed_attention": ("q", "k", "v"), "nsa_compress": ("x", "weights"),
    "nsa_topk": (),
}


def _attention(b: _Backward, node: OpNode, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    o, lse = node.outputs["o"], node.outputs.get("lse")
    if not {"o", "lse"} & set(grads):
        return {}  # only the importance is used: it passes no gradient
    if o in b.outputs and lse is not None and lse in b.outputs:
        results = {"o": b.value(o), "lse": b.value(lse)}
    else:
        again = b.again(node).outputs
        results = {"o": again["o"], "lse": again["lse"]}
    operands = {name: b.value(t) for name, t in node.inputs.items()}
    grad_of = {"do": grads["o"] if "o" in grads else b.zeros_like(results["o"])}
    if "lse" in grads:
        grad_of["dlse"] = grads["lse"]
    attrs: dict[str, Any] = {n: value for n, value in node.attrs.items() if n not in ("stats", "importance")}
    wanted = tuple(n for n in ("q", "k", "v") if b.wants(node, n))
    made = b.out._record(node.op + "_backward", {**operands, **results, **grad_of}, {
        **attrs, "grads": wanted, "deterministic": b.deterministic}, None)
    return {name[1:]: t for name, t in made.outputs.items()}


def _compress(b: _Backward, node: OpNode, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    operands = {name: b.value(t) for name, t in node.inputs.items()}
    wanted = tuple(n for n in ("x", "weights") if b.wants(node, n))
    made = b.out._record("nsa_compress_backward", {**operands, "dcompressed": grads["compressed"]},
                         {**node.attrs, "grads": wanted}, None)
    return {name[1:]: t for name, t in made.outputs.items()}


NSA_RULES: dict[str, Any] = {
    "nsa_selection": _attention, "nsa_compressed_attention": _attention, "nsa_compress": _compress,
    "nsa_topk": lambda b, node, grads: {},
}
