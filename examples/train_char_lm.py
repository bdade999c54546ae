"""Train a small GPT on Python's own standard library, once with frost.attention and once with plain torch.

    python examples/train_char_lm.py [--steps 150] [--plot PNG] [--device cpu|cuda]

Both runs start from the same weights and see the same batches, so their loss curves must lie on each other. Ends with
both final losses and PASS or FAIL, and with that as the exit code.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional as F

import frost

VOCAB, CONTEXT, BATCH, LAYERS, HEADS, WIDTH = 128, 96, 12, 2, 4, 96
TEXT_BYTES = 2_000_000
LEARNING_RATE, WARMUP = 3e-3, 20
SHOWN_ROWS = 10
# Two attentions round differently: 1e-6 in the loss within 150 steps in fp32. A scale that is off by half shows as 0.05.
MAX_DIFFERENCE = 2e-3

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
console = Console()


def frost_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return frost.attention(q, k, v, causal=True)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -math.inf)
    return scores.softmax(-1) @ v


class Block(nn.Module):
    """Pre-norm attention and MLP. q, k and v are slices of one projection, used in place."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.project_in, self.project_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.project_in(self.norms[0](x)).view(b, s, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.project_out(self.attend(q, k, v).transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.mlp(self.norms[1](x))


class CharGPT(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())


def read_text() -> Tensor:
    """ASCII codes of the standard library's sources, in a fixed order."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= TEXT_BYTES:
            break
    if len(data) < 10 * CONTEXT:
        raise SystemExit("the standard library's sources are not on this machine, so there is no text to train on")
    return torch.frombuffer(data[:TEXT_BYTES], dtype=torch.uint8).long().clamp(max=VOCAB - 1)


def train(attend: Attend, text: Tensor, steps: int, device: str, tick: Callable[[float], None]) -> list[float]:
    """The loss of every step. Weights and batches depend on nothing but the seeds."""
    torch.manual_seed(0)
    model = CharGPT(attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / WARMUP))
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=draw)
        window = text[starts + torch.arange(CONTEXT + 1)].to(device)
        loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        tick(losses[-1])
    return losses


def show(curves: dict[str, list[float]]) -> None:
    """Both curves as rows of numbers and bars."""
    first, second = curves.values()
    console.print(f"{'step':>5} {'frost':>8} {'torch':>8} {'difference':>11}")
    stride = max(1, len(first) // SHOWN_ROWS)
    for at in sorted({*range(0, len(first), stride), len(first) - 1}):
        bar = "█" * round(8 * first[at])
        console.print(f"{at + 1:>5} {first[at]:>8.4f} {second[at]:>8.4f} {abs(first[at] - second[at]):>11.1e} {bar}")


def plot(curves: dict[str, list[float]], path: Path) -> str:
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, losses), style in zip(curves.items(), ("-", "--")):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name)
    axes.set(xlabel="step", ylabel="cross entropy (nats per character)", title="character GPT on the standard library")
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"plot: {path}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--plot", type=Path, default=Path(__file__).parent / "output" / "char_lm.png",
                        help="where the loss curves go (default: examples/output/char_lm.png)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: given {args.steps}, expected 1 or more")

    text = read_text()
    console.print(f"{len(text):,} characters of the standard library; {LAYERS} layers, {HEADS} heads, width {WIDTH}, "
                  f"context {CONTEXT}, batch {BATCH}; {args.steps} steps on {args.device}")
    curves: dict[str, list[float]] = {}
    columns = (TextColumn("{task.description:>16}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TextColumn("loss {task.fields[loss]:.3f}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name, attend in (("frost.attention", frost_attention), ("plain torch", plain_attention)):
            task = progress.add_task(name, total=args.steps, loss=math.nan)
            began = time.perf_counter()
            curves[name] = train(attend, text, args.steps, args.device,
                                 lambda loss, task=task: progress.update(task, advance=1, loss=loss))
            progress.console.print(f"{name}: {(time.perf_counter() - began) / args.steps * 1e3:.0f} ms per step")
    show(curves)
    console.print(f"served by: {dict(frost.routing.stats())}", markup=False)
    console.print(plot(curves, args.plot), markup=False)

    ours, theirs = curves.values()
    apart = max(abs(a - b) for a, b in zip(ours, theirs))
    good = apart <= MAX_DIFFERENCE and ours[-1] < ours[0]
    console.print(f"{'PASS' if good else 'FAIL'} train_char_lm: final loss {ours[-1]:.4f} with frost.attention, "
                  f"{theirs[-1]:.4f} with plain torch, never further apart than {apart:.1e}", markup=False, soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
