"""Rows to CSV, and to the short tables that a terminal shows."""

from __future__ import annotations

import csv
import datetime
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .cases import Case, tflops
from .timing import Timing

OK, WRONG, UNAVAILABLE, ERROR = "ok", "WRONG", "unavailable", "error"


@dataclass(frozen=True)
class Row:
    """One candidate on one case in one direction. `check`: the worst share of the allowed error that it used
    (1 is the limit), or why it was not timed. `host_us` only in the host suite."""

    suite: str
    case: str
    direction: str
    candidate: str
    route: str
    status: str
    ms: float = math.nan
    best_ms: float = math.nan
    spread: float = math.nan
    reps: int = 0
    tflops: float = math.nan
    host_us: float = math.nan
    check: str = ""
    compile_s: float = math.nan
    b: int = 0
    hq: int = 0
    hk: int = 0
    s: int = 0
    d: int = 0
    causal: bool = False
    dtype: str = ""
    options: str = ""


def make_row(
    case: Case,
    direction: str,
    candidate: str,
    route: str,
    status: str,
    *,
    timing: Timing | None = None,
    **more: Any,
) -> Row:
    """A row of a case, with its TFLOP/s where there is a timing."""
    shape: dict[str, Any] = {
        n: getattr(case, n) for n in ("b", "hq", "hk", "s", "d", "causal", "dtype", "options")
    }
    times: dict[str, Any] = (
        {}
        if timing is None
        else {
            "ms": timing.median_ms,
            "best_ms": timing.best_ms,
            "spread": timing.spread,
            "reps": timing.reps,
            "tflops": tflops(case, direction, timing.median_ms),
        }
    )
    return Row(case.suite, case.name, direction, candidate, route, status, **times, **shape, **more)


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN where there are none. Raises ValueError for one that is not
    positive."""
    logs = []
    for v in values:
        if not v > 0:
            raise ValueError(f"geomean: given {v}, expected positive numbers")
        logs.append(math.log(v))
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def ratios(
    rows: Sequence[Row],
    ours: str,
    peer: str,
    *,
    direction: str,
    suite: str = "",
    where: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Per case, our speed over the peer's (above 1: we are faster); cases that either lacks are left out."""
    found: dict[str, dict[str, float]] = {}
    for r in rows:
        if (
            r.status == OK
            and r.direction == direction
            and (not suite or r.suite == suite)
            and all(getattr(r, k) == v for k, v in (where or {}).items())
        ):
            found.setdefault(r.case, {})[r.candidate] = r.ms
    return {
        case: times[peer] / times[ours] for case, times in found.items() if ours in times and peer in times
    }


def environment(date: datetime.datetime | None = None) -> dict[str, str]:
    """Card, versions and date: every CSV row carries them."""
    import torch

    out = {
        "date": (date or datetime.datetime.now(datetime.timezone.utc)).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    try:
        import triton

        out["triton"] = triton.__version__
    except ImportError:
        out["triton"] = "none"
    from frost._version import __version__

    out["frost"] = __version__
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()
        out |= {
            "card": torch.cuda.get_device_name(),
            "cudnn": str(cudnn),
            "driver": _driver_version(),
            "cc": "{}.{}".format(*torch.cuda.get_device_capability()),
        }
    else:
        out |= {"card": "none", "cudnn": "none", "driver": "none", "cc": "none"}
    return out


def _driver_version() -> str:
    """The kernel driver's release as Linux shows it; empty elsewhere."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((w for w in first.split() if w.count(".") >= 1 and w.replace(".", "").isdigit()), "")


def write_csv(path: Path, rows: Sequence[Row], env: Mapping[str, str]) -> None:
    """One line per row, the environment in the last columns. NaN is written as an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f.name for f in fields(Row)]
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow([*names, *env])
        for row in rows:
            out.writerow([*(_cell(v) for v in asdict(row).values()), *env.values()])


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def table(rows: Sequence[Row], direction: str, ours: Sequence[str], peers: Sequence[str]) -> str:
    """TFLOP/s by case and candidate, then our first engine's speed over each peer's."""
    mine = [r for r in rows if r.direction == direction and r.suite not in ("host", "overheads")]
    if not mine:
        return ""
    present = {r.candidate for r in mine}
    columns = [c for c in (*ours, *peers) if c in present]
    lead = next((c for c in ours if c in present), None)
    others = [c for c in columns if c != lead] if lead else []
    head = (
        f"{direction + ', TFLOP/s':32}"
        + "".join(f"{c[:10]:>11}" for c in columns)
        + "".join(f"{'/' + c[:7]:>9}" for c in others)
    )
    lines = [head]
    by_case: dict[str, dict[str, Row]] = {}
    for r in mine:
        by_case.setdefault(r.case, {})[r.candidate] = r
    for case, found in by_case.items():
        cells = "".join(f"{_speed(found.get(c)):>11}" for c in columns)
        lines.append(f"{case[:32]:32}{cells}" + "".join(f"{_ratio(found, lead, c):>9}" for c in others))
    return "\n".join(lines)


def _speed(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row.tflops:.0f}" if row.status == OK else row.status[:9]


def _ratio(found: Mapping[str, Row], ours: str | None, peer: str) -> str:
    a, b = found.get(ours or ""), found.get(peer)
    return f"{b.ms / a.ms:.2f}" if a and b and a.status == b.status == OK else "-"


# The subsets that claims are made over: (title, suite, predicate on a row)
_SUBSETS = (
    ("dense d64+d128", lambda r: r.suite == "dense" and r.d <= 128),
    ("dense, all", lambda r: r.suite == "dense"),
    ("s8192 d64+d128", lambda r: r.suite == "dense" and r.s == 8192 and r.d <= 128),
    ("d256", lambda r: r.suite == "dense" and r.d == 256),
    ("gqa", lambda r: r.suite == "gqa"),
    ("short", lambda r: r.suite == "short"),
)


def geomeans(rows: Sequence[Row], ours: Sequence[str], peers: Sequence[str]) -> str:
    """Our speed over each peer's: geometric mean, smallest, and number of cases, by subset and direction."""
    lines = []
    for engine in ours:
        for direction in ("fwd", "bwd"):
            for title, keep in _SUBSETS:
                subset = [r for r in rows if keep(r)]
                cells = []
                for peer in peers:
                    found = ratios(subset, engine, peer, direction=direction)
                    if found:
                        cells.append(
                            f"{peer} {geomean(found.values()):.3f} (min {min(found.values()):.2f}, "
                            f"n={len(found)})"
                        )
                if cells:
                    lines.append(f"{engine} {direction} {title:15} vs " + ", ".join(cells))
    return "\n".join(lines)


def overheads(rows: Sequence[Row], cases: Sequence[Case], ours: Sequence[str]) -> str:
    """Time of each option against its base case, beside the share of work that it has by count."""
    lines = []
    by = {(r.case, r.direction, r.candidate): r for r in rows if r.suite == "overheads" and r.status == OK}
    table_cases = [c for c in cases if c.suite == "overheads"]
    bases = {c.name: c for c in table_cases}
    for engine in ours:
        for direction in ("fwd", "bwd"):
            for case in table_cases:
                row = by.get((case.name, direction, engine))
                if row is None:
                    continue
                text = f"{engine} {direction} {case.name:24}{row.ms:9.3f} ms {row.tflops:6.0f} TFLOP/s"
                base = by.get((case.relative_to or "", direction, engine))
                if base is not None:
                    work = tflops(case, direction, 1.0) / tflops(bases[base.case], direction, 1.0)
                    text += f" {row.ms / base.ms:6.3f} x {base.case!r}" + ("" if work == 1 else f", work {work:.3f} x")
                lines.append(text)
    return "\n".join(lines)


def host_table(rows: Sequence[Row]) -> str:
    """Host microseconds of one call, and the ratio to one torch SDPA FLASH call."""
    mine = [r for r in rows if r.suite == "host" and r.status == OK]
    lines = []
    for direction in ("fwd", "bwd"):
        found = [r for r in mine if r.direction == direction]
        base = next((r.host_us for r in found if r.candidate == "torch SDPA FLASH"), math.nan)
        lines += [
            f"host {direction} {r.candidate:34}{r.host_us:8.1f} us"
            + ("" if math.isnan(base) else f"   {r.host_us / base:5.2f} x FLASH")
            for r in found
        ]
    return "\n".join(lines)


def problems(rows: Sequence[Row], limit: int = 20) -> str:
    """What was not timed and why, shortest form."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for r in rows:
        if r.status != OK:
            seen.setdefault((r.candidate, r.status, r.check[:160]), []).append(f"{r.case} {r.direction}")
    lines = [
        f"{c}: {status} on {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"
        for (c, status, why), names in seen.items()
    ]
    more = [f"… and {len(lines) - limit} more kinds (see the CSV)"] if len(lines) > limit else []
    return "\n".join([*lines[:limit], *more])
