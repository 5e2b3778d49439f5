"""Grouped GEMM of top-1 experts with fused dequantisation per output channel (Elephants, arXiv 2211.10017).

Tokens are sorted by expert; one launch per fully-connected layer multiplies every expert's tokens with its weights,
reading them through the sorted order (permute) and writing through it (unpermute, times the expert's scale). A token
whose expert id is past the last, as batch pruning gives it, is left out: nothing is computed for it or added to its row;
experts without tokens are not read.

Weights are FP16 or BF16, int8 with the conversion instruction ("native"), or int8 and int4 by I2F bit operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specter_lab.compress.i2f import offset_of
from specter_lab.compress.per_channel import ChannelCodes
from specter_lab.engine.kernels.launch import overlaps_launches

HALF, INT8_NATIVE, INT8_I2F, INT4_I2F = KINDS = ("16 bit", "int8 native", "int8 I2F", "int4 I2F")
BITS = {HALF: 16, INT8_NATIVE: 8, INT8_I2F: 8, INT4_I2F: 4}
_K_STEP = 128  # inputs must be a multiple: a tile of int4 words


@dataclass(frozen=True)
class ChannelWeights:
    """One fully-connected layer of all experts, as the kernel reads it: output by output, inputs side by side."""

    kind: str  # of KINDS
    words: Tensor  # [E, N, M bits / 16] int16; code j of a word is input (16 / bits) w + j, in bits `bits * j` and up
    scales: Tensor | None  # [E, 1, N] float16; None for 16 bits
    inputs: int  # M

    @property
    def experts(self) -> int:
        return self.words.shape[0]

    @property
    def outputs(self) -> int:
        return self.words.shape[1]

    @property
    def expert_bytes(self) -> int:
        """What one expert costs to read."""
        return self.words[0].nbytes + (0 if self.scales is None else self.scales[0].nbytes)

    def to(self, device: str | torch.device) -> ChannelWeights:
        scales = None if self.scales is None else self.scales.to(device)
        return ChannelWeights(self.kind, self.words.to(device), scales, self.inputs)


def half_weights(weights: Tensor) -> ChannelWeights:
    """FP16 or BF16 weights [E, M, N] for the kernel."""
    return ChannelWeights(HALF, weights.transpose(1, 2).contiguous().view(torch.int16), None, weights.shape[1])


def packed_weights(coded: ChannelCodes, kind: str) -> ChannelWeights:
    """Codes [E, M, N] for the kernel.

    Raises:
        ValueError: the kind has another width than the codes, or M is no multiple of 4.
    """
    if BITS[kind] != coded.bits or kind == HALF:
        raise ValueError(f"{coded.bits}-bit codes cannot be read as '{kind}'")
    rows = coded.codes.transpose(1, 2).contiguous()  # [E, N, M] int8
    if rows.shape[2] % 4:
        raise ValueError(f"{rows.shape[2]} inputs: a word needs a multiple of 4")
    if kind == INT8_NATIVE:
        words = rows.view(torch.int16)
    elif kind == INT8_I2F:
        words = (rows.to(torch.int16) + offset_of(8)).to(torch.uint8).view(torch.int16)
    else:
        nibbles = (rows + offset_of(4)).to(torch.uint8)
        words = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).view(torch.int16)
    return ChannelWeights(kind, words, coded.scales, rows.shape[2])


def unpacked(weights: ChannelWeights, dtype: torch.dtype) -> Tensor:
    """Effective float32 weights [E, M, N] of what the kernel reads, 16-bit ones being of `dtype`; for references."""
    if weights.kind == HALF:
        return weights.words.view(dtype).transpose(1, 2).float()
    if weights.kind == INT4_I2F:
        bytes_ = weights.words.view(torch.uint8)
        codes = torch.stack((bytes_ & 0xF, bytes_ >> 4), dim=-1).flatten(-2).float() - offset_of(4)
    elif weights.kind == INT8_I2F:
        codes = weights.words.view(torch.uint8).float() - offset_of(8)
    else:
        codes = weights.words.view(torch.int8).float()
    return codes.transpose(1, 2) * weights.scales.float()


@dataclass(frozen=True)
class ChannelTiles:
    """Shape of one program."""

    outputs: int  # weight rows, 16 for every warp at least
    tokens: int  # at least 8
    warps: int
    ahead: int = 2  # tiles of weights that are on their way while as many are multiplied
    shared: bool = False  # 16 bits only: by way of shared memory (`shared_gemm`), `ahead` stages, 64 tokens at least


_SOME = ChannelTiles(64, 16, 4)
_CODES = ((32, _SOME), (math.inf, ChannelTiles(128, 32, 4, 1)))
_TILES = {  # tokens an expert up to which they serve, tiles; where there are two, of a layer with more outputs than inputs
    # and of the others, both of as many tokens, for one sorting serves both. Up to 32 found by `bench_channel --tune` on
    # an H200, weights cold; above, as little as registers allow is read from the L2, not yet measured.
    HALF: ((8, ChannelTiles(64, 16, 2, 4)), (32, _SOME), (64, ChannelTiles(128, 64, 4, 4, True)),
           (math.inf, ChannelTiles(128, 128, 8, 3, True))),
    INT8_NATIVE: ((8, ChannelTiles(64, 8, 4)), *_CODES),
    INT8_I2F: ((8, ChannelTiles(64, 8, 4)), *_CODES),
    INT4_I2F: ((8, ChannelTiles(64, 8, 2), ChannelTiles(64, 8, 4, 4)), *_CODES),
}  # fmt: skip


def tiles_for(weights: ChannelWeights, tokens: int) -> ChannelTiles:
    """The default: few tokens an expert leave most of a wide tile empty, many read the weights again for every tile."""
    used = min(tokens, weights.experts)
    widens, *narrows = next(tiles for most, *tiles in _TILES[weights.kind] if tokens / used <= most)
    tiles = narrows[0] if narrows and weights.outputs <= weights.inputs else widens
    outputs = math.gcd(tiles.outputs, weights.outputs)  # as wide as the layer allows
    return replace(tiles, outputs=outputs, warps=max(1, tiles.warps * outputs // tiles.outputs))


@dataclass(frozen=True)
class SortedTokens:
    """Who computes what, on the device: tile i is expert[i] with tokens order[start[i] : start[i] + count[i]]."""

    expert: Tensor  # [I]
    start: Tensor  # [I] int32
    count: Tensor  # [I] int32; 0: not read, not computed
    order: Tensor  # [T] int32
    tokens: int
    num_experts: int
    tile: int  # the largest count
    direct: bool = False  # one token: its expert is the only tile, the other tensors are not read


def sort_tokens(experts: Tensor, num_experts: int, tile: int) -> SortedTokens:
    """Sort tokens by expert and cut them into tiles; on a GPU nothing is read on the host, so a CUDA graph can hold it.

    Args:
        experts: [T] integers, contiguous; 0 .. E-1, anything else is not computed (batch pruning uses E).
        num_experts: E.
        tile: tokens of a tile at most.
    """
    tokens = len(experts)
    if experts.is_cuda and tokens == 1:
        return SortedTokens(experts, experts, experts, experts, tokens, num_experts, tile, direct=True)
    if experts.is_cuda and tokens:
        from specter_lab.engine.kernels.token_tiles import token_tiles

        return SortedTokens(*token_tiles(experts, num_experts, tile), tokens, num_experts, tile)
    known = (experts >= 0) & (experts < num_experts)
    order = experts.where(known, num_experts).argsort(stable=True)  # [T]
    counts = experts[known].bincount(minlength=num_experts)  # [E]
    tiles = -(-counts // tile)
    expert = torch.arange(num_experts, device=experts.device).repeat_interleave(tiles)  # [I]
    done = (torch.arange(len(expert), device=experts.device) - (tiles.cumsum(0) - tiles)[expert]) * tile
    start, count = (counts.cumsum(0) - counts)[expert] + done, (counts[expert] - done).clamp_max(tile)
    return SortedTokens(*(part.to(torch.int32) for part in (expert, start, count, order)), tokens, num_experts, tile)


def linear(x: Tensor, weights: ChannelWeights, sorted_tokens: SortedTokens, out: Tensor, *, gather: bool = False,
           factors: Tensor | None = None, relu: bool = False, routed: bool = False,
           tiles: ChannelTiles | None = None) -> Tensor:  # fmt: skip
    """One fully-connected layer of every token's expert, into `out`; rows of tokens without an expert are not written.

    Args:
        x: [T, M] float16 or bfloat16 on the GPU, in the order of tokens with `gather`, else sorted.
        weights: of the same type where they have 16 bits.
        sorted_tokens: from `sort_tokens`; its tiles' tokens, a power of two from 8, are the program's.
        out: [T, N], any float type, sorted; with `factors` in the order of tokens, and each row times its factor is added.
        factors: [T] the expert scale of each token.
        relu: apply it to the result.
        routed: `sorted_tokens` was complete before the kernel that this one follows was launched, so weights may be read
            while that one ends.

    Raises:
        ValueError: wrong type or layout, or sizes that the kernel's tiles do not divide.
    """
    from specter_lab.engine.kernels import channel_kernels

    if not sorted_tokens.tokens:
        return out
    tiles = tiles or tiles_for(weights, sorted_tokens.tokens)
    _check(x, weights, sorted_tokens, out, tiles)
    if tiles.shared:
        from specter_lab.engine.kernels import shared_gemm

        slots = (sorted_tokens.expert, sorted_tokens.start, sorted_tokens.count)
        shared_gemm.grouped(x, weights.words.view(x.dtype), slots, sorted_tokens.order, out, tile=sorted_tokens.tile, outputs=tiles.outputs,
                            warps=tiles.warps, stages=tiles.ahead, gather=gather, factors=factors, relu=relu)  # fmt: skip
        return out
    parts = 16 // BITS[weights.kind]
    grid = (weights.outputs // tiles.outputs, len(sorted_tokens.expert))
    pdl = overlaps_launches(x.device)
    channel_kernels.grouped_gemm[grid](
        x.view({1: torch.int16, 2: torch.int32, 4: torch.int64}[parts]), weights.words,
        x if weights.scales is None else weights.scales, x if factors is None else factors, out,
        sorted_tokens.expert, sorted_tokens.start, sorted_tokens.count, sorted_tokens.order, sorted_tokens.num_experts,
        KIND=KINDS.index(weights.kind), PARTS=parts, TYPE=_gluon_type(x.dtype), OUTPUTS=weights.outputs,
        ROW_WORDS=weights.words.shape[2], ROWS=tiles.outputs, TOKENS=sorted_tokens.tile, AHEAD=tiles.ahead,
        DIRECT=sorted_tokens.direct, GATHER=gather, SCATTER=factors is not None, RELU=relu, PDL=pdl, ROUTED=routed,
        num_warps=tiles.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _gluon_type(dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    return {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]


def _check(x: Tensor, weights: ChannelWeights, sorted_tokens: SortedTokens, out: Tensor, tiles: ChannelTiles) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16) or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"inputs are {x.dtype}: contiguous float16 or bfloat16 is needed, and a contiguous result")
    if tiles.shared and (weights.kind != HALF or sorted_tokens.direct or sorted_tokens.tile < 64):
        raise ValueError(
            f"'{weights.kind}' in tiles of {sorted_tokens.tile} tokens: shared memory is for 16 bits and 64"
        )
    if x.shape[1] != weights.inputs or out.shape != (x.shape[0], weights.outputs):
        raise ValueError(f"{tuple(x.shape)} times {weights.inputs} x {weights.outputs} into {tuple(out.shape)}: no fit")
    if weights.inputs % _K_STEP or weights.outputs % tiles.outputs:
        raise ValueError(f"weights of {weights.inputs} x {weights.outputs}: inputs must be a multiple of {_K_STEP}, outputs of {tiles.outputs}")  # fmt: skip


def expert_ffn(x: Tensor, experts: Tensor, factors: Tensor, wi: ChannelWeights, wo: ChannelWeights, out: Tensor,
               *, tiles: ChannelTiles | None = None) -> Tensor:  # fmt: skip
    """Add factor * wo(relu(wi x)) of each token's expert to `out`.

    Args:
        x: [T, H] float16 or bfloat16 on the GPU.
        experts: [T] expert of each token; outside 0 .. E-1: nothing is added, computed or read.
        factors: [T] router probability of the expert.
        wi: H to F of every expert.
        wo: F to H.
        out: [T, H], any float type, not `x`; returned.

    What lies between the two layers is rounded to the type of `x`, sums are float32.
    """
    if len(x):
        sorted_tokens = sort_tokens(experts, wi.experts, (tiles or tiles_for(wi, len(x))).tokens)
        act = torch.empty(x.shape[0], wi.outputs, dtype=x.dtype, device=x.device)  # [T, F], sorted by expert
        linear(x, wi, sorted_tokens, act, gather=True, relu=True, tiles=tiles)
        linear(act, wo, sorted_tokens, out, factors=factors, routed=True, tiles=tiles)  # nothing runs between the two
    return out
