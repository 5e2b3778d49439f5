"""Widening: a small trained model becomes one of an original's full size that computes the same function (Net2Net, arXiv
1511.05641, applied to MoEs). It takes the same routing decisions and moves full-size bytes, which is what a machine
without a model hub needs.

Every axis of a weight grows by copying its entries. Where an axis is summed over (a matrix's inputs), every copy gets a
share, and the shares of an entry's copies sum to one. Shares are powers of two, so that every BF16 value stays exact: r
copies are a of 2^-j and b of 2^-(j+1) with a + b = r. Copies with the same share stand together, so that each INT4 group of
128 inputs holds one share only wherever the widths allow it, and the codes are the small model's, repeated. Heads are copied
whole; the rotary part of multi-head latent attention is left alone. Routers keep their experts.

The vocabulary grows by repeating its rows: token v + n V is another name of token v. Rows left over repeat the padding
token. Greedy decoding is unchanged, since the first of equals wins; sampling spreads a token over its names.

Switch encoder-decoders keep their heads, whose width does not depend on the model's, and their embedding stays the output
layer: with r times the width the logits would be sqrt(r) times as large, so the decoder's last norm is divided by that.

Copies side by side are easy prey for a compressor, as trained weights never are. Where compressed size matters, `untiled`
experts take their place: noise that sums to zero over the copies of an input makes every weight different, and the function
is the same up to BF16's rounding.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PretrainedConfig

from specter_lab.errors import UserError
from specter_lab.models.geometry import BF16_BYTES
from specter_lab.models.load import DECIDING_FILES, read_config, resolve
from specter_lab.models.originals import ORIGINALS, config_for
from specter_lab.models.zoo.shapes import SHAPES

SHARD_BYTES = 2**31
OUT_EXISTS = "{} exists already: give a folder that does not"
# What the two models may differ in; everything else of the config stays the small model's.
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
         "shared_expert_intermediate_size", "kv_lora_rank", "vocab_size", "d_model", "d_ff")  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """How one axis of a weight grows."""

    source: Tensor  # [new] int64, the old entry that each new one copies
    share: Tensor  # [new] float32, its factor where the axis is summed over


def axis(source: Tensor) -> Axis:
    """An axis from its copies; every old entry must have equally many, r, of which the first a get the larger share."""
    order = source.argsort(stable=True)
    counts = source.bincount()
    copies = int(counts[0])
    if not (counts == copies).all():
        raise ValueError("every entry needs the same number of copies")
    rank = torch.empty_like(source)  # which of its entry's copies each one is
    rank[order] = torch.arange(len(source)) % copies
    j = copies.bit_length() - 1
    large = 2 ** (j + 1) - copies  # a: with b = copies - a, a 2^-j + b 2^-(j+1) = 1
    return Axis(source, torch.where(rank < large, 2.0**-j, 2.0 ** -(j + 1)))


def tiled(old: int, new: int) -> Axis:
    """The whole axis repeated.

    Raises:
        UserError: `new` is not a multiple of `old`.
    """
    if new % old:
        raise UserError(f"a width of {old} cannot be tiled to {new}: it has to divide it")
    return axis(torch.arange(old).repeat(new // old))


def query_heads(old: int, old_kv: int, new: int, new_kv: int) -> Tensor:
    """Which query head each new one copies, so that it attends to a copy of its own key-value head: [new]."""
    group, new_group = old // old_kv, new // new_kv
    if old % old_kv or new % new_kv or new_kv % old_kv or new_group % group:
        raise UserError(f"{old} heads over {old_kv} key-value heads cannot be copied to {new} over {new_kv}")
    kv = torch.arange(new) // new_group // (new_kv // old_kv)  # old key-value head of each new query head
    return kv * group + torch.arange(new) % new_group % group


def per_head(heads: Tensor, width: int) -> Axis:
    """Heads of `width` entries copied whole."""
    return axis((heads[:, None] * width + torch.arange(width)).flatten())


def vocabulary(old: int, new: int, padding: int) -> Axis:
    """Rows repeated as often as they fit, the rest copies of the padding token; never summed over."""
    source = torch.arange(new) % old
    source[new // old * old :] = padding
    return Axis(source, torch.ones(new))


def widened_config(small: PretrainedConfig, large: PretrainedConfig) -> PretrainedConfig:
    """The config of `small` grown to the sizes of `large`.

    Raises:
        UserError: another architecture, or another number of experts.
    """
    if small.model_type != large.model_type:
        raise UserError(
            f"a {small.model_type} model cannot become a {large.model_type} model: widen to its own original"
        )
    known = small.to_dict()
    sizes = {name: getattr(large, name) for name in SIZES if name in known}
    return type(small)(**{**known, **sizes, "tie_word_embeddings": small.is_encoder_decoder})


def axes(small: PretrainedConfig, large: PretrainedConfig) -> dict[str, Axis]:
    """Every axis that grows between the two models, by the names used in `RULES`."""
    vocab = vocabulary(small.vocab_size, large.vocab_size, small.pad_token_id or 0)
    if small.model_type == "switch_transformers":
        return {"hidden": tiled(small.d_model, large.d_model), "expert": tiled(small.d_ff, large.d_ff), "vocab": vocab}
    old_kv, new_kv = small.num_key_value_heads, large.num_key_value_heads
    queries = query_heads(small.num_attention_heads, old_kv, large.num_attention_heads, new_kv)
    kv_heads = torch.arange(new_kv) // (new_kv // old_kv)
    expert = "moe_intermediate_size" if hasattr(small, "moe_intermediate_size") else "intermediate_size"
    found = {
        "hidden": tiled(small.hidden_size, large.hidden_size),
        "expert": tiled(getattr(small, expert), getattr(large, expert)),
        "vocab": vocab,
    }
    if getattr(small, "kv_lora_rank", None):
        latent = tiled(small.kv_lora_rank, large.kv_lora_rank)
        rotary = torch.arange(small.kv_lora_rank, small.kv_lora_rank + small.qk_rope_head_dim)
        shared = [c.n_shared_experts * c.moe_intermediate_size for c in (small, large)]
        return found | {
            "query": per_head(queries, small.qk_nope_head_dim + small.qk_rope_head_dim),
            "value": per_head(queries, small.v_head_dim),
            "latent": latent,
            "latent+rotary": Axis(torch.cat([latent.source, rotary]), torch.ones(0)),
            "key+value": per_head(queries, small.qk_nope_head_dim + small.v_head_dim),
            "shared": tiled(*shared),
            "dense": tiled(small.intermediate_size, large.intermediate_size),
        }
    head = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    found |= {"query": per_head(queries, head), "value": per_head(queries, head), "key": per_head(kv_heads, head)}
    if hasattr(small, "shared_expert_intermediate_size"):
        found["shared"] = tiled(small.shared_expert_intermediate_size, large.shared_expert_intermediate_size)
    return found


# Key in a checkpoint -> the axis of its rows (or of the vector) and that of its columns, which are summed over.
RULES = tuple(
    (re.compile(pattern), rows, columns)
    for pattern, rows, columns in (
        (r"lm_head\.weight", "vocab", "hidden"),
        (r"norm\.(weight|bias)|layernorm\.(weight|bias)", "hidden", None),
        (r"self_attn\.q_proj\.weight", "query", "hidden"),
        (r"self_attn\.[kv]_proj\.weight", "key", "hidden"),
        (r"self_attn\.q_proj\.bias", "query", None),
        (r"self_attn\.[kv]_proj\.bias", "key", None),
        (r"self_attn\.o_proj\.weight", "hidden", "value"),
        (r"self_attn\.o_proj\.bias", "hidden", None),
        (r"self_attn\.kv_a_proj_with_mqa\.weight", "latent+rotary", "hidden"),
        (r"self_attn\.kv_b_proj\.weight", "key+value", "latent"),
        (r"experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight", "expert", "hidden"),
        (r"experts\.\d+\.(down_proj|w2)\.weight", "hidden", "expert"),
        (r"shared_experts?\.(gate_proj|up_proj)\.weight", "shared", "hidden"),
        (r"shared_experts?\.down_proj\.weight", "hidden", "shared"),
        (r"mlp\.(gate_proj|up_proj)\.weight", "dense", "hidden"),
        (r"mlp\.down_proj\.weight", "hidden", "dense"),
        (r"(gate|router|router\.classifier|shared_expert_gate)\.weight", None, "hidden"),
        (r"(Self|EncDec)Attention\.[qkv]\.weight", None, "hidden"),
        (r"(Self|EncDec)Attention\.o\.weight", "hidden", None),
        (r"relative_attention_bias\.weight", None, None),
        (r"mlp\.(experts\.expert_\d+\.)?wi\.weight", "expert", "hidden"),
        (r"mlp\.(experts\.expert_\d+\.)?wo\.weight", "hidden", "expert"),
    )
)
EMBEDDING = re.compile(r"model\.embed_tokens\.weight|shared\.weight")
LATENT_NORM = re.compile(r"kv_a_layernorm\.weight")
TIED_NORM = "decoder.final_layer_norm.weight"  # of a Switch model, whose head is the embedding


def widen_tensor(name: str, weight: Tensor, grown: dict[str, Axis]) -> Tensor:
    """One weight of a checkpoint, by its key; exact in its own dtype.

    Raises:
        UserError: no rule knows the key.
    """
    if EMBEDDING.fullmatch(name):  # its columns are outputs
        return weight[:, grown["hidden"].source][grown["vocab"].source]
    if name == TIED_NORM:
        return weight[grown["hidden"].source] * _logits_shrink(len(weight), len(grown["hidden"].source))
    if LATENT_NORM.search(name):
        return weight[grown["latent"].source]
    for pattern, rows, columns in RULES:
        if pattern.search(name):
            if columns is not None:  # the small side first: rows are copied as wholes afterwards
                weight = weight[:, grown[columns].source] * grown[columns].share.to(weight.dtype)
            return weight if rows is None else weight[grown[rows].source]
    raise UserError(f"nothing is known about how '{name}' widens: add its axes to RULES in models/widen.py")


def _logits_shrink(old: int, new: int) -> float:
    """1 / sqrt(copies), if that is exact."""
    root = math.isqrt(new // old)
    if root * root != new // old or root & (root - 1):
        raise UserError(f"a Switch model of width {old} cannot be widened to {new}: give {old} times a power of four")
    return 1 / root


EXPERT = re.compile(r"experts\.(expert_)?\d+\.")


def untiled(name: str, weight: Tensor, grown: dict[str, Axis], seed: int) -> Tensor:
    """A widened expert matrix [rows, columns] plus noise as large as its weights that sums to zero over an input's copies.

    Exact in real numbers; each weight is rounded to BF16 once more. The noise of a matrix depends on its name and `seed`.
    """
    columns = next(columns for pattern, _, columns in RULES if pattern.search(name))
    source = grown[columns].source
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{name}/{seed}".encode()).digest()[:7]))
    noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
    counts = source.bincount()
    means = torch.zeros(len(weight), len(counts)).index_add_(1, source, noise) / counts
    return (weight.float() + noise - means[:, source]).to(weight.dtype)


def widened_tensors(
    folder: Path, small: PretrainedConfig, large: PretrainedConfig, untile_seed: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """All weights of the widened model, one at a time; a tied head becomes one of its own."""
    grown = axes(small, large)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                weight = tensors.get_tensor(name)
                wide = widen_tensor(name, weight, grown)
                noisy = untile_seed is not None and EXPERT.search(name)
                yield name, untiled(name, wide, grown, untile_seed) if noisy else wide
                if EMBEDDING.fullmatch(name) and small.tie_word_embeddings and not large.tie_word_embeddings:
                    yield "lm_head.weight", widen_tensor("lm_head.weight", weight, grown)


def widen(
    folder: Path, small: PretrainedConfig, large: PretrainedConfig, out: Path,
    on_bytes: Callable[[int], None] = lambda _: None, untile_seed: int | None = None,
) -> None:  # fmt: skip
    """Write the widened model as a checkpoint folder, in shards, tensor by tensor; a half-written one has no index.

    Args:
        folder: the small checkpoint.
        small, large: its config, and the one it is to become (`widened_config`).
        out: a folder that does not exist.
        on_bytes: told the bytes of every weight.
        untile_seed: of the noise of `untiled` experts; None: copies stay copies.

    Raises:
        UserError: `out` exists, or a weight that no rule knows.
    """
    if out.exists():
        raise UserError(OUT_EXISTS.format(out))
    out.mkdir(parents=True)
    shard: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    total, held, number = 0, 0, 1

    def flush() -> None:
        file = f"model-{number:05d}.safetensors"
        save_file(shard, out / file, {"format": "pt"})
        where.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, weight in widened_tensors(folder, small, large, untile_seed):
        if held + weight.nbytes > SHARD_BYTES and shard:
            flush()
            held, number = 0, number + 1
        shard[name] = weight.contiguous()
        held, total = held + weight.nbytes, total + weight.nbytes
        on_bytes(weight.nbytes)
    flush()
    for name in DECIDING_FILES[1:]:
        if (folder / name).exists():
            shutil.copy(folder / name, out / name)
    large.save_pretrained(out)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def widen_named(model: str, out: str, original: str | None = None) -> None:
    """Widen a zoo model or checkpoint folder to the sizes of `original` (default: the zoo model's own), with progress.

    Raises:
        UserError: no such model, no original known for it, or one that its widths do not divide.
    """
    folder = resolve(model)
    small = read_config(folder)
    name = original or (SHAPES[model].original if model in SHAPES else None)
    if name is None:
        raise UserError(f"which original is {model} to grow to? Give --to with one of {', '.join(ORIGINALS)}")
    large = widened_config(small, config_for(name))
    if Path(out).exists():
        raise UserError(OUT_EXISTS.format(out))
    with tqdm(total=_bytes(large), unit="B", unit_scale=True, desc=f"widening {model}", mininterval=1.0) as bar:
        widen(folder, small, large, Path(out), bar.update)


def _bytes(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()) * BF16_BYTES
