"""Saved plans: the same plan back, or a PlanError; never a plan for another machine, and never anything
executed from the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import graphs
from cases.data import make
from cases.small import Spec
from cases.table import BY_NAME

from descriptors import pack, sym, unpack
from engines import registry
from engines.base import Target
from frost import cache, plan_io
from frost.errors import PlanError
from frost.plan import Plan
from frost.plan_io import MAGIC, load_plan

SPECS: dict[str, Spec] = {
    "forward": Spec(),
    "backward": Spec(op="sdpa_backward", deterministic=True, dlse=True, sink="fp32", dsink=True),
    "packed": Spec(
        packed=True,
        seqlens=(40, 50),
        strides={"lse": (1, 40)},
        options={"causal": True, "align": "bottom_right"},
    ),
    "symbolic": Spec(
        seqlens=(sym("S", max=512), sym("S", max=512)),
        options={"window": (3, 1), "softcap": 2.5, "scale": 0.3},
    ),
    "names": Spec(prefix="größe_", graph="graph with spaces"),
}


def saved(tmp_path: Path, spec: Spec | None = None, target: Any = "cpu", **how: Any) -> tuple[Plan, Path]:
    plan = (spec or Spec()).build().compile(target, **how)
    plan.save(tmp_path / "a.plan")
    return plan, tmp_path / "a.plan"


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The file with a changed record and a checksum that fits: what a forger, or another version, would
    write."""
    record = unpack(path.read_bytes()[len(MAGIC) + 32 :])
    change(record)
    body = pack(record)
    path.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)
    return path


# ---- round trip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", SPECS)
def test_a_loaded_plan_has_the_same_key_and_engines(what: str, tmp_path: Path) -> None:
    plan, path = saved(tmp_path, SPECS[what])
    cache.clear()
    back = load_plan(path)
    assert back.key == plan.key and back.target == plan.target and back.policy == plan.policy
    assert [r.engine for r in back.routes] == [r.engine for r in plan.routes]
    assert list(back.program.inputs) == list(plan.program.inputs) and back.program == plan.program
    assert back.workspace_size == plan.workspace_size


@pytest.mark.parametrize("engine", ["reference", "torch_sdpa", "triton"])
def test_a_loaded_plan_gives_the_same_bits(engine: str, tmp_path: Path) -> None:
    case = BY_NAME["layout packed qkv"]
    for op in case.ops:
        g, tensors = graphs.build(case, op, make(case))
        plan = g.compile("cpu", engines=[engine], gates="off")
        expected = {n: t.clone() for n, t in plan.execute(tensors).items()}
        plan.save(tmp_path / "b.plan")
        cache.clear(kernels=True)
        for out in plan.program.outputs:
            tensors[out].fill_(float("nan"))
        for name, got in load_plan(tmp_path / "b.plan").execute(tensors).items():
            assert torch.equal(got, expected[name]), name


def test_an_accelerators_plan_can_be_saved_and_loaded_without_the_accelerator(tmp_path: Path) -> None:
    """Built for a target on a build machine: the target has to be named again on load."""
    plan, path = saved(tmp_path, target=Target.cuda((9, 0)), engines=["reference"])
    assert load_plan(path, device=Target.cuda((9, 0))).key == plan.key


def test_saving_overwrites_in_one_step(tmp_path: Path) -> None:
    saved(tmp_path)
    plan, path = saved(tmp_path, Spec(op="sdpa_backward"))
    assert load_plan(path).key == plan.key and [p.name for p in tmp_path.iterdir()] == ["a.plan"]


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Spec().build().compile("cpu").save(tmp_path / "file" / "a.plan")


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "absent.plan")


# ---- another machine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cc", [(8, 6), (9, 0)])
def test_another_architecture_is_refused(cc: tuple[int, int], tmp_path: Path) -> None:
    """cudnn-frontend PR#60, cupy#9830: named on both sides, and never launched."""
    _, path = saved(tmp_path, target=Target.cuda((8, 0)), engines=["reference"])
    with pytest.raises(PlanError, match=f"arch.*sm_80.*sm_{cc[0]}{cc[1]}"):
        load_plan(path, device=Target.cuda(cc))
    with pytest.raises(PlanError, match="arch.*sm_80.*cpu"):
        load_plan(path, device="cpu")


def test_a_cpu_plan_stays_on_the_cpu(tmp_path: Path) -> None:
    """Without a device it loads for the CPU also where a GPU is the default."""
    _, path = saved(tmp_path)
    assert load_plan(path).target == Target.cpu()
    with pytest.raises(PlanError, match="arch.*cpu.*sm_90"):
        load_plan(path, device=Target.cuda((9, 0)))


@pytest.mark.parametrize("what", ["torch", "frost"])
def test_another_version_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = saved(tmp_path)
    other = {**plan_io._versions(), what: "0.0.1"}
    monkeypatch.setattr(plan_io, "_versions", lambda: other)
    with pytest.raises(PlanError, match=f"version of {what}.*0.0.1"):
        load_plan(path)


def test_another_kernel_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """triton#7322: an edited helper must not meet a plan that was made before."""
    _, path = saved(tmp_path, engines=["triton"])
    monkeypatch.setattr(registry.get("triton"), "source_digest", lambda: "0" * 64)
    with pytest.raises(PlanError, match="kernel source of engine triton"):
        load_plan(path)


def test_another_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = saved(tmp_path, engines=["triton"])
    monkeypatch.setattr(registry.get("triton"), "toolchain", lambda: {"triton": "99.0"})
    with pytest.raises(PlanError, match="toolchain of engine triton"):
        load_plan(path)


def test_an_engine_that_no_longer_serves_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than a plan on another engine than the one that was measured."""
    _, path = saved(tmp_path)
    from engines.base import Reason

    cache.clear()
    monkeypatch.setattr(
        registry.get("torch_sdpa"), "unavailable", lambda target: Reason("torch", "old", "new")
    )
    with pytest.raises(PlanError, match="torch_sdpa"):
        load_plan(path)
    cache.clear()


# ---- damage --------------------------------------------------------------------------------------------


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    data = path.read_bytes()
    for n in range(0, len(data), 7):
        path.write_bytes(data[:n])
        with pytest.raises(PlanError):
            load_plan(path)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    for extra in (b"\0", b"\xc0", path.read_bytes()):
        whole = path.read_bytes()
        path.write_bytes(whole + extra)
        with pytest.raises(PlanError):
            load_plan(path)
        path.write_bytes(whole)
    rewritten(path, lambda record: None)
    body = path.read_bytes()[len(MAGIC) + 32 :] + b"\xc0"
    path.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)
    with pytest.raises(PlanError):
        load_plan(path)


def test_flipped_bits_are_refused(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    data = path.read_bytes()
    for i in range(0, len(data), 3):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        with pytest.raises(PlanError):
            load_plan(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"FROSTPLN",
        MAGIC + bytes(32),
        MAGIC + hashlib.sha256(b"").digest(),
        b"\x80\x04\x95pickle.",
        b"PK\x03\x04" + bytes(60),
    ],
)
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(PlanError):
        load_plan(tmp_path / "x")


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another schema": lambda r: r.update(schema=99),
    "a field more": lambda r: r.update(extra=1),
    "a field less": lambda r: r.pop("gates"),
    "another key": lambda r: r.update(key="0" * 16),
    "engines of other number": lambda r: r.update(engines=[]),
    "another engine": lambda r: r.update(engines=["reference"]),
    "an engine nobody has": lambda r: r["digests"].update(nobody="0" * 64),
    "order of unknown engines": lambda r: r.update(order=["nobody"]),
    "order of none": lambda r: r.update(order=[]),
    "a gate policy nobody has": lambda r: r.update(gates="maybe"),
    "number for a text": lambda r: r.update(arch=1),
    "text for a list": lambda r: r.update(engines="torch_sdpa"),
    "text for bytes": lambda r: r.update(graph="graph"),
    "list for a map": lambda r: r.update(versions=[]),
    "no graph": lambda r: r.update(graph=b""),
    "half a graph": lambda r: r.update(graph=r["graph"][: len(r["graph"]) // 2]),
    "a graph with more behind it": lambda r: r.update(graph=r["graph"] + b"\0"),
    "another graph": lambda r: r.update(graph=Spec(batch=9).build().to_bytes()),
    "a graph that means nothing": lambda r: r.update(graph=Spec(heads=(4, 3)).build().to_bytes()),
    "a list for a record": lambda r: (r.clear(), r.update(a=1)),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_record_that_does_not_fit_is_refused_although_its_checksum_does(what: str, tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    with pytest.raises(PlanError):
        load_plan(rewritten(path, FORGERIES[what]))


def test_a_record_that_only_names_what_was_saved_is_taken(tmp_path: Path) -> None:
    """What the forgeries above start from."""
    plan, path = saved(tmp_path)
    assert load_plan(rewritten(path, lambda record: None)).key == plan.key
