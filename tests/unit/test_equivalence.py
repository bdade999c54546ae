"""Running a gate: what passes, what doesn't, and that the matrix covers what gated engines claim."""

import dataclasses

import pytest
import torch
from gated_engine import dummy_engine

from descriptors import OP_TYPES
from engines import registry
from engines.base import Engine, SdpaBwdDsl, Target
from frost import cache, equivalence, gates
from frost.errors import GateError
from frost.fuse import fuse
from frost.gate_matrix import MATRIX, Config


@pytest.fixture
def dummy(tmp_path, register):
    return register(dummy_engine(tmp_path / "kernel.py"))


SMALL = Config("small", dtype="fp32", batch=1, heads=(2, 1), seqlen=(5, 7), head_dim=(8, 8))


def test_the_reference_passes_its_own_matrix_in_small():
    for changes in ({}, {"causal": True, "sink": "fp32"}, {"layout": "last2"}, {"bias": "1hqk", "bias_holes": True}):
        for op in MATRIX:
            result = equivalence.run_config(dataclasses.replace(SMALL, op=op, **changes), "reference")
            assert result.verdict == "pass" and 0 <= result.ratio <= 1, result


def _spoil(dummy, spoil):
    """The dummy engine, with `spoil(operands)` after every launch."""
    inner = dummy.adapter_type

    class Spoiled(inner):
        def compile(self, desc, target):
            executable = super().compile(desc, target)
            prepare = executable.prepare

            def spoiled(launch, workspace):
                call = prepare(launch, workspace)

                def run(stream):
                    call(stream)
                    spoil(launch.operands)
                return run

            executable.prepare = spoiled
            return executable

    type(dummy).adapter_type = Spoiled


def _half_unwritten(x):
    x["o"][:, :, 2:] = float("nan")


def _off_by_tf32(x):
    x["o"] *= 1 + 1e-3


def _stray(x):
    x["o"].as_strided((1,), (1,), x["o"].storage_offset() + x["o"].numel() + 1).fill_(0.0)


def _wrong_lse(x):
    x["lse"] *= 1.4427


@pytest.mark.parametrize("spoil, says", [
    (_half_unwritten, "o: inf x the allowed error"),
    (_off_by_tf32, "o: "),
    (_wrong_lse, "lse: "),
    (_stray, "o: 1 elements around the buffer were written"),
])
def test_a_wrong_engine_does_not_pass(dummy, spoil, says):
    assert equivalence.run_config(SMALL, "dummy").verdict == "pass"
    _spoil(dummy, spoil)
    cache.clear()
    result = equivalence.run_config(SMALL, "dummy")
    assert result.verdict == "fail" and says in result.detail


def test_an_engine_that_raises_fails_the_row_and_one_that_declines_is_listed(dummy):
    result = equivalence.run_config(dataclasses.replace(SMALL, dtype="fp64"), "dummy")
    assert result.verdict == "declined" and "dtype: got fp64" in result.detail

    def crash(_):
        raise RuntimeError("no luck")

    _spoil(dummy, crash)
    cache.clear()
    result = equivalence.run_config(SMALL, "dummy")
    assert result.verdict == "error" and result.detail == "RuntimeError: no luck"


def test_green_needs_a_row_that_was_covered(monkeypatch, dummy):
    rows = (SMALL, dataclasses.replace(SMALL, name="wide", dtype="fp64"))
    monkeypatch.setitem(MATRIX, "sdpa", rows)
    seen = []
    run = equivalence.run_gate("dummy", "sdpa", Target.cpu(), seen.append)
    assert run.ok and [r.verdict for r in seen] == ["pass", "declined"] and run.summary().startswith("1 passed")
    monkeypatch.setitem(MATRIX, "sdpa", rows[1:])
    run = equivalence.run_gate("dummy", "sdpa", Target.cpu())
    assert not run.ok and "wide" in run.summary()
    with pytest.raises(GateError, match="only a green run makes a gate"):
        gates.keep(run)


def test_an_op_without_a_matrix_is_an_error():
    with pytest.raises(GateError, match="op: given 'pointwise'"):
        equivalence.run_gate("reference", "pointwise", Target.cpu())


def test_a_deterministic_row_is_run_again_and_compared_bit_by_bit(register):
    reference = registry.get("reference").adapter(SdpaBwdDsl)
    runs = []

    class Moody(SdpaBwdDsl):
        engine = "moody"
        capabilities = reference.capabilities

        def compile(self, desc, target):
            executable = reference.compile(desc, target)
            prepare = executable.prepare

            def moody(launch, workspace):
                call = prepare(launch, workspace)

                def run(stream):
                    call(stream)
                    runs.append(1)
                    launch.operands["dk"].mul_(1 + 1e-6 * len(runs))
                return run

            executable.prepare = moody
            return executable

    class MoodyEngine(Engine):
        name = "moody"

        def adapters(self):
            return (Moody(),)

    register(MoodyEngine())
    config = dataclasses.replace(SMALL, op="sdpa_backward", deterministic=True)
    result = equivalence.run_config(config, "moody")
    assert len(runs) == equivalence.DETERMINISTIC_REPEATS
    assert result.verdict == "fail" and result.detail == "dk: not bit-equal from run to run"


def test_fp32_results_as_coarse_as_tf32_are_told_apart():
    ref = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    lse = torch.zeros(2, 3).double()
    near, far = ref * (1 + 1e-7), ref * (1 + 7e-4)
    assert equivalence.compare("o", near.float(), ref, near.float(), lse).ratio <= 1
    assert equivalence.compare("o", far.float(), ref, near.float(), lse).ratio > 1


def test_infinities_are_right_only_where_the_oracle_has_them():
    ref = torch.tensor([1.0, -torch.inf, 70000.0], dtype=torch.float64)
    plain, lse = ref.clone(), ref.clone()
    right = torch.tensor([1.0, -torch.inf, torch.inf]).half()
    assert equivalence.compare("lse", right, ref, plain, lse).ratio == 0
    for wrong in ([1.0, torch.inf, torch.inf], [torch.nan, -torch.inf, torch.inf], [1.0, 0.0, torch.inf]):
        assert equivalence.compare("lse", torch.tensor(wrong).half(), ref, plain, lse).ratio == torch.inf


# ---- the matrix as data ------------------------------------------------------------------------------------


def _desc(config):
    case = equivalence.make_case(config)
    given = {n: equivalence.Placed.make(x.shape, x.dtype, "bhsd", "cpu") for n, x in case.operands.items()}
    names = equivalence._wanted(config) if config.op == "sdpa_backward" else ("o", "lse")
    outputs = {n: equivalence.Placed.make(case.answer[n].shape, equivalence._result_dtype(case, n), "bhsd", "cpu")
               for n in names}
    return fuse(equivalence._graph(config, given, outputs)).steps[0].desc


@pytest.mark.parametrize("op", MATRIX)
def test_names_are_unique(op):
    names = [c.name for c in MATRIX[op]]
    assert len(set(names)) == len(names) and all(c.op == op for c in MATRIX[op])


@pytest.mark.parametrize("op, least", [("sdpa", 40), ("sdpa_backward", 40)])
def test_the_matrix_covers_every_option_a_gated_engine_consumes(op, least):
    small = [c for c in MATRIX[op] if "cpu" in c.devices]
    assert len(small) >= least
    covered = OP_TYPES[op].BASE.union(*(_desc(c).set_fields() for c in small))
    for engine in registry.engines():
        if not engine.gated:
            continue
        for adapter in engine.adapters():
            if adapter.op == op:
                for row in adapter.capabilities:
                    assert row.features <= covered, f"{engine.name}: no configuration sets {row.features - covered}"


def test_the_matrix_covers_dtypes_head_dims_groups_and_layouts():
    for op, configs in MATRIX.items():
        assert {c.dtype for c in configs} == {"bf16", "fp16", "fp32"}, op
        assert {(40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)} <= {c.head_dim for c in configs}
        assert {1, 2, 3, 4, 7, 8} <= {c.heads[0] // c.heads[1] for c in configs}
        assert {c.layout for c in configs} == set(equivalence.LAYOUTS)
        assert {c.align for c in configs if c.causal} == {"top_left", "bottom_right"}


def test_operands_have_nan_wherever_nothing_may_read():
    config = next(c for c in MATRIX["sdpa_backward"] if c.name == "packed")
    case = equivalence.make_case(config)
    assert torch.isnan(case.operands["q"][:3]).all() and torch.isnan(case.operands["v"][231:]).all()
    assert not any(torch.isnan(x).any() for x in (*case.answer.values(), *case.plain.values()))
    placed = equivalence.Placed.make((2, 3, 4, 5), torch.float16, "pitch", "cpu")
    placed.view.zero_()
    assert torch.isnan(placed.buffer).any() and placed.stray_writes() == 0
    placed.buffer[-1] = 1
    assert placed.stray_writes() == 1
