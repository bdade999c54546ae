"""What the right answer is, three times over.

`reference` is the engines' reference run in fp64: the oracle. `naive` says the same with einsum, explicit masks and
torch's autograd, sharing no code with it: what the oracle itself is tested against. `plain_composition` is an ordinary
low-precision implementation, whose error sets the scale of the allowed error (see compare.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from engines.reference import plain
from engines.reference.sdpa import sdpa_backward, sdpa_forward

GRADS = ("dq", "dk", "dv", "dbias", "dsink")


@dataclass
class Problem:
    """Inputs and options of one attention call, as `sdpa_forward` takes them; `do` and `dlse` for its backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None = None
    dlse: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def want(self) -> tuple[str, ...]:
        """Every gradient that exists for these operands."""
        given = {"dbias": self.options.get("bias"), "dsink": self.options.get("sink")}
        return tuple(name for name in GRADS if name not in given or given[name] is not None)

    def cast(self, dtype: torch.dtype) -> Problem:
        """The same values in another dtype; lengths, offsets and boolean masks stay as they are."""
        def to(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        return Problem(*(to(getattr(self, f.name)) for f in fields(self)[:5]),
                       options={name: to(x) for name, x in self.options.items()})


@dataclass
class Answer:
    """o, lse and the gradients that were asked for (None otherwise)."""

    o: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsink: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return ((f.name, x) for f in fields(self) if (x := getattr(self, f.name)) is not None)


def reference(problem: Problem, **how: Any) -> Answer:
    """The oracle: the reference engine's formulas in fp64. `how` goes to the reference (host_reads)."""
    wide = problem.cast(torch.float64)
    o, lse = sdpa_forward(wide.q, wide.k, wide.v, **wide.options, **how)
    if wide.do is None:
        return Answer(o, lse)
    grads = sdpa_backward(wide.q, wide.k, wide.v, o, wide.do, lse, dlse=wide.dlse, want=problem.want,
                          **wide.options, **how)
    return Answer(o, lse, *grads)


# ---- the independent formulation -------------------------------------------------------------------------------


def naive(problem: Problem) -> Answer:
    """fp64, the whole score matrix of each sequence, gradients by autograd. Inputs must be finite (sinks may be inf)."""
    wide = problem.cast(torch.float64)
    options = dict(wide.options)
    leaves = [x.detach().clone().requires_grad_() for x in (wide.q, wide.k, wide.v)]
    extra = {name: options[name].detach().clone().requires_grad_()
             for name in ("bias", "sink") if options.get(name) is not None}
    options.update(extra)
    o, lse = naive_forward(*leaves, **options)
    if wide.do is None:
        return Answer(o.detach(), lse.detach())
    loss = (o * wide.do).sum()
    if wide.dlse is not None:
        finite = torch.isfinite(lse)
        loss = loss + (torch.where(finite, lse, 0.0) * wide.dlse).sum()
    inputs = [*leaves, *extra.values()]
    # An input that nothing depends on (no key at all, say) has a zero gradient.
    found = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else [None] * len(inputs)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found)]
    named = dict(zip(("dq", "dk", "dv", *("d" + name for name in extra)), grads))
    return Answer(o.detach(), lse.detach(), **named)


def naive_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Differentiable attention, one (sequence, head) at a time."""
    cu_q, cu_kv = options.pop("cu_seqlens_q", None), options.pop("cu_seqlens_kv", None)
    len_q, len_kv = options.pop("seq_len_q", None), options.pop("seq_len_kv", None)
    bias, mask, sink = (options.pop(name, None) for name in ("bias", "mask", "sink"))
    packed = cu_q is not None
    if not packed:
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    heads, group = q.shape[-2], q.shape[-2] // max(1, k.shape[-2])
    rows_o = q.new_zeros(*q.shape[:-1], v.shape[-1])
    rows_lse = q.new_full(q.shape[:-1], -math.inf)
    batch = cu_q.numel() - 1 if packed else q.shape[0]
    for b in range(batch):
        at_q = _where(b, cu_q, len_q, q.shape[-3])
        at_kv = _where(b, cu_kv, len_kv, k.shape[-3])
        for h in range(heads):
            n_q, n_kv = len(at_q), len(at_kv)
            pick_q, pick_kv = ((at_q, h), (at_kv, h // group)) if packed else ((b, at_q, h), (b, at_kv, h // group))
            o, lse = _naive_head(
                q[pick_q], k[pick_kv], v[pick_kv], _pick(bias, b, h, n_q, n_kv), _pick(mask, b, h, n_q, n_kv),
                None if sink is None else sink[h], **options)
            rows_o = _put(rows_o, pick_q, o)
            rows_lse = _put(rows_lse, pick_q, lse)
    return (rows_o, rows_lse) if packed else (rows_o.permute(0, 2, 1, 3), rows_lse.permute(0, 2, 1))


def _where(b: int, cu: Tensor | None, lengths: Tensor | None, extent: int) -> Tensor:
    start, stop = (0, extent) if cu is None else (int(cu[b]), int(cu[b + 1]))
    if lengths is not None:
        stop = min(stop, start + int(lengths[b]))
    return torch.arange(start, stop)


def _pick(x: Tensor | None, b: int, h: int, n_q: int, n_kv: int) -> Tensor | None:
    if x is None:
        return None
    x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
    x = x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]
    x = x[:n_q] if x.shape[0] != 1 else x
    return (x[:, :n_kv] if x.shape[1] != 1 else x).expand(n_q, n_kv)


def _put(x: Tensor, where: Any, value: Tensor) -> Tensor:
    return x.index_put(tuple(torch.as_tensor(w) for w in where), value)


def _naive_head(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, sink: Tensor | None, *,
    scale: float | None = None, causal: bool = False, align_bottom_right: bool = False,
    window: tuple[int | None, int | None] = (None, None), softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One head of one sequence: q [Sq, D], k [Sk, D], v [Sk, Dv]."""
    n_q, n_kv = q.shape[0], k.shape[0]
    s = torch.einsum("id,jd->ij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    keep = naive_mask(n_q, n_kv, causal, align_bottom_right, window)
    keep = keep if mask is None else keep & mask
    keep = keep & (s != -math.inf)
    # Empty rows are taken apart before the softmax: a NaN made there would come back in the backward as 0 * NaN.
    some = keep.any(-1)
    s = torch.where(keep, s, torch.where(some, -math.inf, 0.0)[:, None])
    lse = torch.logsumexp(s, -1) if n_kv else s.sum(-1)
    lse = torch.where(some, lse, -math.inf)
    if sink is not None:
        lse = torch.where(some, torch.logaddexp(torch.where(some, lse, 0.0), sink), sink.expand(n_q))
    safe = torch.where(some, lse, 0.0)
    p = torch.where(keep & some[:, None], torch.exp(s - safe[:, None]), 0.0)
    return torch.einsum("ij,jd->id", p, v), lse


def naive_mask(n_q: int, n_kv: int, causal: bool, bottom_right: bool, window: tuple[int | None, int | None]) -> Tensor:
    """Pair by pair, straight from the definition."""
    left, right = window
    right = 0 if causal else right
    i, j = torch.arange(n_q)[:, None] + (n_kv - n_q if bottom_right else 0), torch.arange(n_kv)[None, :]
    keep = torch.ones(n_q, n_kv, dtype=torch.bool)
    if left is not None:
        keep = keep & (j >= i - left)
    return keep if right is None else keep & (j <= i + right)


# ---- the low-precision yardstick --------------------------------------------------------------------------


def plain_composition(problem: Problem, saved: tuple[Tensor, Tensor] | None = None) -> Answer:
    """What an ordinary implementation in the io dtype of `problem.q` makes of the same inputs; `saved` is the (o, lse)
    that a backward under test was given."""
    return Answer(**plain.plain_composition(
        problem.q, problem.k, problem.v, do=problem.do, dlse=problem.dlse, saved=saved, **problem.options))
