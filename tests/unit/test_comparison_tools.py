"""The helpers that judge every engine have to notice what they are there for."""

from __future__ import annotations

import math

import layouts
import pytest
import torch
from compare import assert_answer, assert_close_to_oracle
from oracle import Problem, plain_composition, reference

from engines.reference.plain import allowed_error


def _problem(dtype: torch.dtype = torch.bfloat16) -> Problem:
    torch.manual_seed(0)
    return Problem(*(torch.randn(1, 2, 9, 8).to(dtype) for _ in range(4)))


def test_the_plain_composition_passes_its_own_rule() -> None:
    problem = _problem()
    assert max(assert_answer(plain_composition(problem), problem).values()) <= 0.5 + 1e-9


def test_the_floor_tells_true_fp32_from_tf32() -> None:
    """TF32 keeps 10 mantissa bits: its error of some 5e-4 is far above what fp32 is allowed."""
    problem = _problem(torch.float32)
    ref = reference(problem)
    rounded = Problem(*((x.view(torch.int32) & ~0x1FFF).view(torch.float32)
                        for x in (problem.q, problem.k, problem.v, problem.do)))
    with pytest.raises(AssertionError, match="are off"):
        assert_answer({"o": reference(rounded).o.float()}, problem, ref=ref)
    assert_answer({"o": ref.o.float()}, problem, ref=ref)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
def test_one_wrong_element_is_reported_with_its_index(value: float) -> None:
    ref = torch.zeros(2, 3, dtype=torch.float64)
    got = ref.float()
    got[1, 2] = value
    with pytest.raises(AssertionError, match=r"1 of 6 elements are off(.|\n)*\[1, 2\]: given"):
        assert_close_to_oracle(got, ref, ref, lse=torch.zeros(2, dtype=torch.float64))


def test_nan_and_infinities_must_stand_where_the_oracle_has_them() -> None:
    ref = torch.tensor([-math.inf, math.nan, 1e9], dtype=torch.float64)
    got = torch.tensor([-math.inf, math.nan, math.inf], dtype=torch.float16)  # 1e9 rounds to inf in fp16
    assert assert_close_to_oracle(got, ref, got.double(), lse=ref, name="lse") == 0.0
    with pytest.raises(AssertionError, match="1 of 3"):
        assert_close_to_oracle(torch.tensor([-math.inf, 0.0, math.inf]).half(), ref, got.double(), lse=ref, name="lse")


def test_the_allowance_follows_the_formula() -> None:
    ref, plain = torch.tensor([[4.0, -0.5]], dtype=torch.float64), torch.tensor([[4.25, -0.5]])
    lse = torch.tensor([-2048.0], dtype=torch.float64)
    expected = torch.tensor([[0.5 + 2e-5 * 4 * 3, 0.5 + 2e-5 * 3]], dtype=torch.float64)
    torch.testing.assert_close(allowed_error("o", ref, plain, lse), expected)
    torch.testing.assert_close(allowed_error("dk", ref, plain, lse), expected)


@pytest.mark.parametrize("name", layouts.LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 4, 6, 7), (5, 3, 8), (2, 3, 5)])
def test_layouts_hold_the_values_and_poison_the_rest(name: str, shape: tuple[int, ...]) -> None:
    layout = layouts.LAYOUTS[name]
    if not layout.applies(shape):
        pytest.skip("does not apply to this shape")
    x = torch.randn(shape)
    view = layouts.lay_out(x, layout)
    assert view.shape == x.shape and not torch.isnan(view).any()
    if layout.write:
        assert torch.equal(view, x)
        stored = torch.as_strided(view, (view.untyped_storage().nbytes() // 4,), (1,), 0)
        assert int((~torch.isnan(stored)).sum()) == x.numel()
        out = layouts.output_like(shape, torch.float32, layout)
        out.tensor.copy_(x)
        out.check_canaries()
        out.check_written()
        assert torch.equal(out.tensor, x)


def test_canaries_notice_a_stray_write_and_an_unwritten_element() -> None:
    out = layouts.output_like((2, 3), torch.float32, "padded_pitch")
    with pytest.raises(AssertionError, match="never written"):
        out.check_written()
    out.tensor.fill_(0.0)
    out.buffer[out.tensor.storage_offset() + 3] = 0.0
    with pytest.raises(AssertionError, match="1 elements outside"):
        out.check_canaries()


def test_pairwise_covers_every_pair() -> None:
    choices = [["a", "b", "c"], ["x", "y"], ["1", "2", "3"]]
    rows = layouts.pairwise(["p", "q", "r"], choices)
    for (i, left), (j, right) in ((("p", 0), ("q", 1)), (("p", 0), ("r", 2)), (("q", 1), ("r", 2))):
        assert {(row[i], row[j]) for row in rows} == {(a, b) for a in choices[left] for b in choices[right]}
