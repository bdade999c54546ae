"""FROST in two minutes: build a graph, see its routes, run it, and hold every engine to the fp64 oracle.

    python examples/quickstart.py [--device cpu|cuda]

Ends with one line that says PASS or FAIL, and with that as the exit code.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import frost
from engines import registry
from engines.reference.plain import allowed_error, plain_composition

BATCH, HEADS_Q, HEADS_KV, SEQLEN, HEAD_DIM = 2, 4, 2, 48, 32
WINDOW = (16, None)
GRADS = ("q", "k", "v")

console = Console()


def build(dtype: str) -> frost.Graph:
    """Causal sliding-window attention with grouped heads. q and o are [B, S, H, D] buffers: read and written in place."""
    bshd = (SEQLEN * HEADS_Q * HEAD_DIM, HEAD_DIM, HEADS_Q * HEAD_DIM, 1)
    g = frost.Graph("quickstart")
    q = g.tensor("q", (BATCH, HEADS_Q, SEQLEN, HEAD_DIM), stride=bshd, dtype=dtype)
    k = g.tensor("k", (BATCH, HEADS_KV, SEQLEN, HEAD_DIM), dtype=dtype)
    v = g.tensor("v", (BATCH, HEADS_KV, SEQLEN, HEAD_DIM), dtype=dtype)
    o, lse = g.sdpa(q, k, v, causal=True, window=WINDOW, stats=True)
    g.output(o, name="o", stride=bshd)
    g.output(lse, name="lse")
    return g


def make_buffers(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)

    def buffer(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(device, dtype)

    return {"q": buffer(BATCH, SEQLEN, HEADS_Q, HEAD_DIM).transpose(1, 2), "k": buffer(BATCH, HEADS_KV, SEQLEN, HEAD_DIM),
            "v": buffer(BATCH, HEADS_KV, SEQLEN, HEAD_DIM), "d_o": buffer(BATCH, SEQLEN, HEADS_Q, HEAD_DIM).transpose(1, 2)}


def run(dtype: str, buffers: dict[str, torch.Tensor], engines: list[str] | None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Forward and derived backward on the given engines: o, lse and gradients by name, and the engines that served."""
    device = buffers["q"].device
    forward = build(dtype)
    backward = frost.backward_graph(forward, wrt=GRADS)
    plans = [g.compile(device, engines=engines) for g in (forward, backward)]
    results = plans[0].execute({name: buffers[name] for name in GRADS})
    known = {**buffers, **results, "d_lse": torch.zeros_like(results["lse"])}
    results |= plans[1].execute({t.name: known[t.name] for t in backward.inputs})
    return {name.replace("_", ""): x for name, x in results.items()}, [r.engine for p in plans for r in p.routes]


def compare(device: str, dtype: str) -> bool:
    """One row per engine: where it ran, and its largest error as a share of what the tolerance rule allows."""
    buffers = make_buffers(device, getattr(torch, frost.DType.parse(dtype).torch_name))
    wide = {name: x.double() for name, x in buffers.items()}
    oracle, _ = run("fp64", wide, ["reference"])
    plain = plain_composition(buffers["q"], buffers["k"], buffers["v"], do=buffers["d_o"], causal=True, window=WINDOW)
    table = Table(title=f"{dtype} on {device}: error against the fp64 oracle, as a share of what rounding allows",
                  box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("engines=", "forward", "backward", *oracle, "verdict"):
        table.add_column(column, no_wrap=True)
    good, declined = True, []
    for names in (None, *([name] for name in registry.names())):
        label = "default" if names is None else names[0]
        try:
            got, served = run(dtype, buffers, names)
        except frost.NotSupportedError as e:
            declined += [f"{label} declines: {reason}" for reason in e.reasons[label]]
            continue
        shares = [((got[n].double() - ref).abs() / allowed_error(n, ref, plain[n], oracle["lse"])).max().item()
                  for n, ref in oracle.items()]
        ok = all(share <= 1 for share in shares)  # a NaN is no share
        good &= ok
        table.add_row(label, *served, *(f"{share:.2f}" for share in shares), "[green]PASS" if ok else "[red]FAIL")
    console.print(table)
    for line in declined:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device

    console.rule("[bold]the graph")
    graph = build("fp32")
    console.print(graph.to_text(), highlight=False, markup=False)
    console.rule("[bold]where it goes, and why")
    console.print(graph.compile(device).explain(), highlight=False, markup=False, soft_wrap=True)
    console.rule("[bold]what comes out")
    verdicts = [compare(device, dtype) for dtype in ("fp32", "bf16")]
    good = all(verdicts)

    console.rule("[bold]the same as a function")
    q, k, v = (make_buffers(device, torch.float32)[name].requires_grad_() for name in GRADS)
    frost.attention(q, k, v, causal=True, window=WINDOW).sum().backward()
    console.print(f"frost.attention(q, k, v, causal=True, window={WINDOW}).sum().backward()", markup=False)
    console.print(f"frost.routing.stats(): {dict(frost.routing.stats())}", markup=False, soft_wrap=True)
    console.print("[bold green]PASS" if good else "[bold red]FAIL", "quickstart: every engine that served agrees with the "
                  "oracle" if good else "quickstart: an engine is off, see the table")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
