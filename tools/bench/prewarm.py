"""Compiling in parallel before anything is timed, so that the device does not wait for a compiler.

FROST's kernels need no device to be compiled and travel through its disk cache; FlexAttention's travel
through PyTorch's. Each worker is a process of its own, for the compilers hold Python's lock."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from . import overrides
from .cases import Case

MAX_WORKERS = 16


@dataclass(frozen=True)
class Job:
    """One compilation: a FROST engine for a compute capability, or "flex" for the very shape of the case."""

    candidate: str
    case: Case
    direction: str
    cc: tuple[int, int]
    layout: str = "bhsd"
    tiles: Mapping[str, overrides.Tile] = field(default_factory=dict)
    grads: tuple[str, ...] = ("q", "k", "v")


@dataclass(frozen=True)
class Result:
    """How a job went: seconds spent, the compiled kernels' resources, or what went wrong (None: nothing)."""

    job: Job
    seconds: float
    kernels: tuple[Mapping[str, int | str], ...] = ()
    error: str | None = None


def plan_jobs(
    cases: Sequence[Case],
    directions: Sequence[str],
    engines: Sequence[str],
    peers: Sequence[str],
    cc: tuple[int, int],
    *,
    layout: str = "bhsd",
    tiles: Mapping[str, overrides.Tile] | None = None,
) -> list[Job]:
    """What a run over `cases` will ask a compiler for: an engine's kernels once for all sizes, Flex for each
    shape."""
    jobs: dict[tuple, Job] = {}
    for direction in sorted(directions):  # backward first: it takes longest
        for case in cases:
            for engine in engines:
                if engine in ("triton", "sm80"):
                    key = (engine, direction, case.dtype, case.d, case.causal, case.options)
                    jobs.setdefault(key, Job(engine, case, direction, cc, layout, tiles or {}))
            if "flex" in peers and case.suite not in ("host", "overheads"):
                jobs[("flex", direction, case)] = Job("flex", case, direction, cc, layout)
    return sorted(jobs.values(), key=lambda j: (j.direction != "bwd", j.candidate != "flex"))


def run_jobs(jobs: Sequence[Job], workers: int = 0) -> list[Result]:
    """Every job in a pool of processes; a job that fails, or kills its process, is a result with an error."""
    if not jobs:
        return []
    workers = workers or min(MAX_WORKERS, os.cpu_count() or 1, len(jobs))
    done: list[Result] = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run_job, job): job for job in jobs}
        for future in as_completed(waiting):
            try:
                done.append(future.result())
            except Exception as e:
                done.append(Result(waiting[future], 0.0, error=f"{type(e).__name__}: {e}"))
    return done


def run_job(job: Job) -> Result:
    """In the worker."""
    start = time.perf_counter()
    try:
        kernels = _flex(job) if job.candidate == "flex" else _engine(job)
    except Exception as e:
        return Result(
            job, time.perf_counter() - start, error=f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        )
    return Result(job, time.perf_counter() - start, kernels)


def _flex(job: Job) -> tuple[Mapping[str, int | str], ...]:
    import torch

    from . import operands, peers

    peers.make("flex", job.case, operands.make(job.case, layout=job.layout), job.direction).run()
    torch.cuda.synchronize()
    return ()


def _engine(job: Job) -> tuple[Mapping[str, int | str], ...]:
    import torch

    from engines.base import Target

    from . import candidates, operands

    ops = operands.make(job.case, device="meta", layout=job.layout)
    target = Target.cuda(job.cc)
    with overrides.tiles(job.tiles), _recorded() as kernels:
        if job.direction == "fwd":
            graph, _ = candidates.forward_graph(job.case, ops)
            candidates.compile_plan(graph, job.candidate, "off", target)
        else:
            lse = torch.empty(ops.q.shape[:-1], device="meta")
            if len(job.grads) == 3:  # its own forward makes the statistics
                graph, _ = candidates.forward_graph(job.case, ops, stats=True)
                candidates.compile_plan(graph, job.candidate, "off", target)
            graph, _ = candidates.backward_graph(job.case, ops, ops.do, lse, grads=job.grads)
            candidates.compile_plan(graph, job.candidate, "off", target)
    return tuple(kernels)


class _recorded:
    """Notes name, registers, spills and shared bytes of every kernel that Triton compiles meanwhile."""

    def __enter__(self) -> list[Mapping[str, int | str]]:
        from engines.triton import runtime

        self._runtime, self._original = runtime, runtime.compile_kernel
        found: list[Mapping[str, int | str]] = []

        def compile_kernel(module: str, kernel: str, *args: object, **kwargs: object) -> object:
            bundle = self._original(module, kernel, *args, **kwargs)  # type: ignore[arg-type]
            found.append(
                {"kernel": kernel, "shared": bundle.meta["shared"], **runtime.resource_usage(bundle.code)}
            )
            return bundle

        runtime.compile_kernel = compile_kernel  # type: ignore[assignment]
        return found

    def __exit__(self, *_: object) -> None:
        self._runtime.compile_kernel = self._original


def summary(results: Sequence[Result]) -> str:
    """One line: how many, how long, what failed."""
    failed = [r for r in results if r.error]
    engine = [r.seconds for r in results if r.job.candidate != "flex" and not r.error]
    slowest = f", the slowest FROST job {max(engine):.1f} s" if engine else ""
    text = f"compiled {len(results) - len(failed)} of {len(results)} ahead{slowest}"
    return text + "".join(
        f"\n  {r.job.candidate} {r.job.case.name} {r.job.direction}: {r.error}" for r in failed[:6]
    )
