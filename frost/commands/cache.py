"""`frost cache info|clear`: the cache folder."""

from __future__ import annotations

from pathlib import Path

from .common import OK, console, print_json, table

# What compiled kernels, their locks and interrupted writes are called.
_FILES = ("*.frostk", "*.lock", ".tmp-*")


def _files(folder: Path | None) -> list[Path]:
    return [] if folder is None else sorted({p for pattern in _FILES for p in folder.glob(pattern)})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # another process deleted it meanwhile
        return 0


def info(as_json: bool) -> int:
    from .. import env

    folder = env.kernel_cache_dir()
    kernels = [p for p in _files(folder) if p.suffix == ".frostk" and not p.name.startswith(".")]
    gate_dir = env.gate_dir()
    facts = {
        "cache_dir": _text(env.cache_dir()),
        "kernel_dir": _text(folder),
        "kernels": len(kernels),
        "kernel_bytes": sum(map(_size, kernels)),
        "gate_dir": _text(gate_dir),
        "gates": len(list(gate_dir.glob("*.json"))) if gate_dir is not None else 0,
        "plan_cache_size": env.plan_cache_size(),
    }
    if as_json:
        print_json(facts)
        return OK
    listed = table("", "", show_header=False)
    for name, value in facts.items():
        listed.add_row(name.replace("_", " "), "none (kept in memory only)" if value is None else str(value))
    console().print(listed)
    return OK


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def clear(as_json: bool) -> int:
    from .. import env

    folder, deleted = env.kernel_cache_dir(), 0
    for path in _files(folder):
        path.unlink(missing_ok=True)
        deleted += 1
    if as_json:
        print_json({"kernel_dir": _text(folder), "deleted": deleted})
    else:
        print(f"{deleted} files deleted" + ("" if folder is None else f" from {folder}"))
    return OK
