"""NVIDIA's compute-sanitizer over a small matrix of every engine's kernels: `python -m tools.sanitize`.

Each kernel that ships runs at least once under memcheck (addresses outside allocations), racecheck (threads that meet in shared
memory without a barrier) and initcheck (reads of global memory that nobody wrote), and what it computes is held to the oracle
all the same. One process per engine and tool; kernels are compiled beforehand, without the sanitizer.

Exit code 0: no finding in a kernel of ours, every process came to its end; 1 otherwise; 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from frost.equivalence import compile_config, configs_for, run_config
from frost.gate_matrix import Config

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck")
# The allocator of PyTorch hands out parts of large blocks: an access past a tensor is inside the block, and memory that was
# written under another tensor counts as initialised. Without it every tensor is an allocation of its own. Modules load lazily,
# since the sanitizer rewrites every kernel that is loaded, and PyTorch's libraries hold tens of thousands.
CHILD_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "1"}
# (option, value, tools it is for, why); left out where the installed sanitizer's --help does not have it.
OPTIONS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("--print-limit", "0", TOOLS, "all of them: a finding that is not printed has no kernel's name"),
    ("--error-exitcode", "99", TOOLS, "beside the child's own 0 and 3"),
    ("--show-backtrace", "device", TOOLS, "the interpreter's frames on the host say nothing and take time to walk"),
    ("--launch-timeout", "120", TOOLS, "several processes importing PyTorch at once outlast the default of 10 to 60 s"),
    ("--report-api-errors", "no", ("memcheck",), "the driver's refusals are errors with names already (frost.DriverError)"),
    ("--padding", "4096", ("memcheck",), "small allocations lie side by side: past the end of one is inside the next"),
    ("--num-cuda-barriers", "64", ("racecheck",), "what it counts in the code is too few for barriers initialised in a loop"),
)


# ---- what runs -----------------------------------------------------------------------------------------------------------

# Enough heads that the large tiles of Hopper's kernels are picked, with little work: racecheck looks at every access.
_MANY_HEADS: dict[str, Any] = {"heads": (60, 60), "seqlen": (130, 130)}
_OWN = {c.name: c for c in (
    Config("many-heads-d64", causal=True, **_MANY_HEADS),
    Config("many-heads-d128", head_dim=(128, 128), **_MANY_HEADS),
    Config("many-heads-d256", causal=True, head_dim=(256, 256), dtype="fp16", **_MANY_HEADS),
)}
_DENSE = ("bf16-d80-dv48", "one-query", "no-keys", "softcap-causal-bias", "mask-and-bias", "sink-window", "lengths-bottom-right",
          "packed-window-sink", "packed-bias", "layout-slice-of-qkv", "layout-offset-by-one")
_HOPPER = ("square-d64-causal", "square-d128-bshd", "square-d256-causal", "full-d64-long-keys", *_OWN)
_BACKWARD = ("bias-keys", "bias-rows", "bias-one-number", "bias-minus-inf", "dlse-sink-packed", "only-dq",
             "deterministic-gqa-window", "deterministic-packed", "deterministic-bias-row")
_FLAVORS = ("bf16-d64", "bf16-d96", "bf16-d128-causal", "bf16-d192-dv128", "bf16-d256")
_SELECTION = ("bf16-g3", "bf16-g16", "bf16-d192-dv128", "fp32-g4", "hostile-counts", "packed-hostile", "one-query", "layout-bshd")

# (engine, op) -> names of rows: the gate matrix's, or those above.
CASES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("triton", "sdpa"): (*_DENSE, *_HOPPER, "fp32-d1-dv3", "layout-transposed"),
    ("triton", "sdpa_backward"): (*_DENSE, *_HOPPER, *_BACKWARD, "deterministic-d128-causal", "fp32-d1-dv3", "layout-transposed"),
    ("triton", "nsa_selection"): _SELECTION,
    ("triton", "nsa_selection_backward"): (*_SELECTION, "deterministic-packed"),
    ("triton", "nsa_compressed_attention"): ("cmp-bf16-g4", "cmp-fp32-g3", "cmp-packed", "cmp-one-query"),
    ("triton", "nsa_compressed_attention_backward"): ("cmp-bf16-g4", "cmp-fp32-g3", "cmp-packed", "cmp-deterministic-packed"),
    ("triton", "nsa_topk"): ("topk-ties", "topk-packed", "topk-fewer-queries"),
    ("sm80", "sdpa"): (*_DENSE, *_FLAVORS),
    ("sm80", "sdpa_backward"): (*_DENSE, *_FLAVORS, *_BACKWARD, "deterministic-d128-causal"),
}
ENGINES = tuple(dict.fromkeys(engine for engine, _ in CASES))


def configs(engine: str, only: str = "") -> list[Any]:
    """An engine's rows, forward and backward; `only`: a part of "op:name". Raises KeyError for a row that the matrix lost."""
    found = []
    for (name, op), rows in CASES.items():
        if name == engine:
            known = {**{n: replace(c, op=op) for n, c in _OWN.items()}, **{c.name: c for c in configs_for(op, "cuda")}}
            found += [known[row] for row in rows if only in f"{op}:{row}"]
    return found


# ---- names of kernels ----------------------------------------------------------------------------------------------------


def kernel_names(engine: str) -> frozenset[str]:
    """The entry points in an engine's sources: in Python the jitted functions that no other one calls."""
    from engines import registry

    jitted: set[str] = set()
    used: set[str] = set()
    names: set[str] = set()
    folders = {p.parent for p in registry.get(engine).source_files() if "kernels" in p.parts}
    for path in sorted(p for folder in folders for p in folder.iterdir()):
        if path.suffix == ".cu":
            names |= set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", path.read_text()))
        elif path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                    jitted.add(node.name)
                    used |= {n.id for part in node.body for n in ast.walk(part) if isinstance(n, ast.Name)}
    return frozenset(names | (jitted - used))


# ---- a child -------------------------------------------------------------------------------------------------------------


def child(engine: str, only: str) -> int:
    """Runs an engine's rows on the device, one line of JSON each."""
    good = True
    for config in configs(engine, only):
        result = run_config(config, engine, "cuda")
        good &= result.verdict == "pass"
        print(json.dumps({"row": f"{config.op}:{config.name}", "verdict": result.verdict, "detail": result.detail}), flush=True)
    return 0 if good else 3


def compile_shard(engine: str, shard: int, of: int, cc: tuple[int, int]) -> int:
    """Compiles every `of`-th row into the kernel cache. No device is touched; what fails here fails again in the child."""
    from engines.base import Target

    for config in configs(engine)[shard::of]:
        try:
            compile_config(config, engine, Target.cuda(cc))
        except Exception as e:
            print(f"{config.op}:{config.name}: {e}", file=sys.stderr)
    return 0


# ---- what the sanitizer said -----------------------------------------------------------------------------------------------


@dataclass
class Report:
    """One process: rows that passed, and findings by kernel. `problem`: why the process proves nothing, or ""."""

    engine: str
    tool: str
    passed: int = 0
    rows: int = 0
    ours: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    problem: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problem and not self.ours


_SUMMARY = re.compile(r"=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed.*)\s*$")
_HEAD = re.compile(r"=+ (\S.*)")  # what belongs to a finding is indented further
# "at void ns::kernel<4, ns::F<float>>(int)+0x80 in f.cu:9", "at kernel():0x80 in f.cu:9";
# "at 0x80 in f.cu:9:kernel", "at 0x80 in kernel(int)"
_NAMED = (re.compile(r"\bat (?!0x)(.+?)[+:]0x[0-9a-f]+"), re.compile(r"\bat 0x[0-9a-f]+ in (?:[^\s:]+:\d+:)?(.+)"))
_NOT_A_NAME = re.compile(r"\((?:anonymous namespace|instance \d+)\)::|<unnamed>::|^void ")
_NO_FINDING = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application", "No attachable")
_PYTHON = re.compile(r"\.py:\d+\b")
UNNAMED = "? "  # before what is no kernel's name: a finding's first words, or a function inlined into one of Triton's kernels


def _kernel(block: Sequence[str], kernels: frozenset[str]) -> str:
    for line in block:
        if hit := next((m for pattern in _NAMED if (m := pattern.search(line))), None):
            plain = _NOT_A_NAME.sub("", hit.group(1))
            name = re.split(r"[<(\s]", plain, maxsplit=1)[0].rpartition("::")[2]
            return name if name in kernels or not _PYTHON.search(line) else UNNAMED + name
    head = _HEAD.match(block[0])
    return UNNAMED + (head.group(1) if head else block[0])[:60]


def findings(log: str, kernels: frozenset[str]) -> tuple[int | None, Counter[str]]:
    """(the number in the tool's own summary, None where there is none; findings by kernel, or by their first words)."""
    total: int | None = None
    found: Counter[str] = Counter()
    block: list[str] = []
    for line in [*log.splitlines(), "========= ERROR SUMMARY"]:
        if summary := _SUMMARY.match(line):
            total = (total or 0) + int(summary.group(1) or summary.group(2))
        head = _HEAD.match(line)
        if head and block:
            found[_kernel(block, kernels)] += 1
            block = []
        if head and not head.group(1).startswith(_NO_FINDING) or block and line.startswith("========="):
            block.append(line)
    return total, found


def judge(report: Report, log: str, stdout: str, code: int | None, kernels: frozenset[str]) -> Report:
    """What a process that has ended proves. `code`: None where its time ran out. A finding that names no kernel counts as ours:
    a copy of memory that nobody wrote, a warning that results may be wrong, an error of the sanitizer's own; so does one in a
    line of Python, since the kernels of PyTorch and its libraries have none."""
    said = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"row"')]
    report.passed = sum(s["verdict"] == "pass" for s in said)
    total, found = findings(log, kernels)
    for name, count in found.items():
        (report.ours if name in kernels or name.startswith(UNNAMED) else report.others)[name] += count
    unseen = (total or 0) - found.total()
    if unseen > 0:  # past what the tool prints: nobody knows whose
        report.ours["(not printed)"] += unseen
    wrong = [f"{s['row']}: {s['verdict']} {s['detail']}" for s in said if s["verdict"] != "pass"]
    if code is None:
        report.problem = f"time ran out after {report.passed} of {report.rows} rows"
    elif wrong:
        report.problem = wrong[0]
    elif len(said) < report.rows:
        report.problem = f"ended with code {code} after {len(said)} of {report.rows} rows"
    elif total is None:
        report.problem = "the sanitizer printed no summary"
    return report


# ---- processes -------------------------------------------------------------------------------------------------------------


def command(sanitizer: str, tool: str, log: Path, engine: str, only: str, help_text: str) -> list[str]:
    """racecheck looks at our kernels alone: PyTorch's take most of the time and are not the subject. The others have to see
    every kernel, since what one writes another may read."""
    made = [sanitizer, "--tool", tool, "--log-file", str(log)]
    for name, value, tools, _ in OPTIONS:
        if tool in tools and name in help_text:
            made += [name, value]
    option = next((o for o in ("--kernel-name", "--filter") if o in help_text), None)
    if tool == "racecheck" and option is not None:
        made += [part for name in sorted(kernel_names(engine)) for part in (option, f"kernel_substring={name}")]
    return [*made, sys.executable, "-m", "tools.sanitize", "--child", engine, "--only", only]


def run_one(sanitizer: str, help_text: str, engine: str, tool: str, logs: Path, only: str, limit_s: float) -> Report:
    report = Report(engine, tool, rows=len(configs(engine, only)))
    log = logs / f"{engine}-{tool}.log"
    start = time.monotonic()
    process = subprocess.Popen(command(sanitizer, tool, log, engine, only, help_text), cwd=ROOT, text=True,
                               env={**os.environ, **CHILD_ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    code: int | None
    try:
        stdout, _ = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        stdout, code = process.communicate()[0], None
    (logs / f"{engine}-{tool}.out").write_text(stdout)
    report.seconds = time.monotonic() - start
    return judge(report, log.read_text(errors="replace") if log.exists() else "", stdout, code, kernel_names(engine))


def compile_ahead(engines: Iterable[str], cc: tuple[int, int], workers: int) -> None:
    running = [subprocess.Popen(
        [sys.executable, "-m", "tools.sanitize", "--compile", engine, f"{shard}/{workers}", "--cc", f"{cc[0]}.{cc[1]}"], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}) for engine in engines for shard in range(workers)]
    for process in running:
        process.wait()


def show(reports: Sequence[Report]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="compute-sanitizer", title_justify="left")
    for column in ("engine", "tool", "rows", "findings in our kernels", "in others'", "seconds", ""):
        table.add_column(column, overflow="fold")
    for r in reports:
        named = [", ".join(f"{name} {count}" for name, count in counter.most_common()) or "0" for counter in (r.ours, r.others)]
        verdict = "[green]clean[/]" if r.ok else f"[red]{r.problem or 'findings'}[/]"
        table.add_row(r.engine, r.tool, f"{r.passed} of {r.rows}", *named, f"{r.seconds:.0f}", verdict)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m tools.sanitize", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--engine", action="append", choices=ENGINES, help="only this engine (again for more)")
    p.add_argument("--tool", action="append", choices=TOOLS, help="only this tool (again for more)")
    p.add_argument("--only", default="", help='only rows whose "op:name" contains this')
    p.add_argument("--logs", type=Path, default=Path("sanitizer-logs"), help="folder for what the tools print")
    p.add_argument("--limit-s", type=float, default=480, help="seconds that one process may take (default 480)")
    p.add_argument("--jobs", type=int, default=6, help="processes at a time on the device (default 6)")
    p.add_argument("--list", action="store_true", help="print the rows and stop; needs no GPU")
    p.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    p.add_argument("--compile", nargs=2, metavar=("ENGINE", "SHARD/OF"), help=argparse.SUPPRESS)
    p.add_argument("--cc", default="9.0", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    engines, tools = tuple(args.engine or ENGINES), tuple(args.tool or TOOLS)
    if args.child:
        return child(args.child, args.only)
    if args.compile:
        shard, of = map(int, args.compile[1].split("/"))
        major, minor = map(int, args.cc.split("."))
        return compile_shard(args.compile[0], shard, of, (major, minor))
    wanted = {engine: configs(engine, args.only) for engine in engines}
    if args.list:
        for engine, rows in wanted.items():
            print(*(f"{engine} {c.op}:{c.name}" for c in rows), sep="\n")
        return 0
    engines = tuple(e for e in engines if wanted[e])
    if not engines:
        print(f"--only: given {args.only!r}, expected a part of a row that --list names", file=sys.stderr)
        return 2
    import torch

    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    missing = ("an NVIDIA GPU, and this process sees none" if not torch.cuda.is_available() else
               "compute-sanitizer (it comes with the CUDA toolkit), and there is none on the PATH" if sanitizer is None else "")
    if missing or sanitizer is None:
        print(f"tools.sanitize needs {missing} (--list works without)", file=sys.stderr)
        return 2
    help_text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, timeout=60).stdout
    args.logs.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    compile_ahead(engines, torch.cuda.get_device_capability(), max(1, (os.cpu_count() or 1) // len(engines)))
    print(f"compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)
    with ThreadPoolExecutor(max(args.jobs, 1)) as pool:
        jobs = [pool.submit(run_one, sanitizer, help_text, engine, tool, args.logs, args.only, args.limit_s)
                for engine in engines for tool in tools]
        reports = []
        for job in jobs:
            reports.append(job.result())
            print(f"{reports[-1].engine} {reports[-1].tool}: {'clean' if reports[-1].ok else 'NOT CLEAN'}", file=sys.stderr)
    show(reports)
    return 0 if all(r.ok for r in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
