"""Strict loading: nothing missing, unexpected, altered or mistaken for another model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specter_lab.errors import UserError
from specter_lab.files import sha256_of
from specter_lab.models.geometry import GEOMETRY
from specter_lab.models.load import ZOO_MODELS, check_device, load, resolve
from specter_lab.models.packed import MANIFEST, pack
from specter_lab.paths import ZOO


@pytest.fixture
def copy_of_phi(tmp_path):
    """A private copy without manifest: a checkpoint from elsewhere."""
    folder = tmp_path / "phi-copy"
    shutil.copytree(resolve("phi-nano"), folder)
    (folder / MANIFEST).unlink()
    return folder


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_zoo_models_load_and_match_their_geometry(name):
    loaded, row = load(name), GEOMETRY[name]
    config = loaded.model.config
    assert sum(p.numel() for p in loaded.model.parameters()) == row.parameters
    assert (loaded.num_experts, loaded.top_k, config.hidden_size) == (row.num_experts, row.top_k, row.hidden_size)
    assert len(loaded.adapter.moe_layers(loaded.model)) == row.moe_layers
    assert loaded.adapter.expert_width(config) == row.expert_width
    assert not any(p.requires_grad for p in loaded.model.parameters()) and not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer("Routing 42 experts.")["input_ids"]) == "Routing 42 experts."


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_zoo_weights_are_bf16_and_trained(name):
    tensors = load_file(resolve(name) / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    record = json.loads((ZOO / name / "training.json").read_text())
    assert record["tokens"] >= 100_000_000
    assert min(min(layer) for layer in record["expert_load_share"]) >= 0.1
    assert max(record["held_out_nats_per_token"].values()) < 5.0  # a uniform guess is 7.6


def test_unknown_names():
    with pytest.raises(UserError, match="no model 'qwen-nanno': give one of qwen-nano"):
        load("qwen-nanno")
    with pytest.raises(UserError, match="no config.json"):
        load(str(ZOO / "tokenizer"))


def test_hub_id_without_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="cannot fetch 'nobody/no-such-model-here'.*give the folder's path"):
        resolve("nobody/no-such-model-here")


def test_altered_zoo_file_is_named(tmp_path):
    folder = tmp_path / "phi-nano"
    shutil.copytree(resolve("phi-nano"), folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="model.safetensors is not the published file"):
        load(str(folder))


def test_truncated_file(copy_of_phi):
    file = copy_of_phi / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    with pytest.raises(UserError, match="cannot read the weights"):
        load(str(copy_of_phi))


@pytest.mark.parametrize("change, word", [("drop", "missing keys"), ("add", "unexpected keys")])
def test_keys_must_match(copy_of_phi, change, word):
    file = copy_of_phi / "model.safetensors"
    tensors = load_file(file)
    if change == "drop":
        del tensors["model.norm.weight"]
    else:
        tensors["model.layers.0.self_attn.stray.weight"] = torch.zeros(2)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=word):
        load(str(copy_of_phi))


@pytest.mark.parametrize("part", ["block_sparse_moe.gate.weight", "experts.2.w2.weight", "embed_tokens.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(copy_of_phi, part, value):
    file = copy_of_phi / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith(part))
    tensors[name].view(-1)[5] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match="phi-copy: 1 of [0-9,]+ values of 'model.* are not finite, the first at"
    ) as said:
        load(str(copy_of_phi))
    assert "fetch it again" in str(said.value)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there(device):
    for ask in (check_device, lambda name: load("phi-nano", device=name)):
        with pytest.raises(UserError, match=f"no device '{device}' on this machine: give 'cpu'"):
            ask(device)


def test_a_dense_model_needs_no_adapter(copy_of_phi):
    (copy_of_phi / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="'gpt2' is a dense model.*: it routes nothing, so give a Mixture-of-Experts"):
        load(str(copy_of_phi))


def test_architecture_without_adapter(copy_of_phi):
    config = json.loads((copy_of_phi / "config.json").read_text())
    (copy_of_phi / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(
        UserError, match="no adapter for architecture 'llama': add specter_lab/models/adapters/llama.py"
    ):
        load(str(copy_of_phi))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": "qwen2_moe", "hidden_size": "wide"}'])
def test_damaged_config(copy_of_phi, content):
    (copy_of_phi / "config.json").write_text(content)
    with pytest.raises(UserError, match="cannot make sense of"):
        load(str(copy_of_phi))


@pytest.mark.parametrize("change", [{"num_local_experts": 9}, {"hidden_size": 128}])
def test_config_of_another_model(copy_of_phi, change):
    config = json.loads((copy_of_phi / "config.json").read_text())
    (copy_of_phi / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match="other shapes"):
        load(str(copy_of_phi))


def test_more_experts_per_token_than_there_are(copy_of_phi):
    config = json.loads((copy_of_phi / "config.json").read_text())
    (copy_of_phi / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 20}))
    with pytest.raises(UserError, match="20 of 16 experts"):
        load(str(copy_of_phi))


@pytest.mark.parametrize("content", [None, "", '{"version": "1.0"'])
def test_damaged_tokenizer(copy_of_phi, content):
    file = copy_of_phi / "tokenizer.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(UserError, match="tokenizer"):
        load(str(copy_of_phi))


def test_zoo_model_without_manifest(tmp_path, monkeypatch):
    shutil.copytree(ZOO / "phi-nano", tmp_path / "phi-nano")
    (tmp_path / "phi-nano" / MANIFEST).unlink()
    monkeypatch.setattr("specter_lab.models.load.ZOO", tmp_path)
    with pytest.raises(UserError, match="restore it"):
        load("phi-nano")


def test_packed_weights_come_back_whole_or_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("specter_lab.paths.CACHE", tmp_path / "cache")
    folder = tmp_path / "phi-nano"
    shutil.copytree(ZOO / "phi-nano", folder)
    found = resolve(str(folder))
    listed = json.loads((folder / MANIFEST).read_text())
    assert found.name == "phi-nano" and {name: sha256_of(found / name) for name in listed} == listed
    assert resolve(str(folder)) == found
    for file in folder.glob("*.xz"):
        file.write_bytes(file.read_bytes()[:100_000])
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match="safetensors.xz is damaged .*: restore it with `git checkout`"):
        load(str(folder))


def test_packing_is_lossless(copy_of_phi):
    before = sha256_of(copy_of_phi / "model.safetensors")
    (copy_of_phi / MANIFEST).write_text("{}")
    pack(copy_of_phi)
    assert [file.name for file in copy_of_phi.glob("model*")] == ["model.safetensors.xz"]
    assert sha256_of(resolve(str(copy_of_phi)) / "model.safetensors") == before


def test_own_digest_follows_the_config(copy_of_phi):
    before = load(str(copy_of_phi)).digest
    config = json.loads((copy_of_phi / "config.json").read_text())
    (copy_of_phi / "config.json").write_text(json.dumps(config | {"router_jitter_noise": 0.02}))
    assert load(str(copy_of_phi)).digest != before
