"""llama.cpp where somebody has installed it: experts of some layers on the CPU, with and without a draft.

`llama-bench` times plain decoding, `llama-speculative-simple` a draft: the same weights in Q4_0, all on the GPU. Both read a GGUF
file of the original's sizes, written here with random weights: what a token costs to compute does not depend on their values.
What a draft is worth does, so its acceptance stands in the row.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from transformers import Qwen2MoeConfig

from specter_lab.experiments.installed import NOT_INSTALLED, NotRun, found, or_why, output_of
from specter_lab.models.anatomy import Anatomy
from specter_lab.models.originals import config_for

LLAMA = "llama.cpp"
BENCH, SPECULATIVE = "llama-bench", "llama-speculative-simple"
NEW_TOKENS, REPEATS, DEPTH, TIMEOUT_S = 32, 3, 8, 900
PIECE = 1 << 22  # random weights of which every matrix is made
SPECIAL = (("<unk>", 2), ("<s>", 3), ("</s>", 3))  # text and kind of the first tokens


def rows(original: str, anatomy: Anatomy, gpu_bytes: int, folder: Path) -> Iterator[dict]:
    """One row without and one with a draft.

    Args:
        gpu_bytes: of experts on the GPU; the draft's, a quarter of all, count where there is one.
        folder: with room for the model, for a while.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target, draft = Path(scratch) / "target.gguf", Path(scratch) / "draft.gguf"
        for program, files in ((BENCH, (target,)), (SPECULATIVE, (target, draft))):
            row = {"by": "peer", "item": LLAMA if program == BENCH else f"{LLAMA}, with a draft"}
            if found(program) is None:
                yield row | {"title": NOT_INSTALLED}
                continue
            config = config_for(original)
            if not isinstance(config, Qwen2MoeConfig):
                yield row | {"title": f"not run: GGUF files are written for Qwen2-MoE here, and {original} is another"}
                continue
            for file in files:
                if not file.exists():
                    write_gguf(config, file, Type.Q4_0 if file == draft else Type.BF16)
            own = gpu_bytes - (
                anatomy.moe_layers * anatomy.num_experts * anatomy.expert_bytes // 4 if draft in files else 0
            )
            on_cpu = layers_on_cpu(anatomy, own)
            measure = bench if program == BENCH else speculative
            yield row | or_why(measure, files, on_cpu) | {"gpu_expert_gb": round(gpu_bytes / 1e9, 3)}


def layers_on_cpu(anatomy: Anatomy, gpu_bytes: int) -> int:
    """Layers whose experts do not fit."""
    of_layer = anatomy.num_experts * anatomy.expert_bytes
    return anatomy.moe_layers - min(anatomy.moe_layers, max(0, gpu_bytes) // of_layer)


def bench(files: tuple[Path, ...], on_cpu: int) -> dict:
    """Plain decoding."""
    command = [BENCH, "-m", str(files[0]), "-ngl", "99", "-ncmoe", str(on_cpu), "-p", "0", "-n", str(NEW_TOKENS), "-r", str(REPEATS), "-o", "json"]  # fmt: skip
    (of_run,) = json.loads(output_of(command, TIMEOUT_S))
    return {"measured_ms_per_token": round(1e3 / of_run["avg_ts"], 3), "n_tokens": NEW_TOKENS * REPEATS,
            "title": f"build {of_run['build_number']} ({of_run['build_commit']}): {_shown(command)}"}  # fmt: skip


def speculative(files: tuple[Path, ...], on_cpu: int) -> dict:
    """With the Q4_0 draft."""
    usage, version = (output_of([SPECULATIVE, asked], TIMEOUT_S, both=True) for asked in ("--help", "--version"))
    newer = "--spec-draft-n-max" in usage
    draft = ["--spec-type", "draft-simple", "--spec-draft-n-max"] if newer else ["--draft-max"]
    command = [SPECULATIVE, "-m", str(files[0]), "-md", str(files[1]), "-ngl", "99", "-ncmoe", str(on_cpu), "-ngld", "99", "-p", "aaaa",
               "-n", str(NEW_TOKENS), *draft, str(DEPTH), "--temp", "0", "--ignore-eos"]  # fmt: skip
    said = output_of(command, TIMEOUT_S, both=True)
    speed, accepted = (
        re.search(of, said) for of in (r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", r"accept\s*=\s*([\d.]+)%")
    )
    if speed is None or accepted is None:
        raise NotRun(f"not run: {SPECULATIVE} did not say how fast it was")
    build = re.search(r"version: (.+)", version)
    return {"measured_ms_per_token": round(1e3 * float(speed[2]) / int(speed[1]), 3), "n_tokens": int(speed[1]),
            "acceptance": round(float(accepted[1]) / 100, 4),
            "title": f"build {build[1] if build else 'unknown'}, {accepted[1]} % accepted: {_shown(command)}"}  # fmt: skip


def _shown(command: list[str]) -> str:
    return shlex.join([Path(word).name if word.endswith(".gguf") else word for word in command])


def write_gguf(config: Qwen2MoeConfig, path: Path, kind: Type) -> None:
    """A file of these sizes with random weights; norms and the router stay in float32."""
    writer = gguf.GGUFWriter(path, "qwen2moe")
    heads = config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    _add_tokens(writer, config.vocab_size)
    drawn = np.random.default_rng(0).normal(0, 0.02, PIECE).astype(np.float32)
    shapes = dict(_tensors(config))
    for name, shape in shapes.items():
        stored = Type.F32 if len(shape) == 1 or "ffn_gate_inp" in name else kind
        block, block_bytes = gguf.GGML_QUANT_SIZES[stored]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) // block * block_bytes, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pieces = {stored: gguf.quantize(drawn, stored).view(np.uint8) for stored in {Type.F32, kind}}
    for name, shape in shapes.items():
        stored = Type.F32 if len(shape) == 1 or "ffn_gate_inp" in name else kind
        block, block_bytes = gguf.GGML_QUANT_SIZES[stored]
        writer.write_tensor_data(np.resize(pieces[stored], int(np.prod(shape)) // block * block_bytes))
    writer.close()


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Names for all tokens: specials, bytes, and words that nothing is read as."""
    kinds = [*SPECIAL, *((f"<0x{byte:02X}>", 6) for byte in range(256))]
    kinds += [(f"word{number}", 1) for number in range(len(kinds), count)]
    texts, types = zip(*kinds[:count])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(texts))
    writer.add_token_types(list(types))
    writer.add_token_scores([-float(number) for number in range(count)])
    writer.add_vocab_size(count)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _tensors(config: Qwen2MoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, outputs first."""
    hidden, width, shared, experts = (
        config.hidden_size, config.moe_intermediate_size, config.shared_expert_intermediate_size, config.num_experts,
    )  # fmt: skip
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    yield "token_embd.weight", (config.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        of_layer = {
            "attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,), "attn_output.weight": (hidden, hidden),
            "attn_q.weight": (hidden, hidden), "attn_k.weight": (kv, hidden), "attn_v.weight": (kv, hidden),
            "attn_q.bias": (hidden,), "attn_k.bias": (kv,), "attn_v.bias": (kv,), "ffn_gate_inp.weight": (experts, hidden),
            "ffn_gate_exps.weight": (experts, width, hidden), "ffn_up_exps.weight": (experts, width, hidden),
            "ffn_down_exps.weight": (experts, hidden, width), "ffn_gate_inp_shexp.weight": (hidden,),
            "ffn_gate_shexp.weight": (shared, hidden), "ffn_up_shexp.weight": (shared, hidden),
            "ffn_down_shexp.weight": (hidden, shared),
        }  # fmt: skip
        yield from ((f"blk.{layer}.{name}", shape) for name, shape in of_layer.items())
