"""Attention backends by name: for model code that picks one, and for whoever reads the launch banner.

`probe_backends` says what is there and why not, `select_attn_implementation` honours an explicit choice or
refuses it, and never picks a custom kernel by itself. `benchmark_backends` measures; `banner_value` is one
line for a log.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import backend_probes as probes
from .backend_bench import benchmark_backends, benchmark_backends_with_reasons
from .backend_probes import FLASHMLA_CONTRACT, Answer, Where
from .errors import FrostError
from .sdpa_baseline import load_sdpa_baseline, sdpa_baseline_info

__all__ = [
    "ALL_BACKENDS",
    "BackendError",
    "BackendReport",
    "TRITON_FA2_GATE_MODULE",
    "UnknownBackendError",
    "banner_value",
    "benchmark_backends",
    "benchmark_backends_with_reasons",
    "load_sdpa_baseline",
    "probe_backends",
    "sdpa_baseline_info",
    "select_attn_implementation",
]

log = logging.getLogger("frost.backends")

# The module that holds the Triton engine's gates. Imported by this name at each probe, so that a checkout
# without it says so.
TRITON_FA2_GATE_MODULE = "frost.gates"

DEFAULT_BACKEND = "sdpa"


class BackendError(FrostError, RuntimeError):
    """A backend that was asked for by name and cannot be had; the message carries the reason."""


class UnknownBackendError(BackendError, ValueError):
    """A name that is no backend's."""


@dataclass(frozen=True)
class BackendReport:
    """One backend on one device. `reason` is never empty: what makes it available, or why it is not.

    `engine` is what runs underneath; `gate` the stamp of its proof ("not needed", "none"); `versions` of
    what it is made of.
    """

    name: str
    available: bool
    reason: str
    engine: str = ""
    gate: str = "not needed"
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Backend:
    engine: str
    probe: Callable[[Where, Any], Answer]
    refused: str = ""  # never selectable, available or not


def _package(name: str) -> Callable[[Where, Any], Answer]:
    return lambda where, gate_dir: probes.package(name, where)


def _gate_module() -> Any:
    # By name and at each call: the module may not be there, and a test may take it away.
    return importlib.import_module(TRITON_FA2_GATE_MODULE)


def _ours(engine: str, *, always_gated: bool) -> Callable[[Where, Any], Answer]:
    return lambda where, gate_dir: probes.ours(engine, where, gate_dir, _gate_module, always_gated)


_BACKENDS: dict[str, _Backend] = {
    "eager": _Backend("torch", lambda where, gate_dir: probes.eager(where)),
    "sdpa": _Backend("torch", lambda where, gate_dir: probes.sdpa(where)),
    "flex": _Backend("torch", lambda where, gate_dir: probes.flex(where)),
    "triton_fa2": _Backend("frost[triton]", _ours("triton", always_gated=True)),
    "sm80": _Backend("frost[sm80]", _ours("sm80", always_gated=False)),
    "flash_attention_2": _Backend("flash-attn", _package("flash_attention_2")),
    "flash_attention_3": _Backend("flash-attn-3", _package("flash_attention_3")),
    "flash_attention_4": _Backend("flash-attn-4", _package("flash_attention_4")),
    "cudnn": _Backend("torch", lambda where, gate_dir: probes.cudnn(where)),
    "flashmla": _Backend("flash-mla", _package("flashmla"), refused=FLASHMLA_CONTRACT),
}

ALL_BACKENDS: tuple[str, ...] = tuple(_BACKENDS)


def probe_backends(device: Any = None, gate_dir: str | Path | None = None) -> list[BackendReport]:
    """A report for every backend of `ALL_BACKENDS`, in that order. Never raises.

    `device`: "cpu", "cuda", "cuda:1", a torch.device; None is the current CUDA device where there is one,
    else the CPU. `device="cpu"` never initialises CUDA. `gate_dir` replaces the folders that gates are
    looked for in.
    """
    where = probes.resolve(device)
    return [_probe(name, where, gate_dir) for name in ALL_BACKENDS]


def _probe(name: str, where: Where, gate_dir: str | Path | None) -> BackendReport:
    backend = _BACKENDS[name]
    try:
        answer = backend.probe(where, gate_dir)
    except (Exception, SystemExit) as e:
        text = " ".join(str(e).split())
        return BackendReport(
            name, False, f"the probe failed: {type(e).__name__}: {text}", backend.engine, "none"
        )
    return BackendReport(
        name, answer.available, answer.reason, backend.engine, answer.gate, dict(answer.versions)
    )


def _known(name: Any) -> str:
    if isinstance(name, str) and name in _BACKENDS:
        return name
    given = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:80]}…"
    near = difflib.get_close_matches(str(name)[:80].lower(), ALL_BACKENDS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownBackendError(f"unknown backend {given}, expected one of {', '.join(ALL_BACKENDS)}{hint}")


def select_attn_implementation(
    requested: str | None, *, device: Any, gate_dir: str | Path | None = None
) -> str:
    """The backend to use: the one that was requested, or "sdpa" where none was.

    A request is honoured or refused, never replaced: RuntimeError with the probe's reason where the backend
    is not available on `device`, and "unknown backend" with the nearest name where there is no such
    backend. None is always "sdpa": a custom kernel is opted into, with or without a gate.
    """
    if requested is None:
        log.info(
            "attention backend: %s on %s (none was requested; a custom kernel is used only where it "
            "is asked for by name)",
            DEFAULT_BACKEND,
            device,
        )
        return DEFAULT_BACKEND
    name, where = _known(requested), probes.resolve(device).text
    report = next(r for r in probe_backends(device=device, gate_dir=gate_dir) if r.name == name)
    refused = _BACKENDS[name].refused
    if refused:
        rest = "" if refused in report.reason else f": {refused}"
        raise BackendError(f"attention backend {name!r} cannot be selected{rest}; probe: {report.reason}")
    if not report.available:
        raise BackendError(f"attention backend {name!r} is not available on {where}: {report.reason}")
    log.info("attention backend: %s on %s (%s)", name, where, report.reason)
    return name


def banner_value(resolved: str, device: Any = None, gate_dir: str | Path | None = None) -> str:
    """One line for a launch banner: the backend's name, then engine, gate and versions. Raises as an
    unknown backend.
    """
    name = _known(resolved)
    report = _probe(name, probes.resolve(device), gate_dir)
    parts = [
        f"engine {report.engine}",
        f"gate {report.gate}",
        *(f"{n} {v}" for n, v in report.versions.items()),
    ]
    if not report.available:
        parts.append(f"NOT AVAILABLE: {report.reason}")
    return f"{name} ({'; '.join(parts)})"
