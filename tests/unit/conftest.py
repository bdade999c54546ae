"""What the tests of the command line share: folders of their own, a gated engine, a graph in a file."""

import pytest

from engines import registry
from engines.base import Engine, SdpaFwdDsl
from frost import gates, sym
from frost.gate_matrix import MATRIX, Config
from frost.graph import Graph


@pytest.fixture
def cli_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FROST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gates, "shipped_gate_dir", lambda: tmp_path / "shipped")
    monkeypatch.setattr(gates, "_held", {})


@pytest.fixture
def gated(tmp_path, register, monkeypatch):
    """A gated engine that is the reference underneath, and a matrix of two rows, of which it declines one."""

    class Gated(Engine):
        name, gated = "gated", True

        def adapters(self):
            return (registry.get("reference").adapter(SdpaFwdDsl),)

    small = Config("small", dtype="fp32", batch=1, heads=(2, 1), seqlen=(5, 7), head_dim=(8, 8))
    monkeypatch.setitem(MATRIX, "sdpa", (small,))
    return register(Gated())


@pytest.fixture
def graph_file(tmp_path):
    g = Graph("layer")
    n = sym("T", max=256)
    q, k, v = (g.tensor(name, (n, 2, 8), dtype="fp32") for name in "qkv")
    cu = g.tensor("cu", (3,), dtype="int32")
    o, lse = g.sdpa(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_kv=cu, stats=True, name="attention")
    g.output(o, name="o")
    g.output(lse, name="lse")
    path = tmp_path / "layer.frost"
    path.write_bytes(g.to_bytes())
    return path
