"""What all commands share: exit codes, the console, JSON, and what is named on the command line: files, folders,
devices.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from engines.base import Target

    from ..graph import Graph

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class CommandError(Exception):
    """A command that failed, told in one line: exit code 1."""

    code = FAILED


class UsageError(CommandError):
    """The command makes no sense: exit code 2."""

    code = USAGE


class Interrupted(CommandError):
    """Ctrl-C: exit code 130, as shells have it."""

    code = INTERRUPTED


def usage(option: str, error: Exception, *names: str) -> UsageError:
    """An error of the library as one of the option that it came in by. `names`: what the library calls it."""
    text = str(error)
    for name in (option, *names):
        text = text.removeprefix(f"{name}: ")
    return UsageError(f"{option}: {text}")


# ---- what is printed -------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    print(json.dumps(plain(value), indent=1, sort_keys=True, allow_nan=False))


def plain(value: Any) -> Any:
    """JSON has no word for NaN and inf: null, and a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def safe(text: str) -> str:
    """A text as a terminal may see it: names come from files, and a control character in one would be obeyed."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Console(Console):
    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(safe(x) if isinstance(x, str) else x for x in objects), **how)


class _Table(Table):
    def add_row(self, *cells: Any, **how: Any) -> None:
        super().add_row(*(safe(x) if isinstance(x, str) else x for x in cells), **how)


def console(*, stderr: bool = False) -> Console:
    """Wide where the output is no terminal, so that piped tables are not folded. Without markup:
    `frost[triton]` is a name.
    """
    stream = sys.stderr if stderr else sys.stdout
    wide = {} if stream.isatty() else {"width": 160, "soft_wrap": True}
    return _Console(stderr=stderr, markup=False, emoji=False, **wide)  # type: ignore[arg-type]


def table(*columns: str, title: str | None = None, **how: Any) -> Table:
    """A table that loses nothing of a long path or reason."""
    made = _Table(title=None if title is None else safe(title), **how)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def progress(quiet: bool = False) -> Progress:
    """A bar on stderr, where somebody watches."""
    screen = console(stderr=True)
    return Progress(console=screen, transient=True, disable=quiet or not screen.is_terminal)


@contextlib.contextmanager
def working(what: str, quiet: bool = False) -> Iterator[None]:
    """A moving bar for work that cannot be counted."""
    with progress(quiet) as bar:
        bar.add_task(what, total=None)
        yield


# ---- what is named on the command line -------------------------------------------------------------------


@contextlib.contextmanager
def reading(option: str, path: Path, expected: str) -> Iterator[None]:
    """Inside, a file that the command named is read. One that cannot be, or that is something else, is a
    UsageError with the file and what was expected.
    """
    try:
        yield
    except OSError as e:
        raise UsageError(
            f"{option}: given {path}, which cannot be read ({_why(e)}), expected {expected}"
        ) from e
    except ValueError as e:
        text = str(e).removeprefix(f"{path}: ")
        raise UsageError(f"{option}: given {path}, expected {expected} ({text})") from e


def _why(e: OSError) -> str:
    return e.strerror or str(e)


def folder(option: str, path: Path | None) -> None:
    """A folder to look into. Raises UsageError where there is none, or none that may be read."""
    if path is not None:
        with reading(option, path, "a folder"):
            os.listdir(path)


def writable(option: str, path: Path | None, *, pipes: bool = False) -> None:
    """A file to write later, looked at before the work is done; with `pipes` also a pipe or a device. Makes
    nothing; raises CommandError.
    """
    if path is None:
        return
    if path.is_dir():
        raise CommandError(f"{option}: given {path}, which is a folder, expected a file")
    if (
        path.exists() and not path.is_file() and not pipes
    ):  # writing replaces: its name would be a file's then
        raise CommandError(f"{option}: given {path}, which is no file, expected one")
    if path.exists() and not os.access(path, os.W_OK):
        raise CommandError(f"{option}: given {path}, which may not be written, expected a file that may")
    problem = not_makeable(path.parent)
    if problem:
        raise CommandError(f"{option}: given {path}, which cannot be written ({problem})")


def not_makeable(folder: Path) -> str:
    """Why nothing can be written into a folder that may have to be made first; "" where it can, as far as one
    can tell without doing it.
    """
    there = next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written"


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Inside, that file is written, its folder made; CommandError where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        raise CommandError(f"{option}: given {path}, which cannot be written ({_why(e)})") from e


def load_graph(path: Path, option: str = "GRAPH") -> Graph:
    """A graph as `Graph.to_bytes` wrote it. Raises UsageError naming the file."""
    from descriptors import LIMITS
    from descriptors.limits import read_limited

    from ..graph import Graph

    with reading(option, path, "a graph as Graph.to_bytes() returns it"):
        return Graph.from_bytes(read_limited(path, LIMITS["graph"]))


# What NVIDIA has made since Volta: an arch that is none of them is a slip of the keyboard.
ARCHS = tuple(f"sm_{n}" for n in (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121))
_HERE, _ELSEWHERE = "cpu, cuda or cuda:N", "cpu, cuda, cuda:N or an arch such as sm_90"


def known_device(device: str | None, *, archs: bool = False) -> None:
    """A device that exists somewhere, here or not; with `archs` also an arch to compile for. Raises UsageError
    for a word that names none.
    """
    import torch

    expected = _ELSEWHERE if archs else _HERE
    if device is None or (archs and device in ARCHS):
        return
    if device.startswith("sm_"):
        what = f"expected one of {', '.join(ARCHS)}" if archs else f"an arch, expected a device: {expected}"
        raise UsageError(f"--device: given {device!r}, {what}")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"--device: given {device!r}, expected {expected}")


def target_for(device: str | None, *, archs: bool = False) -> Target:
    """Of "cpu", "cuda", "cuda:1", and with `archs` of "sm_90" to compile for without having it. Raises UsageError
    for a word that names no device, CommandError where the device does not answer here.
    """
    import torch

    from ..gate_env import target_of
    from ..plan import resolve_target

    known_device(device, archs=archs)
    if device is not None and device.startswith("sm_"):
        return target_of(device)
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise CommandError(f"--device: given {device!r}, and no CUDA device answers here; {_way_out(archs)}")
    try:
        return resolve_target(device)
    except (RuntimeError, AssertionError) as e:  # torch asserts on an index that is out of range
        text = " ".join(str(e).split()) or type(e).__name__
        raise CommandError(
            f"--device: given {device!r}, which does not answer ({text}); {_way_out(archs)}"
        ) from e


def _way_out(archs: bool) -> str:
    other = ", or an arch such as --device sm_90 to compile for it without having it" if archs else ""
    return f"use --device cpu{other}"


def names(text: str | None) -> list[str] | None:
    """A comma-separated list; None stays None."""
    return None if text is None else [n.strip() for n in text.split(",") if n.strip()]
