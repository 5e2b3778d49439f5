"""GGUF files: routed experts in a ggml type, every other tensor as it is, under llama.cpp's names.

The file carries the architecture's metadata and no tokenizer: it is for reading weights, not for running llama.cpp.
Tensors are told apart by name, never by shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from torch import Tensor

from specter_lab.compress.experts_only import experts_only
from specter_lab.compress.ggml import quantize_rows, row_bytes, type_for_rows
from specter_lab.compress.stored import StoredExperts, StoredProjection, unused_note
from specter_lab.compress.tensor_names import GGUF_EXPERT, GGUF_ROUTER, other_tensors
from specter_lab.errors import UserError
from specter_lab.models.experts import ExpertBank, read_banks
from specter_lab.models.load import LoadedModel

FILE_NAME = "model.gguf"
_PLAIN = {torch.float32: GgmlType.F32, torch.float16: GgmlType.F16, torch.bfloat16: GgmlType.BF16}
_UNQUANTIZED = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
_UNREADABLE = (ValueError, IndexError, KeyError, OSError, OverflowError, UnicodeDecodeError, MemoryError)


@dataclass(frozen=True)
class GgufBank:
    """All routed experts of one MoE layer in ggml types; rows are bytes."""

    layer: int  # decoder layer
    gate: np.ndarray  # [E, I, bytes] uint8
    up: np.ndarray  # [E, I, bytes] uint8
    down: np.ndarray  # [E, H, bytes] uint8


def quantize_bank(bank: ExpertBank, wanted: GgmlType) -> GgufBank:
    """Quantise the experts of one layer, each projection in the type that llama.cpp would take for its row length.

    Raises:
        TypeError: `bank` is not an `ExpertBank`.
    """
    bank = experts_only(bank)

    def stored(weights: Tensor) -> np.ndarray:  # [E, out, in] -> [E, out, bytes]
        rows = weights.float().cpu().flatten(0, 1).numpy()
        return quantize_rows(rows, type_for_rows(wanted, rows.shape[1])).reshape(*weights.shape[:2], -1)

    return GgufBank(bank.layer, stored(bank.gate), stored(bank.up), stored(bank.down))


def fallbacks(source: LoadedModel, wanted: GgmlType) -> tuple[str, ...]:
    """One sentence per projection that cannot be stored in the wanted type."""
    bank = read_banks(source.model)[0]
    rows = {"gate": bank.gate.shape[2], "up": bank.up.shape[2], "down": bank.down.shape[2]}
    return tuple(
        f"{projection}: rows of {row} weights do not fit {wanted.name}, stored as {kind.name} (llama.cpp's rule)"
        for projection, row in rows.items()
        if (kind := type_for_rows(wanted, row)) != wanted
    )


def _metadata(writer: gguf.GGUFWriter, source: LoadedModel) -> None:
    config = source.model.config
    writer.add_name(source.name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_expert_count(source.num_experts)
    writer.add_expert_used_count(source.top_k)
    writer.add_expert_feed_forward_length(source.adapter.expert_width(config))


def _plain_tensors(source: LoadedModel) -> Iterator[tuple[str, GgmlType, Tensor]]:
    """Everything but routed experts, under llama.cpp's names; what has none there is left out.

    Vectors and routers are stored in F32, as llama.cpp wants them; other tensors as they are.
    """
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == source.adapter.gguf_architecture)
    names = gguf.get_tensor_name_map(architecture, source.model.config.num_hidden_layers)
    for name, tensor in other_tensors(source.path):
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is not None:
            stored = tensor.float() if tensor.ndim == 1 or GGUF_ROUTER.match(known) else tensor
            yield known, _PLAIN[stored.dtype], stored.contiguous()


def _expert_tensors(banks: list[ExpertBank], wanted: GgmlType) -> Iterator[tuple[str, GgmlType, tuple[int, ...]]]:
    """Name, type and shape [E, out, in] of the expert tensors, in the order of the file."""
    for bank in banks:
        for projection in ("gate", "up", "down"):
            shape = tuple(getattr(bank, projection).shape)
            yield f"blk.{bank.layer}.ffn_{projection}_exps.weight", type_for_rows(wanted, shape[2]), shape


def write_gguf(source: LoadedModel, wanted: GgmlType, folder: Path) -> None:
    """Write `model.gguf` into `folder`, with one layer's experts in memory at a time.

    Args:
        source: the full-precision model.
        wanted: Q8_0, Q6_K, Q5_K, Q4_K, Q4_0, Q3_K or Q2_K, for the routed experts.
        folder: exists already.
    """
    banks = read_banks(source.model)
    with closing(gguf.GGUFWriter(folder / FILE_NAME, source.adapter.gguf_architecture)) as writer:
        _metadata(writer, source)
        for name, kind, tensor in _plain_tensors(source):
            _announce(writer, name, kind, tuple(tensor.shape))
        for name, kind, shape in _expert_tensors(banks, wanted):
            _announce(writer, name, kind, shape)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, _, tensor in _plain_tensors(source):
            writer.write_tensor_data(tensor.flatten().view(torch.uint8).numpy())
        for bank in banks:
            stored = quantize_bank(bank, wanted)
            for values in (stored.gate, stored.up, stored.down):
                writer.write_tensor_data(values)


def _announce(writer: gguf.GGUFWriter, name: str, kind: GgmlType, shape: tuple[int, ...]) -> None:
    """List a tensor in the header; its data follows later, in the same order."""
    stored_bytes = math.prod(shape[:-1]) * row_bytes(kind, shape[-1])
    writer.add_tensor_info(name, shape, np.dtype(np.float32), stored_bytes, raw_dtype=kind)


def open_gguf(path: Path) -> StoredExperts:
    """The routed experts of a GGUF file.

    Raises:
        UserError: not a GGUF file, a damaged one, or one whose router is quantised.
    """
    try:
        tensors = gguf.GGUFReader(path).tensors
    except _UNREADABLE as error:
        raise UserError(f"{path} is not a whole GGUF file ({error}): fetch or make it again") from error
    quantized = [tensor for tensor in tensors if tensor.tensor_type not in _UNQUANTIZED]
    for tensor in quantized:
        if GGUF_ROUTER.match(tensor.name):
            raise UserError(f"{path}: the router '{tensor.name}' is quantised ({tensor.tensor_type.name}), so this is "
                            f"another model's routing: use a file whose routers are in full precision")  # fmt: skip
    kinds = [tensor.tensor_type.name.lower() for tensor in tensors if GGUF_EXPERT.match(tensor.name)]
    if not kinds:
        raise UserError(f"{path} has no tensors blk.N.ffn_{{gate,up,down}}_exps.weight: it holds no routed experts")
    others = [tensor.name for tensor in quantized if not GGUF_EXPERT.match(tensor.name)]
    notes = (unused_note(others),) if others else ()
    return StoredExperts(f"gguf-{kinds[0]}", notes, _projections(path, tensors))


def _projections(path: Path, tensors: Iterable[gguf.ReaderTensor]) -> Iterator[StoredProjection]:
    for tensor in tensors:
        if match := GGUF_EXPERT.match(tensor.name):
            try:
                values = gguf.dequantize(tensor.data, tensor.tensor_type)  # [E, out, in]
            except (NotImplementedError, *_UNREADABLE) as error:
                raise UserError(f"{path}: '{tensor.name}' ({tensor.tensor_type.name}) cannot be read ({error}): fetch "
                                f"the file again, or one of another type") from error  # fmt: skip
            weights = torch.from_numpy(np.array(values, np.float32))  # a copy: F32 data is the file itself
            yield StoredProjection(int(match[1]), match[2], weights, int(tensor.n_bytes))
