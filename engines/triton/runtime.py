"""Kernel source and TemplateParams to machine code, without a GPU and without Triton's launcher.

Triton's own `kernel[grid](...)` specialises on argument values (1, multiples of 16) and so recompiles for new
shapes. Here the signature and every hint are stated, the result is a `Bundle`, and `engines.cuda_driver`
launches it.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engines.template_loader import Bundle

from . import interpret
from .params import Arg

WARP = 32
# Triton appends two pointers (global and profiling scratch) to every kernel's parameters; ours use neither.
_TRAILING = ("ptr", "ptr")
# Outside kernels/: what decides a kernel's signature, hints and tiles.
_SHAPING_FILES = ("configs.py", "configs_bwd.py", "params.py", "params_bwd.py", "runtime.py")


@cache
def unavailable_reason() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set: this process can only interpret kernels (unset it to compile)"
    return None


def toolchain() -> dict[str, str]:
    """Triton's major.minor; empty where it is not installed."""
    try:
        import triton
    except ImportError:
        return {}
    return {"triton": ".".join(triton.__version__.split(".")[:2])}


def compile_kernel(module: str, kernel: str, args: Sequence[Arg], constexprs: Mapping[str, Any], *,
                   cc: tuple[int, int], num_warps: int, num_stages: int) -> Bundle:
    """Compiles `kernels/<module>.py`'s `kernel` for one compute capability.

    The bundle's meta: name, threads, shared (bytes), kinds (how to pack the parameters, scratch pointers
    included).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"{__package__}.kernels.{module}"), kernel)
    names = [a.name for a in args] + [n for n in function.arg_names if n in constexprs]
    if names != list(function.arg_names):
        differ = sorted(set(names) ^ set(function.arg_names)) or "order"
        raise ValueError(f"{kernel}: argument table and kernel disagree: {differ}")
    signature = {a.name: a.triton_type for a in args} | {n: "constexpr" for n in constexprs}
    constants = {a.name: a.constant for a in args if a.constant is not None} | dict(constexprs)
    hints = {(i,): [["tt.divisibility", a.divisibility]] for i, a in enumerate(args) if a.divisibility}
    source = ASTSource(function, {n: signature[n] for n in function.arg_names}, constants, hints)
    # Triton's own cache is kept out of the way: the template loader caches, and HOME may not be writable.
    scratch_folder = tempfile.TemporaryDirectory(prefix="frost-triton-")
    with interpret.LOCK, triton.knobs.cache.scope(), scratch_folder as folder:
        triton.knobs.cache.dir = folder
        made = triton.compile(source, target=GPUTarget("cuda", cc[0] * 10 + cc[1], WARP),
                              options={"num_warps": num_warps, "num_stages": num_stages})
        meta = made.metadata
        for scratch in ("global_scratch_size", "profile_scratch_size"):
            if getattr(meta, scratch, 0):
                raise RuntimeError(f"{kernel}: compiled with {scratch} {getattr(meta, scratch)}, expected 0")
        kinds = [a.kind for a in args if a.constant is None] + list(_TRAILING)
        return Bundle(made.asm["cubin"], {"name": meta.name, "threads": meta.num_warps * WARP,
                                          "shared": meta.shared, "kinds": kinds})


def argument_values(args: Sequence[Arg], values: Mapping[str, Any]) -> list[Any]:
    """Values in parameter order for `ParamPack`, the two scratch pointers included."""
    return [values[a.name] for a in args if a.constant is None] + [0] * len(_TRAILING)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """registers, spill_bytes (local memory) and static_shared bytes of a kernel, by Triton's cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run([str(tool), "--dump-resource-usage", f.name], check=True, capture_output=True,
                              text=True, timeout=60).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text))
    return {"registers": int(found["REG"]), "spill_bytes": int(found["STACK"]) + int(found["LOCAL"]),
            "static_shared": int(found["SHARED"])}


def source_files() -> tuple[Path, ...]:
    """Every file whose text reaches a kernel."""
    here = Path(__file__).parent
    return (*sorted((here / "kernels").glob("*.py")), *(here / name for name in _SHAPING_FILES))
