"""What a launch banner has to say: the keys, and where each value comes from.

Whoever prints a banner of their own can check it against `MANDATORY_BANNER_KEYS`; `frost.banner()` is ours.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from engines import registry as engine_registry

from . import backend_probes, env
from ._version import __version__
from .backends import DEFAULT_BACKEND, banner_value

__all__ = ["MANDATORY_BANNER_KEYS", "banner", "banner_facts"]

_Fact = Callable[[str, Any, Any], str]


def _device(backend: str, device: Any, gate_dir: Any) -> str:
    where = backend_probes.resolve(device)
    if where.target is None:
        return f"{where.text} ({where.problem})"
    if where.target.device == "cpu":
        return f"cpu ({platform.machine()})"
    return f"{where.text} ({torch.cuda.get_device_name(where.target.index)}, {where.target})"


def _engines(backend: str, device: Any, gate_dir: Any) -> str:
    return " > ".join(engine_registry.names())


_FACTS: dict[str, _Fact] = {
    "frost": lambda backend, device, gate_dir: __version__,
    "torch": lambda backend, device, gate_dir: str(torch.__version__),
    "device": _device,
    "attention_backend": lambda backend, device, gate_dir: banner_value(
        backend, device=device, gate_dir=gate_dir
    ),
    "engines": _engines,
    "gates": lambda backend, device, gate_dir: (
        f"{env.gates()} ({gate_dir or env.gate_dir() or 'no folder of your own'})"
    ),
}

MANDATORY_BANNER_KEYS: tuple[str, ...] = tuple(_FACTS)


def banner_facts(
    backend: str = DEFAULT_BACKEND, device: Any = None, gate_dir: str | Path | None = None
) -> Mapping[str, str]:
    """Every key of `MANDATORY_BANNER_KEYS` with its value, as text. Raises for an unknown backend
    (RuntimeError) or an environment variable that cannot be used (ValueError).
    """
    return {key: fact(backend, device, gate_dir) for key, fact in _FACTS.items()}


def banner(backend: str = DEFAULT_BACKEND, device: Any = None, gate_dir: str | Path | None = None) -> str:
    """The launch banner as text: one `key: value` line for each of `MANDATORY_BANNER_KEYS`. `backend` is
    the resolved one, as `frost.backends.select_attn_implementation` returned it.
    """
    facts = banner_facts(backend, device, gate_dir)
    width = max(map(len, facts))
    return "\n".join(f"{key + ':':<{width + 1}} {value}" for key, value in facts.items())
