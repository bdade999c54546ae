"""Plans: steps that found their engines, bound to buffers and executed.

Two levels. A `PlanCore` holds routes and compiled executables and is what the cache keeps: it knows no sizes that are
run-time facts (packed totals, symbol values). A `Plan` is a core plus the sizes, names and values of one graph; making
one on a cache hit is host arithmetic.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as cache_forever
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from descriptors import OpDesc, TensorDesc
from engines import forks
from engines.base import NO_WORKSPACE, Adapter, BoundCall, Executable, Launch, Target, Workspace

from . import _forked, binding, cache, env, routing, values
from .errors import BindError
from .fuse import fuse
from .lowering import Policy, lower_step
from .plan_key import key_text, plan_key
from .program import Program
from .routing import Route
from .validate import validate
from .workspace import Placement, Request, place

if TYPE_CHECKING:
    from .graph import Graph

_WORKSPACE_ALIGNMENT = 16
_LAYOUTS_KEPT = 64


@dataclass(frozen=True)
class CoreStep:
    """An engine's answer for one step."""

    adapter: Adapter
    executable: Executable
    route: Route


@dataclass(frozen=True)
class PlanCore:
    """What the plan cache keeps: everything that took time, nothing that is a run-time fact."""

    steps: tuple[CoreStep, ...]


@dataclass(frozen=True)
class _Layout:
    """The sizes of a plan under one set of symbol values."""

    descs: tuple[OpDesc, ...]
    inputs: tuple[binding.Expected, ...]
    outputs: tuple[binding.Expected, ...]
    intermediates: tuple[tuple[int, TensorDesc], ...]
    regions: tuple[dict[str, tuple[int, int]], ...]
    checked: tuple[bool, ...]  # steps whose operands hold values worth checking
    placement: Placement
    roomy: list[_Layout] = field(default_factory=list)  # `Plan._at_maxima` of this, once it was needed


class _Ready(NamedTuple):
    """Operands that passed every check, by slot; each step's scratch; the results to hand out."""

    layout: _Layout
    device: torch.device
    buffers: list[torch.Tensor | None]
    spaces: list[Workspace]
    outputs: dict[str, torch.Tensor]


class BoundPlan:
    """Checked operands and prepared launches. Calling it only launches, and returns {name: output tensor}."""

    __slots__ = ("_calls", "_checks", "_index", "_keep", "_on_cpu", "_outputs")

    def __init__(self, calls: Sequence[BoundCall], device: torch.device, outputs: dict[str, torch.Tensor],
                 checks: Sequence[tuple[str, OpDesc, Mapping[str, torch.Tensor]]], keep: Sequence[Any]) -> None:
        self._calls = tuple(calls)
        self._on_cpu = device.type != "cuda"
        self._index = device.index or 0
        self._outputs = outputs
        self._checks = tuple(checks)
        self._keep = tuple(keep)

    def __call__(self) -> dict[str, torch.Tensor]:
        """Launch on the current stream of the operands' device; the caller's current device stays as it is."""
        if self._checks and values.wanted(self._on_cpu):
            for node, desc, operands in self._checks:
                values.check(node, desc, operands)
        if self._on_cpu:
            for call in self._calls:
                call(0)
        elif _current_device() == self._index:
            self._launch()
        else:
            with torch.cuda.device(self._index):
                self._launch()
        return self._outputs

    def _launch(self) -> None:
        stream = _raw_stream(self._index)
        for call in self._calls:
            call(stream)


# torch's own fast paths where it has them: they are half of what a bound call costs.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)


def _in_child() -> None:
    """A bound call asks for the current device first. Where CUDA cannot work it is refused there, which costs nothing
    elsewhere."""
    global _current_device
    if _forked.cuda_is_broken():
        _current_device = _forked.refuse


forks.in_child(_in_child)


class Plan:
    """A compiled graph. Made by `Graph.compile`; safe to execute from many threads at once, each call with buffers
    and workspace of its own."""

    def __init__(self, program: Program, core: PlanCore, target: Target, policy: Policy, key: tuple,
                 cache_hit: bool, graph_bytes: bytes) -> None:
        self.program, self.target, self.policy, self.key = program, target, policy, key
        self.cache_hit = cache_hit
        self._core = core
        self._graph_bytes = graph_bytes
        self._symbolic = any(s.desc.is_symbolic for s in program.slots)
        self._layouts: OrderedDict[tuple, _Layout] = OrderedDict()
        self._static = None if self._symbolic else self._make_layout({})
        self.routes: list[Route] = [
            replace(c.route, graph=program.name, node=s.name, cache_hit=cache_hit)
            for c, s in zip(core.steps, program.steps)]

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def workspace_size(self) -> int:
        """Bytes of workspace at the declared maxima; a workspace is a 1-D uint8 tensor of at least this size."""
        layout = self._static if self._static is not None else self._make_layout(None)
        return layout.placement.nbytes

    def workspace_map(self) -> list[tuple[str, int, int, int, int]]:
        """(name, offset, bytes, first step, last step) of every region, at the declared maxima."""
        layout = self._static if self._static is not None else self._make_layout(None)
        rows = []
        for request in self._requests(layout.descs, layout.intermediates):
            offset, nbytes = layout.placement.offsets[request.key]
            rows.append((_region_name(request.key, self.program), offset, nbytes, request.first, request.last))
        return rows

    def _make_layout(self, bindings: Mapping[str, int] | None) -> _Layout:
        descs = tuple(s.desc.bound(bindings) for s in self.program.steps)
        slots = [s.desc.bound(bindings) for s in self.program.slots]
        intermediates = tuple((s.index, slots[s.index]) for s in self.program.slots if s.kind == "intermediate")
        placement = place(self._requests(descs, intermediates))
        regions: list[dict[str, tuple[int, int]]] = [{} for _ in descs]
        for key, where in placement.offsets.items():
            if key[0] == "step":  # type: ignore[index]
                regions[key[1]][key[2]] = where  # type: ignore[index]
        return _Layout(
            descs,
            tuple(binding.expect(n, i, slots[i]) for n, i in self.program.inputs.items()),
            tuple(binding.expect(n, i, slots[i]) for n, i in self.program.outputs.items()),
            intermediates, tuple(regions), tuple(values.has_values(d) for d in descs), placement)

    def _at_maxima(self, layout: _Layout) -> _Layout:
        """The layout with every piece where it lies at the declared maxima. Packing anew for smaller extents may take more in
        all, and a workspace that a caller made of `workspace_size` has to do."""
        if layout.roomy:
            return layout.roomy[0]
        most = self._make_layout(None).placement
        offsets: dict[Hashable, tuple[int, int]] = {}
        for key, (_, nbytes) in layout.placement.offsets.items():
            if nbytes > most.offsets[key][1]:
                return layout  # an engine that asks for more where there is less to do
            offsets[key] = most.offsets[key][0], nbytes
        regions: tuple[dict[str, tuple[int, int]], ...] = tuple({} for _ in layout.regions)
        for key, where in offsets.items():
            if key[0] == "step":  # type: ignore[index]
                regions[key[1]][key[2]] = where  # type: ignore[index]
        layout.roomy.append(replace(layout, placement=Placement(most.nbytes, offsets), regions=regions, roomy=[]))
        return layout.roomy[0]

    def _requests(self, descs: Sequence[OpDesc], intermediates: Sequence[tuple[int, TensorDesc]]) -> list[Request]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for i, step in enumerate(self.program.steps):
            for _, slot in step.outputs:
                first.setdefault(slot, i)
                last[slot] = max(last.get(slot, i), i)
            for _, slot in step.inputs:
                last[slot] = max(last.get(slot, i), i)
        requests = [Request(("slot", index), desc.nbytes, first[index], last[index]) for index, desc in intermediates]
        for i, (core, desc) in enumerate(zip(self._core.steps, descs)):
            regions = core.executable.workspace(desc)
            regions = core.adapter.workspace(desc) if regions is None else regions
            requests += [Request(("step", i, r.name), r.nbytes, i, i) for r in regions]
        return requests

    def _layout_for(self, tensors: Mapping[str, torch.Tensor]) -> _Layout:
        if self._static is not None:
            return self._static
        bindings = binding.resolve_symbols(self.program, tensors)
        key = tuple(sorted(bindings.items()))
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._make_layout(bindings)
            self._layouts[key] = layout
            while len(self._layouts) > _LAYOUTS_KEPT:
                try:
                    self._layouts.popitem(last=False)
                except KeyError:  # another thread emptied it
                    break
        return layout

    # -- execution -----------------------------------------------------------------------------------------------

    def execute(self, tensors: Mapping[str, torch.Tensor], *,
                workspace: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Check every operand, then launch. Outputs given in `tensors` are written in place, others are allocated.

        A plan is outside autograd: its outputs carry no gradient (`frost.backward_graph` makes a backward plan,
        `frost.attention` does both). Raises BindError (nothing launched, nothing written) for a buffer that does not match its descriptor.
        """
        ready = self._check(tensors, workspace)
        launches = self._launches(ready)
        index = ready.device.index
        if index is None:
            self._execute(ready, launches, 0)
        elif _current_device() == index:
            self._execute(ready, launches, _raw_stream(index))
        else:
            with torch.cuda.device(index):
                self._execute(ready, launches, _raw_stream(index))
        return ready.outputs

    def bind(self, tensors: Mapping[str, torch.Tensor], workspace: torch.Tensor | None = None) -> BoundPlan:
        """Do the checks of `execute` once; the returned call only launches.

        The buffers' contents may change between calls, the buffers may not.
        """
        ready = self._check(tensors, workspace)
        launches = self._launches(ready)
        calls = [core.executable.prepare(launch, space)
                 for core, launch, space in zip(self._core.steps, launches, ready.spaces)]
        checks = [(step.name, launch.desc, launch.operands)
                  for step, launch, checked in zip(self.program.steps, launches, ready.layout.checked) if checked]
        return BoundPlan(calls, ready.device, ready.outputs, checks, (ready.buffers, ready.spaces))

    def _check(self, tensors: Mapping[str, torch.Tensor], workspace: torch.Tensor | None) -> _Ready:
        """Every check of every operand, then the allocations that the caller left to us."""
        binding.check_names(self.program, tensors)
        layout = self._layout_for(tensors)
        device = self._device(tensors)
        buffers: list[torch.Tensor | None] = [None] * len(self.program.slots)
        index = -1 if device.index is None else device.index
        read: list[binding.Operand] = []
        for want in layout.inputs:
            tensor = tensors[want.name]
            if not want.fits(tensor, index):
                binding.check_tensor(want, tensor, device)
            buffers[want.slot] = tensor
            read.append((want, tensor))
        written: list[binding.Operand] = []
        for want in layout.outputs:
            out = tensors.get(want.name)
            if out is not None:
                if not want.fits(out, index):
                    binding.check_tensor(want, out, device)
                buffers[want.slot] = out
                written.append((want, out))
        if written:
            binding.check_overlap(written, read)
        if workspace is not None:
            if self._symbolic and isinstance(workspace, torch.Tensor) and workspace.numel() < layout.placement.nbytes:
                layout = self._at_maxima(layout)
            self._check_workspace(workspace, layout, device, [*written, *read])
        elif layout.placement.nbytes:
            workspace = torch.empty(layout.placement.nbytes, dtype=torch.uint8, device=device)
        outputs: dict[str, torch.Tensor] = {}
        for want in layout.outputs:
            if buffers[want.slot] is None:
                buffers[want.slot] = torch.empty_strided(want.shape, want.stride, dtype=want.dtype, device=device)
            outputs[want.name] = buffers[want.slot]  # type: ignore[assignment]
        for slot, desc in layout.intermediates:
            offset, nbytes = layout.placement.offsets[("slot", slot)]
            buffers[slot] = _carve(workspace, offset, nbytes, desc, device)
        spaces = [Workspace(workspace, regions) if regions else NO_WORKSPACE for regions in layout.regions]
        return _Ready(layout, device, buffers, spaces, outputs)

    def _launches(self, ready: _Ready) -> list[Launch]:
        buffers = ready.buffers
        return [Launch(desc, {name: buffers[slot] for name, slot in step.operands})  # type: ignore[misc]
                for step, desc in zip(self.program.steps, ready.layout.descs)]

    def _execute(self, ready: _Ready, launches: Sequence[Launch], stream: int) -> None:
        if any(ready.layout.checked) and values.wanted(ready.device.index is None):
            for step, launch, checked in zip(self.program.steps, launches, ready.layout.checked):
                if checked:
                    values.check(step.name, launch.desc, launch.operands)
        for core, launch, space in zip(self._core.steps, launches, ready.spaces):
            core.executable.execute(launch, space, stream)

    def _device(self, tensors: Mapping[str, torch.Tensor]) -> torch.device:
        name = next(iter(self.program.inputs), None) or next(iter(tensors))
        device = tensors[name].device
        if device.type != self.target.device:
            raise BindError(f"tensor {name!r}: given device {device}, expected a {self.target.device} device: this plan "
                            f"was compiled for {self.target}; compile the graph with device={device.type!r}")
        if self.target.cc is not None:
            _forked.check()
            cc = _capability(device.index or 0)
            if cc != self.target.cc:
                raise BindError(f"tensor {name!r}: given {device} (sm_{cc[0]}{cc[1]}), expected a device of "
                                f"{self.target}; compile the graph for that device")
        return device

    @staticmethod
    def _check_workspace(workspace: torch.Tensor, layout: _Layout, device: torch.device,
                         operands: Sequence[binding.Operand]) -> None:
        need = layout.placement.nbytes
        if not isinstance(workspace, torch.Tensor) or workspace.dtype is not torch.uint8 or workspace.dim() != 1 \
                or not workspace.is_contiguous():
            given = f"{workspace.dtype}{list(workspace.shape)}" if isinstance(workspace, torch.Tensor) else (
                type(workspace).__name__)
            raise BindError(f"workspace: given {given}, expected a contiguous 1-D uint8 tensor of {need} bytes or more")
        if workspace.device != device:
            raise BindError(f"workspace: given device {workspace.device}, expected {device}")
        if workspace.numel() < need:
            raise BindError(f"workspace: given {workspace.numel()} bytes, expected at least {need} "
                            f"(plan.workspace_size)")
        if need and workspace.data_ptr() % _WORKSPACE_ALIGNMENT:
            raise BindError(f"workspace: given an address that is not {_WORKSPACE_ALIGNMENT}-byte aligned")
        if need:
            binding.check_workspace_overlap(workspace, operands)

    # -- what ran and why ----------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Steps, engines, gates, every decline with its reason, and the workspace map, as text."""
        how = "plan cache hit" if self.cache_hit else "built"
        lines = [f"plan {key_text(self.key)} of graph {self.program.name!r} on {self.target} ({how})"]
        for i, (step, route, core) in enumerate(zip(self.program.steps, self.routes, self._core.steps)):
            lines.append(f"  step {i}: {step.name} ({route.op}) -> {route.engine}   gate: {route.gate}")
            lines += [f"      {name}: {value}" for name, value in core.executable.describe().items()]
            lines += [f"      declined {d.engine}: {d.text}" for d in route.declined]
        lines.append(f"  workspace: {self.workspace_size} bytes")
        lines += [f"      [{offset:>10} +{nbytes:>10}] {name}, steps {first}..{last}"
                  for name, offset, nbytes, first, last in self.workspace_map() if nbytes]
        return "\n".join(lines)

    def save(self, path: Any) -> None:
        """Write the plan to a file: graph, engines and the versions it depends on. See `frost.load_plan`."""
        from .plan_io import save_plan

        save_plan(self, path)

    def __repr__(self) -> str:
        engines = ", ".join(f"{r.op}: {r.engine}" for r in self.routes)
        return f"<Plan {key_text(self.key)} of {self.program.name!r} on {self.target}: {engines}>"


@cache_forever
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _carve(workspace: torch.Tensor | None, offset: int, nbytes: int, desc: TensorDesc,
           device: torch.device) -> torch.Tensor:
    if workspace is None or not nbytes:
        return binding.allocate(desc, device)  # zero elements: nothing is allocated
    piece = workspace[offset:offset + nbytes].view(binding.TORCH_DTYPE[desc.dtype])
    return piece.as_strided(desc.shape, desc.strides)  # type: ignore[arg-type]


def _region_name(key: Any, program: Program) -> str:
    if key[0] == "slot":
        return f"tensor {program.slots[key[1]].name}"
    return f"scratch {program.steps[key[1]].name}.{key[2]}"


def resolve_target(device: Any) -> Target:
    """None: the current CUDA device if there is one, else the CPU. Takes "cpu", "cuda:1", torch.device or Target."""
    if isinstance(device, Target):
        return device
    if device is None:
        device = "cuda" if _forked.cuda_is_broken() or torch.cuda.is_available() else "cpu"
    try:
        dev = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device: given {device!r}, expected \"cpu\", \"cuda\", \"cuda:N\" or a Target ({e})") from e
    if dev.type == "cpu":
        return Target.cpu()
    if dev.type != "cuda":
        raise ValueError(f"device: given {device!r}, expected a CPU or CUDA device")
    _forked.check()
    if not torch.cuda.is_available():
        raise ValueError(f"device: given {device!r}, but this process sees no CUDA device; "
                         f"to compile for one elsewhere pass engines.base.Target.cuda((9, 0))")
    index = torch.cuda.current_device() if dev.index is None else dev.index
    return Target.cuda(torch.cuda.get_device_capability(index), index)


def _still_serves(core: PlanCore, program: Program, target: Target) -> bool:
    """Whether the engines of a cached plan take this graph too: packed totals are in no key, but engines limit them."""
    return all(c.adapter.check_support(s.desc, target).ok for c, s in zip(core.steps, program.steps))


def compile_graph(graph: Graph, device: Any = None, *, engines: Sequence[str] | None = None,
                  gates: str | None = None) -> Plan:
    """Validate, fuse, route and compile a graph; from the plan cache where its key is known.

    Raises GraphError (the graph), NotSupportedError (no engine), ValueError (device, engines or gates), DriverError (a
    CUDA device in a process that was forked after CUDA was used).
    """
    if isinstance(engines, str):
        raise ValueError(f"engines: given the string {engines!r}, expected a list of names such as [{engines!r}]")
    validate(graph)
    program = fuse(graph)
    target = resolve_target(device)
    policy = Policy(None if engines is None else tuple(engines), gates or env.gates())
    key = plan_key(program, target, policy)

    def build() -> PlanCore:
        steps = []
        for step in program.steps:
            lowered = lower_step(step, target, policy, graph=program.name)
            steps.append(CoreStep(lowered.adapter, lowered.executable, lowered.route))
        return PlanCore(tuple(steps))

    core, hit = cache.plans.get(key, build)
    if hit and not _still_serves(core, program, target):
        core, hit = build(), False
    plan = Plan(program, core, target, policy, key, hit, graph.to_bytes())
    for route in plan.routes:
        routing.record(route)
    return plan
