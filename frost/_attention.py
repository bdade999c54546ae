"""Attention on torch tensors: plans found by tensor facts, executed on the tensors as they lie.

One call looks its operands up by (shape, strides, dtype, alignment, device) and the options; a repeated call builds no
graph. Packed token totals and the number of sequences are symbols here, so other totals find the same plan.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descriptors import Dim, sym
from descriptors.dims import multiply
from engines import forks, registry

from . import cache, env, gates, routing
from ._layout import gradient_strides, laid_out_like
from .errors import BindError, NotSupportedError
from .graph import Graph
from .lowering import Policy
from .plan import Plan

GRADS = ("q", "k", "v", "bias", "sink")


class Extras(NamedTuple):
    """The optional tensor operands."""

    bias: Tensor | None = None
    mask: Tensor | None = None
    sink: Tensor | None = None
    seq_len_q: Tensor | None = None
    seq_len_kv: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None


class Options(NamedTuple):
    """Everything else: host values, hashable."""

    scale: float | None = None
    causal: bool = False
    align: str = "top_left"
    window_left: int | None = None
    window_right: int | None = None
    softcap: float | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    engines: tuple[str, ...] | None = None
    gates: str | None = None
    deterministic: bool = False


# ---- forward and backward --------------------------------------------------------------------------------------


def run_forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options,
                need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """(o, lse); lse is None unless it is needed. o lies in memory like q. No autograd."""
    tensors = {"q": q, "k": k, "v": v, **_present(extras)}
    outputs: dict[str, tuple[int, ...] | None] = {"o": _output_strides(q.shape, q.stride(), output_shape(q, v))}
    if need_lse:
        outputs["lse"] = None
    result = _execute("attention", tensors, outputs, options)
    return result["o"], result.get("lse")


def run_backward(do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                 extras: Extras, options: Options, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Gradients of `GRADS`, None where `needs` says no. `do` or `dlse` is None where nothing depends on o or lse."""
    if do is None:
        # Expanded: no memory to fill, whatever the size of o.
        do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape)
    elif do.dtype != o.dtype:
        do = do.to(o.dtype)
    if dlse is not None and dlse.dtype != lse.dtype:
        dlse = dlse.to(lse.dtype)
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, **_present(extras)}
    if dlse is not None:
        tensors["dlse"] = dlse
    outputs: dict[str, tuple[int, ...] | None] = {
        "d" + name: _gradient_strides(tensors[name].shape, tensors[name].stride())
        for name, need in zip(GRADS, needs) if need and name in tensors}
    if not outputs:
        return (None,) * len(GRADS)
    result = _execute("attention_backward", tensors, outputs, options)
    return tuple(result.get("d" + name) for name in GRADS)


# For real tensors, whose extents are ints, the arithmetic of _layout.py is remembered.
_output_strides = lru_cache(maxsize=1024)(laid_out_like)
_gradient_strides = lru_cache(maxsize=1024)(gradient_strides)


def output_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """[.., Dv] with everything else of q."""
    return (*q.shape[:-1], v.shape[-1])


def _present(extras: Extras) -> dict[str, Tensor]:
    return {name: t for name, t in zip(Extras._fields, extras) if t is not None}


def _execute(kind: str, tensors: dict[str, Tensor], outputs: dict[str, tuple[int, ...] | None],
             options: Options) -> dict[str, Tensor]:
    try:
        plan = _find(kind, tensors, outputs, options)
    except (ValueError, TypeError, NotSupportedError) as e:
        _reword(e, kind)
        raise
    device = tensors["q"].device.type
    try:
        if not torch.is_autocast_enabled(device):
            return plan.execute(tensors)
        with torch.autocast(device, enabled=False):  # an engine's own torch ops are not to be cast
            return plan.execute(tensors)
    except BindError as e:
        _reword(e, kind)
        raise


def check_forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, need_lse: bool) -> None:
    """Refuse what `run_forward` refuses before it asks an engine, in the same words, for tensors that hold no data.

    A symbolic extent counts as the number that it stood for when it was traced, which adds no guard. Where there is none
    (an extent that depends on data), nothing is refused here: the call that has data will see to it.
    """
    facts: list[tuple[str, Fact]] = []
    for name, t in {"q": q, "k": k, "v": v, **_present(extras)}.items():
        shape, stride = tuple(map(_traced, t.shape)), tuple(map(_traced, t.stride()))
        if None in shape or None in stride:
            return
        facts.append((name, (shape, stride, t.dtype, 16)))
    options = Options(*map(_traced, options))
    made: tuple[tuple[str, tuple | None], ...] = (("o", None), ("lse", None)) if need_lse else (("o", None),)
    try:
        policy = options.gates if options.gates is not None else env.gates()
        _graph("attention", tuple(facts), made, options).validate()
        Policy(options.engines, policy)
    except (ValueError, TypeError) as e:
        _reword(e, "attention")
        raise


def _traced(value: Any) -> Any:
    """The number behind a symbolic int, None where there is none; all else as it is."""
    if not isinstance(value, torch.SymInt):
        return value
    hint = value.node.hint if value.node.has_hint() else None
    return hint if isinstance(hint, int) else None


# ---- errors: whoever called the function knows of no graph and no node ------------------------------------------

_SAID_BY = {"attention": "attention: ", "attention_backward": "attention: backward: "}
# How validation, lowering and binding begin: with a graph, a node, or a tensor of the graph.
_BEGINNING = re.compile(r"graph '\w+'(?:: |, )|\w+ \(node '\w+'\): |node '\w+': ")
_TENSOR = re.compile(r"\Atensor '(\w+)': ")


def _reword(error: Any, kind: str) -> None:
    """Every line of the error about the function."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = ("\n".join(_line(text, kind) for text in error.args[0].split("\n")),)
        if hasattr(error, "violations"):
            error.violations = tuple(_line(text, kind) for text in error.violations)


def _line(text: str, kind: str) -> str:
    if text.startswith((" ", _SAID_BY["attention"])):  # belongs to the line above; or said before, to another thread
        return text
    while (found := _BEGINNING.match(text)) is not None:
        text = text[found.end():]
    return _SAID_BY[kind] + _TENSOR.sub(r"\1: ", text, count=1)


# ---- facts: what a plan is looked up by -----------------------------------------------------------------------

# Packed extents by tag. Bounds only need to be generous: they are no part of a key. The last of each covers whatever
# fits in memory; the others keep within the positions that 32-bit kernels count.
_BOUNDS = (1 << 22, 1 << 27, 1 << 40)
_SYMBOLS = {(name, bound): sym(name, max=bound) for name in ("Tq", "Tkv", "N") for bound in _BOUNDS}
_PACKED: dict[str, str] = {
    **dict.fromkeys(("q", "o", "lse", "do", "dlse", "dq"), "Tq"), **dict.fromkeys(("k", "v", "dk", "dv"), "Tkv"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), "N")}

Tag = tuple[str, int]
Fact = tuple[tuple, tuple, torch.dtype, int]


def _tags(tensors: Mapping[str, Tensor]) -> dict[str, Tag]:
    """The tag of each leading extent that is a packed total or count. Whatever contradicts itself stays a number, so that
    validation can say what is wrong."""
    cu_q, cu_kv = tensors.get("cu_seqlens_q"), tensors.get("cu_seqlens_kv")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    if cu_q is None or cu_kv is None or not q.dim() == k.dim() == v.dim() == 3 or k.shape[0] != v.shape[0]:
        return {}
    extents = {"Tq": q.shape[0], "Tkv": k.shape[0]}
    # The batch extent of a packed bias is N - 1, which no symbol can say.
    per_sequence = any(t is not None and t.dim() == 4 and t.shape[0] != 1
                       for t in (tensors.get("bias"), tensors.get("mask")))
    if not per_sequence and cu_q.dim() == 1 and cu_q.shape == cu_kv.shape and cu_q.shape[0] > 0:
        extents["N"] = cu_q.shape[0]
    named = {name: (name, next(b for b in _BOUNDS if extent <= b)) for name, extent in extents.items()}
    return {name: named[tag] for name, tag in _PACKED.items() if tag in named}


def _fact(tensor: Tensor, tag: Tag | None) -> Fact:
    low = tensor.data_ptr() & 15
    shape, stride = tensor.shape, tensor.stride()
    if tag is not None:
        return (tag, *shape[1:]), through(shape, stride, tag), tensor.dtype, low & -low or 16
    return shape, stride, tensor.dtype, low & -low or 16


def through(shape: Sequence[int], stride: Sequence[int], tag: Tag) -> tuple:
    """Strides, those that step over the whole packed extent written as (coefficient, tag) so that no total is left.

    The stride of a single token is never used and may be any number; as other totals share its plan, one that no second
    token could have gives way to the gapless one.
    """
    if shape[0] == 1:
        rest = sum((d - 1) * s for d, s in zip(shape[1:], stride[1:])) + 1
        if not rest <= stride[0] < 2**31:
            stride = (max(rest, shape[1] * stride[1] if len(shape) > 1 else 1), *stride[1:])
    span = max(shape[0], 1) * stride[0]
    if span == 0 or all(s < span for s in stride[1:]):
        return tuple(stride)
    return (stride[0], *(
        s if d == 1 or s < span or s % span else (s // span * stride[0], tag)
        for d, s in zip(shape[1:], stride[1:])))


def _dims(values: Sequence[Any]) -> tuple[Dim, ...]:
    """Facts as dims: a tag is a symbol, (coefficient, tag) a multiple of it."""
    def dim(value: Any) -> Dim:
        if not isinstance(value, tuple):
            return int(value)
        if isinstance(value[0], str):
            return _SYMBOLS[value]
        return multiply((value[0], _SYMBOLS[value[1]]))
    return tuple(map(dim, values))


# ---- plans by facts ---------------------------------------------------------------------------------------------

_lock = forks.free_in_child(threading.Lock())
_plans: OrderedDict[Hashable, Plan] = OrderedDict()


def _find(kind: str, tensors: dict[str, Tensor], outputs: dict[str, tuple[int, ...] | None], options: Options) -> Plan:
    policy = options.gates if options.gates is not None else env.gates()
    device = tensors["q"].device
    tags = _tags(tensors) if "cu_seqlens_q" in tensors else {}
    facts = tuple((name, _fact(t, tags.get(name))) for name, t in tensors.items())
    made = tuple(outputs.items()) if not tags else tuple(
        (name, stride if stride is None or name not in tags else through(_shape_of(name, tensors), stride, tags[name]))
        for name, stride in outputs.items())
    world = (registry.names(), registry.every_registration(), _gate_state() if device.type == "cuda" and policy != "off" else None)
    key = (kind, device, policy, options, facts, made, world)
    with _lock:
        plan = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
    # A plan that the plan cache let go of (cache.clear, eviction) is forgotten here too.
    if plan is not None and cache.plans.touch(plan.key):
        routing.count_hits(plan.routes)
        return plan
    plan = _build(kind, facts, made, options, device, policy)
    with _lock:
        _plans[key] = plan
        _plans.move_to_end(key)
        while len(_plans) > env.plan_cache_size():
            _plans.popitem(last=False)
    return plan


def _shape_of(output: str, tensors: Mapping[str, Tensor]) -> Sequence[int]:
    if output == "o":
        return output_shape(tensors["q"], tensors["v"])
    return tensors[output[1:]].shape


def _build(kind: str, facts: tuple[tuple[str, Fact], ...], made: tuple[tuple[str, tuple | None], ...], options: Options,
           device: torch.device, policy: str) -> Plan:
    """Raises GraphError for operands or options that mean nothing, NotSupportedError where no engine serves."""
    return _graph(kind, facts, made, options).compile(device, engines=options.engines, gates=policy)


def _graph(kind: str, facts: tuple[tuple[str, Fact], ...], made: tuple[tuple[str, tuple | None], ...],
           options: Options) -> Graph:
    g = Graph(kind)
    t: dict[str, Any] = {
        name: g.tensor(name, _dims(shape), stride=_dims(stride), dtype=dtype, alignment=alignment)
        for name, (shape, stride, dtype, alignment) in facts}
    names = [name for name, _ in made]
    common: dict[str, Any] = {
        "scale": options.scale, "causal": options.causal, "align": options.align,
        "window": (options.window_left, options.window_right), "softcap": options.softcap,
        "max_seqlen_q": options.max_seqlen_q, "max_seqlen_kv": options.max_seqlen_kv,
        **{name: t[name] for name in Extras._fields if name in t}}
    if kind == "attention":
        o, lse = g.sdpa(t["q"], t["k"], t["v"], stats="lse" in names, **common)
        results: dict[str, Any] = {"o": o, "lse": lse}
    else:
        results = g.sdpa_backward(
            t["q"], t["k"], t["v"], t["o"], t["do"], t["lse"], dlse=t.get("dlse"), dbias="dbias" in names,
            dsink="dsink" in names, grads=tuple(n for n in ("q", "k", "v") if "d" + n in names),
            deterministic=options.deterministic, **common)._asdict()
    for name, stride in made:
        g.output(results[name], name=name, stride=None if stride is None else _dims(stride))
    return g


# What decides where gates are looked for (see env.gate_dir).
_GATE_VARIABLES = ("FROST_GATE_DIR", "FROST_CACHE_DIR", "XDG_CACHE_HOME", "HOME")


def _gate_state() -> tuple:
    """Changes when a gate may have been added or replaced, or the source it vouches for is told anew."""
    folders = _gate_folders(*map(os.environ.get, _GATE_VARIABLES))
    return (gates.kernel_source_hash, *map(_modified, folders))


@lru_cache(maxsize=16)
def _gate_folders(*_: str | None) -> tuple[Path, ...]:
    return gates.gate_dirs()


def _modified(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0
