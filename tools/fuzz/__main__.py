"""Damaged and hostile files against everything that FROST reads from disk.

    python -m tools.fuzz --inputs 100000 --seed 1
    python -m tools.fuzz --target plan --seed 1 --only 1234        # repeats one finding

Exit code 0: every input ended in a result or in a typed error; 1: findings, each with the line that repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from descriptors import LIMITS

from . import worker
from .targets import TARGETS
from .worker import Share

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = 2_000  # inputs of one process
_PROCESS = [sys.executable, "-m", "tools.fuzz"]
_HUNG_S = (
    6 * worker.LIMIT_S
)  # without progress; beyond the worker's own limit it hangs where no signal reaches


def counts(inputs: int, names: Sequence[str]) -> dict[str, int]:
    """Inputs by target: by their shares, all of them given out."""
    total = sum(TARGETS[n].share for n in names)
    out = {n: inputs * TARGETS[n].share // total for n in names}
    out[names[0]] += inputs - sum(out.values())
    return out


def block(name: str, start: int, stop: int, seed: str) -> Share:
    """A range of inputs in a process of its own; one that dies or hangs is a finding, and the next one goes on after it."""
    share, at = Share(name), start
    while at < stop:
        with tempfile.TemporaryDirectory(prefix="frost-fuzz-") as folder:
            board, out, err = (Path(folder) / n for n in ("board", "out.json", "err"))
            board.write_bytes(worker.NO_INPUT + bytes(8))
            command = [
                *_PROCESS,
                "--worker",
                str(out),
                "--target",
                name,
                "--seed",
                seed,
                "--range",
                str(at),
                str(stop),
                "--board",
                str(board),
            ]
            with err.open("wb") as errors:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdout=errors,
                    stderr=errors,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                )
                why = _wait(process, board)
            if not why and out.exists():
                share.add(Share(**json.loads(out.read_text())))
                return share
            text = err.read_text(errors="replace")
            if board.read_bytes()[:8] == worker.NO_INPUT:
                raise RuntimeError(
                    f"fuzz: {name}: a process that was at no input failed ({why})\n{text[-3000:]}"
                )
            index = int.from_bytes(board.read_bytes()[:8], "little")
            share.inputs += int.from_bytes(board.read_bytes()[8:], "little") + 1
            share.found(index, why or f"exit status {process.returncode}", b"", text)
            at = index + 1
    return share


def _wait(process: subprocess.Popen[bytes], board: Path) -> str:
    """Wait for the end. Why it is none to be content with, or an empty text."""
    last, since = b"", time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now = board.read_bytes()
        if now != last:
            last, since = now, time.monotonic()
        elif now[:8] != worker.NO_INPUT and time.monotonic() - since > _HUNG_S:
            process.kill()
            process.wait()
            return f"no end within {_HUNG_S:.0f} s"
    return "" if process.returncode == 0 else f"exit status {process.returncode}"


def table(shares: Iterable[Share]) -> str:
    """Markdown, one row per kind of file."""
    rows = [
        "| kind of file | inputs | taken | refused, by error | slowest | memory, at most | findings |",
        "|---|---|---|---|---|---|---|",
    ]
    whole = Share("**all**")
    for share in shares:
        whole.add(share)
        rows.append(_row(share))
    return "\n".join([*rows, _row(whole)])


def _row(s: Share) -> str:
    refused = ", ".join(f"{name} {n:,}" for name, n in sorted(s.refused.items(), key=lambda p: -p[1]))
    return (
        f"| {s.target} | {s.inputs:,} | {s.taken:,} | {refused} | {s.slowest_s * 1e3:.0f} ms | +{s.peak_mb:.0f} MB | "
        f"{s.findings} |"
    )


def limits_table() -> str:
    """Markdown: what is taken in of each kind of file."""
    rows = [
        "| kind of file | bytes | levels | values | bytes of a text | counts |",
        "|---|---|---|---|---|---|",
    ]
    for r in LIMITS.values():
        more = ", ".join(f"{n:,} {name}" for name, n in r.counts.items())
        rows.append(
            f"| {r.what} | {r.max_bytes:,} | {r.max_depth} | {r.max_values:,} | {r.max_text:,} | {more} |"
        )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument(
        "--inputs", type=int, default=10_000, help="how many, over all targets (default 10000)"
    )
    parser.add_argument("--seed", default="0", help="another text, other inputs (default 0)")
    parser.add_argument(
        "--target", action="append", choices=list(TARGETS), help="only this kind of file; may be repeated"
    )
    parser.add_argument(
        "--only",
        type=int,
        metavar="NUMBER",
        help="one input of one target, in this process, with its traceback",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--limits", action="store_true", help="print the table of limits, and nothing else")
    for hidden in ("--worker", "--board"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--range", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names = args.target or list(TARGETS)
    if args.limits:
        print(limits_table())
        return 0
    if args.worker is not None:
        made = worker.run(names[0], range(*args.range), args.seed, args.board)
        args.worker.write_text(json.dumps(worker.as_plain(made)))
        return 0
    if args.only is not None:
        made = worker.run(names[0], range(args.only, args.only + 1), args.seed)
        print(json.dumps(worker.as_plain(made), indent=1))
        for example in made.examples:
            print(example["detail"], file=sys.stderr)
        return 1 if made.findings else 0
    shares = []
    for name, n in counts(args.inputs, names).items():
        share = Share(name)
        for at in range(0, n, _BLOCK):
            share.add(block(name, at, min(at + _BLOCK, n), args.seed))
            print(f"{name}: {share.inputs} of {n}, {share.findings} findings", file=sys.stderr, flush=True)
        shares.append(share)
    print(json.dumps([asdict(s) for s in shares]) if args.json else table(shares))
    examples = [e for s in shares for e in s.examples]
    for e in examples:
        print(
            f"\n{e['what']}: python -m tools.fuzz --target '{e['target']}' --seed {args.seed} --only {e['index']}\n"
            f"{e['detail'][-1500:]}",
            file=sys.stderr,
        )
    return 1 if any(s.findings for s in shares) else 0


if __name__ == "__main__":
    sys.exit(main())
