"""`python -m tools.sdpa_baseline`: measure PyTorch's attention backends on this GPU and write the pinned
baseline.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from frost import sdpa_baseline
from frost.backends import benchmark_backends_with_reasons

ITERS = 50


def why_not() -> str:
    """Why nothing can be measured here; "" where it can."""
    import torch

    return (
        ""
        if torch.cuda.is_available()
        else "tools.sdpa_baseline needs an NVIDIA GPU, and this process sees none"
    )


def card_info() -> dict[str, str]:
    """`sdpa_baseline.INFO_FIELDS` of this machine."""
    import torch

    from frost.gate_env import recorded_environment, target_of

    target = target_of("cuda")
    found = recorded_environment(target)
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "card": torch.cuda.get_device_name(target.index),
        "cc": str(target),
        "driver": found.get("driver", "unknown"),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "date": now.strftime("%Y-%m-%d"),
    }


def measure(iters: int) -> dict[str, dict[str, float]]:
    """{seqlen: {backend: ms}} at the pinned shape, told on stderr as it goes."""
    table = {}
    shape = sdpa_baseline.SHAPE
    for seq in sdpa_baseline.SEQLENS:
        ms, reasons = benchmark_backends_with_reasons(
            shape["batch"],
            seq,
            shape["n_heads"],
            shape["n_kv_heads"],
            shape["head_dim"],
            iters,
            device="cuda",
            dtype=shape["dtype"],
            only=sdpa_baseline.SDPA_BACKENDS,
        )
        table[str(seq)] = ms
        for name, value in ms.items():
            said = f"not usable: {reasons[name]}" if math.isnan(value) else f"{value:.4f} ms"
            print(f"s{seq} {name}: {said}", file=sys.stderr, flush=True)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """0: written; 2: cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m tools.sdpa_baseline", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=sdpa_baseline.baseline_path(), help="default: the shipped file"
    )
    parser.add_argument("--iters", type=int, default=ITERS, help=f"timed calls each (default {ITERS})")
    args = parser.parse_args(argv)
    problem = why_not()
    if problem:
        print(problem, file=sys.stderr)
        return 2
    sdpa_baseline.write_sdpa_baseline(args.out, measure(args.iters), card_info(), args.iters)
    print(f"written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
