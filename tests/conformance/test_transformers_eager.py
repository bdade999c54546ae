"""FROST against the eager attention functions of Hugging Face's models, called as the models call them.

First each call by itself: o, weights and every gradient. Then whole models whose attention function gives
way to `frost.attention`: logits and the gradients of all parameters. (How FROST serves models by name is
another suite's.)
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.17", reason="transformers >= 5.17 is not installed")

import compare
import hf_calls
import oracle
import torch
from cases import run
from hf_calls import FAMILIES, SCENES, Call
from oracle import Answer, Problem
from torch import Tensor

import frost

FP64 = 1e-12  # see test_pytorch_peers
# Models compute norms and rotations in fp32 whatever their type: two of them differ by its roundings, some hundred.
FP32_MODEL = {"rtol": 1e-4, "atol": 2e-5}
# What each family is here for: options that its calls must hold between them, in one scene or another.
MEANT = {
    "llama": {"causal"},
    "mistral": {"causal", "window"},
    "gemma2": {"causal", "window", "softcap"},
    "gpt_oss": {"causal", "window", "sink"},
    "deepseek_v3": {"causal"},
    "t5": {"bias"},
}
EACH = [pytest.param(f, s, id=f"{f}-{s}") for f in FAMILIES for s in SCENES]


pytestmark = pytest.mark.usefixtures("softmax_in_its_own_type")


@functools.lru_cache(maxsize=32)
def calls(family: str, scene: str) -> tuple[Call, ...]:
    return tuple(hf_calls.record(family, scene))


def asked(call: Call) -> Problem:
    """The call with a gradient for o, none of it in rows that see nothing: eager spreads those over all
    keys."""
    do = torch.randn(*call.q.shape[:-1], call.v.shape[-1], generator=torch.Generator().manual_seed(3))
    seen = call.seen()
    do = do if seen is None else torch.where(seen.any(-1, keepdim=True), do, 0.0)
    options = {n: x.detach() if isinstance(x, Tensor) else x for n, x in call.options.items()}
    return Problem(call.q, call.k, call.v, do, None, options)


def eager_says(call: Call, given: Problem) -> tuple[Answer, Tensor]:
    """(o and gradients, weights [B, Hq, Sq, Sk]) of the model's own function, in fp64."""
    wide = given.cast(torch.float64)
    leaves = {
        "q": wide.q,
        "k": wide.k,
        "v": wide.v,
        **{n: wide.options[n] for n in ("bias", "sink") if n in wide.options},
    }
    leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
    module = call.module
    if "sink" in leaves:
        module = torch.nn.Module()
        module.num_key_value_groups, module.sinks = call.module.num_key_value_groups, leaves["sink"]
    named = {**call.named, **({"position_bias": leaves["bias"]} if "bias" in leaves else {})}
    mask = None if call.mask is None else call.mask.double()
    o, weights = call.eager(module.eval(), leaves["q"], leaves["k"], leaves["v"], mask, **named)
    o = o.transpose(1, 2)
    grads = torch.autograd.grad((o * wide.do).sum(), list(leaves.values()))
    named_grads: dict[str, Any] = {"d" + n: g for n, g in zip(leaves, grads)}
    return Answer(o.detach(), oracle.reference(given_to_oracle(given)).lse, **named_grads), weights.detach()


def given_to_oracle(given: Problem) -> Problem:
    return run.problem_of(given.q, given.k, given.v, given.do, given.dlse, **given.options)


def zero_where_empty(x: Tensor, lse: Tensor) -> Tensor:
    """FROST's answer for a row that sees nothing, where eager has a mean over all keys."""
    return torch.where(torch.isfinite(lse)[..., None], x, 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_calls_are_what_the_family_is_here_for(family: str) -> None:
    found = [c for scene in SCENES for c in calls(family, scene)]
    held = {n for c in found for n, x in c.options.items() if x is not False}
    assert MEANT[family] <= held
    assert "mask" in held  # of padding
    assert any(c.q.shape[2] < c.k.shape[2] for c in calls(family, "continued"))
    if family == "deepseek_v3":
        assert all((c.q.shape[-1], c.v.shape[-1]) == (192, 128) for c in found)
    if family == "t5":
        # The encoder's, the decoder's own, and the decoder's to the encoder.
        assert len({c.kind for c in calls(family, "whole")}) == 3
        assert all(bool(c.options["bias"].any()) for c in found if c.options["causal"])


@pytest.mark.parametrize(("family", "scene"), EACH)
def test_rows_see_what_the_model_let_them_see(family: str, scene: str) -> None:
    """Empty here is empty there."""
    for call in calls(family, scene):
        seen, given = call.seen(), given_to_oracle(asked(call))
        given.options.pop("sink", None)
        lse = oracle.reference(given).lse
        some = torch.ones(1, dtype=torch.bool) if seen is None else seen.any(-1)
        assert torch.equal(torch.isfinite(lse), some.expand(lse.shape))


@pytest.mark.parametrize(("family", "scene"), EACH)
def test_reference_agrees_in_fp64(family: str, scene: str) -> None:
    for n, call in enumerate(calls(family, scene)):
        given = asked(call)
        said, weights = eager_says(call, given)
        wide = given.cast(torch.float64)
        got = run.both("reference", wide, **wide.options)
        # Attention to the unit matrix is its weights.
        unit = torch.eye(wide.k.shape[2], dtype=torch.float64).expand(*wide.k.shape[:3], -1)
        got["weights"] = run.forward("reference", wide.q, wide.k, unit, **wide.options)["o"]
        empty = _lse_without_sink(given)
        want = {**dict(said.items()), "weights": weights}
        for name in ("o", "weights"):
            want[name] = zero_where_empty(want[name], empty)
        for name, x in want.items():
            torch.testing.assert_close(
                got[name],
                x,
                rtol=FP64,
                atol=FP64,
                msg=lambda text, name=name, n=n: f"{name} of call {n}: {text}",
            )


def _lse_without_sink(given: Problem) -> Tensor:
    plain = given_to_oracle(given)
    plain.options.pop("sink", None)
    return oracle.reference(plain).lse


@pytest.mark.parametrize(("family", "scene"), EACH)
def test_interpreted_kernels_agree(family: str, scene: str) -> None:
    """In fp32, by the tolerance rule with eager's fp64 answer in the oracle's place. Layers that ask the
    same are asked once."""
    for call in {c.kind: c for c in calls(family, scene)}.values():
        given = asked(call)
        said, _ = eager_says(call, given)
        said.o = zero_where_empty(said.o, _lse_without_sink(given))
        got = run.both("triton", given, **given.options)
        plain = oracle.plain_composition(given_to_oracle(given), saved=(got["o"], got["lse"]))
        compare.assert_answer(
            got, given_to_oracle(given), ref=said, plain=plain, context=f"{family}, {scene}"
        )


def through_frost(
    eager: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **named: Any
) -> Any:
    call = Call(eager, module, q, k, v, mask, named)
    return frost.attention(q, k, v, engines=["reference"], **call.options).transpose(1, 2), None


@pytest.mark.parametrize(("family", "scene"), EACH)
def test_logits_and_gradients_of_whole_models(family: str, scene: str) -> None:
    answers = []
    for function in (None, through_frost):
        model = FAMILIES[family].build()
        with hf_calls.attention_of(
            family, function or (lambda eager, *given, **named: eager(*given, **named))
        ):
            logits = hf_calls.logits(family, model, scene)
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
        (logits * weight).sum().backward()
        answers.append(
            (logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    (want, grads), (got, mine) = answers
    torch.testing.assert_close(got, want, **FP32_MODEL)
    assert set(mine) == set(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(
            mine[name],
            grad,
            rtol=1e-3,
            atol=1e-4 * max(1.0, grad.abs().max().item()),
            msg=lambda text, name=name: f"{name}: {text}",
        )
