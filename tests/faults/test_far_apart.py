"""Elements more than 2**31 apart: offsets in 64 bits wherever stride x index can pass that.

A wrapped 32-bit offset is a wrong number where the address happens to be mapped and signal 11 where it is
not, so each case runs in a process of its own. The buffers are 4 GiB of address space, of which a few pages
are ever touched. """

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from descriptors import TensorDesc
from engines import registry
from engines.base import Target
from engines.triton.adapter_bwd import backward_params
from engines.triton.adapter_fwd import forward_params

ROOT = Path(__file__).resolve().parents[2]

# Just below 2**31 in elements for each single stride, so that it is typed as 32 bits; twice that is beyond.
FAR = (1 << 30) + 16

SCRIPT = """
    import sys
    import torch
    from cases import run
    engine, op = sys.argv[1:3]
    FAR = (1 << 30) + 16
    keep = []

    def far(t):
        # [1, 1, S, D] or [1, 1, S] with rows FAR elements apart
        strides = [2 * FAR, 2 * FAR, FAR] + [1] * (t.dim() - 3)
        size = (t.shape[2] - 1) * FAR + (t.shape[3] if t.dim() == 4 else 1)
        buffer = torch.empty(size, dtype=t.dtype)
        keep.append(buffer)
        return buffer.as_strided(t.shape, strides).copy_(t)

    torch.manual_seed(0)
    half = torch.float16
    q, k, v, do = (torch.randn(1, 1, 3, 8, dtype=half) for _ in range(4))
    t = {"q": q, "k": k, "v": v, "do": do}
    t.update(bias=torch.randn(1, 1, 3, 3, dtype=half), dlse=torch.randn(1, 1, 3))

    def call(t, out, far_name):
        options = {"bias": t["bias"], "causal": True}
        if op == "sdpa":
            return run.forward(engine, t["q"], t["k"], t["v"], out=out, **options)
        f = run.forward("reference", q, k, v, bias=t["bias"].clone(), causal=True)
        o, lse = (far(f[n]) if n == far_name else f[n] for n in ("o", "lse"))
        options["dlse"] = t["dlse"]
        return run.backward(engine, t["q"], t["k"], t["v"], o, t["do"], lse, out=out, **options)

    near = {n: x.clone() for n, x in call(t, {}, "").items()}
    for far_name in sys.argv[3:]:
        print(far_name, flush=True)
        mine, out = dict(t), {}
        if far_name in t:
            mine[far_name] = far(t[far_name])
        elif far_name in near:
            out = {far_name: far(torch.full_like(near[far_name], float("nan")))}
        got = call(mine, out, far_name)
        for name, x in near.items():
            assert torch.equal(got[name], x), name
    print("equal")
"""

OPERANDS = {
    "sdpa": ("q", "k", "v", "bias", "o", "lse"),
    "sdpa_backward": ("q", "k", "v", "bias", "do", "o", "lse", "dlse", "dq", "dk", "dv", "dbias"),
}


def enough_address_space() -> bool:
    """Whether 4 GiB that are never touched can be had here."""
    import torch

    try:
        torch.empty(2 * FAR + 8, dtype=torch.float16)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("engine", ["triton", "reference"])
@pytest.mark.parametrize("op", OPERANDS)
def test_rows_far_apart_give_what_copies_give(op: str, engine: str) -> None:
    """flash-linear-attention#1080: a tensor needs no 2**31 elements, a large stride is enough. One operand at
    a time; the process says which one it is at."""
    missing = registry.get(engine).unavailable(Target.cpu())
    if missing is not None:
        pytest.skip(str(missing))
    if not enough_address_space():
        pytest.skip("this machine grants no 4 GiB of address space")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), engine, op, *OPERANDS[op]],
        cwd=ROOT,
        timeout=250,
        text=True,
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    said = done.stdout.split()
    assert done.returncode == 0, (
        f"exit status {done.returncode} (-11 is a wrapped address) at {said[-1:]}\n{done.stderr[-2000:]}"
    )
    assert said == [*OPERANDS[op], "equal"]


# ---- what is decided at plan time ------------------------------------------------------------------------


def test_the_largest_offset_decides() -> None:
    def far(stride: int) -> TensorDesc:
        return TensorDesc.make((1, 1, 3, 8), "fp16", (3 * stride, 3 * stride, stride, 1))

    assert not far((2**31 - 8) // 2).needs_int64
    assert far((2**31 - 8) // 2 + 1).needs_int64
    assert far(FAR).needs_int64 and far(FAR).max_offset == 2 * FAR + 7


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "lse", "bias", "do", "dlse", "dq", "dk", "dv", "dbias"])
def test_one_far_operand_takes_the_wide_path(name: str) -> None:
    """In forward and backward; near ones do not."""
    from cases.small import Spec

    from frost.fuse import fuse

    backward = name in ("do", "dlse", "dq", "dk", "dv", "dbias")
    spec = Spec(
        op="sdpa_backward" if backward else "sdpa",
        heads=(1, 1),
        batch=1,
        seqlens=(3, 3),
        bias=(1, 1, 3, 3),
        dlse=backward,
        dbias=backward,
    )
    rank = 3 if name in ("lse", "dlse") else 4
    stride = (3 * FAR, 3 * FAR, FAR, 1)[:rank]
    params = backward_params if backward else forward_params
    for target in (Target.cpu(), Target.cuda((9, 0))):
        assert not params(fuse(spec.build()).steps[0].desc, target).wide
        assert params(fuse(spec.but(strides={name: stride}).build()).steps[0].desc, target).wide
