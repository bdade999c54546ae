"""Every example runs from anywhere, says how it ended, and says it with its exit code too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
# Arguments of a short run. What is not listed here is not tested: the last test sees to that.
SHORT: dict[str, list[str]] = {
    "quickstart": ["--device", "cpu"],
    "train_char_lm": ["--device", "cpu", "--steps", "10", "--plot", "curves.png"],
    "varlen_packing": ["--device", "cpu", "--steps", "3"],
    "custom_engine": [],
}


def run(name: str, arguments: list[str], cwd: Path, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """As a program; with `prelude`, after that code in the same process."""
    script = str(FOLDER / f"{name}.py")
    command = [script, *arguments] if not prelude else [
        "-c", f"import runpy, sys\nsys.argv = {[script, *arguments]!r}\n{prelude}\nrunpy.run_path({script!r}, run_name='__main__')"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=240,
                          check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-2000:]


@pytest.mark.parametrize("name", SHORT)
def test_example_passes(name: str, tmp_path: Path) -> None:
    done = run(name, SHORT[name], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert last_line(done).startswith(f"PASS {name}")
    if name == "quickstart":  # the row in which no engine was named
        assert len(re.findall(r"^ *default ", done.stdout, re.MULTILINE)) == 2
    if name == "train_char_lm":
        pytest.importorskip("matplotlib")
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# An attention that is off by a little must turn every verdict.
SPOILT = {
    "reference": """
from engines.reference import adapter
forward = adapter.sdpa_forward
def spoilt(q, *rest, **options):
    o, lse = forward(q, *rest, **options)
    o.mul_(1.01 if q.dtype.itemsize < 8 else 1.0)
    return o, lse
adapter.sdpa_forward = spoilt
""",
    "functional": """
import frost
attention = frost.attention
frost.attention = lambda q, k, v, **options: attention(q, k, v, **{**options, 'scale': 0.5})
""",
}


@pytest.mark.parametrize(("name", "arguments", "spoilt"), [
    ("quickstart", SHORT["quickstart"], "reference"), ("varlen_packing", SHORT["varlen_packing"], "functional"),
    ("train_char_lm", ["--device", "cpu", "--steps", "30", "--plot", "curves.png"], "functional")])
def test_example_fails_where_attention_is_off(name: str, arguments: list[str], spoilt: str, tmp_path: Path) -> None:
    done = run(name, arguments, tmp_path, SPOILT[spoilt])
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert last_line(done).startswith(f"FAIL {name}")


def test_custom_engine_fails_where_the_engine_is_off(tmp_path: Path) -> None:
    source = (FOLDER / "custom_engine.py").read_text()
    assert source.count("acc / total") == 1
    script = tmp_path / "custom_engine.py"
    script.write_text(source.replace("acc / total", "acc / (total + 0.01)"))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and last_line(done).startswith("FAIL custom_engine"), done.stdout + done.stderr


def test_every_example_is_tested() -> None:
    assert {p.stem for p in FOLDER.glob("*.py")} == set(SHORT)
