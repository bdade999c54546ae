"""`engines` and `descriptors` are common words: make sure that they are the packages which came with this one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SIBLINGS = ("descriptors", "engines")


def check(root: Path | None = None) -> None:
    """Raise ImportError, naming what is in the way, unless each sibling would be imported from beside this package."""
    root = Path(__file__).resolve().parent.parent if root is None else root
    for name in SIBLINGS:
        found = _where(name)
        if found == root / name:
            continue
        if found is None:
            raise ImportError(f"frost: package {name!r}: not found, expected {root / name}; install FROST again", name=name)
        raise ImportError(
            f"frost: package {name!r}: given {found}, expected {root / name}, which came with this frost and is shadowed; "
            f"rename the other one, or put {root} before {found.parent} on sys.path", name=name)


def _where(name: str) -> Path | None:
    """The folder (or file) that `import name` gives or would give."""
    module = sys.modules.get(name)
    if module is not None:
        file, folders = getattr(module, "__file__", None), list(getattr(module, "__path__", ()))
    else:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        file, folders = spec.origin, list(spec.submodule_search_locations or ())
    if folders:
        return Path(folders[0]).resolve()
    return None if file is None else Path(file).resolve()


check()
