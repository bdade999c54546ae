"""Buffers of a case: values, layouts, and NaN wherever an engine has no business reading."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import layouts
import oracle
import torch
from oracle import Answer, Problem
from torch import Tensor

from cases.model import Case

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
TENSOR_OPTIONS = ("bias", "mask", "sink", "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv")


@dataclass
class Data:
    """A case's buffers. `views` go to the engine; `problem` holds the same logical values, contiguous and
    clean."""

    case: Case
    views: dict[str, Tensor]
    problem: Problem
    ref: Answer
    plain: Answer
    _outputs: list[layouts.CanaryBuffer] = field(default_factory=list)

    def output(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A NaN-filled buffer in the case's layout for `name`, between canaries that `check_canaries` looks
        at."""
        made = layouts.output_like(shape, dtype, self.case.layout(name), name=name)
        self._outputs.append(made)
        return made.tensor

    def check_canaries(self) -> None:
        layouts.check_canaries(*self._outputs)


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Logical shapes of the operands and results that are not optional, and of lse."""
    (hq, hk), (sq, sk), (d, dv) = case.heads, case.seqlens, case.dims
    if case.packed:
        return {"q": (sq, hq, d), "k": (sk, hk, d), "v": (sk, hk, dv), "o": (sq, hq, dv), "lse": (sq, hq)}
    b = case.batch
    return {
        "q": (b, hq, sq, d),
        "k": (b, hk, sk, d),
        "v": (b, hk, sk, dv),
        "o": (b, hq, sq, dv),
        "lse": (b, hq, sq),
    }


def lse_dtype(case: Case) -> torch.dtype:
    return torch.float64 if case.dtype == "fp64" else torch.float32


def make(case: Case) -> Data:
    """Fresh buffers on every call (an engine may spoil them); values and oracle answers are computed once a
    process."""
    values, ref, plain = _values(case)
    views = {name: layouts.lay_out(x, case.layout(name)) for name, x in values.items()}
    if case.recipe.poison:
        _poison(case, views)
    # A backward starts from the same saved forward as its yardstick (see engines/reference/plain.py).
    views["o"] = layouts.lay_out(plain.o, case.layout("o"))
    views["lse"] = layouts.lay_out(plain.lse.to(lse_dtype(case)), case.layout("lse"))
    return Data(case, views, _problem(case, values), ref, plain)


@lru_cache(maxsize=64)
def _values(case: Case) -> tuple[dict[str, Tensor], Answer, Answer]:
    gen = torch.Generator().manual_seed(1000 + case.recipe.seed)
    dtype, recipe, shape = DTYPES[case.dtype], case.recipe, shapes(case)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen, dtype=torch.float64)

    values = {
        "q": (normal(*shape["q"]) * recipe.q_scale).to(dtype),
        "k": (normal(*shape["k"]) * recipe.k_scale + recipe.k_offset).to(dtype),
        "v": (normal(*shape["v"]) * recipe.v_scale).to(dtype),
        "do": normal(*shape["o"]).to(dtype),
    }
    if case.dlse:
        values["dlse"] = normal(*shape["lse"]).to(lse_dtype(case))
    if case.bias is not None:
        bias = normal(*case.bias).to(DTYPES[case.bias_dtype or case.dtype])
        bias[..., list(recipe.bias_inf_rows), :] = -math.inf
        values["bias"] = bias
    if case.mask is not None:
        mask = torch.rand(*case.mask, generator=gen) < 0.7
        mask[..., list(recipe.masked_rows), :] = False
        values["mask"] = mask
    if case.sink is not None:
        sink = normal(case.heads[0]) if case.sink_values is None else torch.tensor(case.sink_values)
        values["sink"] = sink.to(DTYPES[case.sink])
    for name, given in (
        ("seq_len_q", case.len_q),
        ("seq_len_kv", case.len_kv),
        ("cu_seqlens_q", case.cu_q),
        ("cu_seqlens_kv", case.cu_kv),
    ):
        if given is not None:
            values[name] = torch.tensor(given, dtype=DTYPES[case.index_dtype])
    # Where a layout makes elements share an address, what is in it then is the value.
    values = {
        name: layouts.lay_out(x, case.layout(name)).clone(memory_format=torch.contiguous_format)
        for name, x in values.items()
    }
    problem = _problem(case, values)
    return values, oracle.reference(problem), oracle.plain_composition(problem)


def _problem(case: Case, values: dict[str, Tensor]) -> Problem:
    options: dict[str, Any] = {name: values[name] for name in TENSOR_OPTIONS if name in values}
    options.update(
        scale=case.scale,
        causal=case.causal,
        align_bottom_right=case.align == "bottom_right",
        window=case.window,
        softcap=case.softcap,
    )
    return Problem(values["q"], values["k"], values["v"], values["do"], values.get("dlse"), options)


# ---- who sees what -----------------------------------------------------------------------------------------


def sequences(case: Case) -> Iterator[tuple[int, range, range]]:
    """(sequence, rows, keys) that are no padding: indices along the sequence axis of q and of k."""
    for b in range(case.sequences):
        spans = []
        for cu, lengths, extent in (
            (case.cu_q, case.len_q, case.seqlens[0]),
            (case.cu_kv, case.len_kv, case.seqlens[1]),
        ):
            start, stop = (0, extent) if cu is None else (cu[b], cu[b + 1])
            if lengths is not None:
                stop = min(stop, start + lengths[b])
            spans.append(range(start, stop))
        yield b, spans[0], spans[1]


def visible(case: Case, b: int, n_q: int, n_kv: int, mask: Tensor | None) -> Tensor:
    """[Hq, n_q, n_kv]: the pairs of one sequence that the mask options leave."""
    keep = oracle.naive_mask(n_q, n_kv, case.causal, case.align == "bottom_right", case.window)
    keep = keep.expand(case.heads[0], n_q, n_kv)
    if mask is None:
        return keep
    full = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    full = full[b if full.shape[0] > 1 else 0]
    full = full[:, :n_q] if full.shape[1] > 1 else full
    full = full[..., :n_kv] if full.shape[2] > 1 else full
    return keep & full.expand(
        full.shape[0],
        n_q if full.shape[1] == 1 else full.shape[1],
        n_kv if full.shape[2] == 1 else full.shape[2],
    )


def _poison(case: Case, views: dict[str, Tensor]) -> None:
    """NaN in every row of q and dO, and every key of k and v, that no pair needs. An operand whose elements
    share addresses is left alone."""
    rows_used = torch.zeros(shapes(case)["lse"], dtype=torch.bool)
    rows_seeing = rows_used.clone()
    keys_seen = torch.zeros(shapes(case)["k"][:-1], dtype=torch.bool)
    hk, group = case.heads[1], case.heads[0] // max(1, case.heads[1])
    for b, rows, keys in sequences(case):
        keep = visible(case, b, len(rows), len(keys), views.get("mask"))
        seen = (
            keep.reshape(hk, group, *keep.shape[1:]).any(1).any(1)
            if keep.numel()
            else keep.new_zeros(hk, len(keys))
        )
        at_q, at_k = (slice(r.start, r.stop) for r in (rows, keys))
        if case.packed:
            rows_used[at_q], rows_seeing[at_q], keys_seen[at_k] = True, keep.any(-1).T, seen.T
        else:
            rows_used[b, :, at_q], rows_seeing[b, :, at_q], keys_seen[b, :, at_k] = True, keep.any(-1), seen
    # With a sink even an empty row has a gradient to pass on.
    needed = {
        "q": rows_used,
        "do": rows_seeing if case.sink is None else rows_used,
        "k": keys_seen,
        "v": keys_seen,
        "dlse": rows_used,
    }
    for name, mask in needed.items():
        view = views.get(name)
        if view is not None and layouts.LAYOUTS[case.layout(name)].write:
            view[~mask] = math.nan
