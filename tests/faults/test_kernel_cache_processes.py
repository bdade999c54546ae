"""Several processes at one kernel cache: races, kills and folders that cannot be used, each with real kernels
where Triton can compile."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import finish, start, wait_until

RANKS = 16

# A stand-in kernel, so that sixteen processes take no minutes; the compile takes long enough for all to meet
# in it.
STAND_IN = """
    import sys, time
    from pathlib import Path
    from engines.template_loader import Bundle, KernelKey, TemplateLoader
    folder, gate = Path(sys.argv[1]), Path(sys.argv[2])
    loader = TemplateLoader(lambda: folder)
    def build():
        time.sleep(0.2)
        return Bundle(bytes(100_000), {"name": "k"})
    while not gate.exists():
        time.sleep(0.001)
    for i in range(5):
        bundle = loader.get(KernelKey("e", f"k{i}", (), "sm_90", "d"), build)
        assert bundle.code == bytes(100_000) and dict(bundle.meta) == {"name": "k"}
    print(loader.stats.kernels_compiled, loader.stats.rebuilt)
"""


def test_sixteen_processes_on_one_empty_folder(tmp_path: Path) -> None:
    """triton#11512: parallel ranks lose files between list and read. Every kernel is built once, by whoever
    came first, and nothing but whole bundles is left."""
    folder, gate = tmp_path / "kernels", tmp_path / "go"
    ranks = [start(STAND_IN, folder, gate) for _ in range(RANKS)]
    time.sleep(1.0)
    gate.touch()
    outcomes = [finish(rank) for rank in ranks]
    built = [tuple(map(int, out.split())) for out, _ in outcomes]
    assert sum(n for n, _ in built) == 5 and all(rebuilt == 0 for _, rebuilt in built), built
    assert all("warning" not in err.lower() and not err.strip() for _, err in outcomes)
    assert sorted(p.suffix for p in folder.iterdir()) == [".frostk"] * 5


def test_a_process_killed_in_the_middle_of_a_build(tmp_path: Path) -> None:
    """flashinfer#972: its lock must not hold up the next one, and what it left half-done is not taken for a
    kernel."""
    script = """
        import sys, time
        from pathlib import Path
        from engines.template_loader import Bundle, KernelKey, TemplateLoader
        folder = Path(sys.argv[1])
        def build():
            (folder / "building").touch()
            time.sleep(float(sys.argv[2]))
            return Bundle(b"code", {})
        TemplateLoader(lambda: folder).get(KernelKey("e", "k", (), "sm_90", "d"), build)
        print("done")
    """
    first = start(script, tmp_path, 600)
    wait_until((tmp_path / "building").exists)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    (tmp_path / "building").unlink()
    begun = time.monotonic()
    out, err = finish(start(script, tmp_path, 0))
    assert out.strip() == "done" and not err.strip() and time.monotonic() - begun < 50
    (tmp_path / "building").unlink()
    assert [p.suffix for p in tmp_path.iterdir()] == [".frostk"]


def test_a_process_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """Half a file under a temporary name: never taken for a kernel, and `frost cache clear` takes it away."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from engines import template_loader
        from engines.template_loader import Bundle, KernelKey, TemplateLoader
        folder = Path(sys.argv[1])
        if len(sys.argv) > 2:
            template_loader.os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
        made = TemplateLoader(lambda: folder)
        made.get(KernelKey("e", "k", (), "sm_90", "d"), lambda: Bundle(b"code", {}))
        print(made.stats.kernels_compiled, made.stats.rebuilt)
    """
    kernels = tmp_path / "kernels"
    first = start(script, kernels, "die")
    first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL
    assert [p.name[:5] for p in kernels.iterdir() if p.suffix == ".frostk"] == [".tmp-"]
    assert finish(start(script, kernels)) == ("1 0\n", "")
    assert finish(start(script, kernels)) == ("0 0\n", "")
    out, _ = finish(
        start("from frost.cli import main\nmain(['cache', 'clear'])", FROST_CACHE_DIR=str(tmp_path))
    )
    assert "2 files deleted" in out and list(kernels.iterdir()) == []


def test_a_builder_that_hangs_holds_nobody_up_for_long(tmp_path: Path) -> None:
    """It still holds the lock, so waiting for it is bounded: after that the kernel is built here too, and said."""
    script = """
        import logging, sys, time
        from pathlib import Path
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        from engines import template_loader
        from engines.template_loader import Bundle, KernelKey, TemplateLoader
        template_loader.LOCK_WAIT_S = 1.0
        folder = Path(sys.argv[1])
        def build():
            (folder / "building").touch()
            time.sleep(float(sys.argv[2]))
            return Bundle(b"code", {})
        TemplateLoader(lambda: folder).get(KernelKey("e", "k", (), "sm_90", "d"), build)
        print("done")
    """
    hung = start(script, tmp_path, 600)
    try:
        wait_until((tmp_path / "building").exists)
        hung.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        out, err = finish(start(script, tmp_path, 0))
        assert out.strip() == "done" and err.count("waited long enough") == 1
        assert 1.0 <= time.monotonic() - begun < 40
    finally:
        hung.kill()
        hung.communicate(timeout=30)


ATTENTION = """
    import logging, sys
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    import torch
    from engines import registry
    from engines.base import Target
    from frost import cache
    from frost.graph import Graph
    if registry.get("triton").unavailable(Target.cuda((9, 0))):
        print("skip")
        sys.exit()
    def graph():
        g = Graph()
        q, k, v = (g.tensor(n, (1, 1, 8, 16), dtype="fp16") for n in "qkv")
        g.output(g.sdpa(q, k, v)[0], name="o")
        return g
    plan = graph().compile(Target.cuda((9, 0)), engines=["triton"], gates="off")
    assert plan.routes[0].engine == "triton"
    x = torch.randn(1, 1, 8, 16).half()
    o = graph().compile("cpu", engines=["reference"]).execute({"q": x, "k": x, "v": x})["o"]
    assert bool(o.isfinite().all())
    info = cache.info()
    print(info.kernels_compiled, info.disk_hits)
"""


def attention(**env: str) -> tuple[list[int], str]:
    out, err = finish(start(ATTENTION, **env))
    if out.strip() == "skip":
        pytest.skip("Triton's compiler is not available here")
    return [int(n) for n in out.split()], err


def test_sixteen_processes_compile_a_real_kernel_once(tmp_path: Path) -> None:
    """As above, with attention for sm_90. The processes are forks of one that has imported everything."""
    script = f"""
        import os, sys, time
        from pathlib import Path
        from frost import cache
        from frost.graph import Graph
        from engines import registry
        from engines.base import Target
        target = Target.cuda((9, 0))
        if registry.get("triton").unavailable(target):
            print("skip")
            sys.exit()
        import triton.compiler
        gate, pids = Path(sys.argv[1]), []
        for rank in range({RANKS}):
            pid = os.fork()
            if pid == 0:
                while not gate.exists():
                    time.sleep(0.001)
                g = Graph()
                q, k, v = (g.tensor(n, (1, 1, 8, 16), dtype="fp16") for n in "qkv")
                g.output(g.sdpa(q, k, v)[0], name="o")
                g.compile(target, engines=["triton"], gates="off")
                info = cache.info()
                os.write(1, f"{{info.kernels_compiled}} {{info.disk_hits}}\\n".encode())
                os._exit(0)
            pids.append(pid)
        gate.touch()
        sys.exit(any(os.waitpid(pid, 0)[1] for pid in pids))
    """
    # From 3.12 on Python warns of forks beside threads; libraries may have started some.
    env = {"FROST_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    out, err = finish(start(script, tmp_path / "go", **env))
    if out.strip() == "skip":
        pytest.skip("Triton's compiler is not available here")
    assert sorted(out.splitlines()) == ["0 1"] * (RANKS - 1) + ["1 0"] and not err.strip(), err
    assert [p.suffix for p in (tmp_path / "cache" / "kernels").iterdir()] == [".frostk"]


HOMES: dict[str, Any] = {
    "home below a file": {"HOME": "{file}/nobody"},
    "home in /proc": {"HOME": "/proc/frost"},
    "cache folder is a file": {"FROST_CACHE_DIR": "{file}"},
    "switched off": {"FROST_CACHE_DIR": "off"},
}


@pytest.mark.parametrize("where", HOMES)
def test_import_and_first_call_where_nothing_can_be_kept(where: str, tmp_path: Path) -> None:
    """flashinfer#2834: PermissionError at import or at the first call. Kernels are compiled into memory, with
    at most one warning that names the folder."""
    (tmp_path / "file").write_text("")
    env = {k: v.format(file=tmp_path / "file") for k, v in HOMES[where].items()}
    env = {"FROST_CACHE_DIR": "", "XDG_CACHE_HOME": "", **env}
    (compiled, hits), err = attention(**env)
    assert (compiled, hits) == (1, 0)
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == (where != "switched off") and all("kernel cache" in line for line in lines), err


def test_the_next_process_compiles_nothing_and_mends_what_is_damaged(tmp_path: Path) -> None:
    assert attention(FROST_CACHE_DIR=str(tmp_path)) == ([1, 0], "")
    assert attention(FROST_CACHE_DIR=str(tmp_path)) == ([0, 1], "")
    (kernel,) = (tmp_path / "kernels").iterdir()
    whole = kernel.read_bytes()
    kernel.write_bytes(whole[:1000])
    counts, err = attention(FROST_CACHE_DIR=str(tmp_path))
    assert counts == [1, 0] and err.count(kernel.name) == 1
    assert len(kernel.read_bytes()) == len(whole)
