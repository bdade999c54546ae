"""The SM80 engine on a CPU: its kernels' own source, compiled by g++ against emulated instructions, behind the engine's
own adapters. Everything but the hardware is what runs on a GPU: masks of adapters, packed arguments, index arithmetic.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engines import registry
from engines.base import Adapter, BoundCall, Engine, Reason, Target, fold_grid
from engines.cuda_driver import ParamPack
from engines.sm80 import compiler, launching
from engines.sm80.adapter_bwd import SdpaBwdDslSm80
from engines.sm80.adapter_fwd import SdpaFwdDslSm80

EMULATION = Path(__file__).parent / "sm80_emulation"
NAME = "sm80_emulated"

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ in this process: kernels cannot be emulated")


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="frost-sm80-")


@lru_cache(maxsize=256)
def library(module: str, kernel: str, struct: str, table: Any, macros: tuple[tuple[str, int], ...], threads: int) -> Any:
    """The kernel as a function (arguments, grid x, grid y, shared bytes, lazy copies)."""
    text = f"""#include "ptx.cuh"
{compiler.source_text(module, struct, table)}
extern "C" void run(const void* args, int blocks, int shared, int lazy) {{
  emulated::lazy = lazy;
  const auto& a = *static_cast<const {struct}*>(args);
  for (int b = 0; b < blocks; ++b) emulated::run_block(b, {threads}, shared, [&] {{ {kernel}(a); }});
}}
extern "C" unsigned long size_of_arguments() {{ return sizeof({struct}); }}
"""
    root = Path(_folder().name)
    sources = root / "kernels"
    if not sources.exists():
        shutil.copytree(compiler.KERNELS, sources)
        shutil.copy(EMULATION / "ptx.cuh", sources / "ptx.cuh")
    name = hashlib.sha256(repr((text, macros)).encode()).hexdigest()[:16]
    source, made = root / f"{name}.cpp", root / f"{name}.so"
    source.write_text(text)
    flags = [f"-D{n}={v}" for n, v in macros]
    done = subprocess.run(["g++", "-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{sources}", *flags, str(source), "-o",
                           str(made)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{kernel}: g++ failed\n{done.stderr[:4000]}")
    return ctypes.CDLL(str(made))


class EmulatedKernel(launching.Kernel):
    """`launching.Kernel` with g++ in place of NVRTC, and a loop over blocks in place of a launch."""

    lazy: ClassVar[bool] = True

    def __init__(self, module: str, name: str, struct: str, table: Any, params: Any, *, threads: int, shared: int,
                 target: Target) -> None:
        self.name, self.table, self.params = name, table, params
        self.shared = shared
        self.library = library(module, name, struct, table, tuple(sorted(params.macros().items())), threads)
        self._pack = ParamPack([kind for _, kind in table])

    def bind(self, programs: int, values: Mapping[str, Any], device: int | None) -> BoundCall:
        x, y, _ = fold_grid(programs)
        packed = self.arguments({**values, "n_programs": programs})
        room = self.library.size_of_arguments()
        assert len(packed) <= room < len(packed) + 8, (len(packed), room)
        buffer = ctypes.create_string_buffer(packed, room)

        def run(stream: int) -> None:
            self.library.run(buffer, x * y if programs else 0, self.shared, int(self.lazy))

        return run


class EmulatedEngine(Engine):
    """The SM80 engine's adapters, asked as if for `cc`."""

    name: ClassVar[str] = NAME

    def __init__(self, cc: tuple[int, int] = (9, 0)) -> None:
        self.cc = cc

    def adapters(self) -> tuple[Adapter, ...]:
        return (_on_cpu(SdpaFwdDslSm80, self.cc), _on_cpu(SdpaBwdDslSm80, self.cc))

    def unavailable(self, target: Target) -> Reason | None:
        return None

    def automatic(self, target: Target) -> bool:
        return False


def _on_cpu(adapter: type[Any], cc: tuple[int, int]) -> Adapter:
    rows = tuple(replace(row, devices=("cpu",), min_cc=None) for row in adapter.capabilities)

    class Emulated(adapter):  # type: ignore[misc, valid-type]
        capabilities = rows
        engine = NAME

        def compile(self, desc: Any, target: Target) -> Any:
            return super().compile(desc, Target.cuda(cc))

    return Emulated()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers the emulated engine for one test; call the result to pick a compute capability and kind of copies."""
    from engines.sm80 import adapter_bwd, adapter_fwd

    for module in (adapter_fwd, adapter_bwd):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
    engine = EmulatedEngine()
    registry.register(engine)

    def choose(cc: tuple[int, int] = (9, 0), lazy: bool = True) -> str:
        engine.cc = cc
        monkeypatch.setattr(EmulatedKernel, "lazy", lazy)
        return NAME

    yield choose
    registry.unregister(NAME)
