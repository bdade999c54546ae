"""Hugging Face models on FROST: tiny random-weight models of each family, logits and gradients against
eager.
"""

from __future__ import annotations

import copy

import pytest
import torch

import frost

transformers = pytest.importorskip(
    "transformers", minversion="5.17", reason="transformers >= 5.17 is not installed"
)

from frost.integrations import _hf_masks  # noqa: E402
from frost.integrations import transformers as integration  # noqa: E402

integration.register()

SHARED = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# name -> (configuration class, what is particular to it)
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5, "head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 5, "head_dim": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": 5,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def config_of(family):
    name, particular = FAMILIES[family]
    return getattr(transformers, name)(**SHARED, **particular)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def pair(family):
    """(eager, frost): the same weights, in training mode."""
    return make_pair(family)


def make_pair(family, implementation="frost"):
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager")
    for name, weight in eager.named_parameters():
        if "sinks" in name or "norm" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(implementation)
    assert ours.config._attn_implementation == implementation
    return eager.train(), ours.train()


def tokens(*shape, seed=0):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def logits_and_grads(model, real=None, **inputs):
    return grads_of(model, model(**inputs, use_cache=False).logits, real)


def grads_of(model, logits, real=None):
    """The logits that count, and the gradients of one loss over them."""
    model.zero_grad()
    kept = logits if real is None else logits[real]
    weight = torch.randn(kept.shape, generator=torch.Generator().manual_seed(1))
    (kept * weight).sum().backward()
    return kept.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(pair, real=None, **inputs):
    assert_equal(*(logits_and_grads(m, real, **inputs) for m in pair))


def assert_equal(theirs, ours):
    (expected, grads), (got, mine) = theirs, ours
    torch.testing.assert_close(got, expected, **TOLERANCE)
    assert set(mine) == set(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(
            mine[name],
            grad,
            rtol=1e-3,
            atol=1e-4 * max(1.0, float(grad.abs().max())),
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_logits_and_gradients(pair):
    assert_same(pair, input_ids=tokens(2, 17))


def test_attention_gradients_are_there(family):
    """Nothing is detached: q, k, v and sinks learn."""
    _, ours = make_pair(family)
    _, grads = logits_and_grads(ours, input_ids=tokens(1, 9))
    wanted = ["q_proj", "k_proj", "v_proj", *(["sinks"] if family == "gpt_oss" else [])]
    for word in wanted:
        found = [g for n, g in grads.items() if word in n]
        assert found and all(g.abs().max() > 0 for g in found), word


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(pair, side):
    mask = torch.ones(3, 13, dtype=torch.long)
    for row, n in ((0, 4), (2, 9)):
        mask[row, slice(0, n) if side == "left" else slice(13 - n, None)] = 0
    assert_same(pair, mask.bool(), input_ids=tokens(3, 13), attention_mask=mask)


def test_training_steps_with_gradient_checkpointing(family):
    """Masks keep their structure through a recomputed forward; the loss goes the same way as eager's."""
    losses = []
    for model in make_pair(family):
        if model.config._attn_implementation == "frost":
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = tokens(2, 11)
        found = []
        for _ in range(4):
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2) and losses[1][-1] < losses[1][0]


def test_padding_of_everything_is_finite(family):
    _, ours = make_pair(family)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1] = 0
    logits, grads = logits_and_grads(ours, input_ids=tokens(2, 6), attention_mask=mask)
    assert torch.isfinite(logits).all() and all(torch.isfinite(g).all() for g in grads.values())


def packed_positions(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


@pytest.mark.parametrize("batch", [1, 2])
def test_packed_position_ids(pair, batch):
    positions = torch.cat([packed_positions(7, 1, 9), packed_positions(3, 12, 2)][:batch])
    assert_same(pair, input_ids=tokens(batch, 17), position_ids=positions)


@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens"])
def test_packed_equals_eager_one_at_a_time(family, pair, told_by):
    """Packed by position ids, or as DataCollatorWithFlattening hands it over, with offsets beside them."""
    if (family, told_by) == ("gpt_oss", "position_ids"):
        pytest.skip(
            "transformers' gpt-oss tells its mask no position ids: eager sees one sequence, and so does FROST"
        )
    eager, ours = pair
    ids, extra = tokens(1, 17), {}
    if told_by == "cu_seq_lens":
        cu = torch.tensor([0, 7, 17], dtype=torch.int32)
        extra = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 10, "max_length_k": 10}
    packed = logits_and_grads(ours, input_ids=ids, position_ids=packed_positions(7, 10), **extra)
    alone = [eager(part, use_cache=False).logits for part in (ids[:, :7], ids[:, 7:])]
    assert_equal(grads_of(eager, torch.cat(alone, 1)), packed)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(pair, padded, cache):
    ids = tokens(2, 8)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    made = []
    for model in pair:
        model.eval()
        how = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
        made.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=9,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                **how,
            )
        )
    assert torch.equal(made[0].sequences, made[1].sequences)
    for a, b in zip(made[0].logits, made[1].logits):
        torch.testing.assert_close(b, a, **TOLERANCE)


def test_a_chunk_into_a_cache(pair):
    """Several queries behind a prefix: the bottom right corner."""
    ids = tokens(1, 12)
    results = []
    for model in pair:
        model.eval()
        with torch.no_grad():
            first = model(ids[:, :7], use_cache=True)
            results.append(model(ids[:, 7:], past_key_values=first.past_key_values, use_cache=True).logits)
    torch.testing.assert_close(results[1], results[0], **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_callers_own_whole_mask(dtype):
    pair = make_pair("llama")
    keep = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(2)) < 0.6
    keep |= torch.eye(11, dtype=torch.bool)
    ids = tokens(2, 11)
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = pair[0](
            ids, attention_mask=added, use_cache=False
        ).logits  # eager adds; it has no boolean masks
        got = pair[1](ids, attention_mask=keep if dtype == torch.bool else added, use_cache=False).logits
    torch.testing.assert_close(got, expected, **TOLERANCE)


def test_an_encoder_sees_both_ways():
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    eager = transformers.BertModel(config).eval()
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("frost")
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    for inputs, real in (({}, None), ({"attention_mask": mask}, mask.bool())):
        assert_equal(*(grads_of(m, m(tokens(2, 9), **inputs).last_hidden_state, real) for m in (eager, ours)))


def test_one_engine_by_name_serves_or_refuses(family):
    """The Triton kernels in the interpreter; and the promise of a name."""
    eager, ours = make_pair(family, "frost:triton")
    ids = tokens(1, 9)
    frost.routing.reset()
    with torch.no_grad():
        torch.testing.assert_close(
            ours(ids, use_cache=False).logits, eager(ids, use_cache=False).logits, **TOLERANCE
        )
    assert {r.engine_name for r in frost.routing.routes()} == {"triton"}
    if family == "mistral":  # transformers itself refuses whatever has "sdpa" in its name for the other two
        ours.set_attn_implementation("frost:torch_sdpa")
        with pytest.raises(frost.NotSupportedError, match="window"), torch.no_grad():
            ours(ids, use_cache=False)


# ---- structure instead of a matrix -----------------------------------------------------------------------


def seen_by_the_attention(monkeypatch, family, model_inputs):
    """The options of every call of `frost.attention` in one forward pass."""
    calls = []
    real = integration.attention

    def spy(*tensors, **options):
        calls.append(options)
        return real(*tensors, **options)

    _, ours = make_pair(family)
    monkeypatch.setattr(integration, "attention", spy)
    with torch.no_grad():
        ours(**model_inputs, use_cache=False)
    return calls


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_no_mask_matrix_is_made(monkeypatch, family, kind):
    mask = torch.ones(1, 17, dtype=torch.long)
    mask[0, :4] = 0
    inputs = {"input_ids": tokens(1, 17)} | {
        "plain": {},
        "padded": {"attention_mask": mask},
        "packed": {"position_ids": packed_positions(7, 10)},
    }[kind]
    calls = seen_by_the_attention(monkeypatch, family, inputs)
    assert len(calls) == 2
    for options in calls:
        assert options["causal"] and options.get("bias") is None
        assert ("mask" in options) == (kind == "padded") and (
            kind != "padded" or options["mask"].shape == (1, 1, 1, 17)
        )
        assert ("cu_seqlens_q" in options) == (kind == "packed" and family != "gpt_oss")
    windows = {options.get("window", (None, None))[0] for options in calls}
    assert windows == {"llama": {None}, "mistral": {4}, "gemma2": {4, None}, "gpt_oss": {4, None}}[family]


def test_what_is_not_recognised_is_built_whole():
    from transformers import masking_utils as masks

    odd = masks.or_masks(masks.causal_mask_function, lambda b, h, q, kv: kv == 3)
    made = integration.attention_mask(batch_size=1, q_length=5, kv_length=5, mask_function=odd, device="cpu")
    assert made.shape == (1, 1, 5, 5) and made[0, 0, 0].tolist() == [True, False, False, True, False]
    assert (
        _hf_masks.read(masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int)), masks) is None
    )
    # A cache of fixed size: the last query is not at the last key.
    made = integration.attention_mask(batch_size=1, q_length=1, kv_length=8, q_offset=3, device="cpu")
    assert made.shape == (1, 1, 1, 8) and made.sum() == 4


def test_a_mask_that_lost_its_structure_means_the_layers_options():
    """A copy to another device keeps no attributes: the window comes from the layer then, packed sequences
    from the numbers.
    """
    q = torch.randn(1, 2, 9, 8)
    module = torch.nn.Module()
    module.is_causal = True
    keys = torch.ones(1, 9, dtype=torch.bool)
    got, _ = integration.attention_forward(module, q, q, q, keys, sliding_window=3)
    torch.testing.assert_close(got.transpose(1, 2), frost.attention(q, q, q, causal=True, window=(2, None)))
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
    got, _ = integration.attention_forward(module, q, q, q, segments)
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    torch.testing.assert_close(
        got.transpose(1, 2), frost.attention(q, q, q, causal=True, mask=mask), rtol=1e-5, atol=1e-5
    )


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        {"dropout": 0.1},
        {"output_attentions": True},
        {"head_mask": torch.ones(2)},
        {"position_bias": torch.ones(1, 2, 4, 4)},
    ],
)
def test_what_would_be_dropped_is_refused(what):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(frost.NotSupportedError, match=f"{next(iter(what))}: given"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, **what)


def test_register_names_engines():
    names = integration.register(["triton", "reference"])
    assert names == ("frost", "frost:triton", "frost:reference")
    assert {"frost", "frost:torch_sdpa"} <= set(integration.register())
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        integration.register(["tritn"])


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers"):
        integration.register()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_in_torch_compile_in_one_graph(name):
    _, ours = make_pair(name)
    ids = tokens(2, 17)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = ours(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, **TOLERANCE)
