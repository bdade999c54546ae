"""The report: facts, saved runs, drawings, and the page itself in a browser."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import frost
from frost import cli, gates, routing
from frost.report import Saved, SavedError, drawing, facts, load_saved, merge_saved, render, write_saved

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import browser

EVIL = '<script>alert(1)</script> & "quotes"'

needs_browser = pytest.mark.skipif(
    browser.chromium() is None and not browser.REQUIRED,
    reason="no Chromium on the PATH (Debian: apt-get install chromium)",
)


def small_graph(name="layer"):
    g = frost.Graph(name)
    q, k, v = (g.tensor(n, (1, 2, 8, 16), dtype="fp32") for n in "qkv")
    gate = g.tensor("gate", (1, 2, 8, 16), dtype="fp32")
    o, _ = g.sdpa(q, k, v, causal=True, window=(3, None), name="attention")
    g.output(g.mul(o, g.sigmoid(gate)), name="y")
    return g


def bench(card="NVIDIA H200", flops=6.9e10, nbytes=4.2e7):
    rows = [
        {"candidate": "CUDNN_ATTENTION", "ms": 0.12, "tflops": 573.0, "status": "ok", "pinned_ms": 0.1},
        {"candidate": "frost[triton]", "ms": 0.15, "tflops": 458.0, "status": "ok", "pinned_ms": None},
        {
            "candidate": "EFFICIENT_ATTENTION",
            "ms": math.nan,
            "tflops": math.nan,
            "status": f"no kernel {EVIL}",
            "pinned_ms": None,
        },
    ]
    return {
        "title": "b4 h32/8 s1024",
        "card": card,
        "dtype": "bf16",
        "rows": rows,
        "ceilings": facts.ceilings(card, "bf16", flops, nbytes),
    }


def suite(name="unit"):
    stats = {"torch_sdpa:sdpa": 3, "reference:sdpa": 7, "reference:mul": 10}
    return {
        "suite": name,
        "counts": stats,
        "cache_hits": {"reference:mul": 2},
        "shares": routing.shares(stats),
        "declines": {"triton:sdpa": {"gate": 4}},
        "texts": {"triton:sdpa": {"gate": "no gate"}},
    }


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.setenv("FROST_GATE_DIR", str(tmp_path / "gates"))
    gates.write_equivalence_gate(tolerances=1.0, shapes_covered=["a", "b"], errors={"a": {"o": 0.5}})
    g = small_graph()
    return Saved(
        graphs=[facts.plan_facts(g, g.compile("cpu"))],
        gates=facts.gate_facts(tmp_path / "gates"),
        routing=[suite()],
        benchmarks=[bench()],
    )


class Tags(HTMLParser):
    """Every element has to be closed where it should be; what is opened is counted."""

    VOID = frozenset({"meta", "input", "br", "img", "link"})

    def __init__(self, page):
        super().__init__()
        self.open, self.count, self.urls = [], {}, []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.urls += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()


# ---- facts -----------------------------------------------------------------------------------------------


def test_a_plans_facts_have_every_reason():
    g = small_graph()
    made = facts.plan_facts(g, g.compile("cpu"))
    assert [s["op"] for s in made["steps"]] == ["sdpa", "sigmoid", "mul"]
    (route,) = [r for r in made["routes"] if r["op"] == "sdpa"]
    assert route["engine"] == "reference" and {d[0] for d in route["declined"]} >= {"triton", "torch_sdpa"}
    assert {n["kind"] for n in made["nodes"]} == {"input", "output", "tensor", "op"}
    assert made["workspace"]["bytes"] and {r["name"] for r in made["workspace"]["regions"]} >= {
        "tensor sigmoid"
    }
    json.dumps(made)


def test_ceilings_are_of_measured_cards_only():
    found = {
        c["label"].split(":")[0].split(",")[0]: c for c in facts.ceilings("NVIDIA H200", "bf16", 1e12, 1e10)
    }
    assert found["device-to-device copy"]["tflops"] == pytest.approx(100 * 4.26)
    assert any(c["tflops"] == 647 for c in found.values())
    assert [c["label"][:6] for c in facts.ceilings("NVIDIA H200", "fp32", 1e12, 1e10)] == ["device"]
    assert facts.ceilings("some other card", "bf16", 1e12, 1e10) == []


def test_gates_are_shown_with_what_speaks_against_them(tmp_path, saved, monkeypatch):
    (good,) = facts.gate_facts(tmp_path / "gates")
    assert good["engine"] == "triton" and good["covers"] == 2 and not good["problem"]
    monkeypatch.setattr(gates, "kernel_source_hash", lambda: "0" * 64)
    assert "kernel source changed" in facts.gate_facts(tmp_path / "gates")[0]["problem"]
    next((tmp_path / "gates").iterdir()).write_text("{")
    assert facts.gate_facts(tmp_path / "gates")[0]["verdict"] == "damaged"


def test_a_benchmark_csv(tmp_path):
    path = tmp_path / "bench.csv"
    head = "suite,case,direction,candidate,route,status,ms,tflops,check,dtype,card"
    path.write_text(
        f"{head}\ndense,s2048 d64,fwd,triton,x,ok,0.5,400,0.3,bf16,NVIDIA H200\n"
        "dense,s2048 d64,fwd,flex,x,WRONG,,,off,bf16,NVIDIA "
        "H200\nhost,h,fwd,triton,x,ok,,,,bf16,NVIDIA H200\n"
    )
    (case,) = facts.csv_facts(path)
    assert [r["candidate"] for r in case["rows"]] == ["triton", "flex"] and case["rows"][0]["tflops"] == 400
    assert (
        math.isnan(case["rows"][1]["ms"])
        and case["rows"][1]["status"] == "WRONG: off"
        and len(case["ceilings"]) == 2
    )
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="it lacks"):
        facts.csv_facts(path)


# ---- saved runs ------------------------------------------------------------------------------------------


def test_a_saved_run_comes_back(tmp_path, saved):
    path = write_saved(tmp_path / "deep" / "run.json", saved)
    assert "NaN" not in path.read_text()
    back = load_saved(path)
    assert back.graphs == saved.graphs and back.environment["torch"] == torch.__version__
    assert back.benchmarks[0]["rows"][2]["ms"] is None
    both = merge_saved([back, load_saved(path)])
    assert both == back
    other = Saved(environment={"torch": "9"})
    assert merge_saved([back, other]).environment["torch"] == f"{torch.__version__} | 9"


def test_a_plan_is_shown_once_whatever_it_was_given_as(saved):
    """Compiled twice, the second time from the plan cache; and with what a run of it measured."""
    g = small_graph()
    facts_of = [facts.plan_facts(g, g.compile("cpu")) for _ in range(2)]
    assert facts_of[1]["cache_hit"] and facts_of[0]["routes"][0]["cache_hit"] is not None
    assert len(merge_saved([Saved(graphs=facts_of), saved]).graphs) == 1
    run = {"ms": 1.0, "repeat": 1, "outputs": {}}
    slow = {**run, "ms": 2.0}
    with_runs = [
        facts_of[0],
        {**facts_of[1], "run": run},
        {**facts_of[0], "run": slow},
        {**facts_of[1], "run": run},
    ]
    merged = merge_saved([Saved(graphs=with_runs), Saved(graphs=facts_of)]).graphs
    assert [m["run"]["ms"] for m in merged] == [1.0, 2.0] and "run" not in facts_of[0]
    other = small_graph("another")
    both = Saved(graphs=[*facts_of, facts.plan_facts(other, other.compile("cpu"))])
    assert [m["name"] for m in merge_saved([both]).graphs] == ["layer", "another"]


def test_the_same_benchmark_and_suite_are_shown_once():
    """NaN is the same as NaN here."""
    part = Saved(benchmarks=[bench()], routing=[suite()])
    again = Saved(benchmarks=[bench(), bench("CPU")], routing=[suite(), suite("other")])
    merged = merge_saved([part, again])
    assert [b["card"] for b in merged.benchmarks] == ["NVIDIA H200", "CPU"]
    assert [s["suite"] for s in merged.routing] == ["unit", "other"]


@pytest.mark.parametrize("damage", [b"{", b"[]", b'{"kind": "frost-run", "schema": 99}', b"\xff"])
def test_a_file_that_is_no_saved_run(tmp_path, damage):
    path = tmp_path / "x.json"
    path.write_bytes(damage)
    with pytest.raises(SavedError, match=r"x\.json"):
        load_saved(path)


def test_a_saved_run_with_a_part_missing(tmp_path, saved):
    path = write_saved(tmp_path / "run.json", saved)
    whole = json.loads(path.read_text())
    del whole["graphs"][0]["routes"]
    path.write_text(json.dumps(whole))
    with pytest.raises(SavedError, match="an item without routes"):
        load_saved(path)


# ---- drawings and the page -------------------------------------------------------------------------------


def test_drawings_are_well_formed_whatever_the_names_are(saved):
    g = saved.graphs[0]
    nodes = [{**n, "label": EVIL, "lines": [EVIL]} for n in g["nodes"]]
    work = g["workspace"]
    regions = [{**r, "name": EVIL} for r in work["regions"]]
    for svg in (
        drawing.graph_svg(nodes, g["edges"]),
        drawing.workspace_svg(regions, work["bytes"], len(g["steps"])),
        drawing.bars_svg(saved.benchmarks[0]["rows"], saved.benchmarks[0]["ceilings"]),
        drawing.share_bar({EVIL: 1.0}),
    ):
        root = ET.fromstring(svg)
        assert root.tag.endswith("svg") and EVIL not in svg
    assert drawing.workspace_svg([], 0, 3) == ""


def test_no_box_of_a_graph_lies_on_another():
    g = frost.backward_graph(small_graph(), wrt=["q", "k", "v", "gate"])
    made = facts.plan_facts(g, g.compile("cpu"))
    root = ET.fromstring(drawing.graph_svg(made["nodes"], made["edges"]))
    boxes = [
        tuple(float(r.get(a)) for a in ("x", "y", "width", "height"))
        for r in root.iter("{http://www.w3.org/2000/svg}rect")
    ]
    assert len(boxes) == len(made["nodes"])
    width, height = float(root.get("width")), float(root.get("height"))
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
        for x2, y2, w2, h2 in boxes[i + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_regions_are_where_the_workspace_map_says(saved):
    work = saved.graphs[0]["workspace"]
    root = ET.fromstring(drawing.workspace_svg(work["regions"], work["bytes"], 3))
    shown = [r for r in work["regions"] if r["bytes"]]
    rects = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(rects) == len(shown)
    for r, rect in zip(shown, rects):
        assert float(rect.get("height")) == pytest.approx(260 * r["bytes"] / work["bytes"], abs=0.1)
        assert float(rect.get("y")) == pytest.approx(26 + 260 * r["offset"] / work["bytes"], abs=0.1)


def test_the_page_is_whole_and_fetches_nothing(saved):
    page = render(saved)
    tags = Tags(page)
    assert (
        tags.urls == []
        and tags.count["svg"] >= 4
        and tags.count["table"] >= 6
        and tags.count.get("link", 0) == 0
    )
    for text in (
        "attention",
        "reference",
        "not supported by torch_sdpa:sdpa",
        "triton-sdpa-cpu",
        "frost[triton]",
        "647 TFLOP/s",
    ):
        assert text in page
    assert "alert(1)</script>" not in page and "no kernel &lt;script&gt;" in page


def test_an_empty_report_says_how_to_fill_it():
    page = render(Saved())
    Tags(page)
    for way_out in (
        "frost run GRAPH --save",
        "frost gate run triton",
        "pytest --frost-routing=FILE",
        "frost bench --save",
    ):
        assert way_out in page


# ---- in a browser ----------------------------------------------------------------------------------------

SORT_AND_FILTER = """
const table = [...document.querySelectorAll("table.data")].find((t) => t.closest("#routing"));
const cells = (n) => [...table.tBodies[0].rows].filter((r) => !r.hidden).map((r) => r.cells[n].textContent);
const out = { before: cells(3), tables: document.querySelectorAll("table.data").length,
              fields: document.querySelectorAll("input.filter").length };
const button = table.tHead.rows[0].cells[3].querySelector("button");
button.click(); out.up = cells(3); out.sort = table.tHead.rows[0].cells[3].getAttribute("aria-sort");
button.click(); out.down = cells(3);
table.tHead.rows[0].cells[2].querySelector("button").click(); out.words = cells(2);
const field = table.previousElementSibling; field.value = "reference SDPA"; field.dispatchEvent(new Event("input"));
out.filtered = cells(1).map((e, i) => e + ":" + cells(2)[i]);
field.value = ""; field.dispatchEvent(new Event("input")); out.all = cells(1).length;
out.seen = [...document.querySelectorAll("svg")].every((s) => s.getBoundingClientRect().width > 50);
return out;
"""


@needs_browser
def test_the_page_opens_without_errors_and_its_tables_sort_and_filter(saved, tmp_path):
    told, errors = browser.ask(render(saved), SORT_AND_FILTER, tmp_path)
    assert errors == []
    assert told["up"] == ["3", "7", "10"] and told["down"] == ["10", "7", "3"] and told["sort"] == "ascending"
    assert sorted(told["before"]) == ["10", "3", "7"] and told["words"] == ["mul", "sdpa", "sdpa"]
    assert told["filtered"] == ["reference:sdpa"] and told["all"] == 3
    assert told["tables"] == told["fields"] >= 6 and told["seen"]


@needs_browser
def test_hostile_text_stays_text(tmp_path):
    evil = Saved(
        routing=[suite(EVIL)],
        gates=[{"name": EVIL, "engine": EVIL, "op": EVIL, "verdict": EVIL, "problem": EVIL}],
        benchmarks=[{**bench(), "title": EVIL}],
        environment={EVIL: EVIL},
    )
    told, errors = browser.ask(
        render(evil, EVIL),
        "window.alert = () => console.error('alert'); return document.scripts.length;",
        tmp_path,
    )
    assert errors == [] and told == 3  # ours, and the two of this test


@needs_browser
def test_a_picture_of_the_page(saved, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render(saved), encoding="utf-8")
    made = browser.picture(path, tmp_path / "shot.png", tmp_path)
    assert made.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and made.stat().st_size > 20_000


def test_where_ci_promises_a_browser_there_is_one():
    assert browser.chromium() is not None or not browser.REQUIRED


# ---- the command -----------------------------------------------------------------------------------------


def command(capsys, *argv):
    code = cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_makes_a_page_from_saved_runs_alone(capsys, tmp_path, saved, monkeypatch):
    """No GPU, no graph file: what another machine saved is enough."""
    monkeypatch.chdir(tmp_path)
    run = write_saved(tmp_path / "run.json", saved)
    code, out, _ = command(capsys, "report", run, "-o", tmp_path / "out" / "r.html", "--json")
    told = json.loads(out)
    page = (tmp_path / "out" / "r.html").read_text()
    assert code == cli.OK and told["graphs"] == 1 and told["benchmarks"] == 1 and "attention" in page
    Tags(page)


def test_the_command_alone_shows_an_example(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = command(capsys, "report", "-o", "r.html", "--device", "cpu", "--save", "kept.json")
    assert code == cli.OK and "2 graphs" in out
    page = (tmp_path / "r.html").read_text()
    assert "attention" in page and "sdpa_backward" in page and load_saved(tmp_path / "kept.json").graphs


def test_the_command_with_routing_dumps_and_graphs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dump = routing.write_dump(
        tmp_path / "d.json", routing.Dump(routing.Stats({"x:sdpa": 3}), suite="my suite")
    )
    graph = tmp_path / "g.frost"
    graph.write_bytes(small_graph("mine").to_bytes())
    code, _, _ = command(
        capsys, "report", "--routing", dump, "--graph", graph, "--device", "cpu", "-o", "r.html"
    )
    page = (tmp_path / "r.html").read_text()
    assert code == cli.OK and "my suite" in page and "mine" in page


def test_the_command_shows_a_graph_that_was_given_twice_once(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = tmp_path / "g.frost"
    graph.write_bytes(small_graph("mine").to_bytes())
    argv = ("report", "--graph", graph, "--graph", graph, "--device", "cpu", "-o", "r.html", "--json")
    assert json.loads(command(capsys, *argv)[1])["graphs"] == 1
    assert (tmp_path / "r.html").read_text().count("<h3>Routes of mine</h3>") == 1


def test_what_was_given_is_not_joined_by_an_example(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_saved(tmp_path / "bench.json", Saved(benchmarks=[bench()]))
    assert json.loads(command(capsys, "report", run, "--json")[1])["graphs"] == 0


def test_a_dump_nobody_named_that_is_damaged_is_left_out(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".frost_routing").mkdir()
    (tmp_path / ".frost_routing" / "bad.msgpack").write_bytes(b"{")
    routing.write_dump(
        tmp_path / ".frost_routing" / "good.msgpack", routing.Dump(routing.Stats({"x:sdpa": 3}), suite="s")
    )
    code, out, err = command(capsys, "report", "--device", "cpu", "--json")
    assert code == cli.OK and json.loads(out)["routing"] == 1 and "left out" in err and "bad.msgpack" in err


def test_the_page_replaces_an_old_one_whole_and_goes_into_a_pipe(capsys, tmp_path, saved):
    run = write_saved(tmp_path / "run.json", saved)
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to("old.html")
    assert command(capsys, "report", run, "-o", tmp_path / "link.html")[0] == cli.OK
    assert (tmp_path / "link.html").is_symlink() and "attention" in (tmp_path / "old.html").read_text()
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    assert command(capsys, "report", run, "-o", tmp_path / "pipe")[0] == cli.OK
    reader.join(60)
    assert read[0].startswith("<!DOCTYPE html>") and (tmp_path / "pipe").is_fifo()
