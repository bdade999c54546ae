"""Packed training batches: sequences of any length side by side, no padding, one plan for all of them.

    python examples/varlen_packing.py [--steps 8] [--device cpu|cuda]

Every step packs other documents: another token total, other lengths, another number of sequences, an empty one among
them. The counters show that plans are built in the first step only, and each result is compared with attention run on
every document by itself. Ends with PASS or FAIL, and with that as the exit code.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import frost

HEADS_Q, HEADS_KV, HEAD_DIM, MAX_SEQLEN = 4, 2, 32, 96
TOLERANCE = 1e-4

console = Console()


def pack(lengths: Tensor, device: str, seed: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v of the packed tokens ([T, H, D], leaves), and the offsets of the sequences ([B + 1])."""
    made = torch.Generator().manual_seed(seed)
    total = int(lengths.sum())
    leaves = [torch.randn(total, heads, HEAD_DIM, generator=made).to(device).requires_grad_()
              for heads in (HEADS_Q, HEADS_KV, HEADS_KV)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return leaves, offsets.to(device, torch.int32)


def one_by_one(leaves: list[Tensor], offsets: list[int]) -> Tensor:
    """The same attention document by document, in plain torch."""
    rows = []
    for start, stop in itertools.pairwise(offsets):
        q, k, v = (x[start:stop].transpose(0, 1) for x in leaves)
        k, v = (x.repeat_interleave(HEADS_Q // HEADS_KV, 0) for x in (k, v))
        future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.mT * HEAD_DIM ** -0.5).masked_fill(future, -torch.inf)
        rows.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(rows)


def step(number: int, device: str) -> tuple[tuple[str, ...], float, int]:
    """What the table shows, the largest difference in o and the gradients, and the plans built by the packed calls."""
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, MAX_SEQLEN + 1, (3 + number % 3,), generator=draw)
    lengths[number % len(lengths)] = 0
    leaves, offsets = pack(lengths, device, number)
    before = frost.cache.info()
    o = frost.attention(*leaves, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=MAX_SEQLEN,
                        max_seqlen_kv=MAX_SEQLEN, causal=True)
    weights = torch.linspace(-1, 1, o.numel(), device=device).view(o.shape)
    grads = torch.autograd.grad((o * weights).sum(), leaves)
    after = frost.cache.info()
    want = one_by_one(leaves, offsets.tolist())
    expected = torch.autograd.grad((want * weights).sum(), leaves)
    off = max((a - b).abs().max().item() for a, b in zip((o, *grads), (want, *expected)))
    built = after.plans_built - before.plans_built
    row = (str(number), str(o.shape[0]), " ".join(map(str, lengths.tolist())), str(built),
           str(after.kernels_compiled - before.kernels_compiled), str(after.hits - before.hits), f"{off:.1e}")
    return row, off, built


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps: given {args.steps}, expected 2 or more, to see a plan used again")

    table = Table(title="packed batches, forward and backward", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("step", "tokens", "lengths", "plans built", "kernels compiled", "plan hits", "max diff"):
        table.add_column(column)
    rows = [step(number, args.device) for number in range(args.steps)]
    for row, _, _ in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"served by: {dict(frost.routing.stats())}", markup=False, soft_wrap=True)

    built = [n for _, _, n in rows]
    right = all(off <= TOLERANCE for _, off, _ in rows)
    once = built[0] == 2 and not any(built[1:])  # one forward and one backward
    console.print(f"{'PASS' if right and once else 'FAIL'} varlen_packing: {args.steps} batches, plans built per step "
                  f"{built}, largest difference {max(off for _, off, _ in rows):.1e}", soft_wrap=True)
    return 0 if right and once else 1


if __name__ == "__main__":
    sys.exit(main())
