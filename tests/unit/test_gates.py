"""Equivalence gates: what a file must match, what refuses it and in which words, and what lowering makes of it."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from gated_engine import dummy_engine

from engines.base import Target
from frost import equivalence, gate_env, gates
from frost.errors import GateError, NotSupportedError
from frost.gate_file import Gate, gate_from_bytes, gate_to_bytes, make_gate
from frost.gate_matrix import Config
from frost.graph import Graph

ROOT = Path(__file__).resolve().parents[2]
SM90, SM80 = Target.cuda((9, 0)), Target.cuda((8, 0))
GOOD = {"tolerances": {"o": 1e-2, "lse": 1e-3}, "shapes_covered": [[1, 2, 3, 4]], "errors": {"o": 1e-3, "lse": 0.0}}


@pytest.fixture(autouse=True)
def own_gates(tmp_path, monkeypatch):
    """A user's gate folder and a shipped one, both empty, and no memory of other tests."""
    monkeypatch.setenv("FROST_GATE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(gates, "shipped_gate_dir", lambda: tmp_path / "shipped")
    for name in ("_tried", "_held"):
        monkeypatch.setattr(gates, name, {})
    monkeypatch.setattr(gates, "_warned", set())


@pytest.fixture
def dummy(tmp_path, register):
    return register(dummy_engine(tmp_path / "kernel.py"), priority=1)


def write(device="cpu", **changes):
    return gates.write_equivalence_gate(device=device, **{"engine": "dummy", **GOOD, **changes})


def check(device="cpu", **how):
    return gates.check_equivalence_gate(**{"engine": "dummy", "device": device, **how})


# ---- both directions of each rule --------------------------------------------------------------------------


def test_a_gate_that_was_written_holds(dummy):
    path = write()
    status = check()
    ok, reason = status
    assert status and ok and reason == "ok" and status.path == path
    assert path.name == "dummy-sdpa-cpu-dummycc1.2.json"
    assert status.stamp.startswith("passed 20") and "(own)" in status.stamp


def test_no_gate(dummy):
    status = check()
    assert not status
    assert "equivalence gate has not passed" in status.reason
    assert "run `frost gate run dummy`, about a minute on your GPU" in status.reason


def test_a_gate_is_for_one_op(dummy):
    write(op="sdpa_backward")
    assert not check() and check(op="sdpa_backward")


def test_an_edited_source_stales_the_gate_and_a_touched_one_does_not(dummy):
    write()
    os.utime(dummy.source, (1, 1))
    assert check()
    dummy.source.write_text("kernel two")
    assert "kernel source changed since the gate ran" in check().reason
    dummy.source.write_text("kernel one")
    assert check()


def test_the_hash_is_looked_up_on_the_module_and_called_without_arguments(monkeypatch):
    gates.write_equivalence_gate(**GOOD)
    assert gates.check_equivalence_gate()
    monkeypatch.setattr(gates, "kernel_source_hash", lambda: "0" * 64)
    status = gates.check_equivalence_gate()
    assert not status and "kernel source changed" in status.reason
    gates.write_equivalence_gate(**GOOD)
    assert gates.check_equivalence_gate()


def test_the_source_hash_of_an_unknown_engine():
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        gates.kernel_source_hash("tritn")


@pytest.mark.parametrize("device, tools, says", [
    (SM80, {"dummycc": "1.2"}, "arch: given sm_80, expected sm_90"),
    ("cpu", {"dummycc": "1.2"}, "arch: given cpu, expected sm_90"),
    (SM90, {"dummycc": "1.3"}, "dummycc: given 1.3, expected 1.2"),
    (SM90, {}, "dummycc: given none, expected 1.2"),
    (SM90, {"dummycc": "1.2", "linker": "9"}, "linker: given 9, expected none"),
])
def test_another_environment_is_named_field_by_field(dummy, device, tools, says):
    write(device=SM90)
    assert check(device=SM90)
    dummy.tools = tools
    status = check(device=device)
    assert not status and says in status.reason and "does not cover this environment" in status.reason


def test_torch_python_and_driver_are_recorded_but_not_matched(dummy, monkeypatch):
    write()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert check()
    assert gates.read_equivalence_gate(engine="dummy").recorded["torch"] != "99.0"


def test_gates_for_several_archs_live_side_by_side(dummy):
    assert len({write(device=t) for t in (SM80, SM90, "cpu")}) == 3
    assert check(device=SM80) and check(device="sm_90") and check()
    assert not check(device="sm_100")


@pytest.mark.parametrize("errors, says", [
    ({"o": 0.5, "lse": 0.0}, "o: given 0.5, expected at most 0.01"),
    ({"o": float("nan"), "lse": 0.0}, "o: given nan"),
    ({"some shape": {"o": 1e-3, "lse": 0.5}}, "some shape.lse: given 0.5, expected at most 0.001"),
    ({"o": float("inf"), "lse": 0.0}, "o: given inf"),
])
def test_errors_beyond_tolerance(dummy, errors, says):
    write(errors=errors)
    status = check()
    assert not status and "errors beyond tolerance" in status.reason and says in status.reason


def test_a_stored_verdict_alone_proves_nothing(dummy):
    path = write(errors={"o": 0.5, "lse": 0.0})
    gate = gate_from_bytes(path.read_bytes())
    assert gate.verdict == "fail"
    path.write_bytes(gate_to_bytes(dataclasses.replace(gate, verdict="pass")))
    assert "errors beyond tolerance" in check().reason


def test_one_number_is_a_tolerance_for_everything(dummy):
    write(tolerances=1.0, errors={"a": {"o": 0.3}, "b": {"dq": 1.0}})
    assert check()
    write(tolerances=1.0, errors=2.0)
    assert not check()


def test_a_caller_may_vouch_and_the_artifact_says_so(dummy):
    write(errors=None)
    assert check() and check().stamp.startswith("vouched for")
    gate = gates.read_equivalence_gate(engine="dummy")
    assert gate.vouched and gate["errors"] is None and gate["verdict"] == "pass"


@pytest.mark.parametrize("change, error", [
    ({"shapes_covered": []}, "shapes_covered"),
    ({"shapes_covered": "all"}, "shapes_covered"),
    ({"shapes_covered": [object()]}, "plain data"),
    ({"tolerances": {}}, "tolerances"),
    ({"tolerances": {"o": -1.0, "lse": 1.0}}, "tolerances.o"),
    ({"tolerances": {"o": float("nan"), "lse": 1.0}}, "tolerances.o"),
    ({"tolerances": {"o": "tight"}}, "tolerances.o"),
    ({"errors": {}}, "errors"),
    ({"errors": {"dq": 0.1}}, "errors: given 'dq', expected a tolerance"),
    ({"op": "../evil"}, "op"),
    ({"device": "tpu"}, "device: given 'tpu'"),
    ({"engine": "dumy"}, "did you mean 'dummy'"),
])
def test_arguments_that_mean_nothing(dummy, tmp_path, change, error):
    with pytest.raises(ValueError, match=error):
        write(**change)
    assert not (tmp_path / "own").exists()


# ---- damage ------------------------------------------------------------------------------------------------


def _other_schema(data: bytes) -> bytes:
    from frost.gate_file import _checksum
    content = json.loads(data)
    del content["checksum"]
    content["schema"] = 99
    return json.dumps({**content, "checksum": _checksum(content)}).encode()


@pytest.mark.parametrize("damage", [
    lambda d: b"",
    lambda d: d[:len(d) // 2],
    lambda d: bytes(range(256)),
    lambda d: b"[]",
    lambda d: b"[" * 100_000,
    lambda d: d.replace(b'"o": 0.001', b'"o": 0.002'),
    lambda d: d.replace(b'"cpu"', b'"gpu"'),
    lambda d: b" " * (5 << 20),
    _other_schema,
], ids=["empty", "half", "binary", "list", "nested", "edited-number", "edited-text", "huge", "schema"])
def test_a_damaged_file_is_refused_as_such(dummy, damage):
    path = write()
    data = damage(path.read_bytes())
    assert data != path.read_bytes()
    path.write_bytes(data)
    status = check()
    assert not status and "is damaged" in status.reason and path.name in status.reason
    with pytest.raises(GateError, match="is damaged"):
        gates.read_equivalence_gate(engine="dummy")


def test_a_gate_reads_back_from_its_bytes():
    gate = make_gate(engine="e", op="o", source="s", environment={"arch": "cpu"}, recorded={}, declined={"x": "y"},
                     date="d", tolerances=1.0, errors={"a": float("inf")}, shapes_covered=[(1, 2)])
    again = gate_from_bytes(gate_to_bytes(gate))
    assert isinstance(again, Gate) and again.verdict == "fail" and again["shapes_covered"] == [[1, 2]]
    assert gate_to_bytes(again) == gate_to_bytes(gate)
    with pytest.raises(KeyError):
        gate["nothing"]


# ---- where gates are looked for ----------------------------------------------------------------------------


def test_a_shipped_gate_serves_where_the_user_has_none(dummy, tmp_path):
    write(gate_dir=tmp_path / "shipped")
    assert check() and "(shipped)" in check().stamp


def test_the_users_own_gate_is_looked_at_first(dummy, tmp_path):
    write(gate_dir=tmp_path / "shipped")
    write(errors={"o": 0.5, "lse": 0.0})
    assert "errors beyond tolerance" in check().reason


@pytest.mark.parametrize("useless", ["damaged", "stale"])
def test_a_useless_own_file_does_not_hide_a_shipped_gate(dummy, tmp_path, useless):
    path = write()
    if useless == "damaged":
        path.write_bytes(b"x")
    else:
        dummy.source.write_text("kernel two")
    write(gate_dir=tmp_path / "shipped")
    assert check().path == tmp_path / "shipped" / path.name


def test_gate_dir_replaces_all_other_places(dummy, tmp_path):
    write()
    assert not check(gate_dir=tmp_path / "elsewhere")
    write(gate_dir=tmp_path / "elsewhere")
    (tmp_path / "own" / "dummy-sdpa-cpu-dummycc1.2.json").unlink()
    assert check(gate_dir=tmp_path / "elsewhere") and not check()


def test_gates_can_be_listed(dummy, tmp_path):
    write()
    write(op="sdpa_backward", gate_dir=tmp_path / "shipped")
    (tmp_path / "shipped" / "other-sdpa-cpu.json").write_text("{")
    found = list(gates.iter_gates())
    assert [(f.path.parent.name, f.gate is None, f.shipped) for f in found] == [
        ("own", False, False), ("shipped", False, True), ("shipped", True, True)]
    assert [f.gate.op for f in gates.iter_gates(engine="dummy", op="sdpa")] == ["sdpa"]


def test_a_folder_that_cannot_be_written_is_a_gate_error(dummy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(GateError, match="set FROST_GATE_DIR or pass gate_dir="):
        write(gate_dir=tmp_path / "file" / "below")
    monkeypatch.delenv("FROST_GATE_DIR")
    monkeypatch.setenv("FROST_CACHE_DIR", "off")
    with pytest.raises(GateError, match="FROST_CACHE_DIR=off"):
        write()
    assert not check()


def test_concurrent_writers_and_readers_never_see_half_a_file(dummy, tmp_path):
    write()
    seen, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            seen.append(check().reason)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=lambda: [write() for _ in range(20)]) for _ in range(4)]
    for t in (reader, *writers):
        t.start()
    for t in writers:
        t.join()
    stop.set()
    reader.join()
    assert set(seen) == {"ok"}
    assert [p.name for p in (tmp_path / "own").iterdir()] == ["dummy-sdpa-cpu-dummycc1.2.json"]


# ---- devices -----------------------------------------------------------------------------------------------


def test_the_cpu_never_initialises_cuda(tmp_path):
    code = """
import torch
def no(*a, **k): raise SystemExit("CUDA was initialised")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.current_device = no
from frost import gates
gates.write_equivalence_gate(tolerances=1.0, errors=0.5, shapes_covered=["all"])
assert gates.check_equivalence_gate() and gates.read_equivalence_gate().environment["arch"] == "cpu"
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FROST_GATE_DIR": str(tmp_path / "own")}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120,
                         check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("device, target", [
    ("cpu", Target.cpu()), (torch.device("cpu"), Target.cpu()), ("sm_90", SM90), ("sm_120", Target.cuda((12, 0))),
    (SM80, SM80),
])
def test_devices(device, target):
    assert gate_env.target_of(device) == target


def test_a_cuda_device_says_its_own_arch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0) if i == 3 else (8, 0))
    assert gate_env.target_of("cuda") == SM90 and gate_env.target_of("cuda").index == 3
    assert gate_env.target_of(torch.device("cuda", 1)) == SM80


def test_a_cuda_device_that_is_not_there(dummy, monkeypatch):
    def missing(*_):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_device", missing)
    status = check(device="cuda")
    assert not status and "equivalence gate has not passed" in status.reason and "CUDA" in status.reason
    with pytest.raises(GateError, match="expected a CUDA device"):
        write(device="cuda")


# ---- what lowering asks ------------------------------------------------------------------------------------


def test_policies(dummy):
    assert gates.gate_for_route("dummy", "sdpa", SM90, "off") == (True, "", "off")
    ok, reason, stamp = gates.gate_for_route("dummy", "sdpa", SM90, "require")
    assert not ok and "has not passed" in reason and stamp == ""
    write(device=SM90)
    ok, reason, stamp = gates.gate_for_route("dummy", "sdpa", SM90, "require")
    assert ok and reason == "" and stamp.startswith("passed")
    with pytest.raises(ValueError, match="gates: given 'maybe'"):
        gates.gate_for_route("dummy", "sdpa", SM90, "maybe")


def test_an_automatic_route_that_lost_an_engine_says_so_once(dummy, caplog):
    with caplog.at_level(logging.WARNING, "frost"):
        gates.gate_for_route("dummy", "sdpa", SM90, "require")
        assert not caplog.records
        for op in ("sdpa", "sdpa_backward", "sdpa"):
            gates.gate_for_route("dummy", op, SM90, "require", automatic=True)
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert "dummy" in caplog.text and "frost gate run dummy" in caplog.text


def _fake_run(monkeypatch, verdict, calls):
    def run(engine, op, target):
        calls.append((engine, op, target))
        errors = {"o": equivalence.TensorError(1e-3, 0.25 if verdict == "pass" else 4.0)}
        return equivalence.GateRun(engine, op, target, (
            equivalence.ConfigResult(Config("one"), verdict, errors, "" if verdict == "pass" else "o: 4 x"),
            equivalence.ConfigResult(Config("two"), "declined", {}, "no bf16")))

    monkeypatch.setattr(equivalence, "run_gate_with_progress", run)


def test_auto_runs_a_missing_gate_once_and_keeps_it(dummy, monkeypatch):
    calls = []
    _fake_run(monkeypatch, "pass", calls)
    for _ in range(3):
        ok, _, stamp = gates.gate_for_route("dummy", "sdpa", Target.cpu(), "auto")
        assert ok and stamp.startswith("passed")
    assert calls == [("dummy", "sdpa", Target.cpu())]
    gate = gates.read_equivalence_gate(engine="dummy")
    assert gate.errors == {"one": {"o": 0.25}} and gate.declined == {"two": "no bf16"}
    assert "one: bf16" in gate.shapes_covered[0]
    dummy.source.write_text("kernel two")
    assert gates.gate_for_route("dummy", "sdpa", Target.cpu(), "auto")[0] and len(calls) == 2


def test_auto_does_not_repeat_a_gate_that_failed(dummy, monkeypatch, tmp_path):
    calls = []
    _fake_run(monkeypatch, "fail", calls)
    for _ in range(2):
        ok, reason, _ = gates.gate_for_route("dummy", "sdpa", Target.cpu(), "auto")
        assert not ok and "it was run now and failed" in reason and "one: o: 4 x" in reason
    assert len(calls) == 1 and not (tmp_path / "own").exists()


def test_auto_without_a_folder_counts_for_this_process(dummy, monkeypatch, tmp_path, caplog):
    calls = []
    _fake_run(monkeypatch, "pass", calls)
    (tmp_path / "own").write_text("in the way")
    for _ in range(2):
        ok, _, stamp = gates.gate_for_route("dummy", "sdpa", Target.cpu(), "auto")
        assert ok and "in this process" in stamp
    assert len(calls) == 1 and "counts for this process only" in caplog.text
    assert gates.holds("dummy", "sdpa", Target.cpu())


def test_auto_cannot_run_for_a_gpu_that_is_not_here(dummy, monkeypatch):
    calls = []
    _fake_run(monkeypatch, "pass", calls)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (8, 0))
    ok, reason, _ = gates.gate_for_route("dummy", "sdpa", SM90, "auto")
    assert not ok and "cannot run here (arch: given sm_90, expected sm_80)" in reason and not calls


def _graph():
    g = Graph("gated")
    q, k, v = (g.tensor(n, (1, 2, 5, 8), dtype="fp32") for n in "qkv")
    g.output(g.sdpa(q, k, v)[0], name="o")
    return g


def test_lowering_obeys_the_gate(dummy, caplog):
    with pytest.raises(NotSupportedError) as refused:
        _graph().compile("cpu", engines=["dummy"])
    assert "equivalence gate has not passed" in refused.value.reasons["dummy"][0]
    with caplog.at_level(logging.WARNING, "frost"):
        (route,) = _graph().compile("cpu").routes
    assert route.engine_name != "dummy" and "frost gate run dummy" in caplog.text
    assert [d.field for d in route.declined if d.engine == "dummy"] == ["gate"]
    assert _graph().compile("cpu", engines=["dummy"], gates="off").routes[0].gate == "off"
    write()
    (route,) = _graph().compile("cpu").routes
    assert route.engine_name == "dummy" and route.gate.startswith("passed 20")
    dummy.source.write_text("kernel two")
    assert _graph().compile("cpu").routes[0].engine_name != "dummy"


def test_holds_follows_the_files_and_the_source(dummy):
    assert not gates.holds("dummy", "sdpa", SM90)
    path = write(device=SM90)
    assert gates.holds("dummy", "sdpa", SM90) and not gates.holds("dummy", "sdpa", SM80)
    good = path.read_bytes()
    path.write_bytes(good[:-20])
    assert not gates.holds("dummy", "sdpa", SM90)
    path.write_bytes(good)
    assert gates.holds("dummy", "sdpa", SM90)
    dummy.source.write_text("kernel two")
    assert not gates.holds("dummy", "sdpa", SM90)


def test_holds_reads_no_file_twice(dummy, monkeypatch):
    write(device=SM90)
    assert gates.holds("dummy", "sdpa", SM90)
    monkeypatch.setattr(gates, "read_gate_file", None)
    assert gates.holds("dummy", "sdpa", SM90)


# ---- what ships --------------------------------------------------------------------------------------------


def _shipped(dummy, tmp_path):
    return {r.name: r.reason for r in gates.check_shipped("dummy", tmp_path / "shipped")}


def test_shipped_gates_are_checked_on_any_machine(dummy, tmp_path):
    name = "dummy-sdpa-sm_90-dummycc1.2.json"
    missing = _shipped(dummy, tmp_path)
    assert list(missing) == ["dummy:sdpa"] and "frost gate run dummy --op sdpa --out" in missing["dummy:sdpa"]
    path = write(device=SM90, gate_dir=tmp_path / "shipped")
    assert _shipped(dummy, tmp_path) == {name: "ok"}
    dummy.tools = {"dummycc": "7.7"}  # the machine that checks may have another compiler
    assert _shipped(dummy, tmp_path) == {name: "ok"}
    dummy.source.write_text("kernel two")
    assert "kernel source changed" in _shipped(dummy, tmp_path)[name]
    path.write_bytes(b"{}")
    assert "is damaged" in _shipped(dummy, tmp_path)[name]
    assert "dummy:sdpa" in _shipped(dummy, tmp_path)


@pytest.mark.parametrize("errors, says", [(None, "vouched"), ({"o": 1.0, "lse": 0.0}, "errors beyond tolerance")])
def test_what_ships_was_measured_and_is_green(dummy, tmp_path, errors, says):
    write(device=SM90, errors=errors, gate_dir=tmp_path / "shipped")
    assert says in next(iter(_shipped(dummy, tmp_path).values()))
