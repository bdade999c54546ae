"""Execution: launches only, on the right device and stream, from any number of threads, with every step
accounted for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import compare
import pytest
import torch
from cases import graphs
from cases.data import make
from cases.model import Case
from cases.small import Spec
from cases.table import BY_NAME
from torch.utils._python_dispatch import TorchDispatchMode

import frost
from descriptors import sym
from engines.base import Launch, Workspace
from frost import values
from frost.graph import Graph
from frost.plan import BoundPlan, Plan

HOST_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")


@contextmanager
def no_host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every way from a tensor to a number on the host raises; checks of values are off, as they are on a
    GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(values, "wanted", lambda on_cpu: False)
        for name in HOST_READS:

            def read(self: torch.Tensor, *args: Any, name: str = name, **kwargs: Any) -> Any:
                raise AssertionError(f"execute read a tensor on the host: Tensor.{name}")

            patch.setattr(torch.Tensor, name, read)
        yield


class NoTensorWork(TorchDispatchMode):
    """Any operator that torch runs while this is open is one too many: an allocation, a copy, a fill."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a bound call ran {func}")


# Every kind of optional operand, in as few programs as will do.
CALLS = {
    case.name: case
    for case in (
        BY_NAME["packed causal bottom_right"].with_("packed", heads=(2, 1), dlse=True, sink="fp32"),
        Case(
            "lengths bf16",
            dtype="bf16",
            heads=(2, 1),
            seqlens=(20, 35),
            len_q=(20, 7),
            len_kv=(5, 35),
            causal=True,
        ),
        Case("bias and mask", heads=(2, 1), seqlens=(20, 35), bias=(1, 2, 1, 35), mask=(2, 1, 20, 1)),
    )
}


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
@pytest.mark.parametrize("name", CALLS)
def test_binding_and_executing_read_nothing_on_the_host(
    name: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cudnn-frontend#552: .tolist() or .item() in execute breaks a CUDA graph's capture. Offsets and lengths
    included."""
    case = CALLS[name]
    data = make(case)
    g, tensors = graphs.build(case, op, data)
    plan = g.compile("cpu", engines=["triton"], gates="off")
    with no_host_reads(monkeypatch):
        results = plan.execute(tensors)
    compare.assert_answer(results, data.problem, ref=data.ref, plain=data.plain, context=name)


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
@pytest.mark.parametrize("name", CALLS)
def test_a_bound_call_only_launches(name: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No allocation, copy or fill: what Triton's engine does on a GPU within a call, seen on its
    interpreter."""
    case = CALLS[name]
    data = make(case)
    g, tensors = graphs.build(case, op, data)
    plan = g.compile("cpu", engines=["triton"], gates="off")
    call = plan.bind(tensors, torch.empty(plan.workspace_size, dtype=torch.uint8))
    monkeypatch.setattr(values, "wanted", lambda on_cpu: False)
    with NoTensorWork():
        results = call()
    compare.assert_answer(results, data.problem, ref=data.ref, plain=data.plain, context=name)


def test_a_bound_call_sees_new_contents() -> None:
    """flash-attention PR#2505: values that were read once stay frozen. Offsets, lengths and data change in
    place."""
    base = BY_NAME["packed causal bottom_right"]
    data = make(base)
    g, tensors = graphs.build(base, "sdpa", data)
    call = g.compile("cpu", engines=["triton"], gates="off").bind(tensors)
    call()
    for i, (cu_q, cu_kv) in enumerate(
        (((0, 50, 50, 50, 50), (0, 60, 60, 60, 60)), ((0, 10, 20, 30, 50), (0, 0, 0, 30, 31)))
    ):
        other = make(base.with_(f"replay {i}", cu_q=cu_q, cu_kv=cu_kv))
        for name, t in tensors.items():
            t.copy_(other.views[name]) if name in other.views and name not in ("o", "lse") else t.fill_(
                float("nan")
            )
        compare.assert_answer(call(), other.problem, ref=other.ref, plain=other.plain, context=f"replay {i}")


def test_inputs_come_out_as_they_went_in() -> None:
    """Bit for bit, poison included, on every engine."""
    for engine in ("reference", "torch_sdpa", "triton"):
        case = BY_NAME["dtype fp32 causal"]
        for op in case.ops:
            data = make(case)
            before = {n: t.clone() for n, t in data.views.items()}
            graphs.execute(case, op, engine, data)
            for name, t in data.views.items():
                compare.assert_same(t, before[name], f"{name} after {op} on {engine}")


@pytest.mark.parametrize("engine", ["triton", "reference", "torch_sdpa"])
@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
def test_one_plan_in_eight_threads(engine: str, op: str) -> None:
    """Each with its own buffers and workspace; every result is its own."""
    case = BY_NAME["size 33x31"]
    g, _ = graphs.build(case, op, make(case))
    plan = g.compile("cpu", engines=[engine], gates="off")
    failures: list[str] = []
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        mine = make(case.with_(f"thread {seed}", recipe=type(case.recipe)(seed=seed)))
        _, tensors = graphs.build(case, op, mine)
        workspace = torch.empty(plan.workspace_size, dtype=torch.uint8)
        barrier.wait()
        for _ in range(2):
            try:
                results = plan.execute(tensors, workspace=workspace)
                compare.assert_answer(results, mine.problem, ref=mine.ref, plain=mine.plain)
            except BaseException as e:
                failures.append(f"thread {seed}: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not failures and not any(t.is_alive() for t in threads)


def test_results_do_not_depend_on_what_the_workspace_held() -> None:
    """cudnn-frontend PR#462: a workspace that is too small or read before it is written gives zeros or
    leftovers."""
    for name, case in CALLS.items():
        data = make(case)
        g, tensors = graphs.build(case, "sdpa_backward", data)
        plan = g.compile("cpu", engines=["triton"], gates="off")
        assert plan.workspace_size > 0
        for fill in (0, 255):
            for out in plan.program.outputs:
                tensors[out].fill_(float("nan"))
            results = plan.execute(
                tensors, workspace=torch.full((plan.workspace_size,), fill, dtype=torch.uint8)
            )
            compare.assert_answer(
                results, data.problem, ref=data.ref, plain=data.plain, context=f"{name}, {fill}"
            )


def test_nothing_is_written_beyond_the_workspace_that_a_plan_asks_for() -> None:
    """Canaries behind `workspace_size` bytes."""
    small = Case("small", heads=(2, 1), seqlens=(20, 35), dims=(8, 8))
    for case in (
        *CALLS.values(),
        small.with_("one bias", bias=(1, 1, 1, 1)),
        small.with_("rows", bias=(2, 1, 20, 1)),
    ):
        data = make(case)
        g, tensors = graphs.build(case, "sdpa_backward", data)
        plan = g.compile("cpu", engines=["triton"], gates="off")
        size = plan.workspace_size
        whole = torch.full((size + 4096,), 171, dtype=torch.uint8)
        plan.execute(tensors, workspace=whole[:size])
        assert bool((whole[size:] == 171).all())


def test_workspace_size_does_not_depend_on_strides() -> None:
    """cudnn-frontend PR#462: head-major statistics shrank the workspace, and every gradient came out 0."""
    sizes = {}
    for name, stride in {
        "row-major": None,
        "head-major": (1, 40),
        "padded": (7, 1),
        "far apart": (1000, 2),
    }.items():
        strides = {} if stride is None else {"lse": stride}
        plan = (
            Spec(op="sdpa_backward", packed=True, seqlens=(40, 50), strides=strides)
            .build()
            .compile("cpu", engines=["triton"], gates="off")
        )
        sizes[name] = plan.workspace_size
    assert len(set(sizes.values())) == 1, sizes


def test_workspace_of_symbolic_plans_is_told_at_the_maximum() -> None:
    """A smaller batch needs less, and takes the buffer that was made for the largest."""
    spec = Spec(
        op="sdpa_backward",
        packed=True,
        heads=(2, 1),
        seqlens=(sym("TQ", max=300), sym("TK", max=300)),
        sequences=sym("N", max=9),
        deterministic=True,
    )
    plan = spec.build().compile("cpu", engines=["triton"], gates="off")
    number = spec.but(seqlens=(300, 300), sequences=8).build().compile("cpu", engines=["triton"], gates="off")
    assert plan.workspace_size == number.workspace_size
    workspace = torch.empty(plan.workspace_size, dtype=torch.uint8)
    case = Case("symbolic", heads=(2, 1), dims=(8, 8), cu_q=(0, 9, 20), cu_kv=(0, 5, 21), seqlens=(20, 21))
    data = make(case)
    _, tensors = graphs.build(case, "sdpa_backward", data)
    results = plan.execute(tensors, workspace=workspace)
    compare.assert_answer(results, data.problem, ref=data.ref, plain=data.plain)


def test_outputs_that_are_not_given_are_allocated_as_declared() -> None:
    spec = Spec(strides={"o": (6 * 4 * 8, 8, 4 * 8, 1), "lse": (24, 1, 4)})
    plan = spec.build().compile("cpu")
    inputs = {n: torch.randn(*shape) for n, (shape, _) in spec.shapes().items()}
    first, second = plan.execute(inputs), plan.execute(inputs)
    assert first["o"].stride() == (192, 8, 32, 1) and first["lse"].stride() == (24, 1, 4)
    assert first["o"].data_ptr() != second["o"].data_ptr() and torch.equal(first["o"], second["o"])


# ---- devices and streams ----------------------------------------------------------------------------------


def test_a_call_runs_under_the_operands_device_and_on_its_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flashinfer#452: launched on device 0 for tensors of device 1. No GPU is needed to see the guard."""
    events: list[Any] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            events.append(("enter", self.index))

        def __exit__(self, *_: object) -> None:
            events.append(("exit", self.index))

    monkeypatch.setattr("frost.plan._current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr("frost.plan._raw_stream", lambda index: 1000 + index)

    def launch(stream: int) -> None:
        events.append(("launch", stream))

    def bound(device: str) -> BoundPlan:
        return BoundPlan([launch, launch], torch.device(device), {}, [], [])

    bound("cuda:1")()
    assert events == [("enter", 1), ("launch", 1001), ("launch", 1001), ("exit", 1)]
    events.clear()
    bound("cuda:0")()
    assert events == [("launch", 1000), ("launch", 1000)]


def test_a_cpu_call_never_touches_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("CUDA was asked")

    plan = Spec().build().compile("cpu", engines=["triton"], gates="off")
    for name in (
        "current_device",
        "current_stream",
        "synchronize",
        "init",
        "_lazy_init",
        "is_current_stream_capturing",
    ):
        monkeypatch.setattr(torch.cuda, name, touched)
    plan.execute({n: torch.randn(*shape) for n, (shape, _) in Spec().shapes().items()})


# ---- several steps -----------------------------------------------------------------------------------------


def chain(steps: int) -> Plan:
    g = Graph(name="chain")
    t = g.tensor("x", (16, 16), dtype="fp32")
    for i in range(steps):
        t = g.sigmoid(t) if i % 2 else g.tanh(t)
    g.output(t, name="y")
    return g.compile("cpu", engines=["reference"])


def test_intermediates_share_memory_by_lifetime() -> None:
    """A chain needs two buffers, however long it is."""
    size = 16 * 16 * 4
    assert [chain(n).workspace_size for n in (1, 2, 3, 9)] == [0, size, 2 * size, 2 * size]


def test_a_chain_through_shared_memory_gives_what_torch_gives() -> None:
    x = torch.randn(16, 16)
    expected = x
    for i in range(9):
        expected = torch.sigmoid(expected) if i % 2 else torch.tanh(expected)
    torch.testing.assert_close(chain(9).execute({"x": x})["y"], expected)


def test_explain_names_engines_reasons_and_memory() -> None:
    spec = Spec(options={"softcap": 3.0}, graph="explained")
    plan = spec.build().compile("cpu")
    text = plan.explain()
    for word in (
        "explained",
        "sdpa",
        "reference",
        "declined torch_sdpa",
        "softcap",
        "declined triton",
        "workspace",
    ):
        assert word in text
    assert plan.routes[0].engine_name == "reference" and "reference" in repr(plan)


def test_workspace_map_adds_up() -> None:
    plan = (
        Spec(op="sdpa_backward", sink="fp32", dsink=True)
        .build()
        .compile("cpu", engines=["triton"], gates="off")
    )
    rows = plan.workspace_map()
    assert rows and max(offset + nbytes for _, offset, nbytes, _, _ in rows) <= plan.workspace_size
    assert all(offset % 16 == 0 for _, offset, _, _, _ in rows)


def test_an_executable_is_handed_bound_descriptors_only() -> None:
    """Symbols are resolved before an engine sees a launch."""
    plan = Spec(seqlens=(sym("S", max=64), 8)).build().compile("cpu", engines=["reference"])
    seen: list[Launch] = []
    executable = plan._core.steps[0].executable
    original = type(executable).prepare

    def prepare(self: Any, launch: Launch, workspace: Workspace) -> Any:
        seen.append(launch)
        return original(self, launch, workspace)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(executable), "prepare", prepare)
        for n in (5, 9):
            plan.execute(
                {"q": torch.randn(2, 4, n, 8), "k": torch.randn(2, 2, 8, 8), "v": torch.randn(2, 2, 8, 8)}
            )
    assert [launch.desc.seqlen_q for launch in seen] == [5, 9]  # type: ignore[attr-defined]
    assert not any(t.is_symbolic for launch in seen for _, t in launch.desc.tensors())


@pytest.mark.parametrize("scattered", [False, True])
def test_a_workspace_of_workspace_size_serves_every_binding(scattered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias row that is bound to 1 keeps the kernel that was chosen at the maximum; and packing smaller pieces anew may take
    more in all, which `scattered` provokes: the pieces then lie where they do at the maxima."""
    from frost import plan as plan_module
    from frost.workspace import Placement

    rows = frost.sym("Sq", max=96)
    g = frost.Graph("symbolic")
    shapes = {"q": (1, 1, rows, 16), "k": (1, 1, 64, 16), "v": (1, 1, 64, 16), "o": (1, 1, rows, 16), "do": (1, 1, rows, 16),
              "lse": (1, 1, rows), "bias": (1, 1, rows, 64)}
    t = {n: g.tensor(n, s, dtype="fp32") for n, s in shapes.items()}
    made = g.sdpa_backward(*(t[n] for n in ("q", "k", "v", "o", "do", "lse")), bias=t["bias"], dbias=True)
    for name in ("dq", "dk", "dv", "dbias"):
        g.output(getattr(made, name), name=name)
    plan = g.compile("cpu", engines=["triton"], gates="off")
    largest = plan.workspace_size

    def feeds(n: int) -> dict[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(n)
        return {name: torch.randn([n if d is rows else d for d in shape], generator=gen) for name, shape in shapes.items()}

    want = {n: plan.execute(feeds(n)) for n in (96, 40, 1)}
    if scattered:
        real = plan_module.place

        def scatter(requests: Any) -> Placement:
            placed = real(requests)
            if placed.nbytes == largest:
                return placed
            return Placement(placed.nbytes + largest, {k: (at + largest, n) for k, (at, n) in placed.offsets.items()})

        monkeypatch.setattr(plan_module, "place", scatter)
        plan._layouts.clear()
    workspace = torch.full((largest,), 0x7F, dtype=torch.uint8)
    for n in (96, 40, 1, 40):
        for name, expected in want[n].items():
            assert torch.equal(plan.execute(feeds(n), workspace=workspace)[name], expected), (n, name)
    with pytest.raises(frost.BindError, match=f"given {largest // 2} bytes, expected at least"):
        plan.execute(feeds(96), workspace=workspace[: largest // 2])
