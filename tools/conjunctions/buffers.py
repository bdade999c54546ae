"""A case made real: poisoned operands in their layouts, results between canaries, the oracle's answer, and the graphs.

Values and answers are made on the CPU from the case's seed, so a case means the same on every device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from frost.equivalence import make_case
from frost.equivalence_nsa import _mask as selection_mask_of
from frost.equivalence_nsa import nsa_results
from frost.gate_matrix_nsa import NsaConfig
from frost.graph import Graph

from . import yardstick
from .case import AnyCase, Attention, Selection, layout_of
from .draw import shapes
from .suite import Case, Recipe, case_data, case_graphs, layouts

MARGIN = 512  # canaries on either side of a result, in elements; a multiple of every vector


@dataclass
class Prepared:
    """A case's operands as the engine gets them, and what its results are held to (CPU, fp64 and the yardstick's).
    `again(n)`: the yardstick's results once more, summed up in another order."""

    case: AnyCase
    views: dict[str, Tensor]
    ref: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    again: Callable[[int], Mapping[str, Tensor]]
    build: Callable[[Prepared, str], tuple[Graph, dict[str, Tensor]]]
    outputs: list[Any] = field(default_factory=list)

    def build_graph(self, op: str) -> tuple[Graph, dict[str, Tensor]]:
        """The graph of one direction and every tensor of it, on the CPU; results are fresh."""
        self.outputs.clear()
        return self.build(self, op)

    def output(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A NaN-filled result in its layout, between canaries."""
        made = layouts.output_like(shape, dtype, _layout(self.case, name, shape), margin=MARGIN, name=name)
        self.outputs.append(made)
        return made.tensor


def prepare(case: AnyCase) -> Prepared:
    """Operands on the CPU, and the answers. Costs the oracle and the yardstick."""
    return _attention(case) if isinstance(case, Attention) else _selection(case)


# ---- layouts -----------------------------------------------------------------------------------------------


def _layout(case: AnyCase, name: str, shape: Sequence[int]) -> Any:
    found = layout_of(case, name)
    if found is None:
        return layouts.LAYOUTS["row_major"]
    strides, offset = found
    # Where elements share an address nothing can be poisoned one by one.
    write = not any(s == 0 and n > 1 for s, n in zip(strides, shape, strict=True))
    name = f"{','.join(map(str, strides))}@{offset} {'one by one' if write else 'shared'}"
    return layouts.Layout(name, lambda shape: strides, offset, write=write)


@contextlib.contextmanager
def _known(case: Attention) -> Iterator[tuple[tuple[str, str], ...]]:
    """The case's layouts under names that the suite's table has meanwhile."""
    known = shapes(case)
    named = {name: _layout(case, name, known[name]) for name, _, _ in case.layouts}
    added = {x.name: x for x in named.values() if x.name not in layouts.LAYOUTS}
    layouts.LAYOUTS.update(added)
    try:
        yield tuple((name, x.name) for name, x in named.items())
    finally:
        for name in added:
            del layouts.LAYOUTS[name]


# ---- attention ---------------------------------------------------------------------------------------------

_INDEXES = (("seq_len_q", "len_q", 0), ("seq_len_kv", "len_kv", 1), ("cu_seqlens_q", "cu_q", 0), ("cu_seqlens_kv", "cu_kv", 1))
_SAME = ("dtype", "batch", "heads", "seqlens", "dims", "cu_q", "cu_kv", "scale", "causal", "align", "window", "softcap", "bias",
         "bias_dtype", "mask", "sink", "sink_values", "len_q", "len_kv", "dlse", "deterministic")


def suite_case(case: Attention, named: tuple[tuple[str, str], ...]) -> Any:
    """The suite's own record of the same call."""
    recipe = Recipe(seed=case.seed, q_scale=case.gain, masked_rows=case.masked_rows, bias_inf_rows=case.bias_inf_rows)
    return Case("random", **{name: getattr(case, name) for name in _SAME}, layouts=named, recipe=recipe)


def _attention(case: Attention) -> Prepared:
    with _known(case) as named:
        data = case_data.make(suite_case(case, named))
        for name, given, side in _INDEXES:
            if getattr(case, given) is not None:
                values = torch.tensor(getattr(case, given), dtype=getattr(torch, case.index[side]))
                data.views[name] = layouts.lay_out(values, _layout(case, name, values.shape))
    case_data._values.cache_clear()  # a run has thousands of cases, none of them twice
    plain = dict(data.plain.items())
    again = yardstick.Reordered(data.problem.q, data.problem.k, data.problem.v, data.problem.do, plain, {
        "dlse": data.problem.dlse, **data.problem.options})
    return Prepared(case, data.views, dict(data.ref.items()), plain, again, _attention_graph)


def _attention_graph(made: Prepared, op: str) -> tuple[Graph, dict[str, Tensor]]:
    case = made.case
    assert isinstance(case, Attention)
    record = suite_case(case, ())
    if op == "sdpa":
        return case_graphs.forward(record, made, stats=case.stats)
    return case_graphs.backward(record, made)


# ---- selection attention -----------------------------------------------------------------------------------


def _selection(case: Selection) -> Prepared:
    config = _config(case, "nsa_selection_backward")
    made = make_case(config)
    views = {name: layouts.lay_out(x, _layout(case, name, x.shape)) for name, x in made.operands.items()}
    return Prepared(case, views, made.answer, made.plain, _reordered_selection(config, made), _selection_graph)


def _reordered_selection(config: NsaConfig, made: Any) -> yardstick.Reordered:
    """Selection is dense attention under the mask that the block entries make; a packed batch is one problem."""
    def dense(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None] if config.packed else x

    def back(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1) if config.packed else x

    # What nobody may read is NaN, and the plain composition multiplies it by 0.
    low = {n: torch.nan_to_num(dense(x)) for n, x in made.operands.items() if n in ("q", "k", "v", "do", "dlse")}
    mask = selection_mask_of(config, made.operands).repeat_interleave(config.heads[1], 1)
    plain = {n: dense(x) for n, x in made.plain.items()}
    return yardstick.Reordered(low["q"], low["k"], low["v"], low["do"], plain,
                               {"dlse": low.get("dlse"), "mask": mask, "scale": config.scale}, back)


def _config(case: Selection, op: str) -> NsaConfig:
    return NsaConfig(
        f"random {case.seed}", op, case.dtype, case.batch, case.heads, case.seqlens, case.dims, case.block, case.slots,
        case.counts, case.hostile, case.packed, case.index, case.scale, case.gain, dlse=case.dlse,
        deterministic=case.deterministic)


_SELECTION_INPUTS = {"nsa_selection": ("q", "k", "v", "block_indices", "block_counts", "cu_seqlens")}


def _selection_graph(made: Prepared, op: str) -> tuple[Graph, dict[str, Tensor]]:
    case = made.case
    assert isinstance(case, Selection)
    g = Graph("random")
    tensors = {n: t for n, t in made.views.items() if n in _SELECTION_INPUTS.get(op, tuple(made.views))}
    handles = {n: case_graphs.declare(g, n, t) for n, t in tensors.items()}
    if op == "nsa_selection":
        handles.pop("dlse", None)
    for name, result in nsa_results(_config(case, op), g, handles).items():
        dtype = torch.float32 if name == "lse" else made.views["q"].dtype
        tensors[name] = made.output(name, tuple(made.ref[name].shape), dtype)
        case_graphs.hand_out(g, result, name, tensors[name])
    return g, tensors
