"""tools.sanitize: which kernels it reaches, and what it makes of what compute-sanitizer prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engines import registry
from engines.base import Target
from engines.template_loader import loader
from frost.equivalence import compile_config
from tools import sanitize

KERNELS = frozenset({"sdpa_fwd", "bwd_dq"})
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
READ = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at sdpa_fwd+0x1a20
=========     by thread (3,0,0) in block (7,0,0)
=========     Address 0x7f0000001000 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x1234] in libcuda.so.1
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::(anonymous namespace)::copy_kernel<4, ns::F<float>, std::array<char *, 1>>(int, T2)+0x80
=========     by thread (0,0,0) in block (0,0,0)
========= Invalid __shared__ write of size 2 bytes
=========     at 0x40 in fwd.cu:512:sdpa_fwd
========= ERROR SUMMARY: 3 errors
"""
RACE = """========= Error: Race reported between Write access at bwd_dq+0x9a0
=========     and Read access at bwd_dq+0xb10 [128 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def rows(*verdicts: str) -> str:
    return "".join(json.dumps({"row": f"sdpa:{i}", "verdict": v, "detail": "why"}) + "\n" for i, v in enumerate(verdicts))


def judged(log: str, stdout: str, code: int | None = 0, expected: int = 1) -> sanitize.Report:
    return sanitize.judge(sanitize.Report("triton", "memcheck", rows=expected), log, stdout, code, KERNELS)


def test_findings_are_counted_by_kernel() -> None:
    report = judged(READ, rows("pass"), 99)
    assert dict(report.ours) == {"sdpa_fwd": 2} and dict(report.others) == {"copy_kernel": 1}
    assert not report.ok and report.passed == 1
    assert dict(judged(RACE, rows("pass"), 99).ours) == {"bwd_dq": 1}


@pytest.mark.parametrize("place, name", [
    ("at void sdpa_fwd<64>(Args<float>)+0x1a0 in fwd.cu:12", "sdpa_fwd"),
    ("at bwd_dq():0x160 in bwd.cu:6", "bwd_dq"),
    ("at 0x88 in bwd_dq(float *)", "bwd_dq"),
    ("at 0x40 in /kernels/fwd.py:512:sdpa_fwd", "sdpa_fwd"),
    ("at sdpa_fwd+0x40 in fwd.py:512", "sdpa_fwd"),
    ("at _elementwise_max+0x40 in standard.py:191", "? _elementwise_max"),
    ("Uninitialized access at 0x7f10 on access by cudaMemcpy source.", "? Invalid __global__ read of size 4 bytes"),
])
def test_a_finding_has_the_name_of_its_kernel(place: str, name: str) -> None:
    """In each form that versions of the sanitizer print; what has none counts as ours."""
    log = ("========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n"
           f"=========     {place}\n=========     by thread (3,0,0) in block (7,0,0)\n=========\n"
           "========= ERROR SUMMARY: 1 error\n")
    report = judged(log, rows("pass"), 99)
    assert dict(report.ours) == {name: 1} and not report.ok


def test_a_warning_that_results_may_be_wrong_is_not_clean() -> None:
    log = ("========= COMPUTE-SANITIZER\n========= Warning: Detected overflow of tracked cuda::barrier structures. Results might "
           "be incorrect.\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n")
    assert not judged(log, rows("pass")).ok
    assert judged(log.replace("========= Warning", "Warning"), rows("pass")).ok  # a line of the program's


def test_nothing_found_is_clean() -> None:
    assert judged(CLEAN, rows("pass")).ok
    others = READ.replace("sdpa_fwd", "somebody_elses")
    assert judged(others, rows("pass"), 99).ok, "what others' kernels do is told, and is not ours"


def test_findings_past_what_is_printed_count_as_ours() -> None:
    many = ": 7 errors\n========= ERROR SUMMARY: 5 errors were not printed. Use --print-limit option"
    report = judged(CLEAN.replace(": 0 errors", many), rows("pass"), 99)
    assert not report.ok and dict(report.ours) == {"(not printed)": 7}


@pytest.mark.parametrize("log, stdout, code, says", [
    (CLEAN, rows("pass"), None, "time ran out after 1 of 1 rows"),
    (CLEAN, "", 1, "ended with code 1 after 0 of 1 rows"),
    (CLEAN, rows("fail"), 3, "sdpa:0: fail why"),
    (CLEAN, rows("declined"), 3, "sdpa:0: declined why"),
    ("", rows("pass"), 0, "no summary"),
])
def test_a_process_that_proves_nothing_is_not_clean(log: str, stdout: str, code: int | None, says: str) -> None:
    report = judged(log, stdout, code)
    assert says in report.problem and not report.ok


def test_options_are_those_that_the_installed_sanitizer_has(tmp_path: Path) -> None:
    def made(tool: str, help_text: str) -> list[str]:
        return sanitize.command("cs", tool, tmp_path / "log", "sm80", "", help_text)

    every = "--kernel-name " + " ".join(name for name, *_ in sanitize.OPTIONS)
    for tool in sanitize.TOOLS:
        line = made(tool, every)
        assert {name for name, _, tools, _ in sanitize.OPTIONS if tool in tools} == {
            part for part in line if part in every.split()} - {"--kernel-name"}
        assert all(line[line.index(name) + 1] == value for name, value, tools, _ in sanitize.OPTIONS if tool in tools)
        assert made(tool, "")[:5] == ["cs", "--tool", tool, "--log-file", str(tmp_path / "log")]
        assert made(tool, "")[5] == sys.executable, "an option of another version would be the program's name to this one"
    assert "kernel_substring=sdpa_bwd_dq" in made("racecheck", every)
    assert made("racecheck", "--filter arg")[5:7] == ["--filter", "kernel_substring=sdpa_bwd_bias"]
    for tool in ("memcheck", "initcheck"):
        assert not any("kernel_substring" in part for part in made(tool, every)), "what others write, ours may read"


def test_a_whole_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program in compute-sanitizer's place that writes a log and reports one row of two."""
    fake = tmp_path / "fake"
    fake.write_text(f"#!{sys.executable}\nimport os, sys\n"
                    "open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write(" + repr(READ) + ")\n"
                    "assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
                    "print('noise'); print(" + repr(rows("pass").strip()) + "); sys.exit(99)\n")
    fake.chmod(0o755)
    report = sanitize.run_one(str(fake), "", "sm80", "memcheck", tmp_path, "sdpa:bf16-d64", 60)
    assert report.rows == 1 and report.passed == 1 and dict(report.ours) == {"sdpa_fwd": 2}
    report = sanitize.run_one(str(fake), "", "sm80", "memcheck", tmp_path, "bf16-d64", 60)
    assert report.rows == 2 and "after 1 of 2 rows" in report.problem
    fake.write_text(f"#!{sys.executable}\nimport time; time.sleep(60)\n")
    assert "time ran out" in sanitize.run_one(str(fake), "", "sm80", "memcheck", tmp_path, "bf16-d64", 0.5).problem


def test_arguments(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main(["--only", "no such row"]) == 2 and "no such row" in capsys.readouterr().err
    assert sanitize.main([]) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
    assert sanitize.main(["--list", "--engine", "sm80"]) == 0
    assert "sm80 sdpa_backward:packed-bias" in capsys.readouterr().out


def test_rows_are_where_the_matrix_has_them() -> None:
    for engine in sanitize.ENGINES:
        assert len({(c.op, c.name) for c in sanitize.configs(engine)}) == sum(
            len(names) for (name, _), names in sanitize.CASES.items() if name == engine)


@pytest.mark.tables
@pytest.mark.parametrize("engine", sanitize.ENGINES)
def test_every_kernel_is_reached(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that no row compiles would never run under the sanitizer; a row that is declined proves nothing."""
    target = Target.cuda((9, 0))
    missing = registry.get(engine).unavailable(target)
    if missing is not None:
        pytest.skip(str(missing))
    seen: set[str] = set()
    real = loader.get

    def watched(*args: Any, **how: Any) -> Any:
        bundle = real(*args, **how)
        seen.add(bundle.meta["name"])
        return bundle

    monkeypatch.setattr(loader, "get", watched)
    for config in sanitize.configs(engine):
        compile_config(config, engine, target)
    assert seen == sanitize.kernel_names(engine)
