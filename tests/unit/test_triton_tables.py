"""Every row of the Triton engine's tile tables, compiled for every class of card without one: that it compiles, fits the card's
shared memory, and spills no more registers than is known.

`make test-kernels` runs these. Head dims, types and options are chosen so that every row is picked by a case of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from descriptors import MaskDesc, SdpaBwdDesc, SdpaDesc, TensorDesc
from engines.base import Target
from engines.triton import configs, configs_bwd, runtime
from engines.triton.adapter_bwd import SdpaBwdExecutable
from engines.triton.adapter_fwd import SdpaFwdExecutable, forward_params
from engines.triton.launching import Kernel

ARCHS = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_120": (12, 0)}
HEAD_DIMS = {"bf16": (32, 64, 128, 256), "fp32": (64, 128, 256)}


@dataclass(frozen=True)
class Options:
    """What a kernel is specialised on beyond types and head dim."""

    name: str
    band: MaskDesc = field(default_factory=MaskDesc)
    softcap: float | None = None
    mask: bool = False
    bias: tuple[int, int] | None = None     # extents of its last two axes
    sink: bool = False


ROWS, COLS = 300, 200
CAUSAL = MaskDesc(causal=True)
OPTIONS = {o.name: o for o in (
    Options("full"), Options("causal", CAUSAL), Options("window-softcap-sink", MaskDesc(causal=True, left=64), 30.0, sink=True),
    Options("mask", CAUSAL, mask=True), Options("bias", bias=(ROWS, COLS)),
    Options("bias-of-keys", CAUSAL, bias=(1, COLS)), Options("bias-of-rows", bias=(ROWS, 1)),
)}
FORWARD_OPTIONS = tuple(n for n in OPTIONS if not n.startswith("bias-"))

# Most bytes of local memory by (kernel, dtype, head dim), where there are any: a debt, written down so that it can only
# shrink. On sm_90 none is wanted. Those of Triton 3.6's assembler; another one allots registers in its own way.
KNOWN_SPILLS: dict[str, dict[tuple[str, str, int], int]] = {
    "sm_80": {
        ("sdpa_fwd", "bf16", 128): 24, ("sdpa_fwd", "fp32", 64): 24, ("sdpa_fwd", "fp32", 128): 8,
        ("bwd_dkdv", "bf16", 64): 8, ("bwd_bias_tile", "bf16", 64): 8, ("bwd_dkdv", "bf16", 128): 24,
        ("bwd_dq", "bf16", 128): 8, ("bwd_dkdv", "fp32", 64): 8, ("bwd_dkdv", "fp32", 128): 32,
        ("bwd_dkdv", "fp32", 256): 16, ("bwd_dq", "fp32", 256): 216,
    },
    "sm_90": {
        ("sdpa_fwd", "bf16", 256): 40, ("sdpa_fwd", "fp32", 64): 16, ("sdpa_fwd", "fp32", 256): 16,
        ("bwd_dq", "bf16", 64): 16, ("bwd_dkdv", "bf16", 64): 80, ("bwd_bias_tile", "bf16", 64): 8,
        ("bwd_dkdv", "bf16", 128): 120, ("bwd_dkdv", "bf16", 256): 392, ("bwd_dkdv", "fp32", 64): 16,
        ("bwd_dkdv", "fp32", 128): 24, ("bwd_dq", "fp32", 128): 8, ("bwd_bias_cols", "fp32", 128): 8,
        ("bwd_dq", "fp32", 256): 240, ("bwd_bias_tile", "fp32", 256): 16,
    },
    "sm_120": {
        ("sdpa_fwd", "bf16", 128): 64, ("sdpa_fwd", "fp32", 256): 24, ("bwd_dkdv", "bf16", 32): 8,
        ("bwd_dkdv", "bf16", 64): 16, ("bwd_pre", "bf16", 128): 8, ("bwd_dkdv", "bf16", 128): 24,
        ("bwd_dq", "bf16", 128): 8, ("bwd_dkdv", "fp32", 64): 16, ("bwd_bias_cols", "fp32", 128): 8,
        ("bwd_dq", "fp32", 256): 232,
    },
}


# Kernels that need more shared memory than the card has, and so do not launch there: a debt too, in bytes.
KNOWN_SHARED = {("sm_120", "bwd_bias_cols", "bf16", 256): 102_400}


def _operands(dtype: str, d: int, options: Options) -> dict[str, Any]:
    def tensor(*shape: int, dtype: str = dtype) -> TensorDesc:
        return TensorDesc.make(shape, dtype, None, 16)

    q, k = tensor(2, 4, ROWS, d), tensor(2, 2, COLS, d)
    return {"q": q, "k": k, "v": k, "o": q, "lse": tensor(2, 4, ROWS, dtype="fp32"), "band": options.band,
            "softcap": options.softcap, "mask": tensor(1, 1, ROWS, COLS, dtype="bool") if options.mask else None,
            "bias": tensor(1, 4, *options.bias) if options.bias else None,
            "sink": tensor(4, dtype="fp32") if options.sink else None}


def forward_kernels(dtype: str, d: int, options: Options, target: Target) -> dict[str, Kernel]:
    """Those that serve every descriptor; Hopper's own are in test_hopper.py."""
    desc = SdpaDesc(**_operands(dtype, d, options))
    return {"sdpa_fwd": SdpaFwdExecutable(forward_params(desc, target), target).kernel}


def backward_kernels(dtype: str, d: int, options: Options, target: Target) -> dict[str, Kernel]:
    given = _operands(dtype, d, options)
    desc = SdpaBwdDesc(**given, do=given["o"], dq=given["q"], dk=given["k"], dv=given["v"], dbias=given["bias"],
                       dsink=given["sink"], deterministic=True)
    return SdpaBwdExecutable(desc, target).kernels


DIRECTIONS = {"sdpa": (forward_kernels, FORWARD_OPTIONS), "sdpa_backward": (backward_kernels, tuple(OPTIONS))}
CASES = [(op, arch, dtype, d) for op in DIRECTIONS for arch in ARCHS for dtype, dims in HEAD_DIMS.items() for d in dims]


@pytest.mark.tables
@pytest.mark.skipif(runtime.unavailable_reason() is not None, reason=str(runtime.unavailable_reason()))
@pytest.mark.skipif(runtime.toolchain().get("triton") != "3.6", reason="the known spills are those of Triton 3.6's assembler")
@pytest.mark.parametrize("op, arch, dtype, d", CASES)
def test_the_kernels_of_a_row(op: str, arch: str, dtype: str, d: int) -> None:
    make, names = DIRECTIONS[op]
    limit = configs.SHARED_LIMIT[configs.arch_class(ARCHS[arch])]
    wrong = []
    for name in names:
        for kernel_name, kernel in make(dtype, d, OPTIONS[name], Target.cuda(ARCHS[arch])).items():
            assert kernel.bundle is not None
            used = runtime.resource_usage(kernel.bundle.code)
            known = KNOWN_SPILLS[arch].get((kernel_name, dtype, d), 0)
            if used["spill_bytes"] > known:
                wrong.append(f"{kernel_name} {name}: spills {used['spill_bytes']} bytes, known are {known}")
            if kernel.bundle.meta["shared"] > KNOWN_SHARED.get((arch, kernel_name, dtype, d), limit):
                wrong.append(f"{kernel_name} {name}: {kernel.bundle.meta['shared']} bytes of shared memory, the card has {limit}")
    assert not wrong, wrong


def _picked() -> Iterator[tuple[str, configs.Row]]:
    """(table, row) for every row that a case above picks."""
    tables = {"FWD": (configs.FWD, FORWARD_OPTIONS), "DKDV": (configs_bwd.DKDV, OPTIONS), "DQ": (configs_bwd.DQ, OPTIONS),
              "BIAS": (configs_bwd.BIAS, [n for n in OPTIONS if OPTIONS[n].bias])}
    for name, (table, options) in tables.items():
        for cc in ARCHS.values():
            for dtype, dims in HEAD_DIMS.items():
                for d in dims:
                    for o in map(OPTIONS.__getitem__, options):
                        want = {"tiled": o.mask or o.bias is not None, "band": o.band != MaskDesc()}
                        blocks = configs.pick(table, cc, 4 if dtype == "fp32" else 2, d, **want)
                        scores = "tiled" if want["tiled"] else "plain"
                        yield name, next(r for r in table if r.blocks is blocks and r.scores == scores)


def test_every_row_is_compiled() -> None:
    """A row that no case picks would never be read by the compiler before a user's card does."""
    picked = {(name, id(row)) for name, row in _picked()}
    tables = {"FWD": configs.FWD, "DKDV": configs_bwd.DKDV, "DQ": configs_bwd.DQ, "BIAS": configs_bwd.BIAS}
    missed = [(name, row.arch, row.itemsize, row.d_pad, row.scores) for name, table in tables.items() for row in table
              if row.arch != "interpreter" and (name, id(row)) not in picked]
    assert not missed
