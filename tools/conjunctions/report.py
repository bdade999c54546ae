"""What a run found, as a table, as lines that repeat its failures, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .case import Attention, Selection, parse
from .judge import DECLINED, PASSED, Verdict
from .pool import Outcome

SHOWN = 12  # failures that are printed with their detail; of the others the line is
CLOSEST = 10


@dataclass
class Report:
    """Everything about one engine's run."""

    engine: str
    device: str
    op: str
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    groups: int = 0
    left: int = 0
    seconds: float = 0.0
    said: int = 0

    def add(self, outcome: Outcome) -> None:
        """Take an outcome in. A failure is said at once."""
        self.outcomes.append(outcome)
        for v in outcome.verdicts:
            if v.bad:
                self.said += 1
                print(f"{v.verdict.upper()} {v.op}: {self.repeat(outcome.line)}", flush=True)
                if self.said <= SHOWN:
                    print(v.detail, flush=True)

    @property
    def failures(self) -> list[tuple[str, Verdict]]:
        return [(o.line, v) for o in self.outcomes for v in o.verdicts if v.bad]

    @property
    def ok(self) -> bool:
        return not self.failures and not self.left and bool(self.outcomes)

    def repeat(self, line: str) -> str:
        return f"python -m tools.conjunctions --engine {self.engine} --device {self.device} --case '{line}'"

    # ---- counting

    def counts(self) -> dict[str, Counter[str]]:
        """Verdicts by op."""
        out: dict[str, Counter[str]] = {}
        for o in self.outcomes:
            for v in o.verdicts:
                out.setdefault(v.op, Counter())[v.verdict] += 1
        return out

    def declines(self) -> dict[str, Counter[str]]:
        """By op: how many declined naming a field."""
        out: dict[str, Counter[str]] = {}
        for o in self.outcomes:
            for v in o.verdicts:
                if v.verdict == DECLINED:
                    out.setdefault(v.op, Counter()).update(v.fields)
        return out

    def served_features(self) -> Counter[str]:
        """What the cases had that passed in both directions."""
        served = (o for o in self.outcomes if all(v.verdict == PASSED for v in o.verdicts))
        return Counter(f for o in served for f in features(o.line))

    def routes(self) -> Counter[str]:
        return Counter(f"{v.label}:{v.op}" for o in self.outcomes for v in o.verdicts if v.label)

    def reordered(self) -> Counter[str]:
        """Results that passed by the yardstick of several orders of summation only."""
        return Counter(f"{v.op} {name}" for o in self.outcomes for v in o.verdicts for name in v.reordered)

    def closest(self) -> list[tuple[float, str, str]]:
        """The passed results that used most of the allowed error: (share, op and result, line)."""
        every = ((share, f"{v.op} {name}", o.line) for o in self.outcomes for v in o.verdicts if v.verdict == PASSED
                 for name, share in v.shares.items())
        return sorted(every, reverse=True)[:CLOSEST]

    # ---- saying it

    def show(self, console: Console) -> None:
        table = Table(title=f"{self.engine} on {self.device}, {self.op}, seed {self.seed}: {len(self.outcomes)} cases in "
                            f"{self.groups} groups, {self.seconds:.0f} s")
        for name in ("op", "passed", "declined", "failed", "error", "crashed", "worst share", "declined with"):
            table.add_column(name, justify="left" if name in ("op", "declined with") else "right")
        declined = self.declines()
        for op, found in self.counts().items():
            worst = max((s for o in self.outcomes for v in o.verdicts if v.op == op and v.verdict == PASSED
                         for s in v.shares.values()), default=0.0)
            said = ", ".join(f"{name} {n}" for name, n in declined.get(op, Counter()).most_common(6))
            table.add_row(op, *(str(found[k]) for k in ("passed", "declined", "failed", "error", "crashed")), f"{worst:.2f}",
                          said)
        console.print(table)
        shown = ", ".join(f"{name} {n}" for name, n in self.served_features().most_common())
        console.print(f"served in both directions: {shown or 'nothing'}", soft_wrap=True, highlight=False)
        if self.reordered():
            said = ", ".join(f"{name} {n}" for name, n in self.reordered().items())
            console.print(f"yardstick measured in several orders of summation: {said}", soft_wrap=True, highlight=False)
        if self.left:
            console.print(f"NOT RUN: {self.left} cases (time limit, or workers that do not start)", soft_wrap=True)
        console.print(f"{len(self.failures)} failures" + ", each with the line that repeats it above" * bool(self.failures))

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine, "device": self.device, "op": self.op, "seed": self.seed, "cases": len(self.outcomes),
            "groups": self.groups, "not_run": self.left, "seconds": round(self.seconds, 1), "ok": self.ok,
            "prepare_seconds": round(sum(o.prepare_s for o in self.outcomes), 1),
            "kernels_compiled": sum(o.kernels for o in self.outcomes),
            "compile_seconds": round(sum(v.compile_s for o in self.outcomes for v in o.verdicts), 1),
            "engine_seconds": round(sum(v.seconds for o in self.outcomes for v in o.verdicts), 1),
            "verdicts": self.counts(), "declined_with": self.declines(), "served": self.served_features(),
            "reordered": self.reordered(), "routes": self.routes(),
            "closest": [{"share": round(s, 4), "result": what, "case": line} for s, what, line in self.closest()],
            "failures": [{"case": line, "repeat": self.repeat(line), **asdict(v)} for line, v in self.failures],
        }


def write(path: Path, reports: Iterable[Report]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([r.to_json() for r in reports], indent=1, allow_nan=True) + "\n")


def features(line: str) -> list[str]:
    """Words for what a case has."""
    case = parse(line)
    if isinstance(case, Selection):
        said = {"packed": case.packed is not None, "counts": case.counts, "hostile entries": case.hostile,
                "odd length": case.seqlens[1] % 2 == 1, "dlse": case.dlse, "deterministic": case.deterministic,
                "one head a group": case.heads[1] == 1, "16 heads a group": case.heads[1] == 16}
    else:
        said = _attention_features(case)
    return [case.dtype, *(name for name, on in said.items() if on)]


def _attention_features(case: Attention) -> dict[str, bool]:
    (hq, hk), (sq, sk), (d, dv) = case.heads, case.seqlens, case.dims
    return {
        "packed": case.cu_q is not None, "padding lengths": case.len_q is not None or case.len_kv is not None,
        "grouped": hq > hk > 1, "one K/V head": hq > hk == 1, "causal": case.causal, "window": case.window != (None, None),
        "bottom right": case.align == "bottom_right", "bias": case.bias is not None, "mask": case.mask is not None,
        "sink": case.sink is not None, "softcap": bool(case.softcap), "dlse": case.dlse,
        "deterministic": case.deterministic, "scale negative": (case.scale or 0) < 0, "scale zero": case.scale == 0,
        "Sq != Sk": sq != sk, "no query or no key": sq == 0 or sk == 0, "one query": sq == 1, "D != Dv": d != dv,
        "D no power of two": d & (d - 1) != 0, "over 500 tokens": max(sq, sk) > 500,
    }
