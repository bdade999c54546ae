"""Compiling the suite's kernels in worker processes, into the disk cache that the tests then read.

A few hundred specialisations, one after the other, would take longer than all the tests together.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from cases import graphs
from cases.data import make
from cases.model import Case

MAX_WORKERS = 16
_WORTH_IT = 8  # fewer than this compile sooner than workers start


def run(wanted: Sequence[tuple[Case, str]], rows: Sequence[tuple[Any, str]], cc: tuple[int, int]) -> None:
    """Compile every (case, op), and every (row of a gate matrix, engine). What fails here fails again, and visibly, in its
    test."""
    from frost import env

    if len(wanted) + len(rows) < _WORTH_IT or env.kernel_cache_dir() is None:
        return
    by_case: dict[Case, list[str]] = defaultdict(list)
    for case, op in wanted:
        by_case[case].append(op)
    start = time.perf_counter()
    workers = min(MAX_WORKERS, os.cpu_count() or 1)
    jobs: list[Future[None]] = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs += [pool.submit(compile_case, case, tuple(ops), cc) for case, ops in by_case.items()]
        jobs += [pool.submit(compile_row, row, engine, cc) for row, engine in rows]
        failed = [job for job in jobs if job.exception() is not None]
    print(
        f"\ncompiled {len(jobs) - len(failed)} of {len(jobs)} cases ahead in {time.perf_counter() - start:.0f} s"
    )


def compile_case(case: Case, ops: tuple[str, ...], cc: tuple[int, int]) -> None:
    """In a worker: no device is touched."""
    import torch

    from engines.base import Target

    torch.set_num_threads(1)
    data = make(case)
    for op in ops:
        graph, _ = graphs.build(case, op, data)
        graph.compile(Target.cuda(cc), engines=["triton"], gates="off")


def compile_row(row: Any, engine: str, cc: tuple[int, int]) -> None:
    """In a worker: no device is touched. Rows that the engine declines raise, here as in their test."""
    import torch

    from engines.base import Target
    from frost.equivalence import compile_config

    torch.set_num_threads(1)
    compile_config(row, engine, Target.cuda(cc))
