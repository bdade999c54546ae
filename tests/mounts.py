"""File systems of a test's own: small ones that get full, and read-only ones, which stop root too.

For scripts in processes of their own, before they import anything that starts threads. The mounts are gone with the
process. Linux with user namespaces; elsewhere `own_namespace` says why not.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT = 1, 32


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def own_namespace() -> str:
    """Enter a user and mount namespace; why that is impossible here, or an empty text."""
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEW_MOUNTS | _NEW_USERS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except (OSError, AttributeError) as e:
        return f"no user namespaces here: {e}"
    return ""


def small(folder: Path, nbytes: int) -> None:
    """An empty file system of so many bytes at `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    _call("mount", b"frost", os.fsencode(folder), b"tmpfs", 0, f"size={nbytes}".encode())


def read_only(folder: Path) -> None:
    """What `small` mounted, from now on read-only."""
    _call("mount", None, os.fsencode(folder), None, _REMOUNT | _READ_ONLY, None)


def fill(folder: Path) -> Path:
    """Use up every byte. Returns the file that does; deleting it makes room again."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as f:
        for size in (4096, 1):
            try:
                while True:
                    f.write(b"x" * size)
            except OSError:
                continue
    return path
