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

from engines import cuda_driver
from engines.template_loader import Bundle

from . import interpret
from .params import Arg

WARP = 32
# Triton appends two pointers (global and profiling scratch) to every kernel's parameters; ours use neither.
_TRAILING = ("ptr", "ptr")
_MAP_DTYPES = {"fp16": 6, "fp32": 7, "bf16": 9}  # the driver's enumerators
# Outside kernels/: what decides a kernel's signature, hints and tiles.
_SHAPING_FILES = ("configs.py", "configs_bwd.py", "configs_hopper.py", "params.py", "params_bwd.py",
                  "params_hopper.py", "runtime.py")


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
                   cc: tuple[int, int], num_warps: int, num_stages: int, max_registers: int | None = None) -> Bundle:
    """Compiles `kernels/<module>.py`'s `kernel` for one compute capability. `max_registers`: a cap for ptxas.

    The bundle's meta: name, threads, shared (bytes), kinds (how to pack the parameters, scratch pointers
    included), maps (for each tensor map, what encoding it takes besides shape, strides and address).
    """
    import triton
    from triton.backends.compiler import GPUTarget

    function = getattr(importlib.import_module(f"{__package__}.kernels.{module}"), kernel)
    names = [a.name for a in args] + [n for n in function.arg_names if n in constexprs]
    if names != list(function.arg_names):
        differ = sorted(set(names) ^ set(function.arg_names)) or "order"
        raise ValueError(f"{kernel}: argument table and kernel disagree: {differ}")
    signature = {a.name: a.triton_type for a in args} | {n: "constexpr" for n in constexprs}
    constants = {a.name: a.constant for a in args if a.constant is not None} | dict(constexprs)
    hints = {(i,): [["tt.divisibility", a.divisibility]] for i, a in enumerate(args) if a.divisibility}
    source = _source_type(function)(function, {n: signature[n] for n in function.arg_names}, constants, hints)
    # Triton's own cache is kept out of the way: the template loader caches, and HOME may not be writable.
    scratch_folder = tempfile.TemporaryDirectory(prefix="frost-triton-")
    with interpret.LOCK, triton.knobs.cache.scope(), scratch_folder as folder:
        triton.knobs.cache.dir = folder
        options = {"num_warps": num_warps, "num_stages": num_stages}
        if max_registers is not None:
            options["maxnreg"] = max_registers
        made = triton.compile(source, target=GPUTarget("cuda", cc[0] * 10 + cc[1], WARP), options=options)
        meta = made.metadata
        for scratch in ("global_scratch_size", "profile_scratch_size"):
            if getattr(meta, scratch, 0):
                raise RuntimeError(f"{kernel}: compiled with {scratch} {getattr(meta, scratch)}, expected 0")
        kinds = [kind for a in args if a.constant is None for kind in _parameter_kinds(a)] + list(_TRAILING)
        return Bundle(made.asm["cubin"], {"name": meta.name, "threads": meta.num_warps * WARP, "shared": meta.shared,
                                          "kinds": kinds, "maps": _map_facts(args, meta)})


def _source_type(function: Any) -> Any:
    """Triton's kernels and Gluon's go through different front ends."""
    from triton.compiler import ASTSource

    if not getattr(function, "is_gluon", lambda: False)():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _parameter_kinds(arg: Arg) -> list[str]:
    """A tensor map is followed by its shape and strides, which the kernel may ask it for."""
    if arg.kind != "tmap":
        return [arg.kind]
    rank = arg.triton_type.split("[")[1].split("]")[0].count(",") + 1
    return ["tmap", *["i32"] * rank, *["i64"] * rank]


def _map_facts(args: Sequence[Arg], meta: Any) -> list[list[Any]]:
    """[dtype, itemsize, swizzle, box] of each tensor map argument."""
    maps = [a.triton_type.removeprefix("tensordesc<").split("[")[0] for a in args if a.kind == "tmap"]
    found = list(getattr(meta, "tensordesc_meta", None) or ()) if maps else []
    if len(found) != len(maps):
        raise RuntimeError(f"{meta.name}: compiled with {len(found)} tensor maps, expected {len(maps)}")
    return [[_MAP_DTYPES[dtype], m["elem_size"], m["swizzle"], list(m["block_size"])] for dtype, m in zip(maps, found)]


def argument_values(args: Sequence[Arg], values: Mapping[str, Any]) -> list[Any]:
    """Values in parameter order for `ParamPack`, the two scratch pointers included. A tensor map's value is its
    (shape, strides); the map itself is all zeros."""
    out: list[Any] = []
    for a in args:
        if a.kind == "tmap":
            shape, strides = values[a.name]
            out += [bytes(cuda_driver.TENSOR_MAP_BYTES), *shape, *strides]
        elif a.constant is None:
            out.append(values[a.name])
    return out + [0] * len(_TRAILING)


def _cuobjdump(cubin: bytes, option: str) -> str:
    """What Triton's cuobjdump says of a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        return subprocess.run([str(tool), option, f.name], check=True, capture_output=True, text=True, timeout=60).stdout


def parameter_offsets(cubin: bytes) -> tuple[int, ...]:
    """Where a kernel reads each of its parameters in the launch buffer, in bytes."""
    found = re.findall(r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)", _cuobjdump(cubin, "-elf"))
    return tuple(at for _, at in sorted((int(ordinal, 16), int(at, 16)) for ordinal, at in found))


def resource_usage(cubin: bytes) -> dict[str, int]:
    """registers, spill_bytes (local memory) and static_shared bytes of a kernel."""
    text = _cuobjdump(cubin, "--dump-resource-usage")
    found = dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text))
    return {"registers": int(found["REG"]), "spill_bytes": int(found["STACK"]) + int(found["LOCAL"]),
            "static_shared": int(found["SHARED"])}


def source_files() -> tuple[Path, ...]:
    """Every file whose text reaches a kernel."""
    here = Path(__file__).parent
    kernels = here / "kernels"
    return (*sorted(kernels.glob("*.py")), *sorted((kernels / "hopper").glob("*.py")),
            *(here / name for name in _SHAPING_FILES))
