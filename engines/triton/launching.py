"""From argument tables to a call that only launches: the driver on a GPU, Triton's interpreter on a CPU."""

from __future__ import annotations

import abc
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import cuda_driver
from engines.base import BoundCall, Executable, Launch, Target, Workspace, digest_files, fold_grid
from engines.template_loader import Bundle, KernelKey, loader

from . import interpret, runtime
from .params import Arg, TemplateParams, resolve_args

ENGINE_NAME = "triton"
# How programs are laid out in a grid: FOLDED keeps every axis below 65,536; FLAT is one axis, which holds 2**31 - 1
# blocks on CUDA; PERSISTENT is one block per multiprocessor, and the kernel walks its programs.
FOLDED, FLAT, PERSISTENT = "folded", "flat", "persistent"


class Kernel:
    """One kernel of one specialisation: compiled for a CUDA target, or interpreted on the CPU."""

    def __init__(self, module: str, name: str, table: Sequence[tuple[str, str]], params: TemplateParams,
                 constexprs: Mapping[str, Any], num_warps: int, num_stages: int, target: Target, *,
                 max_registers: int | None = None) -> None:
        self.module, self.name, self.params, self.max_registers = module, name, params, max_registers
        self.args: tuple[Arg, ...] = self._resolve(table, params)
        self.constexprs = dict(constexprs)
        self.num_warps, self.num_stages = num_warps, num_stages
        self._functions: dict[int, cuda_driver.Function] = {}
        self.bundle: Bundle | None = None if target.cc is None else self._compile(target)
        if self.bundle is not None:
            self.pack = cuda_driver.ParamPack(self.bundle.meta["kinds"])

    def _resolve(self, table: Sequence[tuple[str, str]], params: Any) -> tuple[Arg, ...]:
        return resolve_args(table, params)

    def _sources(self) -> tuple[Path, ...]:
        """The files whose text decides this kernel's code."""
        return runtime.source_files()

    def _compile(self, target: Target) -> Bundle:
        cc = target.cc
        assert cc is not None  # the caller's branch, not user input
        key = KernelKey(ENGINE_NAME, self.name, self.params.items(), target.arch,
                        digest_files(self._sources()), tuple(sorted(runtime.toolchain().items())))
        return loader.get(key, lambda: runtime.compile_kernel(
            self.module, self.name, self.args, self.constexprs, cc=cc, num_warps=self.num_warps,
            num_stages=self.num_stages, max_registers=self.max_registers))

    def freeze(self, programs: int, values: Mapping[str, Any], pointers: Mapping[str, Pointer], *,
               grid: str = FOLDED) -> FrozenKernel:
        """Everything about a launch but its addresses. `values`: every number by name; `pointers`: where each
        pointer argument comes from; `grid`: FOLDED, FLAT or PERSISTENT. Raises ValueError for more programs than a
        grid holds."""
        if programs >= 2**31:
            raise ValueError(f"{self.name}: given {programs} programs, expected fewer than 2**31; split the batch")
        return FrozenKernel(self, programs, {**values, "n_programs": programs}, pointers, grid)

    def bind(self, programs: int, values: Mapping[str, Any], pointers: Mapping[str, Any], device: int | None
             ) -> BoundCall:
        """A launch whose pointers are known: a tensor or None by name, or an address on a GPU."""
        return self.freeze(programs, values, pointers).bind(_NO_OPERANDS, None, device)

    def offset(self, kind: str) -> int:
        """Where the first parameter of a kind starts in the packed buffer, in bytes; 0 where there is none."""
        assert self.bundle is not None  # only asked of compiled kernels
        kinds = list(self.bundle.meta["kinds"])
        return self.pack.offsets[kinds.index(kind)] if kind in kinds else 0

    def maps(self) -> Iterator[tuple[int, Sequence[Any], str]]:
        """(offset in the packed buffer, facts of the bundle, argument name) of each tensor map."""
        assert self.bundle is not None
        offsets = [at for at, kind in zip(self.pack.offsets, self.bundle.meta["kinds"]) if kind == "tmap"]
        names = [a.name for a in self.args if a.kind == "tmap"]
        yield from zip(offsets, self.bundle.meta["maps"], names)

    def function(self, device: int) -> cuda_driver.Function:
        if device not in self._functions:
            bundle = self.bundle
            assert bundle is not None  # compiled in __init__ for every CUDA target
            meta = bundle.meta
            self._functions[device] = cuda_driver.load(
                bundle.code, meta["name"], threads=meta["threads"], shared=meta["shared"], index=device)
        return self._functions[device]

    def describe(self) -> dict[str, Any]:
        out: dict[str, Any] = {"kernel": self.name}
        out |= {k: v for k, v in self.params.items() if v is not None and v is not False}
        if self.bundle is not None:
            out |= {"shared_bytes": self.bundle.meta["shared"], "threads": self.bundle.meta["threads"]}
        return out


@dataclass(frozen=True)
class Operand:
    """A pointer argument that is an operand of the launch."""

    field: str


@dataclass(frozen=True)
class Scratch:
    """A pointer argument that is a workspace region, of fp32 numbers unless it says otherwise."""

    region: str
    dtype: str = "float32"


# Where a pointer comes from; a tensor, an address or None stands for itself.
Pointer = Any
_NO_OPERANDS: Mapping[str, Any] = {}


class FrozenKernel:
    """A launch of one kernel for one set of sizes. Binding it to operands is all that happens per call: on a GPU the
    numbers are packed here already. A kernel's pointers stand side by side in its parameters, so that one call writes
    them all; tensor maps, which hold an address too, come before them."""

    def __init__(self, kernel: Kernel, programs: int, numbers: Mapping[str, Any],
                 pointers: Mapping[str, Pointer], grid: str = FOLDED) -> None:
        self._kernel, self._programs, self._numbers = kernel, programs, dict(numbers)
        self._grid = fold_grid(programs) if grid == FOLDED else (max(programs, 1), 1, 1)
        self._persistent = grid == PERSISTENT
        self._pointers = {a.name: pointers[a.name] for a in kernel.args if a.kind == "ptr"}
        self._sources = tuple(self._pointers.values())
        self._maps: tuple[tuple[int, cuda_driver.TensorMap, Pointer], ...] = ()
        self._mine = threading.local()
        if kernel.bundle is not None and programs:
            zeros = dict.fromkeys(self._pointers, 0)
            self._packed = kernel.pack(runtime.argument_values(kernel.args, {**self._numbers, **zeros}))
            self._head = struct.Struct(f"{len(zeros)}Q")
            self._pointers_at = kernel.offset("ptr")
            self._maps = tuple(
                (at, _tensor_map(facts, self._numbers[name]), pointers[name]) for at, facts, name in kernel.maps())

    def bind(self, operands: Mapping[str, Any], workspace: Workspace | None, device: int | None) -> BoundCall:
        """`device`: the CUDA device's index, None on a CPU. Launches nothing where there is nothing to do."""
        if not self._programs:
            return _nothing
        if device is None:
            return self._interpreted(operands, workspace)
        data = bytearray(self._packed)
        self._head.pack_into(data, self._pointers_at, *self._addresses(self._sources, operands, workspace))
        for at, tensor_map, pointer in self._maps:
            address, = self._addresses((pointer,), operands, workspace)
            data[at:at + cuda_driver.TENSOR_MAP_BYTES] = tensor_map.encode(address, device)
        return cuda_driver.BoundKernel(self._kernel.function(device), self._grid_on(device), bytes(data))

    def launch(self, operands: Mapping[str, Any], workspace: Workspace | None, device: int, stream: int) -> None:
        """Launch now, through a parameter buffer that this thread keeps: the driver copies it before it returns."""
        if not self._programs:
            return
        buffer = getattr(self._mine, "buffer", None)
        if buffer is None:
            buffer = self._mine.buffer = cuda_driver.LaunchBuffer(self._packed)
            self._mine.mapped = [0] * len(self._maps)
        self._head.pack_into(buffer.data, self._pointers_at, *self._addresses(self._sources, operands, workspace))
        if self._maps:
            self._write_maps(buffer, operands, workspace, device)
        cuda_driver.launch(self._kernel.function(device), self._grid_on(device), buffer, stream)

    def _grid_on(self, device: int) -> tuple[int, int, int]:
        if not self._persistent:
            return self._grid
        return min(self._programs, cuda_driver.multiprocessors(device)), 1, 1

    def _write_maps(self, buffer: cuda_driver.LaunchBuffer, operands: Mapping[str, Any],
                    workspace: Workspace | None, device: int) -> None:
        """Encoding costs more than a pointer does, so only maps of addresses that moved are made again."""
        addresses = self._addresses([pointer for _, _, pointer in self._maps], operands, workspace)
        mapped = self._mine.mapped
        for i, (at, tensor_map, _) in enumerate(self._maps):
            if mapped[i] != addresses[i]:
                buffer.write(at, tensor_map.encode(addresses[i], device))
                mapped[i] = addresses[i]

    @staticmethod
    def _addresses(sources: Sequence[Pointer], operands: Mapping[str, Any], workspace: Workspace | None) -> list[int]:
        return [0 if p is None else operands[p.field].data_ptr() if type(p) is Operand
                else _address(p, workspace) for p in sources]

    def _interpreted(self, operands: Mapping[str, Any], workspace: Workspace | None) -> BoundCall:
        kernel = self._kernel
        pointers = {n: _tensor(p, operands, workspace) for n, p in self._pointers.items()}
        given = {a.name: a.constant if a.constant is not None else pointers[a.name] if a.kind == "ptr"
                 else self._numbers[a.name] for a in kernel.args} | kernel.constexprs
        return lambda stream: interpret.run_kernel(kernel.module, kernel.name, self._grid, given)


class FrozenChain:
    """Kernels launched one after the other."""

    def __init__(self, kernels: Sequence[FrozenKernel]) -> None:
        self._kernels = tuple(kernels)

    def bind(self, operands: Mapping[str, Any], workspace: Workspace, device: int | None) -> BoundCall:
        calls = [k.bind(operands, workspace, device) for k in self._kernels]
        if len(calls) == 1:
            return calls[0]

        def run(stream: int) -> None:
            for call in calls:
                call(stream)

        return run


    def launch(self, operands: Mapping[str, Any], workspace: Workspace, device: int | None, stream: int) -> None:
        """Launch all of them now."""
        if device is None:
            self.bind(operands, workspace, None)(stream)
            return
        for kernel in self._kernels:
            kernel.launch(operands, workspace, device, stream)


class ChainExecutable(Executable):
    """An executable whose launches are frozen once for each bound descriptor (`freeze`)."""

    def __init__(self) -> None:
        self._chains = ChainCache(self.freeze)

    @abc.abstractmethod
    def freeze(self, desc: Any) -> FrozenChain:
        """The launches for a bound descriptor, without addresses."""

    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        return self._chains.get(launch.desc).bind(launch.operands, workspace, _device(launch))

    def execute(self, launch: Launch, workspace: Workspace, stream: int) -> None:
        self._chains.get(launch.desc).launch(launch.operands, workspace, _device(launch), stream)


def _device(launch: Launch) -> int | None:
    index = next(iter(launch.operands.values())).get_device()
    return None if index < 0 else index


class ChainCache:
    """The frozen chains of the last few bound descriptors of one executable, found by identity: a plan hands in the
    same descriptor object at every call, and comparing descriptors by value would cost more than it saves."""

    _KEEP = 64

    def __init__(self, freeze: Callable[[Any], FrozenChain]) -> None:
        self._freeze = freeze
        self._found: dict[int, tuple[Any, FrozenChain]] = {}

    def get(self, desc: Any) -> FrozenChain:
        entry = self._found.get(id(desc))
        if entry is not None and entry[0] is desc:
            return entry[1]
        if len(self._found) >= self._KEEP:
            self._found.clear()
        chain = self._freeze(desc)
        self._found[id(desc)] = (desc, chain)  # holds the descriptor, so its id stays its own
        return chain


def _address(pointer: Pointer, workspace: Workspace | None) -> int:
    if isinstance(pointer, Scratch):
        assert workspace is not None  # only chains, which always have one, use scratch
        return workspace.ptr(pointer.region)
    return pointer if isinstance(pointer, int) else pointer.data_ptr()


def _tensor_map(facts: Sequence[Any], extents: tuple[Sequence[int], Sequence[int]]) -> cuda_driver.TensorMap:
    dtype, itemsize, swizzle, box = facts
    shape, strides = extents
    return cuda_driver.TensorMap(dtype=dtype, itemsize=itemsize, shape=shape, strides=strides, box=box, swizzle=swizzle)


def operand(desc: Any, field: str) -> Operand | None:
    """The pointer of a descriptor's operand: null where the descriptor has none."""
    return None if getattr(desc, field) is None else Operand(field)


def _tensor(pointer: Pointer, operands: Mapping[str, Any], workspace: Workspace | None) -> Any:
    if isinstance(pointer, Operand):
        return operands[pointer.field]
    if isinstance(pointer, Scratch):
        import torch

        assert workspace is not None
        return workspace.tensor(pointer.region).view(getattr(torch, pointer.dtype))
    return pointer


def _nothing(stream: int) -> None:
    """A launch with no programs."""
