"""Compiling a gate's kernels in several processes, into the kernel cache that the gate run then reads.

A matrix has a hundred specialisations; one after the other they would take longer than all the measuring. The workers are
fresh interpreters (`python -m frost.gate_prewarm ENGINE OP CC SHARD OF`), not forked or spawned from the caller's: a gate
may be run from inside any program, and neither its threads nor its main module may be copied or run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import env

MAX_WORKERS = 16
TIMEOUT_S = 600


def compile_ahead(engine: str, op: str, cc: tuple[int, int], workers: int | None = None,
                  on_worker: Callable[[], None] | None = None) -> int:
    """Compile every configuration of an op's matrix for a compute capability. Returns how many workers ended well.

    What cannot be compiled here fails again, visibly, in its own row of the gate. Does nothing (0) where kernels are kept
    in memory only, as the workers' would be lost, or where one process would do.
    """
    count = workers or min(MAX_WORKERS, os.cpu_count() or 1)
    if env.kernel_cache_dir() is None or count < 2:
        return 0
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, engine, op, f"{cc[0]}.{cc[1]}", str(shard), str(count)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for shard in range(count)]
    good = 0
    for process in running:
        try:
            good += process.wait(TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if on_worker is not None:
            on_worker()
    return good


def main(argv: Sequence[str]) -> int:
    """In a worker: every `of`-th configuration, from `shard` on. No device is touched."""
    from engines.base import Target

    from .equivalence import compile_config, configs_for

    engine, op, cc, shard, of = argv
    major, minor = cc.split(".")
    target = Target.cuda((int(major), int(minor)))
    failed = 0
    for config in configs_for(op, target.device)[int(shard)::int(of)]:
        try:
            compile_config(config, engine, target)
        except Exception:
            failed += 1
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
