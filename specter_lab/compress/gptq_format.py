"""The GPTQ on-disk format of one linear layer: int32 words of 2, 3, 4 or 8-bit codes.

Per layer, for a weight [out, in] with G groups (the layout that AutoGPTQ introduced and gptqmodel, vLLM and
transformers read):
    qweight [in * bits / 32, out] int32   codes + 2^(b-1), packed along the inputs
    qzeros  [G, out * bits / 32]  int32   zero points, packed along the outputs; "gptq" stores zero - 1, "gptq_v2" zero
    scales  [G, out]              float16
    g_idx   [in]                  int32   group of each input
A word stream is little-endian: code j of 32 starts at bit j * bits of `bits` consecutive words; with 3 bits, codes 10
and 21 straddle two words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specter_lab.compress.grid import Codes

WORD_BITS = 32
FORMAT_V1, FORMAT_V2 = "gptq", "gptq_v2"  # values of checkpoint_format in quantization_config
TENSORS = ("qweight", "qzeros", "scales", "g_idx")


def _bit_offsets(bits: int) -> tuple[Tensor, Tensor]:
    """Word index and bit shift of each of the 32 codes of a run, [32] each."""
    offsets = torch.arange(WORD_BITS) * bits
    return offsets // WORD_BITS, offsets % WORD_BITS


def pack_words(values: Tensor, bits: int) -> Tensor:
    """[N, M] integers 0 .. 2^bits - 1 -> [N * bits / 32, M] int32, packed along the first dimension.

    Raises:
        ValueError: N is not a multiple of 32.
    """
    if values.shape[0] % WORD_BITS:
        raise ValueError(f"{values.shape[0]} values do not fill whole runs of {WORD_BITS}")
    word, shift = _bit_offsets(bits)
    runs = values.to(torch.int64).unflatten(0, (-1, WORD_BITS)) << shift[:, None]  # [N / 32, 32, M]
    words = runs.new_zeros(runs.shape[0], bits + 1, runs.shape[2])  # one more for what straddles; stays 0 at the end
    words.index_add_(1, word, runs & 0xFFFFFFFF)  # codes share no bit, so adding is or-ing
    words.index_add_(1, word + 1, runs >> WORD_BITS)
    return words[:, :bits].flatten(0, 1).to(torch.uint32).view(torch.int32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """[N * bits / 32, M] int32 -> [N, M] int64 values 0 .. 2^bits - 1; the inverse of `pack_words`."""
    runs = (words.to(torch.int64) & 0xFFFFFFFF).unflatten(0, (-1, bits))  # [N / 32, bits, M]
    word, shift = _bit_offsets(bits)
    pairs = runs[:, (word + 1).clamp_max(bits - 1)] << WORD_BITS | runs[:, word]  # [N / 32, 32, M], two words each
    return (pairs >> shift[:, None] & (2**bits - 1)).flatten(0, 1)


def to_tensors(coded: Codes, expert: int) -> dict[str, Tensor]:
    """The four tensors of one expert's linear layer, in "gptq" (version 1) form, on the CPU."""
    codes, scales = coded.codes[expert].cpu(), coded.scales[expert].cpu()  # [out, in], [out, G]
    offset = 2 ** (coded.bits - 1)
    zeros = torch.full((codes.shape[0], scales.shape[1]), offset - 1)  # [out, G]
    return {
        "qweight": pack_words(codes.t().to(torch.int32) + offset, coded.bits),
        "qzeros": pack_words(zeros, coded.bits).t().contiguous(),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // coded.group).to(torch.int32),
    }


def dequantize(tensors: dict[str, Tensor], checkpoint_format: str) -> Tensor:
    """Effective float32 weights [out, in] of one linear layer, symmetric or not, with any order of groups.

    The number of bits is what the shapes say, since a checkpoint may mix several.
    """
    qweight, g_idx = tensors["qweight"], tensors["g_idx"].long()
    bits = qweight.shape[0] * WORD_BITS // g_idx.numel()
    codes = unpack_words(qweight, bits)  # [in, out]
    zeros = unpack_words(tensors["qzeros"].t(), bits).t()  # [G, out]
    if checkpoint_format == FORMAT_V1:
        zeros = (zeros + 1) & (2**bits - 1)
    scales = tensors["scales"].float()  # [G, out]
    return ((codes - zeros[g_idx]) * scales[g_idx]).t().contiguous()
