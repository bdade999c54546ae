"""The command line: exit codes, tables and JSON; and the support matrix that is generated from the rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines import registry
from engines.base import Engine, Executable, SdpaFwdDsl, Support
from frost import backward_graph, cli, gates, routing
from frost.backends import ALL_BACKENDS
from frost.gate_matrix import MATRIX, Config
from frost.graph import Graph
from tools import support_matrix

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("cli_folders")


def run(capsys, *argv):
    code = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


# ---- gate ------------------------------------------------------------------------------------------------


def test_gate_run_prints_a_row_each_and_writes_on_green(gated, capsys, tmp_path):
    code, out, _ = run(capsys, "gate", "run", "gated", "--device", "cpu")
    path = tmp_path / "cache" / "gates" / "gated-sdpa-cpu.json"
    assert code == cli.OK and "PASS     small" in out and " o " in out and " lse " in out
    assert "PASS gated:sdpa: 1 passed" in out and str(path) in out.replace("\n", "")
    assert gates.check_equivalence_gate(engine="gated")


def test_gate_run_writes_nothing_unless_all_is_green(gated, capsys, tmp_path, monkeypatch):
    rows = (*MATRIX["sdpa"], Config("impossible", heads=(3, 2), seqlen=(5, 7), head_dim=(8, 8)))
    monkeypatch.setitem(MATRIX, "sdpa", rows)
    code, out, _ = run(capsys, "gate", "run", "gated", "--device", "cpu", "--out", tmp_path / "out")
    assert code == cli.FAILED and "FAIL     impossible" in out and "nothing written" in out
    assert not (tmp_path / "out").exists()


def test_gate_run_as_json(gated, capsys, tmp_path):
    code, out, _ = run(capsys, "gate", "run", "gated", "--device", "cpu", "--out", tmp_path / "out", "--json")
    (report,) = json.loads(out)
    assert code == cli.OK and report["ok"] and report["op"] == "sdpa" and report["target"] == "cpu"
    assert report["results"][0]["verdict"] == "pass" and set(report["results"][0]["errors"]) == {"o", "lse"}
    assert Path(report["path"]).parent == tmp_path / "out"


def test_gate_run_where_nothing_can_be_written(gated, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(
        capsys, "gate", "run", "gated", "--device", "cpu", "--out", tmp_path / "file" / "below"
    )
    assert code == cli.FAILED and "gate folder: given" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "argv, says",
    [
        (["gate", "run", "gaetd"], "did you mean 'gated'"),
        (["gate", "run", "reference"], "which needs no gate"),
        (["gate", "run", "gated", "--op", "pointwise"], "expected one of ['sdpa']"),
        (["gate", "run", "gated", "--device", "tpu"], "device: given 'tpu'"),
        (["gate", "check", "gaetd"], "did you mean 'gated'"),
        (["gate"], "required"),
        (["gate", "walk"], "invalid choice"),
        (["routing", "show"], "required"),
        (["fly"], "invalid choice"),
        ([], "usage"),
    ],
)
def test_a_command_that_makes_no_sense_is_2(gated, capsys, argv, says):
    code, out, err = run(capsys, *argv)
    assert code == cli.USAGE and says in err and not out


def test_gate_check_fails_until_what_ships_is_whole(gated, capsys, tmp_path):
    code, out, _ = run(capsys, "gate", "check", "gated")
    assert code == cli.FAILED and "there is no gate for it" in out and "1 checked, 1 failed" in out
    run(capsys, "gate", "run", "gated", "--device", "cpu", "--out", tmp_path / "shipped")
    code, out, _ = run(capsys, "gate", "check", "gated")
    assert code == cli.OK and "PASS" in out and "1 checked, 0 failed" in out
    code, out, _ = run(capsys, "gate", "check", "gated", "--json")
    assert code == cli.OK and json.loads(out) == {
        "ok": True,
        "gates": [{"name": "gated-sdpa-cpu.json", "verdict": "pass", "ok": True, "reason": "ok"}],
    }
    (tmp_path / "shipped" / "gated-sdpa-cpu.json").write_text("{}")
    code, out, _ = run(capsys, "gate", "check", "gated")
    assert code == cli.FAILED and "is damaged" in out


def test_gate_check_names_an_op_without_a_matrix_and_does_not_fail_for_it(gated, capsys, monkeypatch):
    """Nobody can run that gate yet; the op is declined on every GPU, and the table says so."""
    monkeypatch.setattr("frost.equivalence.gated_ops", lambda: ("nsa_selection",))
    code, out, _ = run(capsys, "gate", "check", "gated")
    assert code == cli.OK and "NONE" in out and "no gate matrix" in out and "1 checked, 0 failed" in out


def test_gate_check_of_an_engine_that_needs_none(capsys):
    assert run(capsys, "gate", "check", "reference")[0] == cli.OK


def test_gate_list(gated, capsys, tmp_path):
    code, out, _ = run(capsys, "gate", "list", "gated")
    assert code == cli.OK and "no gates in" in out
    run(capsys, "gate", "run", "gated", "--device", "cpu")
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "gated-sdpa-sm_90.json").write_text("x")
    code, out, _ = run(capsys, "gate", "list")
    assert code == cli.OK and "arch cpu" in out and "damaged" in out
    found = json.loads(run(capsys, "gate", "list", "--json")[1])
    assert [(f.get("verdict"), f["shipped"], bool(f["problem"])) for f in found] == [
        ("pass", False, False),
        (None, True, True),
    ]


# ---- routing and cache -----------------------------------------------------------------------------------


def _dump(path):
    declined = (routing.Declined("triton", "gate", "none", "a gate", "no gate"),)
    stats = routing.Stats()
    for route in (
        routing.Route("g", "a", "sdpa", "torch_sdpa[MATH]", declined),
        routing.Route("g", "b", "sdpa", "x"),
        routing.Route("g", "b", "sdpa", "x", cache_hit=True),
    ):
        stats.add(route)
    return routing.write_dump(path, routing.Dump(stats))


def test_routing_show_merges_files(capsys, tmp_path):
    files = [_dump(tmp_path / "a.json"), _dump(tmp_path / "b.msgpack")]
    code, out, _ = run(capsys, "routing", "show", *files)
    assert code == cli.OK and "torch_sdpa" in out and "50.0%" in out and "no gate" in out
    shown = json.loads(run(capsys, "routing", "show", *files, "--json")[1])
    assert shown["counts"] == {"torch_sdpa:sdpa": 2, "x:sdpa": 2} and shown["cache_hits"] == {"x:sdpa": 2}
    assert shown["shares"] == {"torch_sdpa": 0.5, "x": 0.5}


def test_cache_info_and_clear(capsys, tmp_path):
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    (folder / "triton-fwd-sm_90-0.frostk").write_bytes(b"x" * 100)
    for name in ("k.lock", ".tmp-1.frostk", "notes.txt"):
        (folder / name).write_text("")
    facts = json.loads(run(capsys, "cache", "info", "--json")[1])
    assert facts["kernels"] == 1 and facts["kernel_bytes"] == 100 and facts["kernel_dir"] == str(folder)
    code, out, _ = run(capsys, "cache", "info")
    assert code == cli.OK and str(tmp_path / "cache") in out.replace("\n", "")
    assert run(capsys, "cache", "clear")[:2] == (cli.OK, f"3 files deleted from {folder}\n")
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]
    assert json.loads(run(capsys, "cache", "clear", "--json")[1])["deleted"] == 0


def test_cache_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("FROST_CACHE_DIR", "off")
    code, out, _ = run(capsys, "cache", "info")
    assert code == cli.OK and "kept in memory only" in out
    assert run(capsys, "cache", "clear")[:2] == (cli.OK, "0 files deleted\n")


def test_a_bad_environment_variable_is_told_without_a_traceback(capsys, monkeypatch):
    monkeypatch.setenv("FROST_PLAN_CACHE_SIZE", "lots")
    code, _, err = run(capsys, "cache", "info")
    assert code == cli.FAILED and "FROST_PLAN_CACHE_SIZE: given 'lots'" in err


def test_python_m_frost():
    ran = subprocess.run(
        [sys.executable, "-m", "frost", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0 and ran.stdout.startswith("frost ")


def test_routing_diff(capsys, tmp_path):
    def dump(name, **counts):
        stats = routing.Stats({key.replace("__", ":"): n for key, n in counts.items()})
        return routing.write_dump(tmp_path / name, routing.Dump(stats))

    a, b = dump("a.json", x__sdpa=9, y__sdpa=1), dump("b.json", x__sdpa=18, y__sdpa=2)
    c = dump("c.json", x__sdpa=8, y__sdpa=2)
    code, out, _ = run(capsys, "routing", "diff", a, b)
    assert code == cli.OK and "the same shares" in out and "9 -> 18" in out
    code, out, _ = run(capsys, "routing", "diff", a, c)
    assert code == cli.FAILED and "90.0% -> 80.0%" in out and "2 shares moved" in out
    assert run(capsys, "routing", "diff", a, c, "--tolerance", "0.2")[0] == cli.OK
    code, out, _ = run(capsys, "routing", "diff", a, c, "--json")
    assert code == cli.FAILED and json.loads(out)["same"] is False
    for bad in ([a], [a, b, c], [a, tmp_path / "no.json"], [a, a, "--tolerance", "nan"]):
        code, _, err = run(capsys, "routing", "diff", *bad)
        assert code == cli.USAGE and err


# ---- graphs ----------------------------------------------------------------------------------------------


def test_explain(capsys, graph_file):
    code, out, _ = run(capsys, "explain", graph_file, "--device", "cpu")
    assert code == cli.OK and "attention" in out and "must be asked for by name" in out
    shown = json.loads(run(capsys, "explain", graph_file, "--device", "cpu", "--json")[1])
    assert shown["routes"][0]["engine"] == "reference" and shown["target"] == "cpu" and shown["tree"]


def test_explain_for_a_device_that_is_not_here(capsys, graph_file):
    shown = json.loads(
        run(capsys, "explain", graph_file, "--device", "sm_90", "--engines", "reference", "--json")[1]
    )
    assert shown["target"] == "sm_90"


def test_explain_says_why_no_engine_serves(capsys, graph_file):
    code, _, err = run(capsys, "explain", graph_file, "--device", "cpu", "--engines", "torch_sdpa")
    assert code == cli.FAILED and "cu_seqlens_q is not supported by torch_sdpa:sdpa" in err


def test_run_executes_compares_and_saves(capsys, graph_file, tmp_path):
    argv = ("run", graph_file, "--device", "cpu", "--engines", "triton", "--bind", "T=21", "--repeat", "1")
    code, out, _ = run(capsys, *argv, "--save", tmp_path / "run.json")
    assert code == cli.OK and "[21, 2, 8]" in out and "median of 1" in out
    assert json.loads((tmp_path / "run.json").read_text())["graphs"][0]["run"]["symbols"] == {"T": 21}
    made = json.loads(run(capsys, *argv, "--json")[1])
    assert made["ok"] and made["run"]["outputs"]["o"]["difference"] < 1e-5


def test_run_of_every_kind_of_operand(capsys, tmp_path):
    """A backward graph: saved statistics, lengths, masks; whatever it needs is made up."""
    g = Graph("kinds")
    q, k, v = (g.tensor(name, (2, 2, 8, 8), dtype="fp32") for name in "qkv")
    lens = g.tensor("lens", (2,), dtype="int32")
    mask = g.tensor("mask", (1, 1, 8, 8), dtype="bool")
    bias = g.tensor("bias", (8, 8), dtype="fp32")
    g.output(g.sdpa(q, k, v, seq_len_kv=lens, mask=mask, bias=bias)[0], name="o")
    path = tmp_path / "b.frost"
    path.write_bytes(backward_graph(g, wrt=["q", "bias"]).to_bytes())
    code, out, _ = run(
        capsys, "run", path, "--device", "cpu", "--engines", "triton,reference", "--repeat", "1", "--json"
    )
    made = json.loads(out)
    assert code == cli.OK and all(
        o["difference"] < 1e-4 and o["largest"] > 0 for o in made["run"]["outputs"].values()
    )


def _spoilt(register, spoil):
    """An engine that computes what the reference does, and then spoils it."""
    inner = registry.get("reference").adapter(SdpaFwdDsl)

    class SpoiltAdapter(SdpaFwdDsl):
        engine, capabilities = "spoilt", inner.capabilities

        def check_support(self, desc, target):
            return Support()

        def workspace(self, desc):
            return inner.workspace(desc)

        def compile(self, desc, target):
            made = inner.compile(desc, target)

            class Call(Executable):
                def prepare(self, launch, workspace):
                    call = made.prepare(launch, workspace)

                    def run(stream):
                        call(stream)
                        spoil(launch.operands)

                    return run

            return Call()

    class Spoilt(Engine):
        name = "spoilt"

        def adapters(self):
            return (SpoiltAdapter(),)

    register(Spoilt())


def test_run_of_a_result_that_is_nothing_but_infinite(capsys, tmp_path):
    """Rows that see nothing have lse = -inf: the same in both, and no mean to compare with."""
    g = Graph("empty rows")
    q, k, v = (g.tensor(name, (1, 1, n, 8), dtype="fp32") for name, n in zip("qkv", (4, 0, 0)))
    g.output(g.sdpa(q, k, v, stats=True)[1], name="lse")
    path = tmp_path / "g.frost"
    path.write_bytes(g.to_bytes())
    code, out, _ = run(
        capsys, "run", path, "--device", "cpu", "--engines", "triton,reference", "--repeat", "1"
    )
    assert code == cli.OK and "FAIL" not in out


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda o: o["o"].fill_(float("nan")), "FAIL o: NaN"),
        (lambda o: o["o"].mul_(1.01), "FAIL o: 0.01 of its size away"),
        (lambda o: o["lse"].view(-1)[:1].fill_(float("inf")), "FAIL lse: inf of its size away"),
        (lambda o: o["o"].zero_(), "FAIL o: 1 of its size away"),
        (lambda o: o["o"].mul_(1.0001), ""),
    ],
)
def test_run_fails_where_the_result_is_another(capsys, graph_file, register, spoil, says):
    _spoilt(register, spoil)
    argv = ("run", graph_file, "--device", "cpu", "--engines", "spoilt", "--repeat", "1")
    code, out, _ = run(capsys, *argv)
    assert code == (cli.FAILED if says else cli.OK) and says in out and ("FAIL" in out) is bool(says)
    made = json.loads(run(capsys, *argv, "--json")[1])
    assert made["ok"] is not bool(says) and len(made["wrong"]) == bool(says)
    assert run(capsys, *argv, "--no-check")[0] == cli.OK


@pytest.mark.parametrize(
    "argv, says",
    [
        (["run"], "GRAPH is required"),
        (["run", "{graph}", "--bind", "T"], "expected NAME=NUMBER"),
        (["run", "{graph}", "--bind", "Q=3"], "given 'Q', expected one of ['T']"),
        (["run", "{graph}", "--bind", "T=999"], "expected 0..256"),
        (["run", "{graph}", "--bind", "T=²"], "expected NAME=NUMBER"),
        (["run", "{graph}", "--bind", "T=3", "--bind", "T=4"], "given T as 3 and as 4"),
        (["run", "{graph}", "--bind", "T=" + 9 * "9" * 1000], "expected NAME=NUMBER"),
        (["run", "{graph}", "--seed", "-1"], "--seed: given -1"),
        (["run", "{graph}", "--seed", str(1 << 70)], "--seed"),
        (["run", "{graph}", "--repeat", str(1 << 70)], "--repeat"),
        (["run", "{graph}", "--repeat", "0"], "--repeat"),
        (["explain", "{graph}", "--engines", "tritn"], "did you mean 'triton'"),
        (["explain", "{graph}", "--gates", "maybe"], "gates: given 'maybe'"),
        (["explain", "{graph}", "--device", "tpu"], "--device"),
        (["explain", "{graph}", "--bogus"], "--bogus"),
        (["exlpain", "{graph}"], "did you mean 'explain'"),
    ],
)
def test_a_graph_command_that_makes_no_sense_is_2(capsys, graph_file, argv, says):
    code, out, err = run(capsys, *(a.format(graph=graph_file) for a in argv))
    assert code == cli.USAGE and says in err and not out


# ---- backends --------------------------------------------------------------------------------------------


def test_probe(capsys, tmp_path):
    code, out, _ = run(capsys, "probe", "--device", "cpu", "--gate-dir", tmp_path)
    assert code == cli.OK and "attention_backend: sdpa" in out and "frost[triton]" in out
    shown = json.loads(run(capsys, "probe", "--device", "cpu", "--gate-dir", tmp_path, "--json")[1])
    assert [b["name"] for b in shown["backends"]] == list(ALL_BACKENDS) and "attention_backend" in shown[
        "banner"
    ]


def test_bench(capsys, tmp_path):
    argv = (
        "bench",
        "--batch",
        "1",
        "--seq",
        "16",
        "--heads",
        "2",
        "--kv-heads",
        "1",
        "--head-dim",
        "16",
        "--iters",
        "1",
        "--device",
        "cpu",
    )
    code, out, _ = run(capsys, *argv, "--save", tmp_path / "bench.json")
    assert code == cli.OK and "frost[triton]" in out and "NaN" in out and (tmp_path / "bench.json").exists()
    (case,) = json.loads(run(capsys, *argv, "--json")[1])["benchmarks"]
    rows = {r["candidate"]: r for r in case["rows"]}
    assert rows["MATH"]["status"] == "ok" and rows["CUDNN_ATTENTION"]["ms"] is None and case["ceilings"] == []
    code, _, err = run(capsys, *argv, "--heads", "3", "--kv-heads", "2")
    assert code == cli.USAGE and "--heads: given 3, expected a multiple of --kv-heads (2)" in err


# ---- the support matrix ----------------------------------------------------------------------------------


def test_the_page_has_every_engine_op_and_option():
    page = support_matrix.render()
    for engine in support_matrix.own_engines():
        assert f"`{engine.name}`" in page
        for adapter in engine.adapters():
            assert f"## {adapter.op}" in page
            for row in adapter.capabilities:
                for option in row.features:
                    assert f"| `{option}` |" in page


def test_third_party_engines_stay_out_of_the_page(gated):
    assert "`gated`" not in support_matrix.render()


def test_a_stale_page_is_found(tmp_path, capsys):
    path = tmp_path / "docs" / "support.md"
    argv = ["--path", str(path)]
    assert support_matrix.main([*argv, "--check"]) == 1
    assert support_matrix.main(argv) == 0 and support_matrix.main([*argv, "--check"]) == 0
    path.write_text(path.read_text().replace("yes", "no", 1))
    capsys.readouterr()
    assert support_matrix.main([*argv, "--check"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("---") and "python -m tools.support_matrix" in err
