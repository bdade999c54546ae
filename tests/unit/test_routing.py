"""The routing log, its dumps, and the pytest plugin."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from descriptors import pack
from frost import routing
from frost.pytest_plugin import Expectation
from frost.routing import Declined, Route, RoutingError, Stats

ROOT = Path(__file__).resolve().parents[2]

NO_GATE = Declined("triton", "gate", "none", "a valid gate", "no gate")
FWD = Route("g", "att", "sdpa", "torch_sdpa[FLASH_ATTENTION]", (NO_GATE,), "cpu", gate="not needed")
BWD = Route("g", "grad", "sdpa_backward", "reference", (NO_GATE, Declined("torch_sdpa", "dlse", "set", "not set")))


@pytest.fixture
def log(monkeypatch):
    """The only log there is, so that what these tests record stays out of the suite's own dump."""
    log = routing.RoutingLog()
    monkeypatch.setattr(routing, "_attached", [log])
    monkeypatch.setattr(routing, "_log", log)
    return log


def test_counts_name_engine_and_op_without_the_detail(log):
    for route in (FWD, FWD, BWD):
        routing.record(route)
    stats = routing.snapshot(log=log).stats
    assert stats == {"torch_sdpa:sdpa": 2, "reference:sdpa_backward": 1}
    assert stats["triton:sdpa"] == 0
    assert stats.declines == {"triton:sdpa": {"gate": 2}, "triton:sdpa_backward": {"gate": 1},
                              "torch_sdpa:sdpa_backward": {"dlse": 1}}
    assert stats.texts["triton:sdpa"]["gate"] == "no gate"
    assert stats.texts["torch_sdpa:sdpa_backward"]["dlse"] == "dlse: got set, wanted not set"


def test_plan_cache_hits_count_apart(log):
    routing.record(FWD)
    routing.record(FWD.hit())
    routing.count_hits([FWD, BWD])
    dump = routing.snapshot(log=log)
    assert dump.stats == {"torch_sdpa:sdpa": 1}
    assert dump.stats.cache_hits == {"torch_sdpa:sdpa": 2, "reference:sdpa_backward": 1}
    assert dump.stats.declines == {"triton:sdpa": {"gate": 1}}
    assert dump.routes == [FWD]


def test_memory_is_bounded(log):
    for i in range(routing.KEEP + 10):
        routing.record(Route("g", f"n{i}", "sdpa", "reference"))
    dump = routing.snapshot(log=log)
    assert len(dump.routes) == routing.KEEP and dump.routes[-1].node == f"n{routing.KEEP + 9}"
    assert dump.stats == {"reference:sdpa": routing.KEEP + 10}


def test_reset_forgets_the_process_log_but_not_an_attached_one(log):
    other = routing.RoutingLog()
    routing.attach(other)
    routing.record(FWD)
    assert routing.stats() == {"torch_sdpa:sdpa": 1} and routing.routes() == [FWD]
    routing.reset()
    assert routing.stats() == {} and routing.routes() == []
    assert other.stats == {"torch_sdpa:sdpa": 1}
    routing.detach(other)
    routing.record(FWD)
    assert other.stats == {"torch_sdpa:sdpa": 1}
    routing.detach(log)  # the process's own log stays
    routing.record(FWD)
    assert log.stats == {"torch_sdpa:sdpa": 2}


def test_stats_are_a_copy(log):
    stats = routing.stats()
    routing.record(FWD)
    assert stats == {}


def test_threads_lose_nothing(log):
    threads = [threading.Thread(target=lambda: [routing.record(FWD) for _ in range(500)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert routing.snapshot(log=log).stats == {"torch_sdpa:sdpa": 2000}


@pytest.mark.parametrize("name", ["dump.json", "dump.msgpack", "dump"])
def test_a_dump_reads_back(tmp_path, log, name):
    for route in (FWD, BWD, BWD.hit()):
        routing.record(route)
    want = routing.snapshot("suite", log)
    path = routing.write_dump(tmp_path / "new" / name, want)
    assert routing.load(path) == want
    assert (path.read_bytes()[:1] == b"{") == (path.suffix == ".json")
    assert [p.name for p in path.parent.iterdir()] == [name]


@pytest.mark.parametrize("name", ["dump.txt", "dump.yaml", "dump.json.gz"])
def test_a_dump_of_an_unknown_format_is_refused_before_anything_is_written(tmp_path, log, name):
    with pytest.raises(ValueError, match=rf"{name}.*expected a name that ends in \.json or \.msgpack"):
        routing.dump(tmp_path / "new" / name)
    assert not list(tmp_path.iterdir())


def test_dumps_merge(tmp_path, log):
    routing.record(FWD)
    paths = [routing.write_dump(tmp_path / f"{s}.json", routing.snapshot(s, log)) for s in ("one", "two")]
    merged = routing.merge(paths)
    assert merged.stats == {"torch_sdpa:sdpa": 2} and merged.stats.declines == {"triton:sdpa": {"gate": 2}}
    assert merged.routes == [FWD, FWD] and merged.suite == "one, two"


def test_shares():
    stats = Stats({"triton:sdpa": 6, "triton:sdpa_backward": 2, "reference:sdpa": 2})
    assert routing.shares(stats) == {"triton": 0.8, "reference": 0.2}
    assert routing.shares(stats, "sdpa_backward") == {"triton": 1.0}
    assert routing.shares(Stats()) == {}


def _broken_dumps():
    good = routing.Dump(routes=[FWD]).to_wire()
    route = good["routes"][0]
    return {
        "schema": {**good, "schema": 99},
        "missing": {k: v for k, v in good.items() if k != "counts"},
        "extra": {**good, "more": 1},
        "list": [],
        "negative": {**good, "counts": {"triton:sdpa": -1}},
        "count-type": {**good, "counts": {"triton:sdpa": True}},
        "declines": {**good, "declines": {"triton:sdpa": 1}},
        "route-field": {**good, "routes": [{**route, "node": 3}]},
        "route-type": {**good, "routes": ["x"]},
        "declined": {**good, "routes": [{**route, "declined": [["a", "b"]]}]},
    }


@pytest.mark.parametrize("kind", _broken_dumps())
def test_a_dump_of_another_shape_is_refused_by_name(tmp_path, kind):
    value = _broken_dumps()[kind]
    for name, data in (("bad.json", json.dumps(value).encode()), ("bad.msgpack", pack(value))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RoutingError, match=name):
            routing.load(tmp_path / name)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"{", b"[" * 100_000, b"\xff\xfe{}", b"{}trailing"])
def test_damaged_bytes_are_refused(tmp_path, data):
    for name in ("bad.json", "bad.msgpack"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RoutingError):
            routing.load(tmp_path / name)


def test_a_dump_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(routing, "_LIMITS", replace(routing._LIMITS, max_bytes=10))
    (tmp_path / "big.json").write_bytes(b" " * 11)
    with pytest.raises(RoutingError, match="given 11 bytes, expected at most 10"):
        routing.load(tmp_path / "big.json")


# ---- the pytest plugin -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, unmet", [
    ("triton>=0.75", None),
    ("triton >= 75%", None),
    ("triton>0.75", "the share is 0.750"),
    ("triton:sdpa==1", None),
    ("reference<=.25", None),
    ("reference:sdpa<0.1", None),
    ("sm80>=0.1", "the share is 0.000"),
    ("torch_sdpa<0.1", None),
    ("tritn>=0.1", "there is no engine 'tritn'; did you mean 'triton'?"),
    ("tritn<=0.5", "there is no engine 'tritn'; did you mean 'triton'?"),
    ("tritn:nsa>=0.5", "there is no engine 'tritn'; did you mean 'triton'?"),
    ("triton:nsa>=0.1", "nothing was lowered for nsa"),
])
def test_expectations(text, unmet):
    stats = Stats({"triton:sdpa": 3, "reference:sdpa_backward": 1})
    why = Expectation.parse(text).unmet(stats)
    assert why is None if unmet is None else unmet in why


@pytest.mark.parametrize("text", ["", "triton", "triton>=", "triton>=1.5", "triton>=101%", "triton=>0.5", ">=0.5"])
def test_an_expectation_that_makes_no_sense(text):
    with pytest.raises(ValueError, match="--frost-expect: given"):
        Expectation.parse(text)


_SUITE = """
from frost import routing
import pytest

@pytest.mark.parametrize("i", range(4))
def test_it(i):
    routing.record(routing.Route("g", f"n{i}", "sdpa", "triton" if i else "reference"))
    routing.reset()
"""


def _entry_points() -> str:
    """The section of pyproject.toml that makes pytest load the plugin of an installed package."""
    section = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points.pytest11]\n")[2]
    return "".join(f"{name} = {module}\n" for name, module in re.findall(
        r'^"?([\w.]+)"? = "([\w.]+)"$', section.partition("\n\n")[0], re.MULTILINE))


def _pytest(folder: Path, *args: str, conftest: str = "", installed: bool = False):
    """Run a small suite in its own process, as if the package were installed or not."""
    (folder / "test_suite.py").write_text(_SUITE)
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text("[pytest]\n")
    site = folder / "site"
    if installed:
        info = site / "fake-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[pytest11]\n{_entry_points()}")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV_"))}
    env.update(PYTHONPATH=f"{site}{os.pathsep}{ROOT}", OMP_NUM_THREADS="1")
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args], cwd=folder,
                          env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_suite_is_dumped_once_and_its_shares_printed(tmp_path, workers):
    args = ["-p", "frost.pytest_plugin", "--frost-routing=out/suite.json", "--frost-expect", "triton>=0.7"]
    if workers:
        if importlib.util.find_spec("xdist") is None:
            pytest.skip("pytest-xdist is not installed")
        args += ["-n", str(workers)]
    run = _pytest(tmp_path, *args)
    assert run.returncode == 0, run.stdout + run.stderr
    assert routing.load(tmp_path / "out" / "suite.json").stats == {"triton:sdpa": 3, "reference:sdpa": 1}
    assert "triton" in run.stdout and "75.0%" in run.stdout and "4 lowerings" in run.stdout


def test_an_unmet_expectation_fails_a_green_suite(tmp_path):
    run = _pytest(tmp_path, "-p", "frost.pytest_plugin", "--frost-expect", "triton:sdpa>0.9")
    assert run.returncode == 1
    assert "expectation not met: triton:sdpa>0.9: the share is 0.750" in run.stdout


def test_a_dump_of_an_unknown_format_is_a_usage_error(tmp_path):
    run = _pytest(tmp_path, "-p", "frost.pytest_plugin", "--frost-routing=suite.txt")
    assert run.returncode == 4
    assert "suite.txt" in run.stderr and ".json or .msgpack" in run.stderr


def test_an_unknown_engine_fails_a_green_suite_by_its_nearest_name(tmp_path):
    run = _pytest(tmp_path, "-p", "frost.pytest_plugin", "--frost-expect", "tritn<=0.9")
    assert run.returncode == 1
    assert "there is no engine 'tritn'; did you mean 'triton'?" in run.stdout


def test_a_bad_expectation_is_a_usage_error(tmp_path):
    run = _pytest(tmp_path, "-p", "frost.pytest_plugin", "--frost-expect", "triton")
    assert run.returncode == 4
    assert "--frost-expect: given 'triton'" in run.stderr


@pytest.mark.parametrize("args, conftest", [
    (["-p", "frost.pytest_plugin"], ""),
    ([], "pytest_plugins = ['frost.pytest_plugin']"),
    (["-p", "frost.pytest_plugin"], "pytest_plugins = ['frost.pytest_plugin']"),
    ([], ""),
])
def test_the_plugin_may_be_named_although_it_is_installed(tmp_path, args, conftest):
    run = _pytest(tmp_path, *args, "--frost-expect", "triton>=0.7", conftest=conftest, installed=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("FROST routing") == 1
