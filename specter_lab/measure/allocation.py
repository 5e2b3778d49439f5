"""What a draft and a target really hold in memory, as a check on the arithmetic of `plan.memory`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specter_lab.compress.int4 import quantize_bank
from specter_lab.models.anatomy import parameters_by_part
from specter_lab.models.experts import ExpertBank, read_banks


def allocated_bytes(model: PreTrainedModel, context_tokens: int, shared: Collection[str]) -> int:
    """Build a draft beside `model`, every routed expert in INT4, and count the bytes that the two hold.

    Args:
        model: the target in BF16, all experts in memory.
        context_tokens: length of the KV cache, which the target fills by reading that many tokens.
        shared: which of "shared experts", "other parameters" and "KV cache" the draft takes from the target; of the
            rest it gets copies of its own.

    Raises:
        UserError: an architecture without adapter.
    """
    parts = parameters_by_part(model)
    ids = torch.zeros(1, context_tokens, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        cache = model.model(input_ids=ids, use_cache=True).cache
    experts = parts.pop("routed_experts")
    both = {
        "shared experts": parts.pop("shared_experts"),
        "other parameters": [p for of_part in parts.values() for p in of_part],
        "KV cache": _kv_tensors(cache),
    }
    draft = [tensor for bank in read_banks(model) for tensor in _int4_tensors(bank)]
    for part, tensors in both.items():
        draft += tensors if part in shared else [tensor.detach().clone() for tensor in tensors]
    return storage_bytes([*draft, *experts, *(tensor for tensors in both.values() for tensor in tensors)])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all distinct storages behind `tensors`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _int4_tensors(bank: ExpertBank) -> list[Tensor]:
    packed = quantize_bank(bank)
    return [tensor for part in (packed.gate, packed.up, packed.down) for tensor in (part.packed, part.scales)]


def _kv_tensors(cache: DynamicCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
