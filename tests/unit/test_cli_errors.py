"""What the command line says where it cannot do what was asked: exit codes, messages, and errors as JSON."""

import json
import os

import pytest

from frost import cli
from frost.graph import Graph

pytestmark = pytest.mark.usefixtures("cli_folders")


def run(capsys, *argv):
    code = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


# ---- devices ---------------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_a_failure_with_its_reason(gated, capsys, monkeypatch):
    import torch

    def missing(*_):
        raise RuntimeError("no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", missing)
    code, _, err = run(capsys, "gate", "run", "gated", "--device", "cuda")
    assert code == cli.FAILED and "'cuda', which does not answer (no NVIDIA driver); use --device cpu" in err


@pytest.mark.parametrize(
    "argv, other",
    [
        (("explain", "{graph}"), True),
        (("run", "{graph}"), False),
        (("bench",), False),
        (("gate", "run", "gated"), False),
        (("report", "--graph", "{graph}", "-o", "{folder}/r.html"), True),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_without_cuda_the_message_names_the_way_out(
    gated, capsys, graph_file, tmp_path, monkeypatch, argv, other, device
):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv = [a.format(graph=graph_file, folder=tmp_path) for a in argv]
    code, out, err = run(capsys, *argv, "--device", device)
    assert code == cli.FAILED and not out and f"given {device!r}, and no CUDA device answers here" in err
    assert "use --device cpu" in err and ("--device sm_90" in err) is other and "device: device" not in err


@pytest.mark.parametrize(
    "argv, says",
    [
        (("run", "{graph}", "--device", "sm_90"), "an arch, expected a device: cpu, cuda or cuda:N"),
        (("bench", "--device", "sm_90"), "an arch, expected a device"),
        (("probe", "--device", "sm_90"), "an arch, expected a device"),
        (("gate", "run", "gated", "--device", "sm_90"), "an arch, expected a device"),
        (("gate", "run", "gated", "--device", ""), "expected cpu, cuda or cuda:N"),
        (("explain", "{graph}", "--device", "sm_999"), "expected one of sm_70, "),
        (("explain", "{graph}", "--device", "sm90"), "or an arch such as sm_90"),
        (("explain", "{graph}", "--device", "mps"), "or an arch such as sm_90"),
    ],
)
def test_a_device_that_the_command_cannot_use_is_2(gated, capsys, graph_file, argv, says):
    code, out, err = run(capsys, *(a.format(graph=graph_file) for a in argv))
    assert code == cli.USAGE and says in err and not out


def test_the_gate_folder_is_looked_at_before_minutes_go_into_a_gate(gated, capsys, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("the gate was run")

    (tmp_path / "file").write_text("")
    monkeypatch.setattr("frost.equivalence.run_gate_with_progress", never)
    argv = ("gate", "run", "gated", "--device", "cpu")
    code, _, err = run(capsys, *argv, "--out", tmp_path / "file")
    assert code == cli.FAILED and "is no folder" in err
    monkeypatch.setenv("FROST_CACHE_DIR", "off")
    code, _, err = run(capsys, *argv)
    assert code == cli.FAILED and "none here" in err and "--out FOLDER" in err


# ---- files -----------------------------------------------------------------------------------------------


# What each command says about a file that is not there, a folder, and a file of something else.
_READERS = [
    ("explain", "{file}"),
    ("run", "{file}"),
    ("routing", "show", "{file}"),
    ("routing", "diff", "{file}", "{file}"),
    ("report", "{file}"),
    ("report", "--graph", "{file}"),
    ("report", "--routing", "{file}"),
    ("report", "--bench", "{file}"),
]


@pytest.mark.parametrize("argv", _READERS, ids=" ".join)
@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "other"])
def test_a_file_that_cannot_be_read_is_2(capsys, tmp_path, monkeypatch, argv, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.frost"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(b"" if kind == "empty" else b"nothing of ours")
    code, out, err = run(capsys, *(a.format(file=path) for a in argv))
    assert code == cli.USAGE and not out and f"given {path}" in err and "expected a" in err
    assert err.count("x.frost") == 1 and err.count("\n") == 1 and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "argv", [("probe",), ("gate", "list"), ("gate", "check"), ("report",)], ids=lambda a: " ".join(a)
)
@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_gate_folder_that_is_none_is_2(capsys, tmp_path, monkeypatch, argv, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gates"
    if kind == "file":
        path.write_text("")
    code, out, err = run(capsys, *argv, "--gate-dir", path)
    assert code == cli.USAGE and f"--gate-dir: given {path}" in err and not out


@pytest.mark.parametrize("kind", ["folder", "below a file", "pipe"])
def test_a_result_that_cannot_be_kept_is_told_before_the_work(
    capsys, graph_file, tmp_path, monkeypatch, kind
):
    path = tmp_path / "save"
    if kind == "folder":
        path.mkdir()
    elif kind == "below a file":
        path.write_text("")
        path /= "below"
    else:
        os.mkfifo(path)

    def never(*_, **__):
        raise AssertionError("the work was done")

    monkeypatch.setattr("frost.plan.compile_graph", never)
    monkeypatch.setattr("frost.backend_bench.benchmark_backends_with_reasons", never)
    for argv in (("run", graph_file), ("bench",), ("report",)):
        code, out, err = run(capsys, *argv, "--device", "cpu", "--save", path)
        assert code == cli.FAILED and f"--save: given {path}" in err and not out
    if kind != "pipe":
        code, out, err = run(capsys, "report", "--out", path)
        assert code == cli.FAILED and f"--out: given {path}" in err and not out


# ---- errors as JSON --------------------------------------------------------------------------------------


def the_error(code, out, err):
    made = json.loads(out)
    assert set(made) == {"error"} and made["error"]["exit_code"] == code
    assert made["error"]["message"] in err and made["error"]["type"]
    return made["error"]


@pytest.mark.parametrize(
    "argv, code, kind",
    [
        (("explain", "no.frost"), cli.USAGE, "UsageError"),
        (("explain",), cli.USAGE, "UsageError"),
        (("explain", "{graph}", "--bogus"), cli.USAGE, "UsageError"),
        (("run", "{graph}", "--repeat", "x"), cli.USAGE, "UsageError"),
        (("exlpain",), cli.USAGE, "UsageError"),
        ((), cli.USAGE, "UsageError"),
        (
            ("explain", "{graph}", "--device", "cpu", "--engines", "torch_sdpa"),
            cli.FAILED,
            "NotSupportedError",
        ),
        (("gate", "run", "triton", "--device", "cpu", "--out", "/dev/null"), cli.FAILED, "GateError"),
    ],
)
def test_a_failure_as_json_is_one_object(capsys, graph_file, argv, code, kind):
    got = run(capsys, *(a.format(graph=graph_file) for a in argv), "--json")
    error = the_error(*got)
    assert got[0] == code and error["type"] == kind
    if kind == "NotSupportedError":
        assert "cu_seqlens_q is not supported" in " ".join(error["reasons"]["torch_sdpa"])


def test_a_bug_as_json_is_one_object_too_and_its_traceback_is_kept(capsys, graph_file, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("frost.plan.compile_graph", broken)
    got = run(capsys, "explain", graph_file, "--device", "cpu", "--json")
    assert the_error(*got)["type"] == "ZeroDivisionError" and got[0] == cli.FAILED and "Traceback" in got[2]


def test_an_interrupt_is_130(capsys, graph_file, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("frost.plan.compile_graph", stopped)
    got = run(capsys, "explain", graph_file, "--device", "cpu", "--json")
    assert got[0] == 130 and the_error(*got)["type"] == "Interrupted"
    assert run(capsys, "explain", graph_file, "--device", "cpu")[:2] == (130, "")


def test_no_message_says_its_prefix_twice(capsys, graph_file):
    for argv in (
        ("bogus",),
        ("gate", "walk"),
        ("explain", graph_file, "--device", "tpu"),
        ("explain", graph_file, "--engines", "tritn"),
        ("run", graph_file, "--bind", "Q=3"),
        ("run", graph_file, "--bind", "T=x"),
        ("bench", "--seq", "0", "--device", "cpu"),
        ("gate", "check", "nope"),
        ("explain", graph_file, "--bogus"),
    ):
        _, _, err = run(capsys, *argv)
        words = [w.strip().lstrip("-").lower() for w in err.splitlines()[0].split(":")]
        assert words[0] == "frost" and all(a != b for a, b in zip(words, words[1:])), err


def test_control_characters_of_a_file_reach_no_terminal(capsys, tmp_path):
    """An escape sequence in a name could rewrite what was printed before it."""
    g = Graph("name\x1b]0;title\x07")
    x = g.tensor("x\x1b[2J", (2, 2), dtype="fp32")
    g.output(g.tanh(x), name="o\x9b1m")
    path = tmp_path / "evil.frost"
    path.write_bytes(g.to_bytes())
    for argv in (("explain", path), ("run", path), ("explain", path, "--engines", "torch_sdpa")):
        code, out, err = run(capsys, *argv, "--device", "cpu")
        text = out + err
        assert "\\x" in text and not {"\x1b", "\x07", "\x9b"} & set(text)
    assert code == cli.FAILED
    _, _, err = run(capsys, "explain", tmp_path / "no\x1b[2J.frost")
    assert "no\\x1b[2J.frost" in err


def test_an_engine_that_is_not_available_is_told_before_its_gate_is_run(capsys, monkeypatch):
    def never(*_):
        raise AssertionError("the gate was run")

    monkeypatch.setattr("frost.equivalence.run_gate_with_progress", never)
    code, out, err = run(capsys, "gate", "run", "sm80", "--device", "cpu")
    assert (
        code == cli.FAILED
        and not out
        and "'sm80', which is not available on cpu: sm80's kernels run on" in err
    )


# ---- memory ----------------------------------------------------------------------------------------------


def test_bench_of_what_no_memory_holds_has_every_row_with_the_reason(capsys):
    sizes = f"--batch 1 --heads 1 --kv-heads 1 --seq {1 << 40} --head-dim {1 << 15} --iters 1"
    code, out, _ = run(capsys, "bench", *sizes.split(), "--device", "cpu", "--json")
    rows = json.loads(out)["benchmarks"][0]["rows"]
    assert code == cli.FAILED and "frost[triton]" in {r["candidate"] for r in rows}
    assert all(r["ms"] is None and r["status"].startswith("operands: ") for r in rows)


def test_run_of_what_no_memory_holds_is_told_in_one_line(capsys, tmp_path):
    path = tmp_path / "huge.frost"
    g = Graph("layer")
    x = g.tensor("x", (1 << 22, 1 << 22), dtype="fp32")
    g.output(g.tanh(x), name="y")
    path.write_bytes(g.to_bytes())
    code, out, err = run(capsys, "run", path, "--device", "cpu")
    assert (
        code == cli.FAILED and "too large for the memory here" in err and "Traceback" not in err and not out
    )
