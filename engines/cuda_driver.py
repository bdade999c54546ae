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

from descriptors import FrostError

_SUCCESS, _INVALID_CONTEXT = 0, 201
_PARAM_END, _PARAM_POINTER, _PARAM_SIZE = 0, 1, 2
_MAX_DYNAMIC_SHARED = 8
_MULTIPROCESSOR_COUNT = 16
_DEFAULT_SHARED = 48 * 1024

TENSOR_MAP_BYTES = 128
# Parameter kinds: name -> (struct code, bytes, alignment), as the kernel ABI lays parameters out. A "tmap" is a tensor
# map (`TensorMap`), passed by value; its alignment counts from the start of the constant bank, in which parameters begin
# _PARAM_BASE bytes in on sm_90, the only architecture whose kernels here take one.
_PARAM_BASE = 0x210
PARAM_CODES = {"ptr": ("Q", 8, 8), "i64": ("q", 8, 8), "i32": ("i", 4, 4), "u32": ("I", 4, 4), "fp32": ("f", 4, 4),
               "tmap": (f"{TENSOR_MAP_BYTES}s", TENSOR_MAP_BYTES, 64)}


class DriverError(FrostError, RuntimeError):
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
        if hasattr(self.lib, "cuTensorMapEncodeTiled"):  # drivers from CUDA 12.0 on
            self.lib.cuTensorMapEncodeTiled.argtypes = [p, i, u, p, p, p, p, p, i, i, i, i]
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


@cache
def multiprocessors(index: int) -> int:
    """How many multiprocessors a device has."""
    d = driver()
    device, count = ctypes.c_int(), ctypes.c_int()
    d.check("cuDeviceGet", d.lib.cuDeviceGet(ctypes.byref(device), index))
    d.check("cuDeviceGetAttribute", d.lib.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSOR_COUNT, device))
    return count.value


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


_loading = threading.Lock()
_loaded: dict[tuple[bytes, str, int, int, int], Function] = {}


def load(cubin: bytes, name: str, *, threads: int, shared: int, index: int) -> Function:
    """The kernel, loaded once per process and device. A plan for another shape asks for its kernels anew, and a module is
    never unloaded: loaded for each plan, ten thousand shapes would fill the device with copies of a few kernels."""
    key = (cubin, name, threads, shared, index)
    found = _loaded.get(key)
    if found is None:
        with _loading:
            found = _loaded.get(key)
            if found is None:
                found = _loaded[key] = Function(cubin, name, threads=threads, shared=shared, index=index)
    return found


class ParamPack:
    """Packs kernel arguments. `kinds` in parameter order; see PARAM_CODES. `offsets`: where each one starts in the
    buffer, in bytes."""

    __slots__ = ("_struct", "offsets")

    def __init__(self, kinds: Sequence[str]) -> None:
        codes, offsets, end = "<", [], 0
        for kind in kinds:
            code, size, alignment = PARAM_CODES[kind]
            pad = -(end + _PARAM_BASE) % alignment
            codes += f"{pad}x{code}" if pad else code
            offsets.append(end + pad)
            end += pad + size
        self._struct = struct.Struct(codes)
        self.offsets = tuple(offsets)

    def __call__(self, values: Sequence[Any]) -> bytes:
        return self._struct.pack(*values)


class TensorMap:
    """Everything about a tensor map (the operand of Hopper's bulk tensor copies) but its address.

    shape, strides: extents and strides in elements, outermost first, the last stride 1; box: the extents of one copy,
    in the same order. Reads outside the shape give zeros. `dtype` and `swizzle` are the driver's enumerators.
    """

    __slots__ = ("_args", "_kept", "_memory")

    _NO_INTERLEAVE, _PROMOTE_TO_128_BYTES, _FILL_WITH_ZEROS = 0, 2, 0

    def __init__(self, *, dtype: int, itemsize: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int],
                 swizzle: int) -> None:
        rank = len(shape)
        sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
        pitches = (ctypes.c_uint64 * max(rank - 1, 1))(*(s * itemsize for s in reversed(strides[:-1])))
        boxes, steps = (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*(1,) * rank)
        # The driver wants its result at a multiple of 64 bytes.
        self._memory = threading.local()
        self._kept = (sizes, pitches, boxes, steps)
        self._args = (dtype, rank, sizes, pitches, boxes, steps, swizzle)

    def encode(self, address: int, index: int) -> bytes:
        """The map of a tensor at `address`, a multiple of 16, on device `index`. Raises DriverError where the driver refuses
        it."""
        memory = getattr(self._memory, "block", None)
        if memory is None:
            memory = self._memory.block = (ctypes.c_char * (2 * TENSOR_MAP_BYTES))()
        at = ctypes.addressof(memory)
        at += -at % 64
        dtype, rank, sizes, pitches, boxes, steps, swizzle = self._args
        d = driver()
        args = (at, dtype, rank, address, sizes, pitches, boxes, steps, self._NO_INTERLEAVE, swizzle,
                self._PROMOTE_TO_128_BYTES, self._FILL_WITH_ZEROS)
        rc = d.lib.cuTensorMapEncodeTiled(*args)
        if rc == _INVALID_CONTEXT:  # a thread that has not touched CUDA yet; its current device stays as it is
            d.check("cuCtxPushCurrent", d.lib.cuCtxPushCurrent_v2(_primary_context(index)))
            try:
                rc = d.lib.cuTensorMapEncodeTiled(*args)
            finally:
                d.lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        d.check("cuTensorMapEncodeTiled", rc)
        return ctypes.string_at(at, TENSOR_MAP_BYTES)


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

    def write(self, at: int, part: bytes) -> None:
        """Replace the bytes from offset `at` on."""
        ctypes.memmove(ctypes.addressof(self.data) + at, part, len(part))


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
