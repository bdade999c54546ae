"""One share of the inputs, in a process of its own that is watched from outside and watches itself.

A finding is anything but a result or a FrostError: another exception, more time or memory than an input may take, and
code that runs because of what a file says (Python's own audit events tell of imports, exec, processes, sockets, files
written elsewhere).
"""

from __future__ import annotations

import base64
import contextlib
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from descriptors import FrostError

from .mutate import pick, spoil_bytes, spoil_tree
from .targets import TARGETS, Target, warm_up

LIMIT_S = 5.0
LIMIT_MB = 256
_SPARE_BYTES = 3 << 30  # of address space: what asks for more gets a MemoryError, which is a finding
NO_INPUT = b"\xff" * 8  # on the board: before the first one, and after the last
_KEPT = 20  # findings of one share that are told in full


@dataclass
class Share:
    """What came of the inputs of one target."""

    target: str
    inputs: int = 0
    taken: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    peak_mb: float = 0.0
    findings: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Share) -> None:
        self.inputs += other.inputs
        self.taken += other.taken
        for name, n in other.refused.items():
            self.refused[name] = self.refused.get(name, 0) + n
        self.slowest_s, self.peak_mb = max(self.slowest_s, other.slowest_s), max(self.peak_mb, other.peak_mb)
        self.findings += other.findings
        self.examples += other.examples

    def found(self, index: int, what: str, data: bytes, detail: str = "") -> None:
        self.findings += 1
        if len(self.examples) < _KEPT:
            shown = base64.b64encode(data[:3000]).decode()
            self.examples.append(
                {"target": self.target, "index": index, "what": what, "detail": detail[-3000:], "data": shown}
            )


class _TimeUp(BaseException):
    """Not an Exception, so that no handler of ours can take it for an error of the file."""


class Corpus:
    """The valid files of a target, as bytes and as trees."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self.files = target.corpus(folder)
        self.bodies = [target.format.body(f) for f in self.files]
        self.trees = [target.format.parse(b) for b in self.bodies]
        for data, body in zip(self.files, self.bodies):
            assert target.format.seal(body) == data or target.format.write is not None

    def input(self, seed: str, index: int) -> bytes:
        """The spoiled file of that number: always the same one."""
        r = Random(f"{seed}:{self.target.name}:{index}")
        form = self.target.format
        way = r.randrange(10)
        if way < 6:
            tree, donor = pick(r, self.trees)
            try:
                return form.seal(form.write(spoil_tree(r, tree, donor)))
            except (ValueError, TypeError, OverflowError, RecursionError):
                pass  # no file of this format can hold that: spoil bytes instead
        if way < 9:  # a seal that fits, so that what lies behind it is reached
            return form.seal(spoil_bytes(r, *pick(r, self.bodies)))
        return spoil_bytes(r, *pick(r, self.files))


# ---- watching ----------------------------------------------------------------------------------------------------

_FORBIDDEN = frozenset(
    (
        "exec",
        "compile",
        "import",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "os.forkpty",
        "subprocess.Popen",
        "pty.spawn",
        "socket.connect",
        "socket.bind",
        "ctypes.dlopen",
        "pickle.find_class",
        "marshal.loads",
        "code.__new__",
        "os.chmod",
        "os.remove",
        "os.rename",
        "os.symlink",
        "os.link",
        "os.mkdir",
        "os.rmdir",
        "os.truncate",
        "os.kill",
        "sys._getframe.f_code",
        "winreg.OpenKey",
    )
)
_ON_PATHS = frozenset(("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "open"))


class Watch:
    """Audit events while a file is being used."""

    def __init__(self, folder: Path, ours: frozenset[str]) -> None:
        self.folder, self.on, self.forbidden = str(folder), False, (_FORBIDDEN | {"open"}) - ours
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on or event not in self.forbidden:
            return
        if event == "open":
            path, mode, flags = args
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or isinstance(path, int):
                return
        if event in _ON_PATHS and args and os.path.abspath(os.fsdecode(args[0])).startswith(self.folder):
            return
        self.on = False
        caller = "".join(traceback.format_stack(sys._getframe(1), limit=6))
        self.seen.append(f"{event} {str(args)[:200]}\n{caller}")
        self.on = True


def _alarm(*_: object) -> None:
    raise _TimeUp


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def peak_mb(begin: bool = False) -> float:
    """The largest resident memory since the last `begin`, where the kernel lets a process forget older peaks; else since
    the process started."""
    if begin:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(
    name: str, indices: range, seed: str, progress: Path | None = None, skip: frozenset[int] = frozenset()
) -> Share:
    """Use the inputs of these numbers. `progress`: 16 bytes that always hold the number of the current one, and how many
    were finished."""
    share, target = Share(name), TARGETS[name]
    previous = signal.signal(signal.SIGALRM, _alarm)
    with tempfile.TemporaryDirectory(prefix="frost-fuzz-") as temporary, contextlib.ExitStack() as stack:
        folder = Path(os.path.realpath(temporary))
        os.environ.update(FROST_CACHE_DIR=str(folder / "cache"), FROST_GATE_DIR=str(folder / "gates"))
        corpus = Corpus(target, folder)
        warm_up()
        for data in corpus.files:  # warms up what is imported late, and shows that the corpus is valid
            target.use(data, folder)
        board = None
        if progress is not None:
            file = stack.enter_context(progress.open("r+b"))
            board = stack.enter_context(mmap.mmap(file.fileno(), 16))
        watch = Watch(folder, target.ours)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, hard))
        for index in indices:
            if index in skip:
                continue
            data = corpus.input(seed, index)
            if board is not None:
                board[:8] = index.to_bytes(8, "little")
            _one(share, target, data, index, folder, watch)
            if board is not None:
                board[8:] = share.inputs.to_bytes(8, "little")
        if board is not None:
            board[:8] = NO_INPUT
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        watch.on = False
    signal.signal(signal.SIGALRM, previous)
    return share


def _one(share: Share, target: Target, data: bytes, index: int, folder: Path, watch: Watch) -> None:
    before, begun = peak_mb(begin=True), time.perf_counter()
    share.inputs += 1
    watch.on = True
    try:
        with time_limit(LIMIT_S):
            target.use(data, folder)
        share.taken += 1
    except FrostError as e:
        kind = type(e).__name__
        share.refused[kind] = share.refused.get(kind, 0) + 1
        watch.on = False
        if len(str(e)) > 1 << 20:
            share.found(index, "a message of more than 1 MB", data, str(e)[:1000])
    except _TimeUp:
        share.found(index, f"more than {LIMIT_S} s", data, traceback.format_exc())
    except BaseException as e:
        watch.on = False
        share.found(index, type(e).__name__, data, traceback.format_exc())
    watch.on = False
    took, grown = time.perf_counter() - begun, peak_mb() - before
    share.slowest_s, share.peak_mb = max(share.slowest_s, took), max(share.peak_mb, grown)
    if grown > LIMIT_MB:
        share.found(index, f"{grown:.0f} MB", data)
    for event in watch.seen:
        share.found(index, "code ran: " + event.split()[0], data, event)
    watch.seen.clear()


def as_plain(share: Share) -> dict[str, Any]:
    return asdict(share)
