"""Every architecture beside the zoo's three, on a small random model saved and loaded the way real ones are."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from gguf import MODEL_ARCH_NAMES
from gguf import GGMLQuantizationType as GgmlType
from safetensors import safe_open
from transformers import AutoConfig

from specter_lab.compress import gptq, grid, rtn
from specter_lab.compress.checkpoint import load_quantized
from specter_lab.compress.gguf import write_gguf
from specter_lab.compress.gptq_checkpoint import write_gptq
from specter_lab.compress.sequential import quantize_in_order
from specter_lab.errors import UserError
from specter_lab.measure import fidelity
from specter_lab.measure.capture import capture
from specter_lab.measure.prompts import Request, TokenizedRequests
from specter_lab.measure.trace import Origin
from specter_lab.models.adapters import ARCHITECTURES, Adapter, adapter_for
from specter_lab.models.experts import read_banks, with_experts
from specter_lab.models.load import load
from tests.models.foreign import CONFIGS, EXPERTS, MOE_LAYERS, save


@pytest.fixture(scope="module", params=CONFIGS)
def source(request, tmp_path_factory):
    return load(str(save(request.param, tmp_path_factory.mktemp("foreign") / request.param)))


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(1)
    requests = tuple(Request(f"r{i}", "random", "generated", "none", "-") for i in range(6))
    return TokenizedRequests(requests, tuple(torch.randint(3, 2048, (20 + i,), generator=generator) for i in range(6)))


def same_routing(source, model, tokens):
    """Fidelity of `model` with `source` on `tokens`."""
    origin = Origin(source.name, source.digest)
    return fidelity.compare(capture(source.model, tokens, origin), capture(model, tokens, origin))


def test_every_adapter_is_of_its_file_and_known_to_gguf():
    for architecture in ARCHITECTURES:
        adapter = adapter_for(AutoConfig.for_model(architecture))
        assert adapter.model_type == architecture and adapter.gguf_architecture in MODEL_ARCH_NAMES.values()


def test_a_saved_checkpoint_has_the_names_that_the_adapter_says(source):
    with safe_open(source.path / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    named = {
        f"{source.adapter.expert_key(layer, expert, projection)}.weight"
        for layer in MOE_LAYERS[source.adapter.model_type]
        for expert in range(EXPERTS[source.adapter.model_type])
        for projection in ("gate", "up", "down")
    }
    assert named == {key for key in keys if ".experts." in key}
    assert f"model.layers.0.{source.adapter.checkpoint_block}.gate.weight" in keys


def test_geometry_is_read(source):
    kind, config = source.adapter.model_type, source.model.config
    assert (source.num_experts, source.top_k, source.adapter.expert_width(config)) == (EXPERTS[kind], 2, 64)
    assert [layer.index for layer in source.adapter.moe_layers(source.model)] == MOE_LAYERS[kind]


def test_capture_sees_every_layer_and_a_model_agrees_with_itself(source, tokens):
    trace = capture(source.model, tokens, Origin(source.name, source.digest))
    assert list(trace.layers) == MOE_LAYERS[source.adapter.model_type] and trace.num_tokens == tokens.num_tokens
    sums = trace.weights.sum(axis=-1)
    assert (sums < 0.999).any() if source.adapter.model_type == "olmoe" else sums == pytest.approx(1, abs=1e-5)
    assert (same_routing(source, source.model, tokens).ordered_match == 1).all()


def test_a_draft_shares_everything_but_the_experts(source):
    draft = with_experts(source.model, [replace(bank, down=bank.down * 2) for bank in read_banks(source.model)])
    target = dict(source.model.named_parameters())
    for name, parameter in draft.named_parameters():
        assert (parameter.data_ptr() == target[name].data_ptr()) == (".experts." not in name), name


def write_rounded(source, ids, folder):
    write_gptq(source, (rtn.quantize_bank(bank, 4) for bank in read_banks(source.model)), 4, 128, "test", folder)


def write_calibrated(source, ids, folder):
    coded = quantize_in_order(source, ids, partial(gptq.quantize_bank, bits=4))
    write_gptq(source, (bank for bank, _ in coded), 4, 128, "test", folder)


def write_ggml(source, ids, folder):
    write_gguf(source, GgmlType.Q4_0, folder)


@pytest.mark.parametrize("write, name", [(write_rounded, "gptq-int4"), (write_calibrated, "gptq-int4"),
                                         (write_ggml, "gguf-q4_0")])  # fmt: skip
def test_a_quantised_checkpoint_is_read_back_and_routes_much_the_same(source, tokens, tmp_path, write, name):
    ids = torch.randint(3, 2048, (4, 64), generator=torch.Generator().manual_seed(2))
    write(source, ids, tmp_path)
    loaded = load_quantized(tmp_path, source)
    assert loaded.quantizer == name and 4 < loaded.bits_per_weight < 5
    for bank, original in zip(loaded.banks, read_banks(source.model), strict=True):
        for projection in ("gate", "up", "down"):
            exact = getattr(original, projection)
            assert 0 < (getattr(bank, projection) - exact).norm() / exact.norm() < 0.25
    if write is write_rounded:
        assert torch.equal(loaded.banks[0].up, grid.dequantize(rtn.quantize_bank(read_banks(source.model)[0], 4).up))
    overlap = same_routing(source, with_experts(source.model, loaded.banks), tokens).overlap
    assert overlap[:, 0].min() == 1, "nothing quantised lies before the first router"
    assert 0.8 < overlap.mean() < 1


def test_a_missing_adapter_is_shown_filled_in():
    """The template of the message is Python that makes an adapter, with the fields that the configuration has."""
    with pytest.raises(UserError, match="add specter_lab/models/adapters/dots1.py, name it in ARCHITECTURES") as error:
        adapter_for(AutoConfig.for_model("dots1"))
    names = {}
    exec("\n".join(line[4:] for line in str(error.value).split("\n\n", 1)[1].splitlines()), names)
    assert isinstance(names["ADAPTER"], Adapter)
    assert names["ADAPTER"].num_experts(AutoConfig.for_model("dots1", n_routed_experts=12)) == 12
    with pytest.raises(UserError, match="'llama' is a dense model, as far as config.json tells"):
        adapter_for(AutoConfig.for_model("llama"))


def test_a_class_that_transformers_does_not_have(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UserError, match="cannot make sense of .*config.json .*no_such_model"):
        load(str(tmp_path))
