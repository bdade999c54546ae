"""Worker processes that draw nothing and decide nothing: they get lines, and send verdicts.

Each has its own device context, so a case that kills or blocks one costs that case and a restart, and compiling one group's
kernels goes on beside another's running. The first lines of a group go out first; the others follow when those are done, to
any worker, and find the group's kernels in the disk cache.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from .case import parse
from .judge import CRASHED, Verdict

CASE_LIMIT_S = 120.0  # compiling included; what takes longer counts as hanging
STARTS = 3            # times that a worker is started again without having finished a case
FIRST_LINES, MORE_LINES = 6, 12  # of a group that are one worker's at a time
_PRELOAD = ("torch", "tools.conjunctions.judge", "tools.conjunctions.buffers", "engines.triton", "frost.plan")


@dataclass(frozen=True)
class Outcome:
    """A case's verdicts, the seconds that operands and oracle took, and the kernels that were compiled for it."""

    line: str
    verdicts: tuple[Verdict, ...]
    prepare_s: float = 0.0
    kernels: int = 0


def run_line(line: str, engine: str, device: str) -> Outcome:
    """In this process: both directions of one case."""
    import torch

    from frost import cache

    from .buffers import prepare
    from .judge import ensure_registered, judge

    ensure_registered(engine)
    case = parse(line)
    start, before = time.monotonic(), cache.info().kernels_compiled
    made = prepare(case)
    prepared = time.monotonic() - start
    verdicts = tuple(judge(made, op, engine, torch.device(device)) for op in case.OPS)
    return Outcome(line, verdicts, prepared, cache.info().kernels_compiled - before)


def _work(pipe: Connection, engine: str, device: str) -> None:
    """A worker's life: lines in, ("start", n) and ("done", n, outcome) out."""
    import torch

    torch.set_num_threads(1)
    while True:
        lines = pipe.recv()
        if lines is None:
            return
        for n, line in enumerate(lines):
            pipe.send(("start", n, None))
            outcome = run_line(line, engine, device)
            pipe.send(("done", n, outcome))
            if any(v.bad for v in outcome.verdicts) and _broken(device):
                return
        pipe.send(("idle", 0, None))


def _broken(device: str) -> bool:
    """Whether the device context is lost: nothing that follows in this process would mean anything."""
    import torch

    if not device.startswith("cuda"):
        return False
    try:
        torch.cuda.synchronize(device)
        return False
    except Exception:
        return True


@dataclass
class Task:
    """Lines of one group for one worker; `then` is what waits for their kernels."""

    lines: list[str]
    then: list[Task] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(map(bool, self.lines)) + sum(task.count for task in self.then)


def tasks_of(group: Sequence[str]) -> Task:
    """A group cut up: the first lines, which compile, and the rest."""
    first, rest = list(group[:FIRST_LINES]), group[FIRST_LINES:]
    return Task(first, [Task(list(rest[i:i + MORE_LINES])) for i in range(0, len(rest), MORE_LINES)])


def _send(pipe: Connection, message: Any) -> None:
    """A worker that is gone is noticed by its sentinel, with the task that it was given."""
    with contextlib.suppress(OSError):
        pipe.send(message)


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    task: Task = field(default_factory=lambda: Task([]))
    at: int = -1  # the line that is running
    since: float = field(default_factory=time.monotonic)
    failures: int = 0


class Pool:
    """`run(groups)` yields an outcome for every line. After `limit_s` seconds it stops, whatever is running; `left` says how
    many lines were not run to their end."""

    def __init__(self, engine: str, device: str, workers: int, limit_s: float | None = None, method: str = "forkserver"
                 ) -> None:
        self.engine, self.device, self.count, self.limit_s = engine, device, workers, limit_s
        self.left = 0
        self._todo: deque[Task] = deque()
        self._busy: list[_Worker] = []
        # Imported once, in a process that never touches the device.
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(list(_PRELOAD))

    def run(self, groups: Sequence[Sequence[str]]) -> Iterator[Outcome]:
        deadline = time.monotonic() + (float("inf") if self.limit_s is None else self.limit_s)
        # Workers are many and the cores they share are few: one thread each, also in libraries that read this at import.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._todo = deque(tasks_of(g) for g in groups if g)
        lines = sum(task.count for task in self._todo)
        try:
            for _ in range(min(self.count, lines)):
                self._start(0)
            self._feed()
            while self._busy:
                seconds = min(1.0, deadline - time.monotonic())
                if seconds <= 0:
                    return
                ready = wait([w.pipe for w in self._busy] + [w.process.sentinel for w in self._busy], timeout=seconds)
                for worker in list(self._busy):
                    if worker.pipe in ready or worker.process.sentinel in ready:
                        yield from self._hear(worker)
                    elif worker.at >= 0 and time.monotonic() - worker.since > CASE_LIMIT_S:
                        worker.process.kill()
        finally:
            self.left += sum(task.count for task in self._todo) + sum(w.task.count for w in self._busy)
            for worker in self._busy:
                worker.process.kill()
            for worker in self._busy:
                worker.process.join()
            self._busy, self._todo = [], deque()

    def _start(self, failures: int) -> None:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self.engine, self.device), daemon=True)
        process.start()
        theirs.close()
        self._busy.append(_Worker(process, mine, failures=failures))

    def _feed(self) -> None:
        """Tasks to whoever has none; where nobody has one and none is left, everybody may go."""
        for worker in self._busy:
            if not worker.task.lines and self._todo:
                worker.task, worker.at, worker.since = self._todo.popleft(), -1, time.monotonic()
                _send(worker.pipe, worker.task.lines)
        if not any(worker.task.lines for worker in self._busy):
            for worker in self._busy:
                _send(worker.pipe, None)
            for worker in self._busy:
                worker.process.join()
            self._busy = []

    def _hear(self, worker: _Worker) -> Iterator[Outcome]:
        """What a worker has to say, or what is left of one that says nothing more."""
        try:
            while worker.pipe.poll():
                kind, n, outcome = worker.pipe.recv()
                worker.since = time.monotonic()
                if kind == "start":
                    worker.at = n
                elif kind == "done":
                    worker.task.lines[n], worker.at, worker.failures = "", -1, 0
                    yield outcome
                else:
                    self._todo.extend(worker.task.then)
                    worker.task = Task([])
                    self._feed()
                    if worker not in self._busy:
                        return
            if worker.process.is_alive():
                return
        except (EOFError, OSError):
            pass
        yield from self._replace(worker)

    def _replace(self, worker: _Worker) -> Iterator[Outcome]:
        worker.process.join()
        self._busy.remove(worker)
        task, failures = worker.task, worker.failures + 1
        if worker.at >= 0:
            line = task.lines[worker.at]
            said = (f"the process ended with exit code {worker.process.exitcode}"
                    + f" after {CASE_LIMIT_S:.0f} s" * (time.monotonic() - worker.since > CASE_LIMIT_S))
            yield Outcome(line, tuple(Verdict(op, CRASHED, said) for op in parse(line).OPS))
            task.lines[worker.at], failures = "", 1
        if failures > STARTS:
            self.left += task.count
            task = Task([])
        rest = [line for line in task.lines if line]
        if rest:
            self._todo.appendleft(Task(rest, task.then))
        else:
            self._todo.extend(task.then)
        if self._todo:
            self._start(failures)
        self._feed()
