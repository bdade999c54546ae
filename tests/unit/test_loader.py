"""The kernel cache within one process: bundles that check themselves, damage that is mended with one
warning."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from descriptors import WireError
from engines import template_loader
from engines.template_loader import Bundle, KernelKey, TemplateLoader, write_atomically

KEY = KernelKey(
    "triton",
    "fwd",
    (("dtype", "bf16"), ("d_pad", 64), ("bias", None), ("even", True)),
    "sm_90",
    "d" * 64,
    (("triton", "3.6"),),
)
BUNDLE = Bundle(
    bytes(range(256)) * 8, {"name": "fwd", "threads": 128, "shared": 1024, "kinds": ["ptr", "i32"]}
)


def loader(folder: Path | None) -> TemplateLoader:
    return TemplateLoader(lambda: folder)


def never() -> Bundle:
    raise AssertionError("built although it was there")


def get(
    folder: Path | None, build: Callable[[], Bundle] = lambda: BUNDLE, key: KernelKey = KEY
) -> tuple[Bundle, Any]:
    """Through a loader whose memory is empty, as in a new process. (bundle, counters)."""
    made = loader(folder)
    return made.get(key, build), made.stats


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob("*") if not p.name.endswith(".frostk")]


# ---- bundles ---------------------------------------------------------------------------------------------


def test_a_bundle_comes_back_as_it_was() -> None:
    back = Bundle.from_bytes(BUNDLE.to_bytes(KEY), KEY)
    assert back.code == BUNDLE.code and dict(back.meta) == dict(BUNDLE.meta)


OTHERS = {
    "engine": KernelKey("sm80", "fwd", KEY.params, KEY.arch, KEY.digest, KEY.toolchain),
    "kernel": KernelKey("triton", "bwd", KEY.params, KEY.arch, KEY.digest, KEY.toolchain),
    "params": KernelKey(
        "triton", "fwd", (("dtype", "fp16"), *KEY.params[1:]), KEY.arch, KEY.digest, KEY.toolchain
    ),
    "arch": KernelKey("triton", "fwd", KEY.params, "sm_80", KEY.digest, KEY.toolchain),
    "digest": KernelKey("triton", "fwd", KEY.params, KEY.arch, "e" * 64, KEY.toolchain),
    "toolchain": KernelKey("triton", "fwd", KEY.params, KEY.arch, KEY.digest, (("triton", "3.7"),)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_bundle_of_another_kernel_is_not_taken(what: str) -> None:
    """cupy#9830: a key that cannot tell two architectures apart. Also under a name that collides."""
    assert OTHERS[what].file_name != KEY.file_name
    with pytest.raises(WireError, match="another kernel"):
        Bundle.from_bytes(BUNDLE.to_bytes(OTHERS[what]), KEY)


def test_every_flipped_bit_and_every_truncation_is_noticed() -> None:
    data = Bundle(b"code", {"name": "f"}).to_bytes(KEY)
    for i in range(len(data)):
        with pytest.raises(WireError):
            Bundle.from_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :], KEY)
        with pytest.raises(WireError):
            Bundle.from_bytes(data[:i], KEY)
    with pytest.raises(WireError):
        Bundle.from_bytes(data + b"\0", KEY)


def test_true_and_1_and_none_are_different_params() -> None:
    names = {
        KernelKey("e", "k", (("x", v),), "a", "d").file_name for v in (True, 1, None, "1", 0, False, 1.5)
    }
    assert len(names) == 7


# ---- disk --------------------------------------------------------------------------------------------------


def test_what_one_process_compiled_the_next_one_loads(tmp_path: Path) -> None:
    assert get(tmp_path)[1].kernels_compiled == 1
    bundle, stats = get(tmp_path, never)
    assert bundle.code == BUNDLE.code and (stats.disk_hits, stats.kernels_compiled, stats.rebuilt) == (
        1,
        0,
        0,
    )
    assert leftovers(tmp_path) == []


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "zero-length": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "header only": lambda data: data[:8],
    "one byte short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "a flipped bit": flip,
    "random bytes": lambda data: os.urandom(len(data)),
    "text": lambda data: b"not a bundle\n" * 50,
    "of another kernel": lambda data: BUNDLE.to_bytes(OTHERS["arch"]),
    "of another schema": lambda data: other_schema(),
}


def other_schema() -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_loader, "SCHEMA", 99)
        return BUNDLE.to_bytes(KEY)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_rebuilt_with_one_warning(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """triton#4002, pytorch PR#92664: half-written files, or one rank's binary with another's metadata."""
    get(tmp_path)
    path = tmp_path / KEY.file_name
    path.write_bytes(DAMAGE[what](path.read_bytes()))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "frost"):
        bundle, stats = get(tmp_path)
    assert bundle.code == BUNDLE.code and stats.kernels_compiled == 1 and stats.rebuilt >= 1
    assert len(caplog.records) == 1 and path.name in caplog.text
    assert get(tmp_path, never)[0].code == BUNDLE.code, "the file was not mended"
    assert leftovers(tmp_path) == []


def test_many_damaged_files_give_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for key in OTHERS.values():
        get(tmp_path, key=key)
        (tmp_path / key.file_name).write_bytes(b"junk")
    made = loader(tmp_path)
    with caplog.at_level(logging.WARNING, "frost"):
        for key in OTHERS.values():
            made.get(key, lambda: BUNDLE)
    assert len(caplog.records) == 1 and made.stats.kernels_compiled == len(OTHERS)


@pytest.mark.parametrize("make", ["a file in its place", "a path below a file", "/proc"])
def test_a_folder_that_cannot_be_written_means_in_memory(
    make: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """flashinfer#2834: read-only folders and home folders that don't exist. Permission bits don't stop root,
    these do."""
    folder = {
        "a file in its place": tmp_path / "file",
        "a path below a file": tmp_path / "file" / "below" / "it",
        "/proc": Path("/proc/frost/kernels"),
    }[make]
    (tmp_path / "file").write_text("in the way")
    made = loader(folder)
    with caplog.at_level(logging.WARNING, "frost"):
        for key in (KEY, OTHERS["arch"]):
            assert made.get(key, lambda: BUNDLE) is BUNDLE and made.get(key, never) is BUNDLE
    assert len(caplog.records) == 1 and "memory" in caplog.text
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_that_exists_but_takes_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, say."""

    real = os.open

    def full(path: Any, *args: Any, **kwargs: Any) -> int:
        if ".tmp-" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(template_loader.os, "open", full)
    with caplog.at_level(logging.WARNING, "frost"):
        assert get(tmp_path)[0] is BUNDLE
    assert "No space left" in caplog.text and leftovers(tmp_path) == []


def test_no_folder_at_all_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "frost"):
        assert get(None)[0] is BUNDLE
    assert caplog.records == []


def test_interpreted_kernels_stay_out_of_the_folder(tmp_path: Path) -> None:
    assert loader(tmp_path).get(KEY, lambda: BUNDLE, persist=False) is BUNDLE
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.frostk"
    write_atomically(path, b"old")

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(template_loader.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["kept.frostk"]


# ---- locks -----------------------------------------------------------------------------------------------


def test_a_lock_held_by_a_live_process_is_waited_for_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flashinfer#972: a stale lock hangs the next process for ever."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(template_loader, "LOCK_WAIT_S", 0.3)
    path = (tmp_path / KEY.file_name).with_suffix(".lock")
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        with caplog.at_level(logging.WARNING, "frost"):
            assert get(tmp_path)[0].code == BUNDLE.code
        waited = time.monotonic() - start
    assert 0.25 < waited < 10 and "without the lock" in caplog.text
    assert get(tmp_path, never)[0].code == BUNDLE.code


def test_a_lock_file_that_nobody_holds_costs_nothing(tmp_path: Path) -> None:
    """Left by a process that was killed: the system released its lock."""
    (tmp_path / KEY.file_name).with_suffix(".lock").write_text("99999999")
    start = time.monotonic()
    get(tmp_path)
    assert time.monotonic() - start < 5 and leftovers(tmp_path) == []


def test_what_another_process_built_during_the_wait_is_taken(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / KEY.file_name
    held = path.with_suffix(".lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def finish() -> None:
        time.sleep(0.2)
        write_atomically(path, BUNDLE.to_bytes(KEY))
        held.close()

    other = threading.Thread(target=finish)
    other.start()
    bundle, stats = get(tmp_path, never)
    other.join()
    assert bundle.code == BUNDLE.code and stats.disk_hits == 1


# ---- threads ----------------------------------------------------------------------------------------------


def test_one_builder_per_key(tmp_path: Path) -> None:
    made, built, results = loader(tmp_path), [], []

    def build() -> Bundle:
        built.append(1)
        time.sleep(0.1)
        return BUNDLE

    threads = [threading.Thread(target=lambda: results.append(made.get(KEY, build))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert len(built) == 1 and len(results) == 8 and made.stats.memory_hits == 7


def test_a_failed_build_reaches_the_waiters_and_is_tried_again(tmp_path: Path) -> None:
    made, errors = loader(tmp_path), []

    def fail() -> Bundle:
        time.sleep(0.1)
        raise RuntimeError("ptxas crashed")

    def work() -> None:
        try:
            made.get(KEY, fail)
        except RuntimeError as e:
            errors.append(str(e))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert errors == ["ptxas crashed"] * 8
    assert made.get(KEY, lambda: BUNDLE) is BUNDLE and leftovers(tmp_path) == []
