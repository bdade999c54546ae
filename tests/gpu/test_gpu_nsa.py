"""Native sparse attention on the device: the gate matrix, determinism under load, capture, far strides, long inputs."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from test_gpu_determinism import side_load

from frost import equivalence, nsa
from frost.gate_matrix_nsa import NSA_BRANCH_MATRIX, NSA_MATRIX, make_block_idx
from frost.graph import Graph

ROWS = [pytest.param(op, c, id=f"{op}-{c.name}") for op, rows in {**NSA_MATRIX, **NSA_BRANCH_MATRIX}.items()
        for c in rows if "cuda" in c.devices]
pytestmark = pytest.mark.skipif(harness.DEVICE != "cuda", reason="a device suite")


@pytest.mark.slow  # `frost gate run triton --op ...` is the same rows, compiled ahead in parallel
@pytest.mark.parametrize("op, config", ROWS)
def test_a_row_of_the_gate_matrix(op: str, config: Any) -> None:
    result = equivalence.run_config(config, "triton", "cuda")
    assert result.verdict == "pass", result.detail


def operands(t: int, hk: int, group: int, d: int, slots: int = 16, block: int = 64, seed: int = 0) -> dict[str, torch.Tensor]:
    x = {n: harness.randn(1, h, t, d, seed=seed + i)
         for i, (n, h) in enumerate((("q", hk * group), ("k", hk), ("v", hk), ("do", hk * group)))}
    x["block_indices"] = make_block_idx(1, hk, t, block, slots, "cuda", seed)
    return x


def bound(x: dict[str, torch.Tensor], block: int = 64) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """(forward, backward) over NaN-filled results."""
    results: dict[str, torch.Tensor] = {"o": harness.nan_like(x["do"]),
                                        "lse": torch.full(x["q"].shape[:-1], float("nan"), device="cuda")}
    results |= {f"d{n}": harness.nan_like(x[n]) for n in "qkv"}
    g = Graph("forward")
    t = {n: g.tensor_like(n, v) for n, v in x.items() if n != "do"}
    o, lse = g.nsa_selection(*t.values(), block_size=block, stats=True)
    g.output(o, name="o")
    g.output(lse, name="lse")
    forward_feeds = {n: x[n] for n in t} | {n: results[n] for n in ("o", "lse")}
    forward = g.compile("cuda", engines=["triton"], gates="off").bind(forward_feeds)
    g = Graph("backward")
    given = {**x, "o": results["o"], "lse": results["lse"]}
    t = {n: g.tensor_like(n, v) for n, v in given.items()}
    made = g.nsa_selection_backward(t["q"], t["k"], t["v"], t["o"], t["do"], t["lse"], t["block_indices"],
                                    block_size=block, deterministic=True)
    for name, tensor in made._asdict().items():
        g.output(tensor, name=name)
    feeds = {**given, **{n: results[n] for n in ("dq", "dk", "dv")}}
    return forward, g.compile("cuda", engines=["triton"], gates="off").bind(feeds), results


@pytest.mark.parametrize("group", [1, 3, 16])
def test_50_runs_under_load_are_bit_equal(group: int) -> None:
    forward, backward, results = bound(operands(3000, 2, group, 128))
    forward()
    backward()
    first = {n: t.clone() for n, t in results.items()}
    assert all(torch.isfinite(t).all() for t in first.values())
    with side_load():
        for i in range(50):
            for t in results.values():
                t.fill_(float("nan"))
            forward()
            backward()
            for name, t in first.items():
                assert harness.same_bits(results[name], t), f"{name} differs in run {i + 1}"


def test_a_captured_graph_follows_other_indices() -> None:
    """The map is made on the device: a replay with other blocks is the eager result for these."""
    x = operands(1500, 2, 4, 64)
    forward, backward, results = bound(x)
    forward()
    backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
        backward()
    for seed in (5, 6):
        x["block_indices"].copy_(make_block_idx(1, 2, 1500, 64, 16, "cuda", seed))
        for t in results.values():
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        got = {n: t.clone() for n, t in results.items()}
        forward()
        backward()
        assert all(harness.same_bits(got[n], t) for n, t in results.items())


def test_what_is_no_block_is_never_read() -> None:
    x = operands(700, 2, 4, 64)
    x["block_indices"] = x["block_indices"].clone()
    outs = []
    for garbage in (-1, 2**31 - 1, -(2**31), 50_000):
        x["block_indices"][..., 3:] = garbage
        forward, backward, results = bound(x)
        forward()
        backward()
        outs.append({n: t.clone() for n, t in results.items()})
    assert all(harness.same_bits(outs[0][n], other[n]) for other in outs[1:] for n in outs[0])


def test_rows_more_than_2_to_the_31_elements_apart() -> None:
    """flash-linear-attention#1080."""
    far = (1 << 30) + 16
    x = operands(64, 1, 2, 64, slots=2, block=16)
    buffer = torch.empty(2 * far + 64 * 64 * 2, dtype=torch.bfloat16, device="cuda")
    moved = dict(x)
    moved["q"] = buffer.as_strided(x["q"].shape, (4 * far, 2 * far, 64, 1)).copy_(x["q"])
    results = []
    for given in (x, moved):
        forward, backward, made = bound(given, block=16)
        forward()
        backward()
        results.append({n: t.clone() for n, t in made.items()})
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


@pytest.mark.parametrize("name", ["o", "lse", "importance", "dq", "dk", "dv"])
def test_compressed_attention_is_the_references(name: str) -> None:
    got, want = (_compressed(engine)[name] for engine in ("triton", "reference"))
    assert torch.equal(got.isinf(), want.isinf())
    error = torch.where(got == want, 0.0, (got.float() - want.float()).abs())
    assert (error <= 2e-2 * want.float().masked_fill(want.isinf(), 0.0).abs().clamp(min=1)).all(), error.max().item()


def _compressed(engine: str) -> dict[str, torch.Tensor]:
    leaves = [harness.randn(1, h, t, 128, seed=i).requires_grad_() for i, (h, t) in enumerate(((16, 2000), (2, 124), (2, 124)))]
    o, lse, importance = nsa.compressed_attn(*leaves, seqlen_kv=2000, engines=[engine], gates="off")
    grads = torch.autograd.grad(o, leaves, harness.randn(1, 16, 2000, 128, seed=9))
    return {"o": o.detach(), "lse": lse.detach(), "importance": importance, **dict(zip(("dq", "dk", "dv"), grads))}


def test_the_choice_of_blocks_is_the_references() -> None:
    score = torch.randint(0, 50, (2, 2, 5000, 79), device="cuda").float()
    got, want = (nsa.choose_blocks(score, seqlen_kv=5000, engines=[e], gates="off") for e in ("triton", "reference"))
    assert torch.equal(got, want)


def test_the_module_trains() -> None:
    leaves = [harness.randn(1, h, 1500, 64, seed=i).requires_grad_() for i, h in enumerate((8, 2, 2))]
    gates = [torch.sigmoid(harness.randn(1, 8, 1500, seed=10 + i)) for i in range(3)]
    o = nsa.nsa(*leaves, *gates, gates="off")
    o.float().square().mean().backward()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in leaves)


@pytest.mark.slow
def test_128k_tokens_of_64_heads_fit() -> None:
    """16 blocks of 64; nothing of size T x T / block is held."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GB of device memory")
    x = operands(131_072, 4, 16, 128)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward, backward, results = bound(x)
    forward()
    backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held < 16 << 30
    assert all(torch.isfinite(t).all() for t in results.values())
