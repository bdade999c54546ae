"""Backends on a device: probes tell the truth, benchmarks time what is right, the pinned baseline holds,
models run.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch

import frost
from frost import backends, sdpa_baseline
from frost.backends import benchmark_backends_with_reasons, probe_backends, select_attn_implementation


def test_every_backend_has_a_row_with_a_reason() -> None:
    reports = {r.name: r for r in probe_backends(device="cuda")}
    assert tuple(reports) == backends.ALL_BACKENDS and all(r.reason for r in reports.values())
    assert reports["eager"].available and reports["sdpa"].available and reports["flex"].available


def test_a_custom_kernel_is_never_switched_on_by_itself() -> None:
    assert select_attn_implementation(None, device="cuda") == "sdpa"
    report = next(r for r in probe_backends(device="cuda") if r.name == "triton_fa2")
    if report.available:
        assert select_attn_implementation("triton_fa2", device="cuda") == "triton_fa2"
    else:
        assert "equivalence gate" in report.reason or "kernel source changed" in report.reason
        with pytest.raises(RuntimeError):
            select_attn_implementation("triton_fa2", device="cuda")
    with pytest.raises(RuntimeError, match="head_dim contract"):
        select_attn_implementation("flashmla", device="cuda")


@pytest.mark.parametrize("dtype", [None, "fp16", "fp32"])
def test_a_benchmark_has_every_name(dtype: str | None) -> None:
    ms, reasons = benchmark_backends_with_reasons(2, 256, 8, 2, 64, 5, device="cuda", dtype=dtype)
    for name, value in ms.items():
        assert (value > 0 and reasons[name] == "ok") or (math.isnan(value) and reasons[name] != "ok"), (
            name,
            reasons[name],
        )
    assert reasons["MATH"] == reasons["frost[triton]"] == "ok", reasons
    if dtype is None:
        assert reasons["FLASH_ATTENTION"] == "ok" and math.isnan(ms["EFFICIENT_ATTENTION"])


def test_the_pinned_baseline_holds() -> None:
    """Within 2 x on the card that it was measured on."""
    info = backends.sdpa_baseline_info()
    if info["card"] != torch.cuda.get_device_name():
        pytest.skip(f"the baseline is {info['card']}'s, this is {torch.cuda.get_device_name()}")
    shape = sdpa_baseline.SHAPE
    for seq, row in backends.load_sdpa_baseline().items():
        ms, reasons = benchmark_backends_with_reasons(
            shape["batch"],
            int(seq),
            shape["n_heads"],
            shape["n_kv_heads"],
            shape["head_dim"],
            20,
            device="cuda",
            only=tuple(row),
        )
        for name, pinned in row.items():
            if math.isnan(pinned):
                assert math.isnan(ms[name]), f"{name} at {seq} runs now: measure the baseline again"
            else:
                assert pinned / 2 < ms[name] < pinned * 2, (
                    f"{name} at {seq}: {ms[name]:.4f} ms, pinned {pinned} ({reasons[name]})"
                )


@pytest.mark.parametrize("engine", ["frost", "frost:triton"])
def test_a_hugging_face_model_trains_and_generates(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip(
        "transformers", minversion="5.17", reason="transformers >= 5.17 is not installed"
    )
    from frost.integrations.transformers import register

    monkeypatch.setenv("FROST_GATES", "off")  # the gate has its own tests
    register()
    config = transformers.MistralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=40,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").cuda()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(engine)
    ids = torch.randint(3, 64, (2, 130), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    for inputs in ({}, {"attention_mask": mask}):
        got = []
        for model in (eager, ours):
            model.zero_grad()
            logits = model(ids, use_cache=False, **inputs).logits[mask.bool()]
            logits.square().sum().backward()
            got.append((logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
        torch.testing.assert_close(got[1][0], got[0][0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(got[1][1], got[0][1], rtol=2e-2, atol=2e-2 * float(got[0][1].abs().max()))
    made = [
        m.eval().generate(ids[:, :60], attention_mask=mask[:, :60], max_new_tokens=8, do_sample=False)
        for m in (eager, ours)
    ]
    assert torch.equal(made[0], made[1])
    assert frost.routing.stats()["triton:sdpa"] > 0
