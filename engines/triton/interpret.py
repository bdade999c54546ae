"""Runs this engine's kernels on CPU tensors, in Triton's interpreter, inside a process that can also compile
them.

Triton decides at import time whether ``@triton.jit`` gives a compilable or an interpretable function.  Here
triton is imported once, compilable; a second copy of the kernel modules is loaded with the interpreter
switched on, and Triton's own library functions (``tl.sum``, ``tl.max``, ...) are swapped for interpretable
ones only while a kernel runs.  The interpreter patches ``triton.language`` in place and does not undo all of
it, so every attribute is put back afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

KERNEL_DIR = Path(__file__).parent / "kernels"
_COPY = __package__ + ".interpreted_kernels"

# One interpreter state (grid position, patched language) per process; compiling must not see the patched
# language either.
LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child made in the middle of a kernel would have the language half patched: a fork waits for its end.
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


@cache
def unavailable_reason() -> str | None:
    """Why kernels cannot be interpreted here, or None."""
    try:
        import numpy
        import triton
    except ImportError as e:
        return f"{e.name} is not installed"
    if _version(numpy.__version__) >= (2, 4) and _version(triton.__version__) < (3, 7):
        return (f"Triton {triton.__version__}'s interpreter does not work with NumPy {numpy.__version__} "
                "(install 'numpy<2.4', or a newer Triton)")
    return None


def _version(text: str) -> tuple[int, int]:
    parts = text.split(".")
    return int(parts[0]), int(parts[1])


@cache
def kernel_module(name: str) -> types.ModuleType:
    """The interpretable copy of ``kernels/<name>.py``."""
    import triton

    with LOCK, triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        if _COPY not in sys.modules:
            package = types.ModuleType(_COPY)
            package.__path__ = [str(KERNEL_DIR)]
            sys.modules[_COPY] = package
        # Relative imports between kernel files resolve inside the copied package, so they find interpretable
        # copies too.
        return importlib.import_module(f"{_COPY}.{name}")


def _patched_places() -> list[Any]:
    import triton.language as tl

    core = tl.core
    return [tl, core, tl.math, tl.standard, core.tensor, core.dtype, core.tensor_descriptor_base, core.range]


def _patch_language() -> None:
    """Library functions become interpretable, and the language's builtins act on NumPy arrays (Triton's own
    patch)."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    for place in _patched_places():
        for name, value in list(vars(place).items()):
            if isinstance(value, JITFunction):
                setattr(place, name, _device_function(value.fn))
    probe = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(probe)


@cache
def _device_function(fn: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(fn)


def _call_rewritten(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)


@contextlib.contextmanager
def _calls_without_repatching() -> Iterator[None]:
    """Every call of a device function patches the whole language again (milliseconds each, and never undone).
    It is patched already, so a call only has to run the function."""
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.__call__
    InterpretedFunction.__call__ = _call_rewritten  # type: ignore[method-assign]
    try:
        yield
    finally:
        InterpretedFunction.__call__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _exact_bf16_casts() -> Iterator[None]:
    """The interpreter truncates fp32 to bf16, where the GPU rounds to nearest even: twice the error, and
    biased."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    handle = interpreter.TensorHandle

    def narrow(src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return builder.cast_impl(src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
        quiet_nan = ((bits >> 16) | np.uint32(0x40)).astype(np.uint16)
        return handle(np.where(np.isnan(src.data), quiet_nan, rounded), tl.bfloat16)

    def widen(src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.bfloat16, tl.float32):
            return builder.cast_impl(src, dst_type)
        return handle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    builder.create_fp_trunc, builder.create_fp_ext = narrow, widen
    try:
        yield
    finally:
        del builder.create_fp_trunc, builder.create_fp_ext


@contextlib.contextmanager
def _boolean_masks() -> Iterator[None]:
    """A comparison of scalars that is broadcast over a tile arrives as int32 in some releases (3.9), and their loads and
    stores then refuse the mask."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        return mask if mask.data.dtype == bool else interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    builder.create_masked_load = lambda ptrs, mask, *rest: load(ptrs, boolean(mask), *rest)
    builder.create_masked_store = lambda ptrs, value, mask, *rest: store(ptrs, value, boolean(mask), *rest)
    try:
        yield
    finally:
        del builder.create_masked_load, builder.create_masked_store


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """While this is open, interpretable kernels can be launched with ``kernel[grid](...)``; one thread at a
    time."""
    reason = unavailable_reason()
    if reason is not None:
        raise RuntimeError(f"Triton interpreter unavailable: {reason}")
    import triton

    # Gluon copies names of the language when it is imported. Were that to happen while the language is patched (Triton
    # imports it on its own), its kernels could not be compiled in this process any more.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon.language")
    with LOCK, triton.knobs.runtime.scope(), contextlib.ExitStack() as undo:
        saved = [(place, dict(vars(place))) for place in _patched_places()]
        undo.callback(_restore, saved)
        triton.knobs.runtime.interpret = True
        _patch_language()
        undo.enter_context(_calls_without_repatching())
        undo.enter_context(_exact_bf16_casts())
        undo.enter_context(_boolean_masks())
        yield


def _restore(saved: list[tuple[Any, dict[str, Any]]]) -> None:
    from triton.runtime import interpreter

    for place, before in saved:
        now = dict(vars(place))
        for name in now.keys() - before.keys():
            # Rewriting a library function adds the interpreter's globals to its module; the rewritten
            # function, which is cached, goes on needing them.
            if not (isinstance(place, types.ModuleType) and name in vars(interpreter)):
                delattr(place, name)
        for name, value in before.items():
            if now.get(name) is not value and not _is_read_only(place, name):
                setattr(place, name, value)


def _is_read_only(place: Any, name: str) -> bool:
    return inspect.isclass(place) and name in ("__dict__", "__weakref__", "__doc__")


def run_kernel(module: str, kernel: str, grid: tuple[int, ...], args: Mapping[str, Any]) -> None:
    """Interprets `kernels/<module>.py`'s `kernel` over `grid`. `args` maps every parameter, constexprs
    included, to a CPU tensor, a number, or None (a pointer that this specialisation never reads).

    The grid is walked here rather than by Triton's executor, which copies every operand's whole storage back
    and forth.
    """
    function = getattr(kernel_module(module), kernel)
    with interpreting():
        import numpy
        from triton.runtime import interpreter

        body = function.rewrite()
        constants = set(_constexpr_names(function.fn))
        missing = set(function.arg_names) ^ set(args)
        if missing:
            raise TypeError(f"{kernel}: given and expected arguments differ in {sorted(missing)}")
        ready = {name: value if name in constants or value is None else interpreter._implicit_cvt(value)
                 for name, value in args.items()}
        builder = interpreter.interpreter_builder
        full = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*full)
        # Masked arithmetic overflows and divides on purpose; NumPy would warn about each.
        with numpy.errstate(all="ignore"):
            for x, y, z in itertools.product(*map(range, full)):
                builder.set_grid_idx(x, y, z)
                body(**ready)


@cache
def _constexpr_names(fn: Any) -> tuple[str, ...]:
    parameters = inspect.signature(fn).parameters.values()
    return tuple(p.name for p in parameters if "constexpr" in str(p.annotation))
