"""Selection operands whose elements lie more than 2**31 apart (flash-linear-attention#1080): 64-bit offsets everywhere.

A wrapped offset is a wrong number or signal 11, so each case is a process of its own. The buffers are address space of
which a few pages are touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from engines.triton import interpret

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
    import sys
    import torch
    from frost.graph import Graph
    FAR = (1 << 30) + 16
    keep = []

    def far(t, axis):
        strides = [1] * t.dim()
        for i in range(t.dim() - 2, -1, -1):
            strides[i] = strides[i + 1] * t.shape[i + 1]
        strides[axis] = FAR
        buffer = torch.empty((t.shape[axis] - 1) * FAR + t.numel(), dtype=t.dtype)
        keep.append(buffer)
        return buffer.as_strided(t.shape, strides).copy_(t)

    torch.manual_seed(0)
    x = {n: torch.randn(1, h, 3, 16, dtype=torch.float16) for n, h in (("q", 3), ("k", 3), ("v", 3), ("do", 3))}
    x["i"] = torch.zeros(1, 3, 3, 2, dtype=torch.int32)

    def run(x):
        g = Graph()
        t = {n: g.tensor(n, v.shape, stride=v.stride(), dtype=v.dtype, alignment=2) for n, v in x.items() if n != "do"}
        o, lse = g.nsa_selection(t["q"], t["k"], t["v"], t["i"], block_size=16, stats=True)
        g.output(o, name="o"); g.output(lse, name="lse")
        made = g.compile("cpu", engines=["triton"]).execute({n: x[n] for n in t})
        g = Graph()
        given = {**x, **made}
        t = {n: g.tensor(n, v.shape, stride=v.stride(), dtype=v.dtype, alignment=2) for n, v in given.items()}
        grads = g.nsa_selection_backward(t["q"], t["k"], t["v"], t["o"], t["do"], t["lse"], t["i"], block_size=16)
        for n, y in grads._asdict().items():
            g.output(y, name=n)
        return {**made, **g.compile("cpu", engines=["triton"]).execute(given)}

    near = run(x)
    name, axis = sys.argv[1], int(sys.argv[2])
    for n, y in run({**x, name: far(x[name], axis)}).items():
        assert torch.equal(y, near[n]), n
"""


@pytest.mark.skipif(interpret.unavailable_reason() is not None, reason=str(interpret.unavailable_reason()))
@pytest.mark.parametrize("name, axis", [("q", 2), ("q", 1), ("k", 2), ("v", 1), ("do", 2), ("i", 2), ("i", 1)])
def test_far_apart(name: str, axis: int) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FROST_CACHE_DIR": "off"}
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT), name, str(axis)], env=env, capture_output=True,
                         text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
