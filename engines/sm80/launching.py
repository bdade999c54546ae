"""From an argument table to a call that only launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from engines import cuda_driver
from engines.base import BoundCall, Target, fold_grid
from engines.template_loader import Bundle, KernelKey, loader

from . import compiler
from .capabilities import ENGINE
from .params import Table, TemplateParams


class Kernel:
    """One kernel of one specialisation, compiled for a CUDA target. `struct` names its argument struct in the source."""

    def __init__(self, module: str, name: str, struct: str, table: Table, params: TemplateParams, *, threads: int,
                 shared: int, target: Target) -> None:
        self.name, self.table, self.params = name, table, params
        key = KernelKey(ENGINE, name, params.items(), target.arch, compiler.source_digest(),
                        tuple(sorted(compiler.toolchain().items())))
        self.bundle: Bundle = loader.get(key, lambda: compiler.compile_kernel(
            module, name, struct, table, params.macros(), arch=target.arch, threads=threads, shared=shared))
        self._pack = cuda_driver.ParamPack([kind for _, kind in table])
        self._functions: dict[int, cuda_driver.Function] = {}

    def arguments(self, values: Mapping[str, Any]) -> bytes:
        """The packed argument buffer. Every name of the table is looked up in `values`; pointers are addresses."""
        return self._pack([values[name] for name, _ in self.table])

    def bind(self, programs: int, values: Mapping[str, Any], device: int) -> BoundCall:
        """A call on the device of that index. Launches nothing where there is nothing to do."""
        if programs == 0:
            return _nothing
        if programs >= 2**31:
            raise ValueError(f"{self.name}: given {programs} tiles, expected below 2**31; split the batch")
        packed = self.arguments({**values, "n_programs": programs})
        return cuda_driver.BoundKernel(self._function(device), fold_grid(programs), packed)

    def _function(self, device: int) -> cuda_driver.Function:
        if device not in self._functions:
            meta = self.bundle.meta
            self._functions[device] = cuda_driver.load(
                self.bundle.code, meta["name"], threads=meta["threads"], shared=meta["shared"], index=device)
        return self._functions[device]

    def describe(self) -> dict[str, Any]:
        """What runs: name, threads, shared memory and the TemplateParams that say something."""
        meta = self.bundle.meta
        out: dict[str, Any] = {"kernel": self.name, "threads": meta["threads"], "shared_bytes": meta["shared"]}
        return out | {k: v for k, v in self.params.items() if v is not None and v is not False}


# A chain that is found in the cache takes milliseconds, and a bar that flashes up says nothing.
_PATIENCE_S = 0.25


def compile_chain(makers: Mapping[str, Callable[[], Kernel]], clock: Callable[[], float] = time.perf_counter
                  ) -> dict[str, Kernel]:
    """The kernels of a chain by name, in order. Where a terminal watches and compiling takes a while, with a progress bar on
    standard error."""
    kernels: dict[str, Kernel] = {}
    start = clock()
    with ExitStack() as stack:
        advance: Callable[[str], None] | None = None
        for name, make in makers.items():
            if advance is not None:
                advance(name)
            kernels[name] = make()
            if advance is None and clock() - start > _PATIENCE_S:
                advance = _progress(stack, len(makers), len(kernels))
    return kernels


def _progress(stack: ExitStack, total: int, done: int) -> Callable[[str], None] | None:
    """A bar that lives as long as `stack`; None where nobody watches or nothing is left to do."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal or done == total:
        return None
    bar = stack.enter_context(Progress(console=console, transient=True))
    task = bar.add_task("compiling", total=total, completed=done)
    ahead = [done]

    def advance(name: str) -> None:
        bar.update(task, description=f"compiling {name}", completed=ahead[0])
        ahead[0] += 1

    return advance


def _nothing(stream: int) -> None:
    """A launch with no programs."""
