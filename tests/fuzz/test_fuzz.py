"""Some thousands of spoiled files, and the fuzzer itself: what it must find, it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from descriptors import FrostError, WireError
from tools.fuzz import __main__ as supervisor
from tools.fuzz import mutate, targets, worker
from tools.fuzz.__main__ import counts, limits_table, main, table
from tools.fuzz.targets import MSGPACK, TARGETS, Target
from tools.fuzz.worker import Corpus, Share

ROOT = Path(__file__).resolve().parents[2]
INPUTS, SEED = 2_000, "ci"

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the fuzzer reads /proc")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spoiled_files_of_every_kind() -> None:
    """No crash, no hang, no memory, no code, no error without a type. The full run is
    `python -m tools.fuzz --inputs 100000`."""
    run = subprocess.run(
        [sys.executable, "-m", "tools.fuzz", "--inputs", str(INPUTS), "--seed", SEED, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    shares = [Share(**s) for s in json.loads(run.stdout)]
    assert run.returncode == 0, run.stderr[-4000:]
    assert sum(s.inputs for s in shares) == INPUTS and [s.target for s in shares] == list(TARGETS)
    for s in shares:
        assert s.inputs == s.taken + sum(s.refused.values()) and s.refused, s
        # Inputs that are taken are spoiled ones that still mean something: without them nothing behind the reader is tried.
        assert s.taken > 0.01 * s.inputs, s


# ---- what the fuzzer finds ---------------------------------------------------------------------------------------


def _key_error(data: bytes, folder: Path) -> None:
    {}["missing"]


def _exec(data: bytes, folder: Path) -> None:
    exec("1 + 1")


def _write_elsewhere(data: bytes, folder: Path) -> None:
    open(os.devnull, "wb").close()


def _memory(data: bytes, folder: Path) -> None:
    bytearray(400 << 20)[::4096] = b"x" * (100 << 10)


def _too_much_memory(data: bytes, folder: Path) -> None:
    bytearray(1 << 36)


def _endless(data: bytes, folder: Path) -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:  # no handler of ours may swallow the alarm
            pass


def _long_message(data: bytes, folder: Path) -> None:
    raise FrostError("x" * (2 << 20))


BAD: dict[str, tuple[Callable[[bytes, Path], None], str]] = {
    "KeyError": (_key_error, "KeyError"),
    "exec": (_exec, "code ran: exec"),
    "a file written elsewhere": (_write_elsewhere, "code ran: open"),
    "memory": (_memory, "MB"),
    "too much memory": (_too_much_memory, "MemoryError"),
    "a loop": (_endless, "more than"),
    "a message": (_long_message, "a message"),
}


@pytest.fixture
def watch() -> Callable[[Callable[[bytes, Path], None], Path], Share]:
    def run(use: Callable[[bytes, Path], None], folder: Path) -> Share:
        target = Target("bad", 1, MSGPACK, lambda folder: [b"\x01"], use)
        share, found = Share("bad"), worker.Watch(folder, frozenset())
        _, hard = worker.resource.getrlimit(worker.resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * worker.resource.getpagesize()
        worker.resource.setrlimit(worker.resource.RLIMIT_AS, (used + (8 << 30), hard))
        previous = worker.signal.signal(worker.signal.SIGALRM, worker._alarm)
        try:
            worker._one(share, target, b"\x01", 0, folder, found)
        finally:
            worker.signal.signal(worker.signal.SIGALRM, previous)
            worker.resource.setrlimit(worker.resource.RLIMIT_AS, (hard, hard))
        return share

    return run


@pytest.mark.parametrize("what", BAD)
def test_what_must_not_happen_is_found(
    what: str, tmp_path: Path, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LIMIT_S", 0.5)
    use, said = BAD[what]
    share = watch(use, tmp_path)
    assert share.findings >= 1 and any(said in e["what"] for e in share.examples), share


def test_a_typed_error_and_a_result_are_no_findings(tmp_path: Path, watch: Any) -> None:
    def refused(data: bytes, folder: Path) -> None:
        (folder / "mine").write_bytes(data)
        raise WireError("no")

    share = watch(refused, tmp_path)
    assert share.findings == 0 and share.refused == {"WireError": 1}
    assert watch(lambda data, folder: None, tmp_path).taken == 1


@pytest.mark.parametrize(
    "how, said", [("os.kill(os.getpid(), 11)", "exit status -11"), ("hang()", "no end within")]
)
def test_a_process_that_dies_or_hangs_is_found_and_the_rest_goes_on(
    how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash or a hang beneath Python: only the parent can tell, and the inputs behind it are still tried."""
    script = f"""
import os, signal, sys, time
from tools.fuzz import __main__, worker
def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(100)
one = worker._one
def bad(share, target, data, index, *more):
    if index == 3:
        {how}
    one(share, target, data, index, *more)
worker._one = bad
sys.exit(__main__.main(sys.argv[1:]))
"""
    monkeypatch.setattr(supervisor, "_PROCESS", [sys.executable, "-c", script])
    monkeypatch.setattr(supervisor, "_HUNG_S", 3.0)
    share = supervisor.block("op record", 0, 6, "x")
    assert share.inputs == 6 and share.findings == 1, share
    assert share.examples[0]["index"] == 3 and said in share.examples[0]["what"]


# ---- inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in TARGETS if n != "command line"])
def test_an_input_is_repeated_by_its_number_and_the_valid_ones_are_taken(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    corpus = Corpus(target, tmp_path)
    for data, tree in zip(corpus.files, corpus.trees):
        target.use(data, tmp_path)
        target.use(
            target.format.seal(target.format.write(tree)), tmp_path
        )  # taken apart and put together again
    made = [corpus.input("s", i) for i in range(60)]
    assert made == [corpus.input("s", i) for i in range(60)] and len(set(made)) > 45
    assert made[:10] != [corpus.input("t", i) for i in range(10)]


ODD: tuple[Any, ...] = (None, True, -1, 2**63, 0.5, "x", "", [], {}, [[]], {"x": None})


@pytest.mark.parametrize(
    "name", ["graph", "gate", "routing.msgpack", "saved run", "SDPA baseline", "op record"]
)
def test_every_member_of_a_valid_file_replaced_by_everything_odd(name: str, tmp_path: Path) -> None:
    """No chance in it: each place once, with each value, and once left out."""
    target = TARGETS[name]
    corpus = Corpus(target, tmp_path)
    taken = refused = 0
    for tree in corpus.trees[:1] if name == "graph" else corpus.trees[:3]:
        for at in range(len(mutate.places(tree))):
            for value in (*ODD, KeyError):
                spoilt = mutate.copied(tree)
                node, key = mutate.places(spoilt)[at]
                if value is KeyError:
                    del node[key]
                else:
                    node[key] = value
                try:
                    target.use(target.format.seal(target.format.write(spoilt)), tmp_path)
                    taken += 1
                except FrostError:
                    refused += 1
    assert refused > 50 and taken > 0, (refused, taken)


def test_spoiled_trees_leave_the_original_alone() -> None:
    tree = {"a": [1, {"b": "c"}], "d": None}
    before = repr(tree)
    made = [repr(mutate.spoil_tree(Random(i), tree, tree)) for i in range(300)]
    assert repr(tree) == before and len(set(made)) > 150


def test_the_marks_of_hostile_texts_are_looked_for(tmp_path: Path) -> None:
    """A page that let a text through as markup would be a finding."""
    from frost.report import Saved, page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "escape", lambda text, quote=True: text)
        with pytest.raises(targets.Broken, match="markup"):
            targets._show(Saved(benchmarks=[{"title": mutate.MARK, "rows": [], "ceilings": []}]))
    targets._show(Saved(benchmarks=[{"title": mutate.MARK, "rows": [], "ceilings": []}]))


def test_shares_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(counts(100_000, list(TARGETS)).values()) == 100_000
    assert counts(10, ["gate"]) == {"gate": 10} and sum(t.share for t in TARGETS.values()) == 100
    text = table([Share("graph", 5, 1, {"WireError": 4}, 0.5, 3.0, 0)])
    assert "| graph | 5 | 1 | WireError 4 | 500 ms | +3 MB | 0 |" in text and "**all**" in text
    assert main(["--limits"]) == 0 and capsys.readouterr().out.strip() == limits_table()
    assert "| graph | 16,777,216 |" in limits_table()
