"""Imports: one direction, cheap, and never somebody else's `engines` or `descriptors`."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("descriptors", "engines", "frost")
# Who may import whom of ours. tools, tests and examples are leaves: nobody may import them.
ALLOWED = {"descriptors": {"descriptors"}, "engines": {"descriptors", "engines"},
           "frost": {"descriptors", "engines", "frost"}}
OURS = {*PACKAGES, "tools", "tests", "examples"}
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import statement, wherever it stands."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[:len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def under_type_checking(path: Path) -> set[int]:
    """Lines that only a type checker sees."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_imports_run_one_way(path: Path) -> None:
    """frost -> engines -> descriptors; a descriptor needs no torch."""
    package = path.relative_to(ROOT).parts[0]
    for line, module in imported(path):
        top = module.split(".")[0]
        assert top not in OURS or top in ALLOWED[package], f"{path}:{line} imports {module}"
        if package == "descriptors":
            assert top not in ("torch", "triton"), f"{path}:{line} imports {module}"


def engine_folders() -> list[str]:
    return sorted(p.parent.name for p in (ROOT / "engines").glob("*/__init__.py"))


@pytest.mark.parametrize("engine", engine_folders())
def test_engines_never_import_each_other(engine: str) -> None:
    others = set(engine_folders()) - {engine}
    for path in sorted((ROOT / "engines" / engine).rglob("*.py")):
        for line, module in imported(path):
            parts = module.split(".")
            assert parts[0] != "engines" or not others & set(parts[1:2]), f"{path}:{line} imports {module}"


def test_shared_engine_modules_import_no_engine() -> None:
    """The registry names engines in a table and imports them when it is first asked."""
    for path in sorted((ROOT / "engines").glob("*.py")):
        skipped = under_type_checking(path)
        for line, module in imported(path):
            parts = module.split(".")
            assert line in skipped or parts[0] != "engines" or parts[1:2] not in [[e] for e in engine_folders()], (
                f"{path}:{line} imports {module}")


def test_the_rules_see_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader itself: nested, relative and aliased imports."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "engines" / "triton" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("import frost.plan as p\nfrom .. import reference\ndef f():\n    from ..torch_sdpa.cells import y\n")
    found = {module for _, module in imported(path)}
    assert {"frost.plan", "engines.reference", "engines.torch_sdpa.cells", "engines.torch_sdpa.cells.y"} <= found


def python(code: str, *, cwd: Path, path: list[Path], flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, *flags, "-c", code], cwd=cwd, env=env, capture_output=True, text=True,
                          timeout=120, check=False)


def test_import_brings_no_triton_and_wakes_no_gpu(tmp_path: Path) -> None:
    run = python("import sys, frost, torch\n"
                 "print('triton' in sys.modules, torch.cuda.is_initialized(), frost.attention.__name__)",
                 cwd=tmp_path, path=[ROOT])
    assert run.stdout.split() == ["False", "False", "attention"], run.stderr


def test_public_names_exist() -> None:
    import frost

    for name in frost.__all__:
        assert getattr(frost, name) is not None
    assert frost.Graph.__module__ == "frost.graph" and issubclass(frost.GraphError, ValueError)
    assert issubclass(frost.NotSupportedError, RuntimeError) and issubclass(frost.PlanError, ValueError)


@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_shadowed_sibling_is_named(kind: str, tmp_path: Path) -> None:
    """A user's own `engines` in front of ours: said at once, with both places and the way out."""
    other = tmp_path / ("engines.py" if kind == "module" else "engines")
    if kind == "package":
        other.mkdir()
    (other / "__init__.py" if kind == "package" else other).write_text("")
    run = python("import frost", cwd=tmp_path, path=[tmp_path, ROOT])
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: frost: package 'engines'")
    for part in (str(other), str(ROOT / "engines"), "rename"):
        assert part in last


def test_a_plain_folder_of_that_name_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    run = python("import frost", cwd=tmp_path, path=[tmp_path, ROOT])
    assert run.returncode == 0, run.stderr


def test_a_sibling_that_was_imported_from_elsewhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "descriptors").mkdir()
    (tmp_path / "descriptors" / "__init__.py").write_text("")
    run = python(f"import sys, descriptors; sys.path.insert(0, {str(ROOT)!r}); import frost", cwd=tmp_path,
                 path=[tmp_path])
    assert "ImportError: frost: package 'descriptors'" in run.stderr


def test_a_missing_sibling_is_named(tmp_path: Path) -> None:
    """A copy of one package alone. Without site-packages: told before anything else is imported."""
    shutil.copytree(ROOT / "frost", tmp_path / "frost", ignore=shutil.ignore_patterns("__pycache__"))
    run = python("import frost", cwd=tmp_path, path=[tmp_path], flags=["-S"])
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: frost: package 'descriptors': not found") and "install" in last
