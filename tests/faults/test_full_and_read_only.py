"""Disks that are full and folders that are read-only: what was there stays whole, what cannot be kept is said once, and
everything works without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import finish, start

# Everything of ours that writes a file, one after another. Each says what became of it.
WRITERS = """
    def writers(folder):
        import frost
        from frost import gates, routing
        from frost.report import Saved, write_saved
        g = frost.Graph()
        q, k, v = (g.tensor(n, (1, 1, 8, 16), dtype="fp32") for n in "qkv")
        g.output(g.sdpa(q, k, v)[0], name="o")
        plan = g.compile("cpu")
        yield "plan", lambda: plan.save(folder / "a.plan")
        yield "dump", lambda: routing.dump(folder / "a.msgpack", suite="x" * 8000)
        yield "dump", lambda: routing.dump(folder / "a.json", suite="x" * 8000)
        yield "run", lambda: write_saved(folder / "a.run", Saved(environment={"note": "x" * 8000}))
        yield "gate", lambda: gates.write_equivalence_gate(
            tolerances=1.0, shapes_covered=["x" * 8000], gate_dir=folder / "gates")

    def write_all(folder):
        said = []
        for name, write in writers(folder):
            try:
                write()
            except (OSError, frost.GateError) as e:
                said.append(type(e).__name__ + ":" + str(getattr(e, "errno", None) or getattr(e.__cause__, "errno", None)))
            else:
                said.append("written")
        return said

    def contents(folder):
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*"))
                if p.is_file() and p.name != "filler" and p.suffix != ".lock"}
"""

KERNELS = """
    def compiled(dtype):
        # What a process that starts now counts: kernels compiled, and loaded from disk.
        from engines.base import Target
        frost.cache.clear(kernels=True)
        frost.cache.reset_counters()
        g = frost.Graph()
        q, k, v = (g.tensor(n, (1, 1, 8, 16), dtype=dtype) for n in "qkv")
        g.output(g.sdpa(q, k, v)[0], name="o")
        plan = g.compile(Target.cuda((9, 0)), engines=["triton"], gates="off")
        assert plan.routes[0].engine_name == "triton"
        info = frost.cache.info()
        return info.kernels_compiled, info.disk_hits
"""

OWN = """
    import sys
    from pathlib import Path
    import mounts
    folder = Path(sys.argv[1])
    why = mounts.own_namespace()
    if why:
        print("skip", why)
        sys.exit()
    mounts.small(folder, 512 << 10)
    import logging
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    import frost
    from engines import registry
    from engines.base import Target
    missing = registry.get("triton").unavailable(Target.cuda((9, 0)))
    if missing:
        print("skip", missing)
        sys.exit()
"""


def run(text: str, tmp_path: Path, **env: str) -> tuple[list[str], list[str]]:
    """Lines of stdout and stderr; skips where the script says so."""
    folder = tmp_path / "disk"
    out, err = finish(start(text, folder, FROST_CACHE_DIR=str(folder / "cache"), **env), timeout=200)
    if out.startswith("skip"):
        pytest.skip(out[5:].strip())
    return out.splitlines(), [line for line in err.splitlines() if line.strip()]


FULL = """
    print(compiled("fp16"), write_all(folder))
    before = contents(folder)
    filler = mounts.fill(folder)
    print(compiled("fp16"), compiled("bf16"), compiled("fp32"))
    print(write_all(folder), contents(folder) == before)
    frost.load_plan(folder / "a.plan"), frost.routing.load(folder / "a.json")
    filler.unlink()
    print(compiled("bf16"), write_all(folder), len(contents(folder)) - len(before))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """ENOSPC from a real file system: kernels are compiled into memory with one warning; whatever was to be replaced is
    as it was, no temporary file is left, and with room again all is as usual."""
    out, err = run(OWN + KERNELS + WRITERS + FULL, tmp_path)
    assert out == [
        f"(1, 0) {['written'] * 5}",
        "(0, 1) (1, 0) (1, 0)",
        f"{['OSError:28'] * 4 + ['GateError:28']} True",
        f"(1, 0) {['written'] * 5} 1",
    ]
    assert (
        len(err) == 1 and "cannot write" in err[0] and "No space left" in err[0] and "memory only" in err[0]
    )


READ_ONLY = """
    print(compiled("fp16"), write_all(folder))
    before = contents(folder)
    mounts.read_only(folder)
    print(compiled("fp16"), compiled("bf16"), compiled("fp32"))
    print(write_all(folder), contents(folder) == before)
    frost.load_plan(folder / "a.plan"), frost.routing.load(folder / "a.json")
"""


def test_a_read_only_folder(tmp_path: Path) -> None:
    """EROFS, which stops root too: what it holds is used, the rest is compiled into memory with one warning."""
    out, err = run(OWN + KERNELS + WRITERS + READ_ONLY, tmp_path)
    assert out == [
        f"(1, 0) {['written'] * 5}",
        "(0, 1) (1, 0) (1, 0)",
        f"{['OSError:30'] * 4 + ['GateError:30']} True",
    ]
    assert len(err) == 1 and "cannot write" in err[0] and "Read-only file system" in err[0]


LIMITED = """
    import resource, sys
    from pathlib import Path
    folder = Path(sys.argv[1])
    folder.mkdir()
    import logging
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    import frost
    from engines.template_loader import Bundle, KernelKey, TemplateLoader

    def kernel():
        made = TemplateLoader(lambda: folder)
        bundle = made.get(KernelKey("e", "k", (), "sm_90", "d"), lambda: Bundle(bytes(100_000), {}))
        assert bundle.code == bytes(100_000)
        return made.stats.kernels_compiled, made.stats.disk_hits
"""

WRITES_THAT_BREAK_OFF = """
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    print(kernel(), write_all(folder), contents(folder))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(kernel(), write_all(folder), len(contents(folder)))
    before = contents(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    print(kernel(), write_all(folder), contents(folder) == before)
"""


def test_writes_that_break_off_in_the_middle(tmp_path: Path) -> None:
    """The first 4 KiB are written and the rest is refused (EFBIG), as where a quota ends. Small plans still fit."""
    out, err = run(LIMITED + WRITERS + WRITES_THAT_BREAK_OFF, tmp_path)
    refused = ["OSError:27"] * 3 + ["GateError:27"]
    assert (
        out[0].startswith(f"(1, 0) {['written', *refused]} {{'a.plan':") and out[0].count("b'FROSTPLN") == 1
    )
    assert out[1:] == [f"(1, 0) {['written'] * 5} 6", f"(0, 1) {['written', *refused]} True"]
    assert len(err) == 1 and "File too large" in err[0]
