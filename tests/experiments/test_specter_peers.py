"""Other people's systems: the files written for them, and what a row says when they are not here."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from transformers import Qwen2MoeConfig

from specter_lab.experiments import installed
from specter_lab.experiments.specter import peer_llama, peers
from specter_lab.models.anatomy import anatomy
from specter_lab.models.originals import config_for

QWEN = "Qwen1.5-MoE-A2.7B"
SMALL = Qwen2MoeConfig(
    hidden_size=256, intermediate_size=512, moe_intermediate_size=128, shared_expert_intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, vocab_size=600, max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip


@pytest.mark.parametrize("kind", [Type.BF16, Type.Q4_0])
def test_a_gguf_file_has_every_weight_in_its_type(tmp_path, kind):
    peer_llama.write_gguf(SMALL, tmp_path / "model.gguf", kind)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == 3 + 17 * 2
    experts, router = found["blk.1.ffn_down_exps.weight"], found["blk.0.ffn_gate_inp.weight"]
    assert list(experts.shape) == [128, 256, 8] and experts.tensor_type == kind and router.tensor_type == Type.F32
    weights = gguf.dequantize(experts.data, kind).reshape(8, 256, 128)
    assert 0.015 < weights.std() < 0.025 and np.isfinite(weights).all()
    assert reader.get_field("qwen2moe.expert_count").contents() == 8
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == 600


def test_layers_whose_experts_do_not_fit():
    of = anatomy(config_for(QWEN), QWEN)
    layer = of.num_experts * of.expert_bytes
    assert [peer_llama.layers_on_cpu(of, size) for size in (-5, 0, 12 * layer, 12 * layer - 1, 99 * layer)] == [
        24,
        24,
        12,
        13,
        0,
    ]


def test_who_is_not_here_has_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    of = anatomy(config_for(QWEN), QWEN)
    rows = [
        *peer_llama.rows(QWEN, of, 1 << 30, tmp_path),
        *(installed.or_why(peer, of, 1 << 30, tmp_path) for peer in (peers.vllm, peers.moe_infinity)),
    ]
    assert [row["title"] for row in rows] == [installed.NOT_INSTALLED] * 4
    assert [row["item"] for row in rows[:2]] == ["llama.cpp", "llama.cpp, with a draft"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["sh", "-c", "echo first >&2; echo 'no room' >&2; exit 3"], "not run: sh stopped: no room"),
        (["sh", "-c", "sleep 7 & sleep 7"], "not run: sh did not end within 0.2 s"),
        (["no-such-program"], "not run: no-such-program cannot be started"),
    ],
)  # fmt: skip
def test_a_command_that_fails_or_hangs_is_one_sentence(command, why):
    with pytest.raises(installed.NotRun, match=why):
        installed.output_of(command, 0.2 if "sleep" in command[-1] else 10)


def test_a_command_that_works():
    assert installed.output_of(["sh", "-c", "echo 42; echo 43 >&2"], 10) == "42\n"
    assert installed.output_of(["sh", "-c", "echo 42; echo 43 >&2"], 10, both=True) == "42\n43\n"


def test_what_is_measured_routes_its_tokens_apart(monkeypatch):
    monkeypatch.setattr(peers, "config_for", lambda _: SMALL)
    model = peers.model_of_size("small").float()
    embedded = model.model.embed_tokens.weight[:64]
    chosen = (embedded @ model.model.layers[0].mlp.gate.weight.T).topk(2).indices
    assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 5
