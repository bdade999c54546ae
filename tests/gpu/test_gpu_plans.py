"""Plans on a device: what compiles when, gates, devices, routes."""

from __future__ import annotations

import harness
import pytest
import torch

from frost import cache, gates, routing
from frost.errors import BindError
from frost.graph import Graph

two_gpus = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"
)


def test_a_new_shape_compiles_nothing() -> None:
    # One shape of each set of kernels: on Hopper causal squares have their own, few rows keep the general backward.
    for sq, sk in ((200, 264), (200, 200), (16, 16)):
        harness.bind_pair(harness.dense_inputs(2, 4, 2, sq, sk, 64), causal=True).run()
    before = cache.info()
    for b, hq, hk, sq, sk in ((1, 1, 1, 1, 1), (3, 8, 2, 1000, 77), (2, 6, 2, 128, 128), (5, 4, 4, 17, 2048)):
        pair = harness.bind_pair(harness.dense_inputs(b, hq, hk, sq, sk, 64), causal=True)
        pair.run()
        pair.check(f"{b} {hq}/{hk} {sq}x{sk}")
    after = cache.info()
    assert after.kernels_compiled == before.kernels_compiled
    assert after.disk_hits == before.disk_hits


def test_20_packed_batches_share_plans_and_kernels() -> None:
    """Totals and lengths change from call to call, the number of sequences stays (cudnn-frontend#604)."""
    pick = torch.Generator().manual_seed(3)
    before = None
    for step in range(20):
        total = 100 + 37 * step
        offsets = [0, *sorted(torch.randint(0, total, (3,), generator=pick).tolist()), total]
        pair = harness.bind_pair(
            harness.packed_inputs(total, total, 4, 2, 64, offsets, offsets, seed=step), causal=True
        )
        pair.run()
        pair.check(f"total {total}")
        if before is None:
            before = cache.info()
    after = cache.info()
    assert (after.plans_built, after.kernels_compiled) == (before.plans_built, before.kernels_compiled)


@pytest.mark.parametrize("op", ["sdpa", "sdpa_backward"])
def test_shipped_gate_of_this_device_holds(op: str) -> None:
    """The gate that ships for this architecture matches the kernels' source and the installed compiler."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    names = [g.path.name for g in gates.iter_gates(gates.shipped_gate_dir(), engine=harness.ENGINE, op=op)]
    if not any(arch in name for name in names):
        pytest.skip(f"no gate ships for {arch}; shipped: {names or 'none'}")
    status = gates.check_equivalence_gate(
        engine=harness.ENGINE, op=op, device="cuda", gate_dir=gates.shipped_gate_dir()
    )
    assert status.ok, status.reason


def test_route_says_which_engine_and_that_gates_were_off() -> None:
    routing.reset()
    inputs = {n: t for n, t in harness.dense_inputs(1, 1, 1, 8, 8, 64).items() if n != "do"}
    plan = harness.forward_plan(inputs, {"o": harness.nan_like(inputs["q"])})
    assert plan.routes[0].engine.startswith(harness.ENGINE)
    assert plan.routes[0].gate == "off"
    assert "gate: off" in plan.explain()


# ---- devices
# ---------------------------------------------------------------------------------------------------


def _forward(device: str = "cuda") -> tuple[object, dict[str, torch.Tensor]]:
    tensors = {n: t.to(device) for n, t in harness.dense_inputs(1, 2, 2, 40, 40, 64).items() if n != "do"}
    tensors["o"] = torch.full_like(tensors["q"], float("nan"))
    inputs = {n: tensors[n] for n in "qkv"}
    return harness.forward_plan(inputs, {"o": tensors["o"]}, device=device), tensors


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_a_cpu_tensor_is_refused_by_name(name: str) -> None:
    """A clear error, not a pointer fault (triton#2441)."""
    plan, tensors = _forward()
    moved = {**tensors, name: tensors[name].cpu()}
    # The first input says where the plan runs; whoever lives elsewhere is named.
    with pytest.raises(BindError, match=r"tensor '[qkvo]': given device (cpu|cuda:0), expected"):
        plan.execute(moved)
    assert torch.isnan(moved["o"]).all()


def test_a_cpu_plan_refuses_cuda_tensors() -> None:
    g = Graph("cpu")
    q, k, v = (g.tensor(n, (1, 1, 4, 8), dtype="fp32") for n in "qkv")
    g.output(g.sdpa(q, k, v)[0], name="o")
    plan = g.compile("cpu", engines=["reference"])
    t = torch.zeros(1, 1, 4, 8, device="cuda")
    with pytest.raises(BindError, match="given device cuda:0.*expected a cpu device"):
        plan.execute({"q": t, "k": t, "v": t})


@two_gpus
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("operands", [0, 1])
def test_operands_decide_the_device(current: int, operands: int, deterministic: bool) -> None:
    """Runs on the operands' device whatever the current one is, which stays as it was (flashinfer#452)."""
    torch.cuda.set_device(0)
    wanted = harness.bind_pair(harness.dense_inputs(2, 4, 2, 130, 130, 64), causal=True, deterministic=deterministic)
    wanted.run()
    torch.cuda.set_device(current)
    try:
        inputs = {n: t.to(f"cuda:{operands}") for n, t in wanted.inputs.items()}
        torch.cuda.synchronize(operands)
        pair = harness.bind_pair(inputs, causal=True, deterministic=deterministic)
        pair.run()
        torch.cuda.synchronize(operands)
        assert torch.cuda.current_device() == current
        for name, t in wanted.results.items():
            assert pair.results[name].device.index == operands
            here = pair.results[name].to(t.device)
            if name == "dq" and not deterministic:  # may be added up in arrival order
                torch.testing.assert_close(here, t, atol=2e-2, rtol=2e-2)
            else:
                assert harness.same_bits(here, t), name
    finally:
        torch.cuda.set_device(0)


@two_gpus
def test_a_plan_serves_the_other_device_of_its_architecture() -> None:
    plan, tensors = _forward("cuda:0")
    plan.execute(tensors)
    other = {n: t.to("cuda:1") for n, t in tensors.items()}
    other["o"].fill_(float("nan"))
    plan.execute(other)
    torch.cuda.synchronize(1)
    assert harness.same_bits(other["o"].to("cuda:0"), tensors["o"])


@two_gpus
@pytest.mark.parametrize("name", ["k", "v", "o"])
def test_operands_on_two_devices_are_refused_by_name(name: str) -> None:
    plan, tensors = _forward("cuda:0")
    with pytest.raises(BindError, match=f"tensor '{name}': given device cuda:1, expected cuda:0"):
        plan.execute({**tensors, name: tensors[name].to("cuda:1")})
    assert torch.isnan(tensors["o"]).all()


@two_gpus
def test_streams_of_the_other_device() -> None:
    """The current stream of the operands' device is the one that is used."""
    plan, tensors = _forward("cuda:1")
    plan.execute(tensors)
    torch.cuda.synchronize(1)
    want = tensors["o"].clone()
    late = {n: torch.full_like(t, float("nan")) for n, t in tensors.items()}
    bound = plan.bind(late)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for n in "qkv":
            late[n].copy_(tensors[n])
        with torch.cuda.device(0):
            bound()
    stream.synchronize()
    assert harness.same_bits(late["o"], want)
