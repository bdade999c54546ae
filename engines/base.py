"""The contract between lowering and an engine.

    Capabilities   rows of data: what one engine cell can do; `judge` turns a row and a descriptor into reasons
    Adapter        one op of one engine: check_support -> workspace -> compile (on descriptors alone, no GPU needed)
    Executable     what compile returns; `prepare` binds operands once, the bound call only launches
    Launch         the bound descriptor and the named operands
    Engine         a named set of adapters with availability, source files and toolchain

Sizes never reach an Executable at compile time: they come with the bound descriptor of each `Launch`, so one
executable serves every shape that shares its TemplateParams.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from descriptors import (
    DType,
    FrostError,
    NsaCompressBwdDesc,
    NsaCompressDesc,
    NsaCompressedBwdDesc,
    NsaCompressedDesc,
    NsaSelectionBwdDesc,
    NsaSelectionDesc,
    NsaTopkDesc,
    OpDesc,
    PointwiseDesc,
    SdpaBwdDesc,
    SdpaDesc,
)

if TYPE_CHECKING:
    import torch

GRID_LIMIT = 65_535

# Records with queries, keys and values: rows judge their dtype, head dims and groups.
_ATTENTION = (SdpaDesc, SdpaBwdDesc, NsaSelectionDesc, NsaSelectionBwdDesc, NsaCompressedDesc, NsaCompressedBwdDesc)

# A bound call: takes the raw stream handle (0 on a CPU) and only launches.
BoundCall = Callable[[int], None]


@dataclass(frozen=True)
class Target:
    """Where a plan is to run. `cc` is the compute capability of a CUDA target, e.g. (9, 0); no GPU is needed to name one.

    `index` picks the device at run time and is no plan-time fact.
    """

    device: str
    cc: tuple[int, int] | None = None
    index: int = field(default=0, compare=False)

    @staticmethod
    def cpu() -> Target:
        return Target("cpu")

    @staticmethod
    def cuda(cc: tuple[int, int], index: int = 0) -> Target:
        return Target("cuda", (int(cc[0]), int(cc[1])), index)

    @property
    def arch(self) -> str:
        """"cpu" or "sm_90"."""
        return "cpu" if self.cc is None else f"sm_{self.cc[0]}{self.cc[1]}"

    def __str__(self) -> str:
        return self.arch


@dataclass(frozen=True)
class Reason:
    """Why an engine cannot serve a descriptor: the field, what was given, what would do."""

    field: str
    got: str
    wanted: str
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.field}: got {self.got}, wanted {self.wanted}"


@dataclass(frozen=True)
class Support:
    """A verdict with all its reasons; empty means yes."""

    reasons: tuple[Reason, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ok


class Decline(FrostError):
    """The typed "no" that lets lowering ask the next engine. Anything else an engine raises is a bug and propagates."""

    def __init__(self, *reasons: Reason) -> None:
        super().__init__("; ".join(map(str, reasons)))
        self.reasons = reasons


@dataclass(frozen=True)
class Capabilities:
    """One engine cell, as data. The support matrix in the docs is generated from these rows."""

    engine: str
    op: str
    devices: tuple[str, ...]
    dtypes: tuple[DType, ...]
    features: frozenset[str]                      # the optional descriptor fields this cell consumes
    min_cc: tuple[int, int] | None = None         # on CUDA
    head_dim: tuple[int, int] | None = None       # inclusive range; None = any
    head_dim_v: tuple[int, int] | None = None
    head_dim_multiple: int = 1
    equal_head_dims: bool = False
    unit_last_stride: bool = False                # q, k, v, o, do and gradients need last stride 1
    groups: str = "any"                           # "any" or "mha" (as many K/V heads as query heads)
    symbolic: bool = True                         # symbolic extents
    deterministic: bool = True                    # its backward is bit-reproducible
    allocates: bool = False                       # allocates through the framework while executing
    note: str = ""

    def judge(self, desc: OpDesc, target: Target) -> tuple[Reason, ...]:
        """All reasons why this row does not cover the descriptor."""
        out: list[Reason] = []

        def want(ok: bool, name: str, got: object, wanted: object) -> None:
            if not ok:
                out.append(Reason(name, str(got), str(wanted)))

        want(target.device in self.devices, "device", target.device, " or ".join(self.devices))
        if target.cc is not None and self.min_cc is not None:
            want(target.cc >= self.min_cc, "arch", target, f"sm_{self.min_cc[0]}{self.min_cc[1]} or newer")
        unknown = desc.set_fields() - self.features
        for name in sorted(unknown):
            out.append(Reason(name, "set", "not set", f"{name} is not supported by {self.engine}:{desc.op}"))
        if isinstance(desc, _ATTENTION):
            self._judge_attention(desc, want)
        if getattr(desc, "deterministic", False):
            want(self.deterministic, "deterministic", True, False)
        want(self.symbolic or not any(t.is_symbolic for _, t in desc.tensors()), "shape", "symbolic", "numbers")
        return tuple(out)

    def _judge_attention(self, desc: Any, want: Callable[[bool, str, object, object], None]) -> None:
        dtypes = " or ".join(map(str, self.dtypes))
        want(desc.q.dtype in self.dtypes, "dtype", desc.q.dtype, dtypes)
        for name, value, bounds in (("head_dim", desc.head_dim, self.head_dim),
                                    ("head_dim_v", desc.head_dim_v, self.head_dim_v)):
            if bounds is not None:
                want(bounds[0] <= value <= bounds[1], name, value, f"{bounds[0]}..{bounds[1]}")
            want(value % self.head_dim_multiple == 0, name, value, f"a multiple of {self.head_dim_multiple}")
        want(not self.equal_head_dims or desc.head_dim == desc.head_dim_v, "head_dim_v", desc.head_dim_v, desc.head_dim)
        want(self.groups == "any" or desc.group == 1, "group", desc.group, 1)
        if self.unit_last_stride:
            for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
                tensor = getattr(desc, name, None)
                if tensor is not None:
                    want(tensor.unit_last_stride, f"{name}.stride[-1]", tensor.strides[-1], 1)


@dataclass(frozen=True)
class Region:
    """A named piece of workspace, in bytes. One list of these both sizes and carves the workspace."""

    name: str
    nbytes: int


@dataclass(slots=True)  # made on every call, and a frozen one costs three times as much to make
class Launch:
    """What to launch with: the descriptor with every symbol bound, and the operands by field name."""

    desc: OpDesc
    operands: Mapping[str, torch.Tensor]

    def ptr(self, name: str) -> int:
        """Address of an operand, 0 where it is absent."""
        tensor = self.operands.get(name)
        return 0 if tensor is None else tensor.data_ptr()


class Workspace:
    """The carved regions of one step: offsets into one uint8 buffer."""

    __slots__ = ("_base", "_buffer", "_offsets")

    def __init__(self, buffer: torch.Tensor | None, offsets: Mapping[str, tuple[int, int]]) -> None:
        self._buffer = buffer
        self._base = 0 if buffer is None else buffer.data_ptr()
        self._offsets = offsets

    def ptr(self, name: str) -> int:
        """Address of a region; 0 where it is empty."""
        offset, nbytes = self._offsets[name]
        return self._base + offset if nbytes else 0

    def tensor(self, name: str) -> torch.Tensor:
        """The region as a uint8 tensor."""
        offset, nbytes = self._offsets[name]
        if self._buffer is None:
            raise LookupError(f"workspace region {name!r}: this plan was bound without a workspace")
        return self._buffer[offset:offset + nbytes]


NO_WORKSPACE = Workspace(None, {})


class Executable(abc.ABC):
    """A compiled op: the whole kernel chain, for every shape with the same TemplateParams."""

    @abc.abstractmethod
    def prepare(self, launch: Launch, workspace: Workspace) -> BoundCall:
        """Do all host work for these operands; the returned call launches on the stream it is given, nothing else."""

    def execute(self, launch: Launch, workspace: Workspace, stream: int) -> None:
        """`prepare` and one call. Engines whose preparation costs something override it with a direct launch."""
        self.prepare(launch, workspace)(stream)

    def workspace(self, desc: OpDesc) -> tuple[Region, ...] | None:
        """Scratch of one execution where it depends on which kernels were compiled; None: what the adapter says."""
        return None

    def describe(self) -> Mapping[str, Any]:
        """What runs (kernel names, TemplateParams, registers where known), for `plan.explain()`."""
        return {}


class Adapter(abc.ABC):
    """One op of one engine."""

    engine: ClassVar[str]
    op: ClassVar[str]
    capabilities: ClassVar[tuple[Capabilities, ...]]

    def check_support(self, desc: OpDesc, target: Target) -> Support:
        """All reasons against, on descriptors alone. The default judges the capability rows: one that fits is enough,
        otherwise the reasons of the row that came closest."""
        verdicts = [row.judge(desc, target) for row in self.capabilities]
        return Support(min(verdicts, key=len) if verdicts else (Reason("op", desc.op, "an op of this engine"),))

    def label(self, desc: OpDesc, target: Target) -> str:
        """The engine's name as the route shows it; may carry a detail in brackets."""
        return self.engine

    def workspace(self, desc: OpDesc) -> tuple[Region, ...]:
        """Scratch of one execution, as a function of the (bound) extents. See also `Executable.workspace`."""
        return ()

    @abc.abstractmethod
    def compile(self, desc: OpDesc, target: Target) -> Executable:
        """Everything that takes time. May raise `Decline`."""

    def execute(self, executable: Executable, launch: Launch, workspace: Workspace, stream: int = 0) -> None:
        """Launches only."""
        executable.execute(launch, workspace, stream)


class SdpaFwdDsl(Adapter):
    """Attention forward."""

    op = SdpaDesc.OP


class SdpaBwdDsl(Adapter):
    """Attention backward."""

    op = SdpaBwdDesc.OP


class PointwiseDsl(Adapter):
    """Primitive ops (`descriptors.ops.PRIMITIVES`)."""

    op = PointwiseDesc.OP


class NsaSelectionFwdDsl(Adapter):
    """Native sparse attention: attention over selected blocks."""

    op = NsaSelectionDesc.OP


class NsaSelectionBwdDsl(Adapter):
    """Its gradients."""

    op = NsaSelectionBwdDesc.OP


class NsaCompressFwdDsl(Adapter):
    """Block pooling of keys or values."""

    op = NsaCompressDesc.OP


class NsaCompressBwdDsl(Adapter):
    """Its gradients."""

    op = NsaCompressBwdDesc.OP


class NsaCompressedFwdDsl(Adapter):
    """Attention over compressed keys, with the importance of selection blocks."""

    op = NsaCompressedDesc.OP


class NsaCompressedBwdDsl(Adapter):
    """Its gradients."""

    op = NsaCompressedBwdDesc.OP


class NsaTopkDsl(Adapter):
    """The choice of blocks by importance."""

    op = NsaTopkDesc.OP


# The adapter class that serves each record type: `lower_dsl` finds an engine's cell by it.
API_TYPES: dict[type[OpDesc], type[Adapter]] = {
    SdpaDesc: SdpaFwdDsl, SdpaBwdDesc: SdpaBwdDsl, PointwiseDesc: PointwiseDsl,
    NsaSelectionDesc: NsaSelectionFwdDsl, NsaSelectionBwdDesc: NsaSelectionBwdDsl,
    NsaCompressDesc: NsaCompressFwdDsl, NsaCompressBwdDesc: NsaCompressBwdDsl,
    NsaCompressedDesc: NsaCompressedFwdDsl, NsaCompressedBwdDesc: NsaCompressedBwdDsl, NsaTopkDesc: NsaTopkDsl,
}


class Engine:
    """A named set of adapters. Subclass and override what differs; all of it is cheap and needs no GPU.

    `gated`: routable only with an equivalence gate (frost.gates) that covers its source and environment.
    """

    name: ClassVar[str]
    gated: ClassVar[bool] = False

    def adapters(self) -> tuple[Adapter, ...]:
        return ()

    def adapter(self, api_type: type[Adapter]) -> Adapter | None:
        return next((a for a in self.adapters() if isinstance(a, api_type)), None)

    def unavailable(self, target: Target) -> Reason | None:
        """Why nothing of this engine can run on the target (a package missing, say); None when it can."""
        return None

    def automatic(self, target: Target) -> bool:
        """Whether `engines=None` may choose it on this target."""
        return True

    def needs_gate(self, target: Target) -> bool:
        return self.gated

    def source_files(self) -> tuple[Path, ...]:
        """Every file whose text reaches a kernel."""
        return ()

    def op_source_files(self, op: str) -> tuple[Path, ...]:
        """Those that reach the kernels of one op: what its gate vouches for. All of them unless an engine says less."""
        return self.source_files()

    def toolchain(self) -> Mapping[str, str]:
        """Compiler versions that are part of a kernel's identity, e.g. {"triton": "3.6"}: major.minor."""
        return {}

    def source_digest(self) -> str:
        return digest_files(self.source_files())

    def op_source_digest(self, op: str) -> str:
        return digest_files(self.op_source_files(op))


def digest_files(files: Iterable[Path]) -> str:
    """SHA-256 over names and contents, independent of where the tree lies and of time stamps."""
    stamps = []
    for path in sorted(files, key=lambda p: (p.name, str(p))):
        stat = path.stat()
        stamps.append((str(path), stat.st_mtime_ns, stat.st_size))
    return _digest(tuple(stamps))


@lru_cache(maxsize=64)
def _digest(stamps: tuple[tuple[str, int, int], ...]) -> str:
    h = hashlib.sha256()
    for name, _, _ in stamps:
        path = Path(name)
        data = path.read_bytes()
        h.update(f"{path.parent.name}/{path.name}\0{len(data)}\0".encode())
        h.update(data)
    return h.hexdigest()


def fold_grid(n: int) -> tuple[int, int, int]:
    """A grid of at least `n` programs in which no axis passes 65,535. Programs number themselves y * X + x and leave
    when they are past `n`."""
    x = min(max(n, 1), GRID_LIMIT)
    y = -(-n // x) if n else 1
    if y > GRID_LIMIT:
        raise ValueError(f"grid: given {n} programs, expected at most {GRID_LIMIT * GRID_LIMIT}")
    return (x, y, 1)
