"""A widened model computes what the small one does, routes as it does, and has its INT4 codes."""

import pytest
import torch

from specter_lab.compress.int4 import quantize_bank
from specter_lab.compress.rtn import quantize_bank as coded
from specter_lab.errors import UserError
from specter_lab.models.experts import read_banks
from specter_lab.models.load import load, load_translator
from specter_lab.models.originals import ORIGINALS
from specter_lab.models.routing import observe_routing
from specter_lab.models.stacks import stacks_of
from specter_lab.models.widen import axis, query_heads, tiled, vocabulary, widen, widen_tensor, widened_config

# Sizes between the nano model and its original: every axis grows, one of them by a number that is no power of two.
LARGER = {
    "qwen-nano": dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=4, intermediate_size=128,
                      moe_intermediate_size=384, shared_expert_intermediate_size=384, vocab_size=4500),
    "phi-nano": dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384, vocab_size=4096),
    "deepseek-nano": dict(hidden_size=512, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1728,
                          moe_intermediate_size=384, kv_lora_rank=128, vocab_size=4096),
}  # fmt: skip


@pytest.fixture(scope="module", params=LARGER)
def pair(request, tmp_path_factory):
    """A nano model, and the same widened, written and loaded."""
    small = load(request.param)
    sizes = type(small.model.config)(**{**small.model.config.to_dict(), **LARGER[request.param]})
    out = tmp_path_factory.mktemp("wide") / request.param
    widen(small.path, small.model.config, widened_config(small.model.config, sizes), out)
    return small, load(str(out))


def test_same_logits_and_routing(pair):
    small, large = pair
    ids = torch.randint(3, 2048, (2, 48), generator=torch.Generator().manual_seed(0))
    routed, logits = [], []
    for model in (small.model, large.model):
        seen = []
        with torch.inference_mode(), observe_routing(model, seen.append):
            logits.append(model(ids).logits)
        routed.append([layer.indices.sort(dim=-1).values for layer in seen])
    assert all((a == b).all() for a, b in zip(*routed, strict=True))
    scale = logits[0].abs().max()
    assert (logits[1][..., :2048] - logits[0]).abs().max() < 1e-5 * scale
    assert torch.equal(logits[1].argmax(-1), logits[0].argmax(-1)), "the first of equal logits wins"


def test_token_names_are_interchangeable(pair):
    small, large = pair
    ids = torch.randint(3, 2048, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(large.model(ids + 2048).logits, large.model(ids).logits)


def test_bf16_weights_stay_exact(pair):
    small, large = pair
    exact = (p.to(torch.bfloat16).float() == p for p in large.model.parameters())
    assert all(same.all() for same in exact)


def test_int4_codes_are_the_small_models_repeated(pair):
    small, large = pair
    for narrow, wide in zip(read_banks(small.model), read_banks(large.model), strict=True):
        codes, wide_codes = coded(narrow, 4), coded(wide, 4)
        copies = wide.down.shape[2] // narrow.down.shape[2]
        rows = wide.down.shape[1] // narrow.down.shape[1]
        assert torch.equal(wide_codes.down.codes, codes.down.codes.repeat(1, rows, copies))
        assert torch.equal(wide_codes.gate.codes, codes.gate.codes.repeat(1, copies, rows))
        assert quantize_bank(wide).down.packed.shape[2] == wide.down.shape[2] // 2


def test_shares_are_powers_of_two_that_sum_to_one():
    for copies in (1, 2, 3, 8, 19, 44, 100):
        grown = tiled(32, 32 * copies)
        assert torch.zeros(32).index_add_(0, grown.source, grown.share).eq(1).all()
        assert torch.frexp(grown.share).mantissa.eq(0.5).all()
    with pytest.raises(UserError, match="width of 32 cannot be tiled to 100"):
        tiled(32, 100)
    with pytest.raises(ValueError, match="same number of copies"):
        axis(torch.tensor([0, 0, 1]))


@pytest.mark.parametrize(("old", "new"), [((2, 1), (32, 8)), ((2, 2), (16, 16)), ((4, 2), (8, 4))])
def test_query_heads_keep_their_key_value_head(old, new):
    copied = query_heads(*old, *new)
    for head, source in enumerate(copied.tolist()):
        own = head // (new[0] // new[1]) // (new[1] // old[1])  # old head behind the new key-value head it attends to
        assert source // (old[0] // old[1]) == own
    assert copied.bincount().tolist() == [new[0] // old[0]] * old[0]


def test_originals_can_be_reached():
    """The nano models' sizes divide their originals', and INT4 groups of 128 hold one share only."""
    for name, original in (
        ("qwen-nano", "Qwen1.5-MoE-A2.7B"),
        ("phi-nano", "Phi-3.5-MoE"),
        ("deepseek-nano", "DeepSeek-V2-Lite"),
    ):
        small = load(name).model.config
        large = widened_config(small, ORIGINALS[original])
        assert (large.hidden_size, large.vocab_size) == (
            ORIGINALS[original].hidden_size,
            ORIGINALS[original].vocab_size,
        )
        field = "intermediate_size" if name == "phi-nano" else "moe_intermediate_size"
        grown = tiled(getattr(small, field), getattr(large, field))
        assert (grown.share.view(-1, 128) == grown.share.view(-1, 128)[:, :1]).all()


def test_left_over_rows_repeat_the_padding_token():
    assert vocabulary(4, 11, 0).source.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0]


def test_bad_input(tmp_path):
    small = load("qwen-nano")
    with pytest.raises(UserError, match="qwen2_moe model cannot become a phimoe model"):
        widened_config(small.model.config, ORIGINALS["Phi-3.5-MoE"])
    with pytest.raises(UserError, match="exists already"):
        widen(small.path, small.model.config, small.model.config, tmp_path)
    with pytest.raises(UserError, match="nothing is known about how 'model.layers.0.other.weight' widens"):
        widen_tensor("model.layers.0.other.weight", torch.ones(2, 2), {})


def test_untiled_experts_compute_the_same_and_no_two_weights_are_copies(pair):
    from specter_lab.models.load import read_config
    from specter_lab.models.widen import EXPERT, axes, widened_tensors

    small, large = pair
    config = read_config(large.path)
    grown = axes(small.model.config, config)
    seen = 0
    plain = widened_tensors(small.path, small.model.config, config)
    for (name, tiled_weight), (_, weight) in zip(plain, widened_tensors(small.path, small.model.config, config, 0)):
        if not EXPERT.search(name):
            assert torch.equal(weight, tiled_weight)
        elif ".0." in name:
            column = "expert" if "down" in name or "w2" in name else "hidden"
            source = grown[column].source
            total = torch.zeros(len(weight), int(source.max()) + 1)
            sums = [total.clone().index_add_(1, source, w.float()) for w in (weight, tiled_weight)]
            assert (sums[0] - sums[1]).abs().max() < 0.02 * sums[1].std() * 4
            assert len(weight.unique(dim=0)) == len(weight) and len(tiled_weight.unique(dim=0)) < len(weight)
            seen += 1
    assert seen


@pytest.fixture(scope="module")
def translators(tmp_path_factory):
    """The translator, and the same widened."""
    small = load_translator("switch-nano")
    config = small.model.config
    sizes = type(config)(**{**config.to_dict(), "d_model": 512, "d_ff": 384, "vocab_size": 4096})
    out = tmp_path_factory.mktemp("wide") / "switch-nano"
    widen(small.path, config, widened_config(config, sizes), out)
    return small, load_translator(str(out))


def test_a_wide_translator_has_the_same_logits_and_routing(translators):
    generator = torch.Generator().manual_seed(0)
    sources, targets = (torch.randint(3, 2048, (3, 24), generator=generator) for _ in range(2))
    logits, routed = [], []
    for source in translators:
        stacks, model = stacks_of(source.model.config), source.model
        used = []
        hooks = [
            module.experts.register_forward_hook(lambda _, arguments, __: used.append(stacks.indices(arguments[1])))
            for module in stacks.sparse(model).values()
        ]
        with torch.inference_mode():
            logits.append(model(input_ids=sources, decoder_input_ids=targets).logits)
        routed.append(used)
        for hook in hooks:
            hook.remove()
    assert len(routed[0]) == 3 and all(map(torch.equal, *routed))
    assert (logits[1][..., :2048] - logits[0]).abs().max() < 1e-5 * logits[0].abs().max()
    exact = (p.to(torch.bfloat16).float() == p for p in translators[1].model.parameters())
    assert all(same.all() for same in exact)


def test_a_translators_width_grows_by_powers_of_four(translators):
    small = translators[0].model.config
    with pytest.raises(UserError, match="a power of four"):
        widen_tensor("decoder.final_layer_norm.weight", torch.ones(128), {"hidden": tiled(128, 256)})
    assert widened_config(small, small).tie_word_embeddings
