"""Everything that FROST reads from disk: how a valid file is taken apart and sealed again, and what is done with a
spoiled one.

Whatever a file holds, reading it, and using what was read, ends in a result or in a `FrostError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from descriptors import FrostError, op_from_wire, pack, unpack
from engines.template_loader import MAGIC as KERNEL_MAGIC
from engines.template_loader import Bundle, TemplateLoader
from frost import cli, gate_file, gates, routing, sdpa_baseline
from frost.fuse import fuse
from frost.graph import Graph
from frost.plan_io import MAGIC as PLAN_MAGIC
from frost.plan_io import load_plan
from frost.report import Saved, facts, load_saved, merge_saved, render

from . import corpora
from .mutate import MARK

# ---- formats: bytes <-> body (what a checksum covers) <-> tree ---------------------------------------------------


def _as_it_is(data: bytes) -> bytes:
    return data


@dataclass(frozen=True)
class Format:
    """`body` takes the seal off, `seal` puts a fitting one on. `parse` and `write`: the body as a tree (ValueError,
    TypeError or OverflowError where it has none)."""

    parse: Callable[[bytes], Any]
    write: Callable[[Any], bytes]
    body: Callable[[bytes], bytes] = _as_it_is
    seal: Callable[[bytes], bytes] = _as_it_is


def _parse_msgpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False)


def _plain(value: Any) -> Any:
    """Keys as JSON has them."""
    if isinstance(value, dict):
        return {k if isinstance(k, str) else str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _write_json(tree: Any) -> bytes:
    return json.dumps(_plain(tree), default=str).encode()


def _hashed(magic: bytes) -> dict[str, Callable[[bytes], bytes]]:
    start = len(magic) + 32
    return {
        "body": lambda data: data[start:],
        "seal": lambda body: magic + hashlib.sha256(body).digest() + body,
    }


def _parse_plan(body: bytes) -> Any:
    record = _parse_msgpack(body)
    record["graph"] = _parse_msgpack(record["graph"])
    return record


def _write_plan(tree: Any) -> bytes:
    if isinstance(tree, dict) and isinstance(tree.get("graph"), dict):
        tree = {**tree, "graph": pack(tree["graph"])}
    return pack(tree)


def _seal_gate(body: bytes) -> bytes:
    try:
        content = json.loads(body)
        content.pop("checksum", None)
        return _write_json({**content, "checksum": gate_file._checksum(content)})
    except (ValueError, AttributeError, TypeError, RecursionError):
        return body


MSGPACK = Format(_parse_msgpack, pack)
JSON = Format(json.loads, _write_json)
GATE = Format(json.loads, _write_json, seal=_seal_gate)
PLAN = Format(_parse_plan, _write_plan, **_hashed(PLAN_MAGIC))
KERNEL = Format(_parse_msgpack, pack, **_hashed(KERNEL_MAGIC))
CSV = Format(
    lambda data: [line.split(",") for line in data.decode().split("\n")],
    lambda tree: "\n".join(
        ",".join(map(str, row)) if isinstance(row, list) else str(row) for row in tree
    ).encode(),
)

# ---- what is done with a file ------------------------------------------------------------------------------------


class Broken(Exception):
    """Something that was read did what it must not."""


def _use_graph(data: bytes, folder: Path) -> None:
    g = Graph.from_bytes(data)
    g.to_text(), g.to_dot(), repr(g)
    g.validate()
    program = fuse(g)
    if not Graph.from_bytes(g.to_bytes()).same_as(g):
        raise Broken("a graph that was read differs from what it writes")
    if len(program.steps) < 200:
        g.compile("cpu", engines=["reference"]).explain()


def warm_up() -> None:
    """What others compile and import when it is first needed, whatever the file: networkx' dispatch of a search for
    cycles, NumPy's masked arrays, codecs."""
    g = Graph()
    x = g.tensor("x", (2, 3), dtype="fp32")
    a = g.tanh(x)
    b = g.tanh(a)
    g.output(b, name="o", stride=(3, 2))
    with contextlib.suppress(FrostError):
        g.validate()
    assert a.producer is not None
    g._attach(a.producer, {"x": b})
    with contextlib.suppress(FrostError):
        g.validate()
    importlib.import_module("numpy.ma")
    "\0".encode("unicode_escape"), "x".encode("idna")


def _put(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path


def _use_plan(data: bytes, folder: Path) -> None:
    load_plan(_put(data, folder / "x.plan")).explain()


def _use_gate(data: bytes, folder: Path) -> None:
    where = folder / "one"
    where.mkdir(exist_ok=True)
    _put(data, where / "triton-sdpa-sm_90-triton3.6.json")
    status = gates.check_equivalence_gate(engine="triton", op="sdpa", device="sm_90", gate_dir=where)
    (
        str(status.reason),
        list(gates.check_shipped(gate_dir=where)),
        gates.holds("triton", "sdpa", gates.target_of("sm_90"), where),
    )
    _show(Saved(gates=facts.gate_facts(where)))
    gate_file.gate_from_bytes(data)


def _use_dump(path: Path) -> None:
    dump = routing.merge([path, path])
    (
        routing.shares(dump.stats),
        [r.key for r in dump.routes],
        routing.write_dump(path.with_name("y.json"), dump),
    )
    _show(Saved(routing=facts.routing_facts([path])))


def _show(saved: Saved) -> None:
    page = render(merge_saved([saved, saved]))
    if MARK in page or "<img" in page:
        raise Broken("a text of the file stands in the page as markup")
    page.encode()


def _use_run(data: bytes, folder: Path) -> None:
    _show(load_saved(_put(data, folder / "x.json")))


def _use_csv(data: bytes, folder: Path) -> None:
    _show(Saved(benchmarks=facts.csv_facts(_put(data, folder / "x.csv"))))


def _use_baseline(data: bytes, folder: Path) -> None:
    path = _put(data, folder / "baseline.json")
    before = sdpa_baseline.baseline_path
    sdpa_baseline.baseline_path = lambda: path
    try:
        _show(Saved(benchmarks=facts.baseline_facts()))
        sdpa_baseline.load_sdpa_baseline(), sdpa_baseline.sdpa_baseline_info()
    finally:
        sdpa_baseline.baseline_path = before


def _use_bundle(data: bytes, folder: Path) -> None:
    """What the loader makes of it: the bundle, or a build in its place."""
    _put(data, folder / corpora.KEY.file_name)
    made = TemplateLoader(lambda: folder)
    bundle = made.get(corpora.KEY, lambda: Bundle(b"built", {}))
    if made.stats.kernels_compiled and bundle.code != b"built":
        raise Broken("a bundle that was neither read nor built")
    Bundle.from_bytes(data, corpora.KEY)


def _use_record(data: bytes, folder: Path) -> None:
    hash(op_from_wire(unpack(data)))


_COMMANDS = {
    "graph": ("explain", "{}", "--device", "cpu", "--engines", "reference"),
    "dump": ("routing", "show", "{}"),
    "diff": ("routing", "diff", "{}", "{}"),
    "run": ("report", "{}", "-o", "{}.html", "--device", "cpu"),
}


def _use_command(data: bytes, folder: Path) -> None:
    """The command line over the same file as every kind: an exit code, never a traceback."""
    path, accepted = _put(data, folder / "x.msgpack"), 0
    for words in _COMMANDS.values():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
            code = cli.main([w.format(path) for w in words])
        if code not in (0, 1, 2) or "Traceback" in err.getvalue():
            raise Broken(f"frost {words[0]}: exit code {code}")
        accepted += code == 0
    if not accepted:
        raise FrostError("refused by every command")


@dataclass(frozen=True)
class Target:
    """A kind of file. `share`: parts per hundred of all inputs. `ours`: audit events that we cause ourselves, whatever the
    file holds."""

    name: str
    share: int
    format: Format
    corpus: Callable[[Path], list[bytes]]
    use: Callable[[bytes, Path], None]
    ours: frozenset[str] = frozenset()


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("graph", 30, MSGPACK, corpora.graphs, _use_graph),
        Target("plan", 15, PLAN, corpora.plans, _use_plan),
        Target("gate", 10, GATE, corpora.gate_files, _use_gate),
        Target(
            "routing.msgpack",
            9,
            MSGPACK,
            corpora.dumps_msgpack,
            lambda data, folder: _use_dump(_put(data, folder / "x.msgpack")),
        ),
        Target(
            "routing.json",
            7,
            JSON,
            corpora.dumps_json,
            lambda data, folder: _use_dump(_put(data, folder / "x.json")),
        ),
        Target("saved run", 12, JSON, corpora.runs, _use_run),
        Target("benchmark CSV", 4, CSV, corpora.csvs, _use_csv),
        Target("SDPA baseline", 4, JSON, corpora.baselines, _use_baseline),
        Target("kernel bundle", 5, KERNEL, corpora.bundles, _use_bundle),
        Target("op record", 3, MSGPACK, corpora.records, _use_record),
        Target(
            "command line",
            1,
            MSGPACK,
            lambda folder: [*corpora.graphs(folder), *corpora.dumps_msgpack(folder)],
            _use_command,
            ours=frozenset(("compile", "exec")),
        ),  # typer evaluates the annotations of the commands
    )
}
