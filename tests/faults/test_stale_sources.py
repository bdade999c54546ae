"""What a kernel was made from: every file that reaches it changes its identity, and nothing else does."""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path

import pytest

import engines.triton as triton_engine
from engines import registry
from engines.base import digest_files
from engines.template_loader import KernelKey

HERE = Path(triton_engine.__file__).parent
SOURCES = registry.get("triton").source_files()


def copied(to: Path) -> list[Path]:
    """The source files under another root, in the same folders."""
    out = []
    for path in SOURCES:
        target = to / HERE.name / path.relative_to(HERE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        out.append(target)
    return out


def test_the_tree_may_lie_anywhere_and_be_touched(tmp_path: Path) -> None:
    """No absolute path and no time stamp is in a digest: an installed copy of the same sources is the same
    kernel."""
    first, second = copied(tmp_path / "a"), copied(tmp_path / "b" / "deeper")
    assert digest_files(first) == digest_files(second) == registry.get("triton").source_digest()
    for path in first:
        os.utime(path, (1, 1))
    assert digest_files(first) == digest_files(second)
    assert digest_files(reversed(first)) == digest_files(second)


@pytest.mark.parametrize("name", [str(p.relative_to(HERE)) for p in SOURCES])
def test_every_file_counts(name: str, tmp_path: Path) -> None:
    """triton#7322: only the top function's text was hashed. A constant in a helper, in one file after the
    other."""
    files = copied(tmp_path)
    before = digest_files(files)
    target = next(p for p in files if str(p).endswith(name))
    target.write_text(target.read_text() + "\nCHANGED = 1\n")
    after = digest_files(files)
    assert after != before
    keys = {KernelKey("triton", "sdpa_fwd", (), "sm_90", d) for d in (before, after)}
    assert len({k.file_name for k in keys}) == 2


def test_a_renamed_or_moved_file_counts(tmp_path: Path) -> None:
    files = copied(tmp_path)
    moved = files[0].with_name("other.py")
    files[0].rename(moved)
    assert digest_files([moved, *files[1:]]) != registry.get("triton").source_digest()


def test_an_edit_of_the_same_length_within_the_same_clock_tick_counts(tmp_path: Path) -> None:
    """Digests are remembered by path, time and size; the content decides all the same where these can't
    tell."""
    path = tmp_path / "kernel.py"
    path.write_text("A = 1\n")
    before = digest_files([path])
    stamp = path.stat().st_mtime_ns
    path.write_text("A = 2\n")
    os.utime(path, ns=(stamp + 1, stamp + 1))
    assert digest_files([path]) != before


def test_kernels_import_nothing_outside_the_digest() -> None:
    """Every module that a kernel file imports, by relative import, is one of the sources; the rest is
    Triton."""
    listed = {p.resolve() for p in SOURCES}
    for path in SOURCES:
        if path.parent.name != "kernels":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                found = (path.parent / f"{node.module}.py").resolve()
                assert found in listed, f"{path.name} imports {node.module}"
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert all(str(n).split(".")[0] in ("triton", "__future__") for n in names), (
                    path.name,
                    names,
                )


def test_every_kernel_file_and_every_table_of_tiles_and_signatures_counts() -> None:
    names = {p.name for p in SOURCES}
    assert {p.name for p in (HERE / "kernels").glob("*.py")} <= names
    assert {"params.py", "params_bwd.py", "configs.py", "configs_bwd.py", "runtime.py"} <= names


def test_the_digest_is_a_function_of_the_sources_alone() -> None:
    assert registry.get("triton").source_digest() == digest_files(SOURCES)
    assert len(registry.get("triton").source_digest()) == 64
