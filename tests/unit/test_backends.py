"""Backends by name: every row has a reason, a request is honoured or refused, a custom kernel is never
chosen by itself.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import frost
from engines.base import Target
from frost import backend_probes, backends, gates, registry
from frost.backends import (
    ALL_BACKENDS,
    BackendReport,
    banner_value,
    probe_backends,
    select_attn_implementation,
)

ROOT = Path(__file__).resolve().parents[2]
GATE = {"tolerances": {"o": 1e-2}, "shapes_covered": [[1, 2, 64, 64]], "errors": {"o": 1e-3}}
DEVICES = ["cpu", "cuda", "cuda:99", "meta", None, torch.device("cpu"), object(), "sm_90"]

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


@pytest.fixture(autouse=True)
def own_gates(tmp_path, monkeypatch):
    monkeypatch.setenv("FROST_GATE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(gates, "_held", {})


def rows(**how) -> dict[str, BackendReport]:
    return {r.name: r for r in probe_backends(**how)}


def write(folder, **changes):
    return gates.write_equivalence_gate(gate_dir=folder, **{**GATE, **changes})


def select(name, folder, device="cpu"):
    return select_attn_implementation(name, device=device, gate_dir=folder)


# ---- probing ---------------------------------------------------------------------------------------------


def test_the_declared_backends():
    assert ALL_BACKENDS == (
        "eager",
        "sdpa",
        "flex",
        "triton_fa2",
        "sm80",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
        "cudnn",
        "flashmla",
    )


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: str(d)[:12])
def test_every_backend_has_a_row_with_a_reason(device, tmp_path):
    reports = probe_backends(device=device, gate_dir=tmp_path)
    assert [r.name for r in reports] == list(ALL_BACKENDS)
    assert all(r.reason.strip() and isinstance(r.available, bool) for r in reports)


def test_what_is_part_of_torch_is_there_on_a_cpu(tmp_path):
    found = rows(device="cpu", gate_dir=tmp_path)
    assert [n for n in ALL_BACKENDS if found[n].available] == ["eager", "sdpa", "flex"]
    for name in ("flash_attention_2", "cudnn", "sm80", "flashmla"):
        assert not found[name].available


@no_gpu
def test_a_device_that_does_not_answer_has_nothing(tmp_path):
    for report in probe_backends(device="cuda", gate_dir=tmp_path):
        assert not report.available
        assert "no CUDA device answers" in report.reason or "not yet implemented" in report.reason


def test_a_cpu_probe_initialises_no_gpu_and_imports_no_triton(tmp_path):
    code = (
        "import sys, torch\n"
        "def no(*a, **k): raise AssertionError('CUDA was initialised')\n"
        "torch.cuda._lazy_init = no\n"
        "from frost.backends import probe_backends, banner_value\n"
        f"probe_backends(device='cpu', gate_dir={str(tmp_path)!r}); banner_value('triton_fa2', "
        "device='cpu')\n"
        "print(torch.cuda.is_initialized())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout.strip() == "False", run.stderr


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(1), OSError()])
def test_a_probe_that_fails_is_a_reason(error, tmp_path, monkeypatch):
    """A probe call may even exit the process on an unknown arch (huggingface/kernels#707)."""

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(backend_probes, "flex", fails)
    report = rows(device="cpu", gate_dir=tmp_path)["flex"]
    assert not report.available and type(error).__name__ in report.reason


def test_a_package_that_is_broken_says_so(tmp_path, monkeypatch):
    """Installed, for a device that would do, and its import fails."""
    where = backend_probes.Where("cuda:0", Target.cuda((9, 0)))
    monkeypatch.setattr(backend_probes, "_installed", lambda spec: "1.2.3")
    real = importlib.import_module

    def broken(name, *rest):
        if name == "flash_attn":
            raise OSError("undefined symbol")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    answer = backend_probes.package("flash_attention_2", where)
    assert not answer.available and "undefined symbol" in answer.reason
    monkeypatch.setattr(importlib, "import_module", lambda name, *rest: object())
    answer = backend_probes.package("flash_attention_2", where)
    assert answer.available and "flash-attn 1.2.3" in answer.reason
    old = backend_probes.package("flash_attention_3", backend_probes.Where("cuda:0", Target.cuda((8, 0))))
    assert not old.available and "arch: given sm_80, expected sm_90" in old.reason


# ---- selecting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex"])
def test_a_request_is_honoured(name, tmp_path):
    assert select(name, tmp_path) == name


@pytest.mark.parametrize("name", ALL_BACKENDS)
def test_a_refusal_carries_the_probes_reason(name, tmp_path):
    report = rows(device="cpu", gate_dir=tmp_path)[name]
    if report.available:
        pytest.skip("it is available here")
    with pytest.raises(RuntimeError) as e:
        select(name, tmp_path)
    assert report.reason in str(e.value) and name in str(e.value)


@pytest.mark.parametrize("gate", [False, True])
def test_none_is_sdpa_gate_or_no_gate_and_is_logged(gate, tmp_path, caplog):
    if gate:
        write(tmp_path)
    with caplog.at_level(logging.INFO):
        assert select(None, tmp_path) == "sdpa"
    assert "sdpa" in caplog.text and "none was requested" in caplog.text


@pytest.mark.parametrize(
    "wrong, near",
    [("spda", "sdpa"), ("triton_fa", "triton_fa2"), ("SDPA", "sdpa"), ("flash_attn_2", "flash_a")],
)
def test_an_unknown_backend_names_the_nearest(wrong, near, tmp_path):
    with pytest.raises(RuntimeError, match=f"unknown backend {wrong!r}.*did you mean '{near}"):
        select(wrong, tmp_path)
    with pytest.raises(ValueError, match="unknown backend"):
        banner_value(wrong, device="cpu")


@pytest.mark.parametrize("wrong", ["", "zzzzzz", 3])
def test_an_unknown_backend_that_is_near_nothing(wrong, tmp_path):
    with pytest.raises(RuntimeError, match="unknown backend"):
        select(wrong, tmp_path)


def test_an_endless_name_makes_no_endless_message(tmp_path):
    with pytest.raises(RuntimeError, match="unknown backend 'sdpasdpa") as e:
        select("sdpa" * 100_000, tmp_path)
    assert len(str(e.value)) < 400


def test_a_refusal_says_on_which_device(tmp_path):
    with pytest.raises(RuntimeError, match="not available on (cpu|cuda)"):
        select("triton_fa2", tmp_path, None)


@pytest.mark.parametrize("available", [False, True])
def test_flashmla_is_refused_for_what_it_is_even_where_it_is_there(available, tmp_path, monkeypatch):
    if available:
        monkeypatch.setattr(
            backends, "probe_backends", lambda **_: [BackendReport("flashmla", True, "flash-mla 1.0")]
        )
    with pytest.raises(
        RuntimeError,
        match=r"head_dim contract: MLA, head_dim_v 512, cannot serve a GQA head_dim 128 model on any GPU",
    ):
        select("flashmla", tmp_path)


# ---- triton_fa2 and its gate -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_triton_fa2_needs_a_gate_whichever_device_is_asked_about(device, tmp_path):
    with pytest.raises(RuntimeError, match="equivalence gate has not passed"):
        select("triton_fa2", tmp_path, device)


def test_triton_fa2_with_its_gate(tmp_path):
    write(tmp_path)
    assert select("triton_fa2", tmp_path) == "triton_fa2"
    report = rows(device="cpu", gate_dir=tmp_path)["triton_fa2"]
    assert report.available and report.gate.startswith("passed") and "forward only" in report.reason
    write(tmp_path, op="sdpa_backward")
    assert "backward proven too" in rows(device="cpu", gate_dir=tmp_path)["triton_fa2"].reason
    with pytest.raises(RuntimeError, match="equivalence gate"):
        select("triton_fa2", tmp_path / "elsewhere")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_stale_gate_is_refused(device, tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(gates, "kernel_source_hash", lambda: "0" * 64)
    with pytest.raises(RuntimeError, match="kernel source changed"):
        select("triton_fa2", tmp_path, device)


@no_gpu
def test_a_gate_of_the_interpreter_opens_no_gpu(tmp_path):
    write(tmp_path)
    with pytest.raises(RuntimeError, match="no CUDA device answers"):
        select("triton_fa2", tmp_path, "cuda")


@pytest.mark.parametrize("made_on, differs", [({"triton": "9.9"}, "triton"), ({}, "arch")])
def test_a_gate_of_another_environment_is_refused(made_on, differs, tmp_path, monkeypatch):
    from frost import gate_env

    monkeypatch.setattr(
        backend_probes, "resolve", lambda device: backend_probes.Where("cuda:0", Target.cuda((9, 0)))
    )
    write(tmp_path, device=Target.cuda((8, 0)) if differs == "arch" else Target.cuda((9, 0)))
    real = gate_env.matched_environment
    monkeypatch.setattr(
        gates, "matched_environment", lambda engine, target: {**real(engine, target), **made_on}
    )
    with pytest.raises(RuntimeError, match=f"equivalence gate does not cover this environment .*{differs}"):
        select("triton_fa2", tmp_path, "cuda")


def test_errors_beyond_tolerance_and_damaged_files_are_refused(tmp_path):
    path = write(tmp_path, errors={"o": 1.0})
    with pytest.raises(RuntimeError, match="equivalence gate has not passed: errors beyond tolerance"):
        select("triton_fa2", tmp_path)
    path.write_text("{")
    with pytest.raises(RuntimeError, match="equivalence gate .* is damaged"):
        select("triton_fa2", tmp_path)


@pytest.mark.parametrize("block", ["sys.modules", "importlib", "name"])
def test_a_checkout_without_the_gate_module_is_not_yet_implemented(block, tmp_path, monkeypatch):
    """The module is imported by its name at each call: blocked, it is missing; unblocked, it is back."""
    write(tmp_path)
    assert rows(device="cpu", gate_dir=tmp_path)["triton_fa2"].available
    with monkeypatch.context() as m:
        if block == "sys.modules":
            m.setitem(sys.modules, backends.TRITON_FA2_GATE_MODULE, None)
        elif block == "importlib":
            real = importlib.import_module

            def blocked(name, package=None):
                if name == backends.TRITON_FA2_GATE_MODULE:
                    raise ModuleNotFoundError(name)
                return real(name, package)

            m.setattr(importlib, "import_module", blocked)
        else:
            m.setattr(backends, "TRITON_FA2_GATE_MODULE", "frost.no_such_module")
        assert [r.name for r in probe_backends(device="cpu", gate_dir=tmp_path)] == list(ALL_BACKENDS)
        with pytest.raises(RuntimeError, match="not yet implemented"):
            select("triton_fa2", tmp_path)
        assert select(None, tmp_path) == "sdpa"
    assert select("triton_fa2", tmp_path) == "triton_fa2"


def test_gates_written_at_the_same_time_leave_a_whole_one(tmp_path):
    errors = []

    def work(i):
        try:
            for _ in range(10):
                write(tmp_path, errors={"o": 1e-3 * (i + 1) / 8})
                status = gates.check_equivalence_gate(gate_dir=tmp_path)
                if not status.ok:
                    errors.append(status.reason)
        except Exception as e:
            errors.append(repr(e))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and [p.name for p in tmp_path.iterdir()] == [
        p.name for p in tmp_path.glob("triton-*.json")
    ]
    assert select("triton_fa2", tmp_path) == "triton_fa2"


def test_a_home_that_cannot_be_read_or_written(tmp_path, monkeypatch):
    blocked = tmp_path / "home"
    blocked.write_text("a file where a folder should be")
    for name in ("FROST_GATE_DIR", "FROST_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(blocked))
    assert [r.name for r in probe_backends(device="cpu")] == list(ALL_BACKENDS)
    assert select_attn_implementation(None, device="cpu") == "sdpa"
    with pytest.raises(frost.GateError, match="FROST_GATE_DIR"):
        gates.write_equivalence_gate(**GATE)


# ---- the banner ------------------------------------------------------------------------------------------


def test_banner_value_starts_with_the_name_and_says_what_is_underneath(tmp_path):
    value = banner_value("sdpa", device="cpu")
    assert value.startswith("sdpa") and "engine torch" in value and f"torch {torch.__version__}" in value
    assert "NOT AVAILABLE" in banner_value("triton_fa2", device="cpu", gate_dir=tmp_path)
    write(tmp_path)
    value = banner_value("triton_fa2", device="cpu", gate_dir=tmp_path)
    assert (
        value.startswith("triton_fa2")
        and "gate passed" in value
        and "triton 3." in value
        and "NOT" not in value
    )


def test_the_banner_has_every_mandatory_key(tmp_path):
    assert "attention_backend" in registry.MANDATORY_BANNER_KEYS
    text = frost.banner("eager", device="cpu", gate_dir=tmp_path)
    lines = dict(line.split(":", 1) for line in text.splitlines())
    assert tuple(lines) == registry.MANDATORY_BANNER_KEYS
    assert lines["attention_backend"].strip().startswith("eager")
    with pytest.raises(RuntimeError, match="unknown backend"):
        frost.banner("nothing")
