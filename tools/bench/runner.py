"""One case in one direction: make every candidate, check each, time those that are right, together."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from . import candidates, check, operands, peers, report
from .candidates import Candidate, Unavailable
from .cases import Case
from .report import Row, make_row
from .timing import Timing, time_interleaved


@dataclass(frozen=True)
class Settings:
    """What a run measures and how. `reps` counts timed calls per candidate."""

    engines: tuple[str, ...] = ("triton",)
    peers: tuple[str, ...] = peers.PEERS
    gates: str = "off"
    layout: str = "bhsd"
    reps: int = 20
    route_note: str = ""


def run_case(case: Case, direction: str, settings: Settings) -> list[Row]:
    """The rows of every candidate, in the order engines, then peers."""
    ops = operands.make(case, layout=settings.layout)
    oracle = check.Oracle(case, ops, direction)
    made, rows = _make_all(case, direction, ops, settings)
    right = {}
    checks: dict[str, str] = {}
    for name, candidate in made.items():
        limit = 1.0 if name in settings.engines else check.PEER_SLACK
        ok, text = _oracle_check(candidate, oracle, limit=limit)
        checks[name] = text
        if ok:
            right[name] = candidate
        else:
            rows[name] = make_row(case, direction, name, candidate.route, report.WRONG, check=text)
    _whole_check(case, direction, right, checks, rows)
    times: dict[str, Timing] = {}
    if right:
        times = time_interleaved({n: c.run for n, c in right.items()}, reps=settings.reps)
    for name, timing in times.items():
        candidate = right[name]
        note = f" {settings.route_note}" if settings.route_note and name in settings.engines else ""
        ok, text = (
            (True, "") if name not in settings.engines else _oracle_check(candidate, oracle, poison=False)
        )
        if not ok:
            rows[name] = make_row(
                case, direction, name, candidate.route, report.WRONG, check=f"after timing: {text}"
            )
            continue
        rows[name] = make_row(
            case,
            direction,
            name,
            candidate.route + note,
            report.OK,
            timing=timing,
            check=checks[name],
            compile_s=candidate.compile_s,
        )
    del made, right, ops, oracle
    gc.collect()
    torch.cuda.empty_cache()
    return [rows[n] for n in (*settings.engines, *settings.peers) if n in rows]


def _make_all(
    case: Case, direction: str, ops: operands.Operands, settings: Settings
) -> tuple[dict[str, Candidate], dict[str, Row]]:
    made: dict[str, Candidate] = {}
    rows: dict[str, Row] = {}
    for name in (*settings.engines, *settings.peers):
        try:
            if name in settings.engines:
                make = candidates.forward if direction == "fwd" else candidates.backward
                made[name] = make(name, case, ops, gates=settings.gates)
            else:
                made[name] = peers.make(name, case, ops, direction)
        except Unavailable as e:
            rows[name] = make_row(case, direction, name, "", report.UNAVAILABLE, check=_one_line(e))
        except Exception as e:
            rows[name] = make_row(
                case, direction, name, "", report.ERROR, check=f"{type(e).__name__}: {_one_line(e)}"
            )
            _reraise_if_device_is_lost(e)
    return made, rows


def _oracle_check(
    candidate: Candidate, oracle: check.Oracle, *, poison: bool = True, limit: float = 1.0
) -> tuple[bool, str]:
    if poison:
        candidate.poison()
    try:
        got = candidate.run()
        torch.cuda.synchronize()
    except Exception as e:
        _reraise_if_device_is_lost(e)
        return False, f"{type(e).__name__}: {_one_line(e)}"
    return check.verdict(oracle.shares(got, candidate.saved), limit)


def _whole_check(
    case: Case, direction: str, right: dict[str, Candidate], checks: dict[str, str], rows: dict[str, Row]
) -> None:
    """Hold everyone to one peer that passed the oracle, on all heads. A peer that differs from the yardstick
    is reported like one of ours."""
    yardstick = next((n for n in ("cudnn", "flash", "flex", "efficient", "reference") if n in right), None)
    if yardstick is None:
        for name in right:
            checks[name] += " (sampled heads only)"
        return
    expected = dict(right[yardstick].run())
    limit = check.WHOLE_TOLERANCE[case.dtype]
    for name in [n for n in right if n != yardstick]:
        right[name].poison()
        errors = check.whole_error(right[name].run(), expected)
        worst = max(errors.values(), default=0.0)
        if worst > limit:
            candidate = right.pop(name)
            text = f"differs from {yardstick}: " + ", ".join(
                f"{n} {e:.3g}" for n, e in errors.items() if e > limit
            )
            rows[name] = make_row(case, direction, name, candidate.route, report.WRONG, check=text)
        else:
            checks[name] += f", {worst:.1e} vs {yardstick}"


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split())[:300]


def _reraise_if_device_is_lost(e: BaseException) -> None:
    """After an illegal access every later call fails too: stop and say so."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        raise RuntimeError(f"the device is in error after: {type(e).__name__}: {_one_line(e)}") from lost


__all__ = ["Settings", "run_case"]
