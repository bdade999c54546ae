"""Native sparse attention on torch tensors: plans found by tensor facts, as `_attention.py` does for `frost.attention`.

A repeated call builds no graph. Packed token totals and counts are symbols for selection; pooling, whose number of blocks
depends on the total, keeps it a number, which is no part of a plan key either.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engines import forks, registry

from . import cache, env, routing
from ._attention import _BOUNDS, Tag, _dims, _fact, _gate_state, through
from ._layout import gradient_strides, laid_out_like
from .graph import Graph
from .plan import Plan


class Call(NamedTuple):
    """What a plan is made for beyond its tensors: attributes of the op by name, and where it may run."""

    attrs: tuple[tuple[str, Any], ...] = ()
    engines: tuple[str, ...] | None = None
    gates: str | None = None
    deterministic: bool = False


Results = Mapping[str, Any]


def _selection(g: Graph, t: Results, wanted: Sequence[str], call: Call) -> Results:
    options = {n: t[n] for n in ("block_counts", "cu_seqlens") if n in t}
    o, lse = g.nsa_selection(t["q"], t["k"], t["v"], t["block_indices"], stats="lse" in wanted, **options,
                             **dict(call.attrs))
    return {"o": o, "lse": lse}


def _selection_backward(g: Graph, t: Results, wanted: Sequence[str], call: Call) -> Results:
    options = {n: t[n] for n in ("block_counts", "cu_seqlens", "dlse") if n in t}
    return g.nsa_selection_backward(
        t["q"], t["k"], t["v"], t["o"], t["do"], t["lse"], t["block_indices"], grads=_grads(wanted),
        deterministic=call.deterministic, **options, **dict(call.attrs))._asdict()


def _compress(g: Graph, t: Results, wanted: Sequence[str], call: Call) -> Results:
    options = {n: t[n] for n in ("weights", "cu_seqlens") if n in t}
    return {"compressed": g.nsa_compress(t["x"], **options, **dict(call.attrs))}


def _compress_backward(g: Graph, t: Results, wanted: Sequence[str], call: Call) -> Results:
    options = {n: t[n] for n in ("weights", "cu_seqlens") if n in t}
    return g.nsa_compress_backward(t["x"], t["dcompressed"], grads=_grads(wanted), **options,
                                   **dict(call.attrs))._asdict()


def _compressed(g: Graph, t: Results, wanted: Sequence[str], call: Call) -> Results:
    options = {"cu_seqlens": t["cu_seqlens"]} if "cu_seqlens" in t else {}
    made = g.nsa_compressed_attention(t["q"], t["k"], t["v"], stats="lse" in wanted, importance="importance" in wanted,
                                      **options, **dict(call.attrs))
    return dict(zip(("o", "lse", "importance"), made))


def _compressed_backward(g: Graph, t: Results, wanted: Sequence[str], call: Call) -> Results:
    options = {n: t[n] for n in ("cu_seqlens", "dlse") if n in t}
    return g.nsa_compressed_attention_backward(
        t["q"], t["k"], t["v"], t["o"], t["do"], t["lse"], grads=_grads(wanted), deterministic=call.deterministic,
        **options, **dict(call.attrs))._asdict()


def _topk(g: Graph, t: Results, wanted: Sequence[str], call: Call) -> Results:
    options = {"cu_seqlens": t["cu_seqlens"]} if "cu_seqlens" in t else {}
    return {"block_indices": g.nsa_topk(t["importance"], **options, **dict(call.attrs))}


def _grads(wanted: Sequence[str]) -> tuple[str, ...]:
    return tuple(name[1:] for name in wanted)


# op -> how its graph is written. The first tensor handed over says the device.
_WRITERS: dict[str, Callable[[Graph, Results, Sequence[str], Call], Results]] = {
    "nsa_selection": _selection, "nsa_selection_backward": _selection_backward, "nsa_compress": _compress,
    "nsa_compress_backward": _compress_backward, "nsa_compressed_attention": _compressed,
    "nsa_compressed_attention_backward": _compressed_backward, "nsa_topk": _topk,
}
_WITH_TOTALS = ("nsa_selection", "nsa_selection_backward")

_lock = forks.free_in_child(threading.Lock())
_plans: OrderedDict[Hashable, Plan] = OrderedDict()


def run(op: str, tensors: dict[str, Tensor], outputs: dict[str, tuple[int, ...] | None], call: Call) -> dict[str, Tensor]:
    """Execute one op. `outputs`: the results that are wanted, with their strides (None: row-major)."""
    device = next(iter(tensors.values())).device
    plan = _find(op, tensors, outputs, call, device)
    if not torch.is_autocast_enabled(device.type):
        return plan.execute(tensors)
    with torch.autocast(device.type, enabled=False):  # an engine's own torch ops are not to be cast
        return plan.execute(tensors)


def like(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Gapless strides for `shape` in the memory order of x."""
    return laid_out_like(x.shape, x.stride(), shape)


def gradient_of(x: Tensor) -> tuple[int, ...]:
    """Strides of the gradient of x."""
    return gradient_strides(x.shape, x.stride())


def _tags(op: str, tensors: Mapping[str, Tensor]) -> dict[str, Tag]:
    """The tag of each leading extent that is a packed total or count. What contradicts itself stays a number, so that
    validation can say what is wrong."""
    cu = tensors.get("cu_seqlens")
    if cu is None or op not in _WITH_TOTALS:
        return {}
    rows = {n: t for n, t in tensors.items() if n != "cu_seqlens"}
    total = rows["q"].shape[0] if rows["q"].dim() else 0
    if any(t.dim() < 2 or t.shape[0] != total for t in rows.values()) or cu.dim() != 1 or cu.shape[0] < 1:
        return {}
    tokens: Tag = ("Tq", next(b for b in _BOUNDS if total <= b))
    offsets: Tag = ("N", next(b for b in _BOUNDS if cu.shape[0] <= b))
    return {**dict.fromkeys(rows, tokens), "cu_seqlens": offsets,
            **dict.fromkeys(("o", "lse", "dq", "dk", "dv"), tokens)}


_SHAPE_OF = {"o": "q", "lse": "q", "dq": "q", "dk": "k", "dv": "v"}


def _find(op: str, tensors: dict[str, Tensor], outputs: dict[str, tuple[int, ...] | None], call: Call,
          device: torch.device) -> Plan:
    policy = call.gates if call.gates is not None else env.gates()
    tags = _tags(op, tensors)
    facts = tuple((name, _fact(t, tags.get(name))) for name, t in tensors.items())
    made = tuple((name, stride if stride is None or name not in tags else through(
        (tensors[_SHAPE_OF[name]].shape[0], *(1,) * (len(stride) - 1)), stride, tags[name]))
        for name, stride in outputs.items())
    world = (registry.names(), registry.every_registration(), _gate_state() if device.type == "cuda" and policy != "off" else None)
    key = (op, device, policy, call, facts, made, world)
    with _lock:
        plan = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
    if plan is not None and cache.plans.touch(plan.key):
        routing.count_hits(plan.routes)
        return plan
    plan = _build(op, facts, made, call, device, policy)
    with _lock:
        _plans[key] = plan
        _plans.move_to_end(key)
        while len(_plans) > env.plan_cache_size():
            _plans.popitem(last=False)
    return plan


def _build(op: str, facts: tuple, made: tuple, call: Call, device: torch.device, policy: str) -> Plan:
    """Raises GraphError for operands or options that mean nothing, NotSupportedError where no engine serves."""
    g = Graph(op)
    t = {name: g.tensor(name, _dims(shape), stride=_dims(stride), dtype=dtype, alignment=alignment)
         for name, (shape, stride, dtype, alignment) in facts}
    results = _WRITERS[op](g, t, [name for name, _ in made], call)
    for name, stride in made:
        if results[name] is not None:
            g.output(results[name], name=name, stride=None if stride is None else _dims(stride))
    return g.compile(device, engines=call.engines, gates=policy)
