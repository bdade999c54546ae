"""What lies in a compiled kernel's place in the cache folder: only the kernel itself is ever used.

Real kernels for GPUs that need not be here; a process's first look at the folder each time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cases.small import Spec

from engines import registry
from engines.base import Target
from engines.template_loader import loader
from engines.triton import launching
from frost import cache

SPEC = Spec(dtype="fp16", dims=(16, 16))


def compiled(monkeypatch: pytest.MonkeyPatch, cc: tuple[int, int] = (9, 0)) -> cache.CacheInfo:
    """The counters of a process that starts now and compiles attention for a GPU of that capability."""
    target = Target.cuda(cc)
    missing = registry.get("triton").unavailable(target)
    if missing is not None:
        pytest.skip(str(missing))
    cache.clear(kernels=True)
    cache.reset_counters()
    monkeypatch.setattr(loader, "_warned", set())
    plan = SPEC.build().compile(target, engines=["triton"], gates="off")
    assert plan.routes[0].engine_name == "triton"
    return cache.info()


def flip(kernel: Path, at: float) -> None:
    data = bytearray(kernel.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x20
    kernel.write_bytes(data)


def of_another_arch(kernel: Path) -> None:
    """The bundle of sm_80 under the name of sm_90's: a name that collides, or a folder put together by hand."""
    with pytest.MonkeyPatch.context() as patch:
        compiled(patch, (8, 0))
    (other,) = kernel.parent.glob("*-sm_80-*.frostk")
    other.replace(kernel)


def of_another_source(kernel: Path) -> None:
    """The same kernel before its source was edited, under the new one's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "digest_files", lambda files: "0" * 64)
        compiled(patch)
    (other,) = [p for p in kernel.parent.glob("*-sm_90-*.frostk") if p != kernel]
    other.replace(kernel)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda kernel: os.truncate(kernel, 1000),
    "one byte short": lambda kernel: os.truncate(kernel, kernel.stat().st_size - 1),
    "a bit flipped in the header": lambda kernel: flip(kernel, 0.0),
    "a bit flipped in the middle": lambda kernel: flip(kernel, 0.5),
    "a bit flipped at the end": lambda kernel: flip(kernel, 1.0),
    "zero-length": lambda kernel: os.truncate(kernel, 0),
    "longer than any kernel": lambda kernel: os.truncate(kernel, 1 << 40),
    "of another arch": of_another_arch,
    "of another source": of_another_source,
    "a pipe": lambda kernel: (kernel.unlink(), os.mkfifo(kernel)),
    "a link to a device that never ends": lambda kernel: (kernel.unlink(), kernel.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_built_over_with_one_warning(
    what: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert compiled(monkeypatch).kernels_compiled == 1
    (kernel,) = (fresh_cache / "kernels").iterdir()
    size = kernel.stat().st_size
    DAMAGE[what](kernel)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "frost"):
        info = compiled(monkeypatch)
    assert (info.kernels_compiled, info.disk_hits) == (1, 0) and len(caplog.records) == 1
    assert kernel.name in caplog.text and "built again" in caplog.text
    assert kernel.is_file() and not kernel.is_symlink() and kernel.stat().st_size == size
    info = compiled(monkeypatch)
    assert (info.kernels_compiled, info.disk_hits) == (0, 1), "it was not mended"


def test_a_folder_in_its_place_stays_there(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of ours deletes a folder. The kernel is built, in memory, and both are said once."""
    compiled(monkeypatch)
    (kernel,) = (fresh_cache / "kernels").iterdir()
    kernel.unlink()
    kernel.mkdir()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "frost"):
        info = compiled(monkeypatch)
    assert info.kernels_compiled == 1 and kernel.is_dir()
    assert ["is unusable" in r.message or "cannot write" in r.message for r in caplog.records] == [True, True]
    assert [p.name for p in kernel.parent.iterdir()] == [kernel.name]
