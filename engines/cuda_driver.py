"""The few CUDA driver calls a launch needs, through ctypes: load a cubin, raise its shared memory, launch it.

One packed parameter buffer per launch (CU_LAUNCH_PARAM_BUFFER_POINTER) keeps a bound call at a few microseconds:
neither Triton's nor any other launcher's per-argument work is on the path.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

_SUCCESS, _INVALID_CONTEXT = 0, 201
_PARAM_END, _PARAM_POINTER, _PARAM_SIZE = 0, 1, 2
_MAX_DYNAMIC_SHARED = 8
_DEFAULT_SHARED = 48 * 1024

# Parameter kinds: name -> struct code. "@" packing gives each its natural alignment, as the kernel ABI does.
PARAM_CODES = {"ptr": "Q", "i64": "q", "i32": "i", "u32": "I", "fp32": "f"}


class DriverError(RuntimeError):
    """A CUDA driver call failed; the message carries the call and the driver's own name for the error."""


class _Driver:
    """libcuda, opened on first use."""

    def __init__(self) -> None:
        try:
            self.lib = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise DriverError(f"no CUDA driver: {e}") from e
        p, u, i = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int
        self.lib.cuLaunchKernel.argtypes = [p, u, u, u, u, u, u, u, p, p, p]
        self.lib.cuModuleLoadData.argtypes = [ctypes.POINTER(p), ctypes.c_char_p]
        self.lib.cuModuleGetFunction.argtypes = [ctypes.POINTER(p), p, ctypes.c_char_p]
        self.lib.cuFuncSetAttribute.argtypes = [p, i, i]
        self.lib.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(p), i]
        self.lib.cuCtxPushCurrent_v2.argtypes = [p]
        self.lib.cuCtxPopCurrent_v2.argtypes = [ctypes.POINTER(p)]
        self.lib.cuCtxSetCurrent.argtypes = [p]
        self.lib.cuGetErrorName.argtypes = [i, ctypes.POINTER(ctypes.c_char_p)]
        self.check("cuInit", self.lib.cuInit(0))

    def check(self, call: str, rc: int) -> None:
        if rc != _SUCCESS:
            name = ctypes.c_char_p()
            self.lib.cuGetErrorName(rc, ctypes.byref(name))
            raise DriverError(f"{call}: {(name.value or b'unknown').decode()} ({rc})")


_lock = threading.Lock()
_driver: _Driver | None = None
_contexts: dict[int, int] = {}


def driver() -> _Driver:
    """The opened driver. Raises DriverError where there is none."""
    global _driver
    if _driver is not None:
        return _driver
    with _lock:
        if _driver is None:
            _driver = _Driver()
        return _driver


def _primary_context(index: int) -> int:
    d = driver()
    with _lock:
        if index not in _contexts:
            ctx = ctypes.c_void_p()
            d.check("cuDevicePrimaryCtxRetain", d.lib.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), index))
            _contexts[index] = ctx.value or 0
        return _contexts[index]


class Function:
    """A loaded kernel on one device. `index` is the driver's device ordinal, which is torch's device index."""

    __slots__ = ("_module", "context", "handle", "name", "shared", "threads")

    def __init__(self, cubin: bytes, name: str, *, threads: int, shared: int, index: int) -> None:
        d = driver()
        self.context = _primary_context(index)
        self.name, self.threads, self.shared = name, threads, shared
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        d.check("cuCtxPushCurrent", d.lib.cuCtxPushCurrent_v2(self.context))
        try:
            d.check("cuModuleLoadData", d.lib.cuModuleLoadData(ctypes.byref(module), cubin))
            d.check("cuModuleGetFunction", d.lib.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            if shared > _DEFAULT_SHARED:
                d.check("cuFuncSetAttribute", d.lib.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared))
        finally:
            d.lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        # Modules live as long as the process: a plan may be captured in a CUDA graph that outlives every Python object.
        self._module = module.value
        self.handle = function.value


class ParamPack:
    """Packs kernel arguments. `kinds` in parameter order; see PARAM_CODES."""

    __slots__ = ("_struct",)

    def __init__(self, kinds: Sequence[str]) -> None:
        self._struct = struct.Struct("@" + "".join(PARAM_CODES[k] for k in kinds))

    def __call__(self, values: Sequence[Any]) -> bytes:
        return self._struct.pack(*values)


_Extra = ctypes.c_void_p * 5


@cache
def _buffer_type(size: int) -> Any:
    return ctypes.c_char * size


class LaunchBuffer:
    """A packed parameter buffer and the argument array that points at it."""

    __slots__ = ("_size", "data", "extra")

    def __init__(self, params: bytes) -> None:
        self.data = _buffer_type(len(params)).from_buffer_copy(params)
        self._size = ctypes.c_size_t(len(params))
        self.extra = _Extra(_PARAM_POINTER, ctypes.addressof(self.data), _PARAM_SIZE, ctypes.addressof(self._size),
                            _PARAM_END)


def launch(function: Function, grid: tuple[int, int, int], buffer: LaunchBuffer, stream: int) -> None:
    """Launch once. The driver has read the buffer when this returns."""
    call = driver().lib.cuLaunchKernel
    args = (function.handle, *grid, function.threads, 1, 1, function.shared, stream, None, buffer.extra)
    rc = call(*args)
    if rc == _INVALID_CONTEXT:  # a thread that has not touched CUDA yet has no current context
        driver().lib.cuCtxSetCurrent(function.context)
        rc = call(*args)
    if rc != _SUCCESS:
        driver().check(f"launch of {function.name}", rc)


class BoundKernel:
    """One kernel with its grid and packed arguments; calling it launches on the given raw stream."""

    __slots__ = ("_buffer", "_function", "_grid")

    def __init__(self, function: Function, grid: tuple[int, int, int], params: bytes) -> None:
        self._function, self._grid, self._buffer = function, grid, LaunchBuffer(params)

    def __call__(self, stream: int) -> None:
        launch(self._function, self._grid, self._buffer, stream)
