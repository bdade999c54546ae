"""The environment a gate is about: what must match, and what is only recorded."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from engines import registry
from engines.base import Target

from .errors import GateError

if TYPE_CHECKING:
    import torch

    Device = str | torch.device | Target


def target_of(device: Device) -> Target:
    """The target of "cpu", "cuda", "cuda:1", "sm_90", a torch.device or a Target.

    "cpu" stands for the interpreter and initialises nothing. Raises GateError where a CUDA device is asked
    for and there is none, ValueError for anything else.
    """
    if isinstance(device, Target):
        return device
    text = str(device)
    if text == "cpu":
        return Target.cpu()
    if text.startswith("sm_") and text[3:].isdigit() and len(text) >= 5:
        return Target.cuda((int(text[3:-1]), int(text[-1])))
    kind, _, index = text.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ValueError(f"device: given {text!r}, expected 'cpu', 'cuda', 'cuda:<index>' or an arch such as "
                         f"'sm_90'")
    import torch

    try:
        number = int(index) if index else torch.cuda.current_device()
        return Target.cuda(torch.cuda.get_device_capability(number), number)
    except (RuntimeError, AssertionError) as e:  # torch asserts on an index that is out of range
        raise GateError(f"device: given {text!r}, expected a CUDA device that answers ({e})") from e


def matched_environment(engine: str, target: Target) -> dict[str, str]:
    """What a gate must match beside the source: the arch and the compilers' major.minor."""
    return {"arch": target.arch, **registry.get(engine).toolchain()}


def recorded_environment(target: Target) -> dict[str, str]:
    """What a gate records for its readers; never matched. Asks a device only for a target that names one
    here."""
    import torch

    found = {"torch": str(torch.__version__), "python": platform.python_version()}
    if target.device == "cuda" and torch.cuda.is_available():
        if target.index < torch.cuda.device_count():
            found["card"] = torch.cuda.get_device_name(target.index)
        found["driver"] = _driver_version()
    return found


def _driver_version() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return "unknown"
    return next((w for w in words if w[0].isdigit() and w.count(".") >= 1), "unknown")
