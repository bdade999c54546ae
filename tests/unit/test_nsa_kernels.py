"""Selection kernels as artifacts: what they are made from, that they compile for every arch without spilling, and sizes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import engines.triton as triton_engine
from descriptors import NsaSelectionBwdDesc, NsaSelectionDesc, TensorDesc
from engines import registry
from engines.base import Target
from engines.triton import nsa_map, runtime
from engines.triton.params_nsa import nsa_params
from frost import gates

HERE = Path(triton_engine.__file__).parent
ENGINE = registry.get("triton")


# ---- identity --------------------------------------------------------------------------------------------------


def test_an_op_vouches_for_its_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change to a selection kernel leaves the gates of dense attention standing, and the other way round."""
    dense, sparse = (set(ENGINE.op_source_files(op)) for op in ("sdpa", "nsa_selection"))
    assert {p.name for p in sparse - dense} >= {"map.py", "fwd.py", "bwd.py", "params_nsa.py", "configs_nsa.py"}
    assert not any("nsa" in str(p.relative_to(HERE)) for p in dense)
    assert set(ENGINE.source_files()) == dense | sparse
    hashes = {op: gates.op_source_hash("triton", op) for op in ("sdpa", "sdpa_backward", "nsa_selection")}
    assert hashes["sdpa"] == hashes["sdpa_backward"] != hashes["nsa_selection"]
    monkeypatch.setattr(gates, "kernel_source_hash", lambda: "0" * 64)
    assert gates.op_source_hash("triton", "nsa_selection") == "0" * 64


def test_kernels_import_nothing_outside_their_digest() -> None:
    listed = {p.resolve() for p in nsa_map.source_files()}
    for path in (HERE / "kernels" / "nsa").glob("*.py"):
        assert path.resolve() in listed
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parent if node.level == 1 else path.parent.parent
                assert (folder / f"{node.module}.py").resolve() in listed, f"{path.name} imports {node.module}"
            elif isinstance(node, ast.Import):
                assert {a.name.split(".")[0] for a in node.names} == {"triton"}


# ---- specialisations -------------------------------------------------------------------------------------------


def descs(t: int = 8192, group: int = 16, hk: int = 4, d: int = 128, dv: int = 128, slots: int = 16, block: int = 64,
          dtype: str = "bf16", batch: int = 1) -> dict[str, Any]:
    def desc(*shape: int, dtype: str = dtype) -> TensorDesc:
        return TensorDesc.make(shape, dtype)

    q, k, v, o = desc(batch, hk * group, t, d), desc(batch, hk, t, d), desc(batch, hk, t, dv), desc(batch, hk * group, t, dv)
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "o": o, "block_indices": desc(batch, hk, t, slots, dtype="int32"), "block_size": block,
        "lse": desc(batch, hk * group, t, dtype="fp32")}
    return {"nsa_selection": NsaSelectionDesc(**given),
            "nsa_selection_backward": NsaSelectionBwdDesc(**given, do=o, dq=q, dk=k, dv=v)}


def test_sizes_and_batches_share_kernels() -> None:
    """Nothing that changes from batch to batch is compiled in; the group is."""
    base = nsa_params(descs()["nsa_selection_backward"], interpreted=False)
    for change in ({"t": 999}, {"hk": 1}, {"batch": 7}, {"slots": 9}):
        assert nsa_params(descs(**change)["nsa_selection_backward"], interpreted=False) == base, change
    assert nsa_params(descs(group=3)["nsa_selection_backward"], interpreted=False) != base
    assert nsa_params(descs(block=32)["nsa_selection"], interpreted=False) != base


@pytest.mark.slow
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("d, dv, limit", [(128, 128, 16), (64, 64, 16)])
@pytest.mark.skipif(runtime.unavailable_reason() is not None, reason=str(runtime.unavailable_reason()))
def test_hot_kernels_do_not_spill(cc: tuple[int, int], d: int, dv: int, limit: int) -> None:
    from engines.base import API_TYPES

    for desc in descs(d=d, dv=dv).values():
        adapter = ENGINE.adapter(API_TYPES[type(desc)])
        assert adapter is not None
        made: Any = adapter.compile(desc, Target.cuda(cc))
        for name, kernel in made.kernels.items():
            assert runtime.resource_usage(kernel.bundle.code)["spill_bytes"] <= limit, name


SIZES: tuple[dict[str, int], ...] = (
    {"t": 131_072}, {"t": 2**22, "group": 1, "hk": 1}, {"batch": 4096, "t": 128, "hk": 8}, {"slots": 128})


def geometries(**change: int) -> list[nsa_map.Geometry]:
    from engines.triton.adapter_nsa import backward_geometry, forward_geometry

    pair = descs(**change)
    return [forward_geometry(pair["nsa_selection"]), backward_geometry(pair["nsa_selection_backward"])]


def test_every_launch_fits_a_grid() -> None:
    """64/4 heads of 128k tokens, and many small sequences: programs and row numbers stay inside 32 bits."""
    for change in SIZES:
        for g in geometries(**change):
            assert g.held_items < 2**31 and g.entries * g.parts(g.tokens) * g.group < 2**31 and g.tokens <= g.rows
            assert sum(n for _, n in g.launches()) == g.rows


def test_what_is_held_covers_every_part_and_grows_with_the_tokens() -> None:
    """Workspace is sized at the declared maxima of extents and then used for smaller ones."""
    before: list[dict[str, int]] = [{}, {}]
    for t in (1, 31, 64, 65, 1000, 4095, 4096, 4097, 8191, 9000, 16_384, 16_385, 40_000, 131_072, 131_073):
        for i, g in enumerate(geometries(t=t)):
            for _, n in g.launches():
                parts = g.parts(n)
                assert parts * g.span <= g.held_tokens and parts * g.n_blocks <= g.held_blocks
                assert g.problems * parts * g.items <= g.held_items
                assert g.problems * parts * (g.n_blocks + 1) <= g.map_regions()["offsets"]
            sizes = {**g.map_regions(), "rows held": g.held_rows}
            assert all(sizes[n] >= size for n, size in before[i].items()), t
            before[i] = sizes


def test_a_part_of_a_launch_stays_in_the_cache_and_gives_blocks_enough_rows() -> None:
    from engines.triton import configs_nsa

    forward, backward = geometries()
    assert forward.parts(forward.tokens) == 4 and forward.span * 16 * 128 * 2 == configs_nsa.PART_BYTES
    assert backward.span * 2 == forward.span  # Q and dO
    for g in geometries(t=131_072):
        assert g.span * g.slots * g.group >= configs_nsa.PART_ROWS * g.n_blocks


@pytest.mark.parametrize("op", ["nsa_selection", "nsa_selection_backward"])
@pytest.mark.parametrize("batch, tokens", [(16, 8192), (7, 65_536), (4, 2048)])
def test_workspace_at_the_maxima_holds_every_binding(op: str, batch: int, tokens: int) -> None:
    """How many tokens a launch takes depends on the batch, in steps: it is settled at the declared maxima."""
    from engines.triton.adapter_nsa import (
        backward_geometry,
        backward_regions,
        forward_geometry,
        forward_regions,
    )

    geometry, regions = {"nsa_selection": (forward_geometry, forward_regions),
                         "nsa_selection_backward": (backward_geometry, backward_regions)}[op]
    most = geometry(descs(t=tokens, hk=2, d=64, dv=64, batch=batch)[op]).most
    largest = {r.name: r.nbytes for r in regions(descs(t=tokens, hk=2, d=64, dv=64, batch=batch)[op], most)}
    for b in range(1, batch + 1):
        for t in (1, tokens // 3, tokens - 1, tokens):
            found = {r.name: r.nbytes for r in regions(descs(t=t, hk=2, d=64, dv=64, batch=b)[op], most)}
            assert all(found[n] <= largest[n] for n in found), (b, t)


@pytest.mark.parametrize("op, dtype, served", [
    ("nsa_compressed_attention", "bf16", False), ("nsa_compressed_attention", "fp32", True),
    ("nsa_compressed_attention_backward", "fp16", False), ("nsa_compressed_attention_backward", "fp32", False)])
def test_head_dims_that_no_gate_row_has_run_are_declined_on_a_gpu(op: str, dtype: str, served: bool) -> None:
    """Interpreted they are served: there the tests run them."""
    from descriptors import NsaCompressedBwdDesc, NsaCompressedDesc
    from engines.base import API_TYPES

    def desc(*shape: int, of: str = dtype) -> TensorDesc:
        return TensorDesc.make(shape, of)

    q, k, v, o = desc(1, 2, 64, 192), desc(1, 1, 15, 192), desc(1, 1, 15, 128), desc(1, 2, 64, 128)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "o": o, "lse": desc(1, 2, 64, of="fp32"), "seqlen_kv": 64, "block_len": 8,
                             "stride": 4, "block_size": 16}
    made: Any = NsaCompressedDesc(**given) if op == NsaCompressedDesc.OP else NsaCompressedBwdDesc(
        **given, do=o, dq=q, dk=k, dv=v)
    adapter = ENGINE.adapter(API_TYPES[type(made)])
    assert adapter is not None
    assert adapter.check_support(made, Target.cuda((9, 0))).ok == served
    reasons = " ".join(map(str, adapter.check_support(made, Target.cpu()).reasons))
    assert "gate" not in reasons, reasons
