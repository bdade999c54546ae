"""Equivalence gates: a kernel is routable only while its proof holds.

A gate is a small JSON artifact, reviewed like code: engine, op, digest of the kernel source, environment,
what was covered, the errors against the fp64 oracle, tolerances, date, verdict. It must match in three
things: the source digest, the compute capability, and the major.minor of the compiler that makes the code.
torch and the driver are recorded, not matched.

The user's own gates (FROST_GATE_DIR, else the folder `gates` of the cache folder) are looked at before the
shipped ones; a `gate_dir` argument replaces both. A damaged file proves nothing and is passed over; of the
rest the first one that is about this source and this environment decides.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from descriptors import LIMITS, WireError
from descriptors.limits import read_limited
from engines import forks, registry
from engines.base import Target
from engines.template_loader import write_atomically

from . import env
from .errors import GateError
from .gate_env import matched_environment, recorded_environment, target_of
from .gate_file import Gate, GateFormatError, beyond_tolerance, gate_from_bytes, gate_to_bytes, make_gate
from .sdpa_baseline import load_sdpa_baseline as load_sdpa_baseline
from .sdpa_baseline import sdpa_baseline_info as sdpa_baseline_info

if TYPE_CHECKING:
    from .equivalence import GateRun
    from .gate_env import Device

log = logging.getLogger("frost.gates")

NOT_PASSED = "equivalence gate has not passed"
_LIMITS = LIMITS["gate"]


def shipped_gate_dir() -> Path:
    """Where the gates that ship with the package live; the folder is absent while none ships."""
    return Path(__file__).parent / "gate_data"


def kernel_source_hash(engine: str = "triton") -> str:
    """SHA-256 over every file that reaches the engine's kernels. Raises ValueError for an unknown engine."""
    return registry.get(engine).source_digest()


def op_source_hash(engine: str, op: str) -> str:
    """What a gate of the op vouches for: the files that reach its kernels."""
    # Looked up on the module at each call, and without arguments for the Triton engine, so that it can be
    # replaced; whoever replaced it means every op.
    whole = kernel_source_hash() if engine == "triton" else kernel_source_hash(engine)
    known = registry.get(engine)
    return known.op_source_digest(op) if whole == known.source_digest() else whole


def way_out(engine: str) -> str:
    """What a user can do about a missing or stale gate."""
    return f"run `frost gate run {engine}`, about a minute on your GPU"


# ---- files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateFile:
    """A gate's file: the gate, or what is wrong with it."""

    path: Path
    gate: Gate | None
    problem: str = ""
    shipped: bool = False


def gate_file_name(engine: str, op: str, environment: Mapping[str, str]) -> str:
    """e.g. triton-sdpa-sm_90-triton3.6.json: one file per engine, op, arch and compiler."""
    tools = [f"{name}{version}" for name, version in sorted(environment.items()) if name != "arch"]
    return "-".join([engine, op, environment["arch"], *tools]) + ".json"


def gate_dirs(gate_dir: str | Path | None = None) -> tuple[Path, ...]:
    """Where gates are looked for, in order."""
    if gate_dir is not None:
        return (Path(gate_dir),)
    own = env.gate_dir()
    return (shipped_gate_dir(),) if own is None else (own, shipped_gate_dir())


def iter_gates(gate_dir: str | Path | None = None, *, engine: str | None = None,
               op: str | None = None) -> Iterator[GateFile]:
    """Every gate file in search order, damaged ones included; of one engine and op where given."""
    pattern, most = f"{engine or '*'}-{op or '*'}-*.json", _LIMITS.counts["files in a folder"]
    for folder in gate_dirs(gate_dir):
        try:
            # glob gives nothing for a folder that is missing; one that may not be read is as good as missing
            # here.
            paths = list(islice(folder.glob(pattern), most + 1))
        except OSError:
            continue
        if len(paths) > most:
            yield GateFile(folder, None, f"gate folder {folder}: given more than {most} files {pattern}, expected fewer; "
                                         "only so many are read")
        paths = sorted(paths[:most])
        for path in paths:
            if not path.name.startswith("."):
                yield read_gate_file(path)


def read_gate_file(path: Path) -> GateFile:
    """Read one file; what is wrong with it is told, not raised."""
    shipped = path.parent == shipped_gate_dir()
    try:
        return GateFile(path, gate_from_bytes(read_limited(path, _LIMITS)), shipped=shipped)
    except (OSError, WireError, GateFormatError) as e:
        return GateFile(path, None, f"equivalence gate {path.name} is damaged: {e}", shipped)


# ---- write, read, check ------------------------------------------------------------------------------------


def write_equivalence_gate(
    *, tolerances: float | Mapping[str, Any], shapes_covered: Sequence[Any], engine: str = "triton",
    op: str = "sdpa", device: Device = "cpu", errors: float | Mapping[str, Any] | None = None,
    gate_dir: str | Path | None = None, declined: Mapping[str, str] | None = None,
) -> Path:
    """Write the gate of an engine's op for the current kernel source and the environment of `device`.

    `tolerances`: the largest allowed error, one number or numbers by name. `errors`: the measured ones, by
    the same names or by configuration and then those names; None means that the caller vouches, and the
    artifact says so. `shapes_covered`: what was run (plain data, at least one). `declined`: configurations
    that the engine refused, with its reason. Errors beyond tolerance make an artifact whose verdict is
    "fail".

    Returns the file's path. Raises ValueError for arguments that mean nothing and GateError where the folder
    cannot be written or the device does not answer.
    """
    target = target_of(device)
    matched = matched_environment(engine, target)
    now = datetime.datetime.now(datetime.timezone.utc)
    gate = make_gate(
        engine=engine, op=op, source=op_source_hash(engine, op), environment=matched, declined=declined or {},
        recorded=recorded_environment(target), tolerances=tolerances, errors=errors,
        shapes_covered=shapes_covered, date=now.strftime("%Y-%m-%dT%H:%M:%SZ"))
    folder = env.gate_dir() if gate_dir is None else Path(gate_dir)
    if folder is None:
        raise GateError("gate folder: none here (no home folder, or FROST_CACHE_DIR=off), expected one that "
                        "can be written; set FROST_GATE_DIR or pass gate_dir=")
    path = folder / gate_file_name(engine, op, matched)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, gate_to_bytes(gate))
    except OSError as e:
        raise GateError(f"gate folder: given {folder}, expected one that can be written ({e}); set "
                        f"FROST_GATE_DIR or pass gate_dir=") from e
    return path


@dataclass(frozen=True)
class GateStatus:
    """The answer of a check: truthy iff the gate holds; unpacks as (ok, reason). `reason` is "ok" or what
    differs.

    `gate` and `path` are those of the file that decided; `stamp` is what a route shows.
    """

    ok: bool
    reason: str
    gate: Gate | None = None
    path: Path | None = None
    stamp: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def __iter__(self) -> Iterator[Any]:
        return iter((self.ok, self.reason))


# How near a refused gate came; of several the nearest explains itself.
_ABSENT, _DAMAGED, _ELSEWHERE, _STALE, _DECIDES = range(5)


def check_equivalence_gate(*, engine: str = "triton", op: str = "sdpa", device: Device = "cpu",
                           gate_dir: str | Path | None = None) -> GateStatus:
    """Whether a gate covers the engine's op with its current source on `device`; else the reason and the way
    out."""
    try:
        target = target_of(device)
    except GateError as e:
        return GateStatus(False, f"{NOT_PASSED}: {e}")
    return _check(engine, op, matched_environment(engine, target), op_source_hash(engine, op),
                  iter_gates(gate_dir, engine=engine, op=op))


def _check(engine: str, op: str, matched: Mapping[str, str], source: str,
           files: Iterator[GateFile]) -> GateStatus:
    best, nearest = _ABSENT, GateStatus(
        False, f"{NOT_PASSED}: there is none for {engine}:{op} on {_text(matched)}; {way_out(engine)}")
    for file in files:
        level, status = _judge(file, engine, op, matched, source)
        if level == _DECIDES:
            return status
        if level > best:
            best, nearest = level, status
    return nearest


def _judge(file: GateFile, engine: str, op: str, matched: Mapping[str, str],
           source: str) -> tuple[int, GateStatus]:
    gate = file.gate
    if gate is None:
        return _DAMAGED, GateStatus(False, f"{file.problem}; {way_out(engine)}", path=file.path)
    if (gate.engine, gate.op) != (engine, op):  # a name with hyphens can match another's pattern
        return _ABSENT, GateStatus(False, NOT_PASSED)
    both = ((name, matched.get(name, "none"), gate.environment.get(name, "none"))
            for name in sorted({*matched, *gate.environment}))
    other = [f"{name}: given {here}, expected {there}" for name, here, there in both if here != there]
    if other:
        text = f"equivalence gate does not cover this environment ({'; '.join(other)})"
        return _ELSEWHERE, _refuse(file, text)
    stale = _changed_source(gate, source)
    if stale:
        return _STALE, _refuse(file, f"{stale}: the equivalence gate no longer holds")
    red = _red(gate)
    if red:
        return _DECIDES, _refuse(file, f"{NOT_PASSED}: {red}")
    vouched = "vouched for" if gate.vouched else "passed"
    stamp = f"{vouched} {gate.date[:10]} on {_text(matched)} ({'shipped' if file.shipped else 'own'})"
    return _DECIDES, GateStatus(True, "ok", gate, file.path, stamp)


def _changed_source(gate: Gate, source: str) -> str:
    if gate.source == source:
        return ""
    return f"kernel source changed since the gate ran (given {source[:12]}, expected {gate.source[:12]})"


def _red(gate: Gate) -> str:
    # The errors are judged anew: the stored verdict alone proves nothing.
    bad = beyond_tolerance(gate.errors, gate.tolerances)
    if not bad and gate.verdict == "pass":
        return ""
    return f"errors beyond tolerance ({'; '.join(bad[:3]) or f'verdict {gate.verdict}'})"


def _refuse(file: GateFile, text: str) -> GateStatus:
    engine = file.gate.engine if file.gate is not None else ""
    return GateStatus(False, f"{text}; {way_out(engine)}", file.gate, file.path)


def _text(matched: Mapping[str, str]) -> str:
    return ", ".join(v if k == "arch" else f"{k} {v}" for k, v in matched.items())


def read_equivalence_gate(*, engine: str = "triton", op: str = "sdpa", device: Device = "cpu",
                          gate_dir: str | Path | None = None) -> Gate:
    """The gate that decides about the engine's op on `device`, whether it holds or not: the one a check would
    go by.

    Raises GateError where there is none for this environment, or only damaged ones.
    """
    status = check_equivalence_gate(engine=engine, op=op, device=device, gate_dir=gate_dir)
    if status.gate is None or (not status.ok and status.gate.environment != matched_environment(
            engine, target_of(device))):
        raise GateError(status.reason)
    return status.gate


# ---- what lowering asks ------------------------------------------------------------------------------------

_auto_lock = forks.free_in_child(threading.Lock())
_warn_lock = forks.free_in_child(threading.Lock())
_tried: dict[tuple, GateStatus] = {}       # what gates="auto" ran in this process, passed or not
_warned: set[str] = set()
_held: dict[tuple, tuple[tuple, bool]] = {}


def holds(engine: str, op: str, target: Target, gate_dir: str | Path | None = None) -> bool:
    """Whether the engine's op is proven on the target. Cheap to ask again: files are read anew only when they
    or their folder changed."""
    matched, source = matched_environment(engine, target), op_source_hash(engine, op)
    key = (engine, op, tuple(matched.items()), source)
    if key in _tried and _tried[key].ok:
        return True
    folders = gate_dirs(gate_dir)
    names = [f / gate_file_name(engine, op, matched) for f in folders]
    stamps = tuple(_stamp(p) for p in (*folders, *names))
    known = _held.get((key, folders))
    if known is None or known[0] != stamps:
        known = (stamps, _check(engine, op, matched, source, iter_gates(gate_dir, engine=engine, op=op)).ok)
        _held[(key, folders)] = known
    return known[1]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def gate_for_route(engine: str, op: str, target: Target, policy: str, *,
                   automatic: bool = False) -> tuple[bool, str, str]:
    """(ok, reason, stamp) for one route under a gate policy.

    "require": as the files say. "auto": a gate that is missing, stale or elsewhere is run once and kept.
    "off": yes, stamped "off". `automatic` says that the caller named no engines: losing one to its gate is
    then logged once.
    """
    if policy not in env.GATE_POLICIES:
        raise ValueError(f"gates: given {policy!r}, expected one of {', '.join(env.GATE_POLICIES)}")
    if policy == "off":
        return True, "", "off"
    status = check_equivalence_gate(engine=engine, op=op, device=target)
    if not status.ok and policy == "auto":
        status = _run_missing(engine, op, target)
    if not status.ok and automatic:
        _warn_lost(engine, status.reason)
    return (True, "", status.stamp) if status.ok else (False, status.reason, "")


def _warn_lost(engine: str, reason: str) -> None:
    with _warn_lock:
        if engine in _warned:
            return
        _warned.add(engine)
    log.warning("engine %s was not chosen: %s", engine, reason)


def _run_missing(engine: str, op: str, target: Target) -> GateStatus:
    """Run the gate once in this process; others wait for it. A passed one that cannot be kept counts here all
    the same."""
    key = (engine, op, tuple(matched_environment(engine, target).items()), op_source_hash(engine, op))
    with _auto_lock:
        if key not in _tried:
            _tried[key] = _run_now(engine, op, target)
        return _tried[key]


def _run_now(engine: str, op: str, target: Target) -> GateStatus:
    from .equivalence import run_gate_with_progress

    try:
        here = target_of(target.device if target.device == "cpu" else f"{target.device}:{target.index}")
    except GateError as e:
        return GateStatus(False, f"{NOT_PASSED}: it cannot run here: {e}")
    if here != target:
        return GateStatus(False, f"{NOT_PASSED}: it cannot run here (arch: given {target}, expected {here})")
    run = run_gate_with_progress(engine, op, target)
    if not run.ok:
        return GateStatus(False, f"{NOT_PASSED}: it was run now and failed: {run.summary()}")
    try:
        path = keep(run)
    except GateError as e:
        log.warning("the gate of %s:%s passed but counts for this process only: %s", engine, op, e)
        return _in_this_process(target)
    status = check_equivalence_gate(engine=engine, op=op, device=target)
    return status if status.ok else _in_this_process(target, path)


def _in_this_process(target: Target, path: Path | None = None) -> GateStatus:
    return GateStatus(True, "ok", path=path, stamp=f"passed in this process on {target}")


def keep(run: GateRun, gate_dir: str | Path | None = None) -> Path:
    """Write the artifact of a run that is green. Raises GateError for any other run, or where it cannot be
    written.

    Errors are stored in units of what the tolerance rule allows that element, so every tolerance is 1.
    """
    if not run.ok:
        raise GateError(f"{run.engine}:{run.op}: only a green run makes a gate; {run.summary()}")
    passed = [r for r in run.results if r.verdict == "pass"]
    return write_equivalence_gate(
        engine=run.engine, op=run.op, device=run.target, gate_dir=gate_dir, tolerances=1.0,
        errors={r.name: {t: e.ratio for t, e in r.errors.items()} for r in passed},
        shapes_covered=[r.described() for r in passed],
        declined={r.name: r.detail for r in run.results if r.verdict == "declined"})


# ---- what ships --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShippedCheck:
    """One line of `frost gate check`. `verdict`: "pass", "fail", or "none" for an op that nobody can gate yet (it has
    no matrix), which every GPU therefore declines; that is said, and no failure."""

    name: str
    verdict: str
    reason: str

    @property
    def ok(self) -> bool:
        return self.verdict != "fail"


def check_shipped(engine: str | None = None, gate_dir: str | Path | None = None) -> list[ShippedCheck]:
    """Every shipped gate (or every one in `gate_dir`) against the current kernel source, whatever machine
    this is: it must be whole, of a known engine, made from this source, and green. A gated engine's op
    without any gate is a failed line of its own, unless it has no gate matrix to be run."""
    from .equivalence import gated_ops

    folder = shipped_gate_dir() if gate_dir is None else Path(gate_dir)
    out, seen = [], set()
    for file in iter_gates(folder, engine=engine):
        problem = file.problem or _shipped_problem(file.gate)
        out.append(ShippedCheck(file.path.name, "fail" if problem else "pass", problem or "ok"))
        if file.gate is not None:
            seen.add((file.gate.engine, file.gate.op))
    for known in registry.engines():
        if known.gated and engine in (None, known.name):
            for op in sorted({a.op for a in known.adapters() if (known.name, a.op) not in seen}):
                name = f"{known.name}:{op}"
                if op not in gated_ops():
                    out.append(ShippedCheck(name, "none", "it has no gate matrix yet: unproven, declined on every GPU"))
                    continue
                command = f"frost gate run {known.name} --op {op} --out {folder}"
                out.append(ShippedCheck(name, "fail", f"there is no gate for it in {folder}; run `{command}` on a GPU"))
    return out


def _shipped_problem(gate: Gate | None) -> str:
    if gate is None:
        return "unreadable"
    if gate.engine not in registry.names():
        return f"engine: given {gate.engine!r}, expected one of {list(registry.names())}"
    stale = _changed_source(gate, op_source_hash(gate.engine, gate.op))
    if stale:
        return f"{stale}; {way_out(gate.engine)}"
    # What ships was measured: nobody can vouch for a kernel in everybody's name.
    return _red(gate) or ("it was vouched for, expected measured errors" if gate.vouched else "")
