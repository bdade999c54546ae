"""What all commands share: exit codes, the console, JSON, devices and graphs from the command line."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from engines.base import Target

    from ..graph import Graph

OK, FAILED, USAGE = 0, 1, 2


class UsageError(Exception):
    """The command makes no sense: exit code 2."""


def print_json(value: Any) -> None:
    print(json.dumps(plain(value), indent=1, sort_keys=True, allow_nan=False))


def plain(value: Any) -> Any:
    """JSON has no word for NaN and inf: null, and a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def console(*, stderr: bool = False) -> Console:
    """Wide where the output is no terminal, so that piped tables are not folded. Without markup:
    `frost[triton]` is a name.
    """
    stream = sys.stderr if stderr else sys.stdout
    wide = {} if stream.isatty() else {"width": 160, "soft_wrap": True}
    return Console(stderr=stderr, markup=False, emoji=False, **wide)  # type: ignore[arg-type]


def load_graph(path: Path) -> Graph:
    """A graph as `Graph.to_bytes` wrote it. Raises OSError or GraphError naming the file."""
    from descriptors import WireError

    from ..errors import GraphError
    from ..graph import Graph

    try:
        return Graph.from_bytes(path.read_bytes())
    except (WireError, GraphError) as e:
        raise GraphError(f"{path}: {e}; a graph file is what Graph.to_bytes() returns") from e


def known_device(device: str | None) -> None:
    """A device that exists somewhere, here or not. Raises UsageError for a word that names none."""
    import torch

    try:
        if device is not None and not device.startswith("sm_"):
            torch.device(device)
    except RuntimeError as e:
        raise UsageError(f"--device: given {device!r}, expected cpu, cuda, cuda:N or an arch such as sm_90") from e


def target_for(device: str | None) -> Target:
    """ "cpu", "cuda", "cuda:1", or an arch such as "sm_90" to compile for without having it."""
    from ..gate_env import target_of
    from ..plan import resolve_target

    try:
        return (
            target_of(device) if device is not None and device.startswith("sm_") else resolve_target(device)
        )
    except ValueError as e:
        raise UsageError(f"--device: {e}") from e


def names(text: str | None) -> list[str] | None:
    """A comma-separated list; None stays None."""
    return None if text is None else [n.strip() for n in text.split(",") if n.strip()]
