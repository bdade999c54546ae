"""Kernel source + TemplateParams -> compiled kernel, cached in memory and on disk.

A kernel's identity is its engine, kernel name, TemplateParams, arch, source digest and toolchain: never a size, a
pointer or a packed total. In memory one builder runs per key and others wait for it. On disk there is one file per
kernel, a self-checked bundle (header, payload, checksum) that is written to a temporary name in the same folder and
renamed. A damaged file is rebuilt with one warning; a folder that cannot be used means in-memory only, with one warning;
waiting for another process's build is bounded, after which the kernel is built here too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from descriptors import LIMITS, WireError, pack, unpack
from descriptors.limits import check_size, read_limited

from . import forks

try:
    import fcntl
except ImportError:  # not POSIX: no cross-process lock, the atomic rename still keeps files whole
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("frost.cache")

MAGIC = b"FROSTK1\n"
SCHEMA = 1
LOCK_WAIT_S = 60.0
_LIMITS = LIMITS["kernel bundle"]


@dataclass(frozen=True)
class KernelKey:
    """A compiled kernel's identity. `params` is the TemplateParams record as (field, value) pairs of host scalars."""

    engine: str
    kernel: str
    params: tuple[tuple[str, Any], ...]
    arch: str
    digest: str
    toolchain: tuple[tuple[str, str], ...] = ()

    def to_wire(self) -> dict[str, Any]:
        return {"engine": self.engine, "kernel": self.kernel, "params": [list(p) for p in self.params],
                "arch": self.arch, "digest": self.digest, "toolchain": [list(t) for t in self.toolchain]}

    @property
    def file_name(self) -> str:
        name = hashlib.sha256(pack(self.to_wire())).hexdigest()[:32]
        return f"{self.engine}-{self.kernel}-{self.arch}-{name}.frostk"


@dataclass(frozen=True)
class Bundle:
    """A compiled kernel: machine code and what a launch needs to know (entry name, threads, shared bytes, params…)."""

    code: bytes
    meta: Mapping[str, Any]

    def to_bytes(self, key: KernelKey) -> bytes:
        body = pack({"schema": SCHEMA, "key": key.to_wire(), "meta": dict(self.meta), "code": self.code})
        return MAGIC + hashlib.sha256(body).digest() + body

    @staticmethod
    def from_bytes(data: bytes, key: KernelKey) -> Bundle:
        """Raises WireError where the bytes are damaged or belong to another kernel, arch, source or toolchain."""
        check_size(len(data), _LIMITS)
        if data[:len(MAGIC)] != MAGIC or len(data) < len(MAGIC) + 32:
            raise WireError("kernel bundle: not a FROST bundle, or truncated")
        digest, body = data[len(MAGIC):len(MAGIC) + 32], data[len(MAGIC) + 32:]
        if hashlib.sha256(body).digest() != digest:
            raise WireError("kernel bundle: checksum does not match")
        record = unpack(body, _LIMITS)
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise WireError("kernel bundle: given another schema")
        if pack(record.get("key")) != pack(key.to_wire()):
            raise WireError("kernel bundle: it belongs to another kernel")
        if not isinstance(record.get("code"), bytes) or not isinstance(record.get("meta"), dict):
            raise WireError("kernel bundle: fields are missing")
        return Bundle(record["code"], record["meta"])


@dataclass
class LoaderStats:
    """Counters that tests can assert on."""

    kernels_compiled: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    rebuilt: int = 0


@dataclass
class _Entry:
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None


class TemplateLoader:
    """`get(key, build)`: memory, then disk, then `build()`. Thread-safe, one builder per key."""

    def __init__(self, folder: Callable[[], Path | None] = lambda: None) -> None:
        self._folder = folder
        self._entries: dict[KernelKey, _Entry] = {}
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.stats = LoaderStats()

    def set_folder(self, folder: Callable[[], Path | None]) -> None:
        """Where bundles are kept; asked at each use, None = in memory only."""
        self._folder = folder

    def clear(self) -> None:
        """Forget what is in memory; files stay."""
        with self._lock:
            self._entries.clear()

    def get(self, key: KernelKey, build: Callable[[], Bundle], *, persist: bool = True) -> Bundle:
        """The compiled kernel. `persist=False` keeps it out of the disk cache (interpreted kernels).

        A failed build is not kept and its error reaches every waiter; after an interrupt, which is the builder's alone,
        a waiter builds instead.
        """
        while True:
            with self._lock:
                entry = self._entries.get(key)
                mine = entry is None
                if entry is None:
                    entry = self._entries[key] = _Entry()
            if mine:
                break
            entry.done.wait()
            if isinstance(entry.error, Exception):
                raise entry.error
            if entry.error is not None:
                continue
            with self._lock:
                self.stats.memory_hits += 1
            return entry.value
        try:
            entry.value = self._load_or_build(key, build, persist)
        except BaseException as e:
            entry.error = e
            with self._lock:  # a failed build is not remembered: the next caller tries again
                self._entries.pop(key, None)
            raise
        finally:
            entry.done.set()
        return entry.value

    def after_fork(self) -> None:
        """In a child: builds of threads that are not here will never end."""
        self._lock = threading.Lock()
        self._entries = {key: entry for key, entry in self._entries.items() if entry.done.is_set()}

    def _load_or_build(self, key: KernelKey, build: Callable[[], Bundle], persist: bool) -> Bundle:
        folder = self._usable_folder() if persist else None
        if folder is None:
            return self._build(build)
        path = folder / key.file_name
        found = self._read(path, key)
        if found is not None:
            return found
        with _bounded_lock(path.with_suffix(".lock")):
            found = self._read(path, key)  # another process may have built it while we waited
            if found is not None:
                return found
            bundle = self._build(build)
            self._write(path, bundle.to_bytes(key))
            return bundle

    def _build(self, build: Callable[[], Bundle]) -> Bundle:
        bundle = build()
        with self._lock:
            self.stats.kernels_compiled += 1
        return bundle

    def _read(self, path: Path, key: KernelKey) -> Bundle | None:
        try:
            bundle = Bundle.from_bytes(read_limited(path, _LIMITS), key)
        except FileNotFoundError:
            return None
        except (WireError, OSError) as e:
            self._warn("damaged", f"kernel cache: {path.name} is unusable ({e}); it is built again")
            with self._lock:
                self.stats.rebuilt += 1
            return None
        with self._lock:
            self.stats.disk_hits += 1
        return bundle

    def _usable_folder(self) -> Path | None:
        try:
            folder = self._folder()
            if folder is None:
                return None
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        except OSError as e:
            self._warn("folder", f"kernel cache: {e}; compiled kernels are kept in memory only")
            return None

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_atomically(path, data)
        except OSError as e:
            self._warn("folder", f"kernel cache: cannot write {path.name} ({e}); kept in memory only")

    def _warn(self, kind: str, text: str) -> None:
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        log.warning(text)


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary name in the same folder, then rename: readers see the old file or the whole new one. Who may
    read it is the umask's to say, so that a cache or gate folder can be shared."""
    temp = path.with_name(f".tmp-{secrets.token_hex(8)}{path.suffix}")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


@contextlib.contextmanager
def _bounded_lock(path: Path, wait_s: float | None = None) -> Iterator[None]:
    """Hold an advisory lock on `path`; after `wait_s` seconds go on without it. The kernel releases a dead holder's."""
    if fcntl is None:
        yield
        return
    deadline = time.monotonic() + (LOCK_WAIT_S if wait_s is None else wait_s)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield  # a folder we may read but not write
        return
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    log.warning("kernel cache: waited long enough for %s; building without the lock", path.name)
                    break
                time.sleep(0.02)
            except OSError:
                break  # a file system without locks
        yield
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)


loader = TemplateLoader()
forks.in_child(loader.after_fork)
