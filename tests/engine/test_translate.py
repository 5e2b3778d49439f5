"""The lean translator against transformers' own generate, with and without pruning, with all ways to compute experts."""

import pytest
import torch
from transformers import SwitchTransformersForConditionalGeneration

from specter_lab.engine.switch_experts import LoopExperts, SortedExperts, channel_experts
from specter_lab.engine.switch_model import aligned, encode, random_switch, read_switch
from specter_lab.engine.translate import Options, Session, translate
from specter_lab.models.switch import SwitchGeometry
from specter_lab.models.zoo.translation import config

TINY = config(d_model=32, d_ff=48, heads=2, head_dim=16, encoder_layers=4, decoder_layers=2, dropout=0.0, experts=6)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    made = SwitchTransformersForConditionalGeneration(TINY).eval()
    for name, weight in made.named_parameters():  # sharp, and not dominated by the token read last
        if "classifier" in name:
            torch.nn.init.normal_(weight, std=1.0)
        if name.endswith(("o.weight", "wo.weight")):
            weight.data *= 5
        if name.endswith("q.weight"):
            weight.data *= 3
    made.shared.weight.data[2] *= 6  # </s> now and then
    return made


@pytest.fixture(scope="module")
def sources():
    ids = torch.randint(5, 2000, (24, 9), generator=torch.Generator().manual_seed(4))
    ids[3, 5:], ids[7, 3:] = 0, 0
    return ids


def theirs(model, sources, beam, max_tokens):
    out = model.generate(input_ids=sources, attention_mask=(sources != 0).long(), num_beams=beam, do_sample=False,
                         max_new_tokens=max_tokens, early_stopping=False, length_penalty=1.0)[:, 1:]  # fmt: skip
    out = torch.nn.functional.pad(out, (0, max_tokens - out.shape[1]))
    after_end = ((out == 2).cumsum(1) - (out == 2).int()) > 0  # the class repeats </s> there, since its pad id is 0
    return out.masked_fill(after_end, 0)


def test_encoder_states_are_the_classes(model, sources):
    expected = model.encoder(input_ids=sources, attention_mask=(sources != 0).long()).last_hidden_state
    found, mask = encode(read_switch(model), sources)
    kept = sources != 0
    torch.testing.assert_close(found[kept], expected[kept], atol=2e-5, rtol=2e-5)
    assert ((mask[:, 0, 0] == 0) == kept).all()


@pytest.mark.parametrize("keys", [8, 9, 32])
def test_a_bias_is_laid_out_for_fused_attention(keys):
    bias = torch.randn(5, keys, 3).permute(2, 0, 1)
    found = aligned(bias)
    assert torch.equal(found, bias) and found.stride(-1) == 1 and all(stride % 8 == 0 for stride in found.stride()[:-1])


@pytest.mark.parametrize("beam", [1, 2, 3])
def test_translations_are_the_classes(model, sources, beam):
    found = translate(read_switch(model), sources, Options(beam=beam, max_tokens=20))
    assert torch.equal(found.tokens, theirs(model, sources, beam, 20))
    ends = (found.tokens == 2).any(1)
    assert 0 < ends.sum() < len(sources)  # some end, some are cut


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("make", [SortedExperts, LoopExperts])
def test_pruning_changes_no_token_and_saves_experts(model, sources, beam, make):
    plain, pruned = (translate(read_switch(model, make), sources, Options(beam, 20, prune)) for prune in (False, True))
    assert torch.equal(plain.tokens, pruned.tokens)
    torch.testing.assert_close(plain.scores, pruned.scores)  # an expert with fewer rows: BLAS may sum in another order
    assert (pruned.experts == 6).any() and not (plain.experts == 6).any()
    same = pruned.experts == plain.experts
    assert same[pruned.experts < 6].all()


def test_given_lengths_end_sentences(model, sources):
    lengths = torch.arange(len(sources)) % 7 + 1
    found = Session(read_switch(model), *sources.shape, Options(max_tokens=12), forced=True)(sources, lengths)
    assert found.steps == 7
    used = (found.experts[:, 0] < 6).sum(0)
    assert torch.equal(used, lengths)


@pytest.mark.parametrize("beam", [1, 2])
def test_a_session_forgets_the_batch_before(model, sources, beam):
    made, options = read_switch(model), Options(beam, 20)
    session = Session(made, *sources.shape, options)
    session(sources.flip(0))
    again, alone = session(sources), translate(made, sources, options)
    assert (
        torch.equal(again.tokens, alone.tokens)
        and torch.equal(again.scores, alone.scores)
        and torch.equal(again.experts, alone.experts)
    )


@pytest.mark.parametrize("beam", [1, 2])
def test_a_batch_that_narrows_says_the_same(model, sources, beam, monkeypatch):
    made, sizes, step = read_switch(model), [], Session.step
    ends = (translate(made, sources, Options(beam, 40)).tokens == made.end).any(1)
    mixed = torch.cat((sources[~ends][:1], sources[ends].repeat(4, 1)[:7], sources[~ends][1:2]))
    monkeypatch.setattr(Session, "step", lambda state: (sizes.append(len(state.finished)), step(state))[1])
    whole, narrow = (translate(made, mixed, Options(beam, 40, narrow=narrow)) for narrow in (False, True))
    alone, apart = sizes[: whole.steps], sizes[whole.steps :]
    assert set(alone) == {9} and apart[0] == 9 and apart == sorted(apart, reverse=True) and apart[-1] == 2
    assert torch.equal(narrow.tokens, whole.tokens) and torch.equal(narrow.experts, whole.experts)
    assert narrow.steps == whole.steps
    torch.testing.assert_close(narrow.scores, whole.scores, atol=1e-4, rtol=1e-5)


def test_a_random_model_has_its_geometry():
    geometry = SwitchGeometry(hidden=128, ffn=256, encoder_layers=4, decoder_layers=2, experts=4, vocab=500)
    made = random_switch(geometry, SortedExperts, dtype=torch.float32, device="cpu")
    experts = [layer.feed_forward.experts for layer in (*made.encoder, *made.decoder) if layer.feed_forward.experts]
    assert len(experts) == geometry.moe_layers and made.num_experts == 4
    assert sum(e.wi.numel() + e.wo.numel() for e in experts) == geometry.expert_parameters
    session = Session(made, 2, 5, Options(max_tokens=4), forced=True)
    found = session(torch.randint(3, 500, (2, 5)), torch.tensor([2, 4]))
    assert found.tokens.shape == (2, 4) and found.steps == 4


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["16 bit", "int8 native", "int8 I2F", "int4 I2F"])
@pytest.mark.parametrize("beam", [1, 2])
def test_on_a_gpu_a_captured_step_is_the_step(kind, beam):
    geometry = SwitchGeometry(hidden=128, ffn=256, encoder_layers=4, decoder_layers=2, experts=8, vocab=500)
    made = random_switch(geometry, lambda wi, wo: channel_experts(wi, wo, kind), dtype=torch.bfloat16, device="cuda")
    sources = torch.randint(3, 500, (12, 7), device="cuda")
    eager, graph = (
        Session(made, 12, 7, Options(beam, 16, graph=graph), forced=True)(sources) for graph in (False, True)
    )
    assert torch.equal(eager.tokens, graph.tokens) and torch.equal(eager.experts, graph.experts)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [7, 32])
def test_memory_efficient_attention_takes_the_bias(keys):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    draw = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(3, 4, keys, 2, 64, device="cuda", dtype=torch.float16, generator=draw).transpose(2, 3)
    bias = torch.randn(keys, keys, 2, device="cuda", dtype=torch.float16, generator=draw).permute(2, 0, 1)
    bias = aligned(bias + torch.zeros(4, 1, 1, keys, device="cuda", dtype=torch.float16))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # raises where it is refused
        found = torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=bias, scale=1.0)
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=bias, scale=1.0)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("beam", [1, 2, 3])
def test_translations_on_a_gpu_are_the_cpus(model, sources, beam):
    there = SwitchTransformersForConditionalGeneration(TINY).eval().cuda()
    there.load_state_dict(model.state_dict())
    options = Options(beam, 20, graph=False)
    found = translate(read_switch(there), sources.cuda(), options)
    expected = translate(read_switch(model), sources, options)
    assert torch.equal(found.tokens.cpu(), expected.tokens) and torch.equal(found.experts.cpu(), expected.experts)
    torch.testing.assert_close(found.scores.cpu(), expected.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("beam", [1, 2])
def test_one_sentence_on_a_gpu(beam, prune):
    """What has one row has strides that mean nothing."""
    geometry = SwitchGeometry(hidden=128, ffn=256, encoder_layers=2, decoder_layers=2, experts=8, vocab=500)
    made = random_switch(geometry, lambda wi, wo: channel_experts(wi, wo, "16 bit"), dtype=torch.float16, device="cuda")
    source = torch.randint(3, 500, (1, 7), device="cuda")
    graph, plain = (translate(made, source, Options(beam, 9, prune, graph)) for graph in (True, False))
    assert torch.equal(graph.tokens, plain.tokens) and graph.tokens.shape == (1, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_a_gpu_counts_no_step_after_the_last_sentence(graph):
    geometry = SwitchGeometry(hidden=128, ffn=256, encoder_layers=2, decoder_layers=2, experts=8, vocab=500)
    made = random_switch(geometry, lambda wi, wo: channel_experts(wi, wo, "16 bit"), dtype=torch.float16, device="cuda")
    sources = torch.randint(3, 500, (5, 7), device="cuda")
    session = Session(made, 5, 7, Options(max_tokens=16, graph=graph), forced=True)
    for longest in (7, 1, 16):
        lengths = torch.tensor([1, 1, longest, 1, 1], device="cuda")
        assert session(sources, lengths).steps == longest
