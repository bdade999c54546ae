"""The table of limits: every kind of file, at and beyond each of its limits, and files that are no files."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import attacks
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import finish, start

from descriptors import LIMITS, FrostError, WireError, pack, parse_json, unpack
from descriptors.limits import read_limited, shown, shown_names
from engines.template_loader import Bundle, KernelKey, TemplateLoader
from frost import GraphError, PlanError, gates, load_plan, routing, sdpa_baseline, validate
from frost.commands.common import UsageError, load_graph
from frost.fuse import fuse
from frost.gate_file import GateFormatError, gate_from_bytes
from frost.graph import Graph
from frost.report import SavedError, load_saved
from frost.report.facts import csv_facts

MESSAGE = LIMITS["message"]


def _gate(path: Path) -> None:
    """The one that raises; that those which don't raise see it too is asserted on the way."""
    file = gates.read_gate_file(path)
    assert file.gate is None and "is damaged" in file.problem, file
    raise GateFormatError(file.problem)


def _baseline(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa_baseline, "baseline_path", lambda: path)
        sdpa_baseline.load_sdpa_baseline()


def _bundle(path: Path) -> None:
    key = KernelKey("e", "k", (), "sm_90", "d")
    path.rename(path.with_name(key.file_name))
    made = TemplateLoader(lambda: path.parent)
    assert made.get(key, lambda: Bundle(b"built", {})).code == b"built" and made.stats.rebuilt
    raise WireError("built again")


# kind -> (file name, how it is read, what it is refused with)
READERS: dict[str, tuple[str, Callable[[Path], Any], type[Exception]]] = {
    "graph": ("x.graph", load_graph, UsageError),
    "plan": ("x.plan", load_plan, PlanError),
    "kernel bundle": ("x.frostk", _bundle, WireError),
    "gate": ("triton-sdpa-x.json", _gate, GateFormatError),
    "routing dump": ("x.json", routing.load, routing.RoutingError),
    "routing dump, msgpack": ("x.msgpack", routing.load, routing.RoutingError),
    "saved run": ("x.json", load_saved, SavedError),
    "SDPA baseline": ("x.json", _baseline, sdpa_baseline.BaselineError),
    "benchmark CSV": ("x.csv", csv_facts, SavedError),
}


def test_every_kind_of_file_is_read_here() -> None:
    assert {name.split(",")[0] for name in READERS} | {"message"} == set(LIMITS)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "one byte too large": lambda path: None,  # made below
    "a pipe": os.mkfifo,
    "a device that never ends": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "empty": Path.touch,
}


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize("kind", READERS)
def test_what_is_no_file_of_its_kind(kind: str, what: str, tmp_path: Path) -> None:
    """Refused at once and unread, by the kind's own error."""
    name, read, error = READERS[kind]
    path = tmp_path / name
    NO_FILES[what](path)
    if what.startswith("one byte"):
        path.touch()
        os.truncate(path, LIMITS[kind.split(",")[0]].max_bytes + 1)  # a hole: it takes no room
    begun = time.monotonic()
    with pytest.raises(error) as e:
        read(path)
    if kind != "kernel bundle" and what not in ("empty", "one byte too large"):
        assert "regular file" in str(e.value)
    assert time.monotonic() - begun < 5


def test_a_file_that_grows_while_it_is_read() -> None:
    """Files in /proc say that they have no bytes."""
    path = "/proc/self/status"
    assert os.stat(path).st_size == 0 and b"VmRSS" in read_limited(path, MESSAGE)
    with pytest.raises(WireError, match="expected at most 10"):
        read_limited(path, replace(MESSAGE, max_bytes=10))


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


# what -> (limits, a value at the limit, the same with one more, what is said)
EDGES: dict[str, tuple[Any, Any, Any, str]] = {
    "depth": (replace(MESSAGE, max_depth=5), nested(5), nested(6), "nested too deeply"),
    "depth, maps": (
        replace(MESSAGE, max_depth=2),
        {"a": {"b": 1}, "c": {}},
        {"a": {"b": {}}},
        "nested too deeply",
    ),
    "text": (replace(MESSAGE, max_text=8), ["ä" * 4], ["ä" * 4 + "x"], "a text of"),
    "text, key": (replace(MESSAGE, max_text=3), {"abc": 1}, {"abcd": 1}, "a text of"),
}


@pytest.mark.parametrize("what", EDGES)
@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_the_last_that_is_taken_and_the_first_that_is_not(form: str, what: str) -> None:
    limits, last, first, said = EDGES[what]
    write = pack if form == "msgpack" else lambda v: json.dumps(v, ensure_ascii=False).encode()
    read = unpack if form == "msgpack" else parse_json
    assert read(write(last), limits) == last
    with pytest.raises(WireError, match=said):
        read(write(first), limits)


def test_the_number_of_values() -> None:
    """msgpack counts containers, members and keys; JSON what stands for them: brackets, commas, colons."""
    limits = replace(MESSAGE, max_values=7)
    assert unpack(pack([1, [2], {"k": 3}]), limits) == [1, [2], {"k": 3}]
    with pytest.raises(WireError, match="more than 7 values"):
        unpack(pack([1, [2], {"k": 3}, 4]), limits)
    assert parse_json(b"[0,1,2,3,4,5]", limits) == list(range(6))
    with pytest.raises(WireError, match="more than 7 values"):
        parse_json(b"[0,1,2,3,4,5,6]", limits)


SMALL_AND_LARGE: dict[str, Callable[[int], bytes]] = {
    "empty lists in msgpack": lambda n: b"\xdd" + n.to_bytes(4, "big") + b"\x90" * n,
    "lists that declare what is not there": lambda n: (
        b"\xdd" + (n - 5).to_bytes(4, "big") + b"\xdd\0\x40\0\0" * (n // 5)
    ),
    "a text that declares what is not there": lambda n: b"\xdb\xff\xff\xff\xff" + b"x" * n,
    "empty lists in JSON": lambda n: b"[" + b"[]," * (n // 3) + b"0]",
    "numbers in JSON": lambda n: b"[" + b"0," * (n // 2) + b"0]",
    "opening brackets": lambda n: b"[" * n,
    "quotes": lambda n: b'"' * n,
    "escaped quotes": lambda n: b'["' + b'\\"' * (n // 2) + b'"]',
    "escaped quotes without an end": lambda n: b'["' + b'\\"' * (n // 2),
    "backslashes": lambda n: b'["' + b"\\" * n,
    "digits": lambda n: b"1" * n,
    "a number with a long tail": lambda n: b"1." + b"1" * n,
    "an exponent of many digits": lambda n: b"1e" + b"9" * n,
}

MEASURED = """
    import resource, sys, time
    import test_limits as t
    from descriptors import LIMITS, WireError, parse_json, unpack
    data = t.SMALL_AND_LARGE[sys.argv[1]](15 << 20)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for read in (unpack, parse_json):
        try:
            read(data, LIMITS["routing dump"])
        except WireError as e:
            assert len(str(e)) < 500
        else:
            raise AssertionError("taken")
    print(time.process_time() - begun, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("what", SMALL_AND_LARGE)
def test_many_values_in_few_bytes(what: str) -> None:
    """15 MB that a parser alone would turn into a gigabyte, or take minutes for."""
    tests = str(Path(__file__).parent)
    out, _ = finish(
        start(f"    import sys\n    sys.path.insert(0, {tests!r})\n" + MEASURED, what), timeout=100
    )
    seconds, mb = map(float, out.split())
    assert seconds < 10 and mb < 150, out


# ---- what JSON and msgpack can say and we do not take ------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        "9" * 20,
        "-" + "9" * 20,
        "9" * 5000,
        '"\\ud800"',
        '{"\\udc00x": 1}',
        "\ufeff1",
        "",
        "{",
        "1 2",
        '"\x01"',
        "'x'",
        "[1,]",
        "{1: 2}",
    ],
)
def test_json_that_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        parse_json(text.encode(), MESSAGE)


@pytest.mark.parametrize(
    "text",
    [
        '"\\ud83d\\ude00"',
        '"\\\\ud800"',
        '"\\\\\\"[{"',
        '{"a\\"[": "]\\\\"}',
        "1e-999",
        str(2**63 - 1),
        "-0.0",
    ],
)
def test_json_that_is_taken(text: str) -> None:
    assert repr(parse_json(text.encode(), MESSAGE)) == repr(json.loads(text))


@pytest.mark.parametrize(
    "data",
    [
        b"\xd4\x01x",
        b"\xd6\xff\0\0\0\0",
        b"\xc7\x08\xff12345678",
        b"\xc1",
        b"\x81\x01\x02",
        b"\x81\x90\x02",
        b"\xa2\xff\xfe",
    ],
)
def test_msgpack_that_is_refused(data: bytes) -> None:
    """Extension types and timestamps, keys that are no texts, text that is no UTF-8."""
    with pytest.raises(WireError):
        unpack(data)


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**62), 2**62),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    ),
    lambda x: st.one_of(
        st.lists(x, max_size=4),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), x, max_size=4),
    ),
    max_leaves=20,
)


def depth(value: Any) -> int:
    if isinstance(value, (list, dict)):
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


@settings(max_examples=300, deadline=None)
@given(VALUES, st.booleans())
def test_both_formats_measure_what_is_there(value: Any, ascii_only: bool) -> None:
    """Any plain value comes back, at exactly its own depth."""
    for data, read in (
        (pack(value), unpack),
        (json.dumps(value, ensure_ascii=ascii_only).encode(), parse_json),
    ):
        assert read(data, replace(MESSAGE, max_depth=depth(value))) == value
        if depth(value):
            with pytest.raises(WireError, match="nested too deeply"):
                read(data, replace(MESSAGE, max_depth=depth(value) - 1))


@settings(max_examples=1500, deadline=None)
@given(st.binary(max_size=24))
def test_the_measured_and_the_parser_agree(data: bytes) -> None:
    """What msgpack reads, and holds nothing that we refuse, is taken; nothing else is."""
    try:
        theirs = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception:
        with pytest.raises(WireError):
            unpack(data)
        return
    if "ExtType" in repr(theirs) or "Timestamp" in repr(theirs):
        with pytest.raises(WireError):
            unpack(data)
    else:
        assert repr(unpack(data)) == repr(theirs)


@settings(max_examples=100, deadline=None)
@given(st.one_of(VALUES, st.just("x" * 10_000), st.just([[0] * 20] * 1000)))
def test_a_message_shows_a_little_of_anything(value: Any) -> None:
    assert len(shown(value)) < 300
    assert len(str(shown_names({str(i): i for i in range(5000)}))) < 3000


# ---- graphs that mean a lot of work ------------------------------------------------------------------------------

ATTACKED = """
    import resource, sys, time
    sys.path.insert(0, sys.argv[1])
    import attacks
    from descriptors import FrostError
    data = attacks.ATTACKS[sys.argv[2]]()
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        attacks.use(data)
        said = ""
    except FrostError as e:
        said = str(e)
    print(time.process_time() - begun, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, len(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", attacks.ATTACKS)
def test_a_small_file_is_no_large_task(what: str) -> None:
    """Read, printed, validated and compiled, or refused: within seconds (of the processor), 200 MB, and a message that can
    be read."""
    out, _ = finish(start(ATTACKED, Path(__file__).parent, what), timeout=200)
    seconds, mb, said = map(float, out.split())
    assert seconds < 25 and mb < 200 and said < 10e6, out


def _seconds(data: bytes) -> float:
    """Of the processor, for reading, printing, validating and ordering; the best of five. Without the garbage collector, which
    comes by in the large one more often and has the whole process to walk."""
    took = []
    for _ in range(5):
        gc.collect()
        gc.disable()
        try:
            begun = time.process_time()
            g = Graph.from_bytes(data)
            g.to_text()
            g.validate()
            fuse(g)
            took.append(time.process_time() - begun)
        finally:
            gc.enable()
    return min(took)


@pytest.mark.parametrize("make", [attacks.a_long_chain, attacks.every_op_handed_out])
def test_work_grows_with_the_file_and_not_with_its_square(make: Callable[[int], bytes]) -> None:
    """Four times the nodes: four times the work, sixteen times were it quadratic."""
    small, large = make(attacks.NODES // 4), make(attacks.NODES)
    assert len(Graph.from_bytes(large).to_text()) < 5 * len(large)  # a deep tree is not indented without end
    few, many = _seconds(small), _seconds(large)
    assert many < 9 * few, (few, many)


def test_a_graph_that_breaks_every_rule_lists_the_first_thousand() -> None:
    g = Graph()
    x = g.tensor("x", (2, 3), dtype="fp32")
    for _ in range(700):
        g.output(g.sdpa(x, x, x)[0])
    with pytest.raises(GraphError) as e:
        g.validate()
    assert len(e.value.violations) == validate.MOST + 1 and "and more" in e.value.violations[-1]
    assert str(e.value).count("\n") == validate.MOST


def test_what_a_plan_cannot_be_read_back_from_is_not_written(tmp_path: Path) -> None:
    """Better no file than one that nobody can load."""
    g = Graph("g" * (LIMITS["graph"].max_text + 1))
    g.output(g.tanh(g.tensor("x", (2,), dtype="fp32")), name="o")
    with pytest.raises(PlanError, match="could not be read back.*a text of"):
        g.compile("cpu").save(tmp_path / "a.plan")
    assert list(tmp_path.iterdir()) == []


HEAD = ["suite", "case", "direction", "candidate", "status", "ms", "tflops", "check", "card", "dtype"]


@pytest.mark.parametrize(
    "names, rows, said",
    [
        (HEAD, 3, "3 rows, expected at most 2"),
        ([*HEAD, "more", "and more"], 1, "12 columns, expected at most 11"),
        ([*HEAD, "more"], 2, "more than 20 values"),
    ],
)
def test_rows_and_columns_of_a_benchmark(
    names: list[str], rows: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(
        LIMITS["benchmark CSV"], max_values=20 if rows == 2 else 100, counts={"rows": 2, "columns": 11}
    )
    monkeypatch.setitem(LIMITS, "benchmark CSV", small)
    (tmp_path / "x.csv").write_text(",".join(names) + "\n" + (",".join("1" * len(names)) + "\n") * rows)
    with pytest.raises(SavedError, match=said):
        csv_facts(tmp_path / "x.csv")


@pytest.mark.parametrize(
    "line, said",
    [
        ("a,b", "expected 10 columns"),
        ("a," * 10 + "b", "expected 10 columns"),
        ("a," * 9 + "x" * 20_000, "at most 16384"),
        ("a,b,c,d,ok,soon,,,,", "given 'soon', expected a number"),
        ('"a', "unexpected end"),
    ],
)
def test_lines_of_a_benchmark(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(",".join(HEAD) + "\n" + line)
    with pytest.raises(SavedError, match=said):
        csv_facts(tmp_path / "x.csv")


def test_how_much_of_a_saved_run_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frost.report import Saved, saved_fields, write_saved

    gate = {"name": "g", "engine": "e", "op": "o", "verdict": "pass"}
    path = write_saved(tmp_path / "x.json", Saved(gates=[gate] * 3))
    assert len(load_saved(path).gates) == 3
    monkeypatch.setattr(saved_fields, "COUNTS", {**saved_fields.COUNTS, "gates": 2})
    with pytest.raises(SavedError, match="given 3 gates, expected at most 2"):
        load_saved(path)


def test_many_gates_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_LIMITS", replace(gates._LIMITS, counts={"files in a folder": 5}))
    for i in range(7):
        (tmp_path / f"triton-sdpa-{i}.json").write_text("{}")
    files = list(gates.iter_gates(tmp_path))
    assert len(files) == 6 and "more than 5 files" in files[0].problem


def test_the_root_of_the_errors() -> None:
    """Whoever catches FrostError catches everything that we say on purpose."""
    import frost

    for error in (
        frost.BindError,
        frost.DriverError,
        frost.GateError,
        frost.GraphError,
        frost.NotSupportedError,
        frost.PlanError,
        frost.WireError,
        routing.RoutingError,
        SavedError,
        GateFormatError,
        sdpa_baseline.BaselineError,
    ):
        assert issubclass(error, frost.FrostError) and issubclass(error, (ValueError, RuntimeError))
    assert frost.FrostError is FrostError
    with pytest.raises(GateFormatError, match="nested too deeply"):
        gate_from_bytes(b"[" * 1000)
