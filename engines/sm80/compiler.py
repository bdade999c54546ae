"""Kernel source and TemplateParams to machine code by NVRTC, through cuda-core: no GPU, no CUDA toolkit, no headers.

A translation unit is three lines: the argument struct, written from the argument table, and an include of the kernel's
source; everything else comes in as macros.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engines.base import digest_files
from engines.template_loader import Bundle

from .params import Table

KERNELS = Path(__file__).parent / "kernels"
# Outside kernels/: what decides a kernel's arguments, macros and tiles.
_SHAPING_FILES = ("compiler.py", "configs.py", "configs_bwd.py", "params.py", "params_bwd.py")
_C_TYPES = {"ptr": "void*", "i64": "long long", "i32": "int", "u32": "unsigned", "fp32": "float"}


class CompileError(RuntimeError):
    """NVRTC rejected a kernel: a bug of this engine. Carries the log and the TemplateParams."""


@cache
def unavailable_reason() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    try:
        _program_types()
        _nvrtc_version()
    except ImportError as e:
        return f"cuda-core is missing or incomplete (pip install 'frost-attention[cuda]'): {e}"
    except Exception as e:  # a broken library shows in as many ways as there are loaders
        return f"NVRTC cannot be loaded: {type(e).__name__}: {e}"
    return None


@cache
def _nvrtc_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"nvrtcVersion: {status}")
    return int(major), int(minor)


def _program_types() -> tuple[Any, Any]:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:  # cuda-core before 1.0 kept them here
        from cuda.core.experimental import Program, ProgramOptions
    return Program, ProgramOptions


def toolchain() -> dict[str, str]:
    """NVRTC's major.minor; empty where it cannot be loaded."""
    if unavailable_reason() is not None:
        return {}
    return {"nvrtc": "{}.{}".format(*_nvrtc_version())}


def struct_text(name: str, table: Table) -> str:
    """The C++ struct that a packed argument buffer of `table` is."""
    members = " ".join(f"{_C_TYPES[kind]} {field};" for field, kind in table)
    return f"struct {name} {{ {members} }};"


def source_text(module: str, struct: str, table: Table) -> str:
    """The translation unit of one kernel."""
    return f'{struct_text(struct, table)}\n#include "{module}.cu"\n'


def compile_kernel(module: str, kernel: str, struct: str, table: Table, macros: Mapping[str, int], *, arch: str,
                   threads: int, shared: int) -> Bundle:
    """Compiles `kernels/<module>.cu`'s `kernel` for one arch ("sm_90").

    The bundle's meta: name, threads, shared (bytes of dynamic shared memory), kinds (how to pack the arguments).
    Raises CompileError with NVRTC's log.
    """
    program_type, options_type = _program_types()
    options = options_type(arch=arch, std="c++17", include_path=str(KERNELS),
                           define_macro=[(name, str(value)) for name, value in macros.items()])
    try:
        code = program_type(source_text(module, struct, table), "c++", options).compile("cubin").code
    except Exception as e:
        stated = " ".join(f"{n}={v}" for n, v in macros.items())
        raise CompileError(f"{kernel} for {arch} does not compile with {stated}:\n{e}") from None
    return Bundle(bytes(code), {"name": kernel, "threads": threads, "shared": shared,
                                "kinds": [kind for _, kind in table]})


def source_files() -> tuple[Path, ...]:
    """Every file whose text reaches a kernel."""
    here = Path(__file__).parent
    sources = (p for p in KERNELS.iterdir() if p.suffix in (".cu", ".cuh"))
    return (*sorted(sources), *(here / name for name in _SHAPING_FILES))


def source_digest() -> str:
    return digest_files(source_files())
