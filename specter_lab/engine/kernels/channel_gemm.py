"""Grouped GEMM of top-1 experts with fused dequantisation per output channel (Elephants, arXiv 2211.10017).

Tokens are sorted by expert; one launch per fully-connected layer multiplies every expert's tokens with its weights,
reading them through the sorted order (permute) and writing through it (unpermute, times the expert's scale). A token
whose expert id is past the last, as batch pruning gives it, is sorted to the end, not computed, and its result is zero;
experts without tokens are not read.

Weights are FP16 or BF16, int8 with the conversion instruction ("native"), or int8 and int4 by I2F bit operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specter_lab.compress.i2f import offset_of
from specter_lab.compress.per_channel import ChannelCodes
from specter_lab.engine.kernels.launch import MAX_TOKENS, overlaps_launches

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


_FEW_TOKENS = {  # of at most 8 tokens an expert; found by `bench_channel --tune` on an H200, weights cold
    HALF: ChannelTiles(64, 16, 2, 4), INT8_NATIVE: ChannelTiles(64, 8, 4), INT8_I2F: ChannelTiles(64, 8, 4),
    INT4_I2F: ChannelTiles(64, 8, 2),
}  # fmt: skip


def tiles_for(kind: str, tokens: int, experts: int) -> ChannelTiles:
    """The default: few tokens an expert leave most of a wide tile empty."""
    share = tokens / min(tokens, experts)
    return _FEW_TOKENS[kind] if share <= 8 else ChannelTiles(64, 16 if share <= 32 else 32, 4)


@dataclass(frozen=True)
class SortedTokens:
    """Who computes what, on the device: slot s is expert `expert[s]` with tokens order[start[s] : start[s] + count[s]]."""

    expert: Tensor  # [S]
    start: Tensor  # [S] int32
    count: Tensor  # [S] int32; 0: not read, not computed
    order: Tensor  # [T] int32
    tokens: int
    num_experts: int
    direct: bool  # one token: its expert is the only slot, the other tensors are not read
    tiles: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # by tokens of a tile, see `tiled`


def sort_tokens(experts: Tensor, num_experts: int) -> SortedTokens:
    """Sort tokens by expert; on a GPU nothing is read on the host, so a CUDA graph can hold it.

    Args:
        experts: [T] integers; 0 .. E-1, anything else is not computed (batch pruning uses E).
        num_experts: E.
    """
    tokens = len(experts)
    if experts.is_cuda and tokens:
        from specter_lab.engine.kernels.routes import route

        if tokens <= MAX_TOKENS:  # one small kernel
            routes = route(experts[:, None].contiguous(), num_experts)
            return SortedTokens(
                routes.expert, routes.start, routes.count, routes.order, tokens, num_experts, routes.direct
            )
    known = torch.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    ordered, order = known.to(torch.int32).sort(stable=True)  # a radix sort on a GPU
    ids = torch.arange(num_experts + 1, dtype=torch.int32, device=experts.device)
    ends = torch.searchsorted(ordered, ids, out_int32=True)  # [E + 1]
    return SortedTokens(ids[:-1], ends[:-1], ends[1:] - ends[:-1], order.to(torch.int32), tokens, num_experts, False)


def tiled(sorted_tokens: SortedTokens, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expert, start and count of tiles of at most `tile` tokens; computed once for both layers."""
    if sorted_tokens.direct:
        return sorted_tokens.expert, sorted_tokens.start, sorted_tokens.count
    if tile not in sorted_tokens.tiles:
        from specter_lab.engine.kernels.token_tiles import token_tiles

        slots = (sorted_tokens.expert, sorted_tokens.start, sorted_tokens.count)
        sorted_tokens.tiles[tile] = token_tiles(*slots, sorted_tokens.tokens, tile)
    return sorted_tokens.tiles[tile]


def linear(x: Tensor, weights: ChannelWeights, sorted_tokens: SortedTokens, out: Tensor, *, gather: bool = False,
           factors: Tensor | None = None, relu: bool = False, routed: bool = False,
           tiles: ChannelTiles | None = None) -> Tensor:  # fmt: skip
    """One fully-connected layer of every token's expert, into `out`; rows of tokens without an expert are not written.

    Args:
        x: [T, M] float16 or bfloat16 on the GPU, in the order of tokens with `gather`, else sorted.
        weights: of the same type where they have 16 bits.
        sorted_tokens: from `sort_tokens`.
        out: [T, N], any float type: in the order of tokens, each row times its factor, with `factors`; else sorted.
        factors: [T] the expert scale of each token.
        relu: apply it to the result.
        routed: `sorted_tokens` was complete before the kernel that this one follows was launched, so weights may be read
            while that one ends.

    Raises:
        ValueError: wrong type or layout, or sizes that the kernel's tiles do not divide.
    """
    from specter_lab.engine.kernels import channel_kernels

    tiles = tiles or tiles_for(weights.kind, sorted_tokens.tokens, sorted_tokens.num_experts)
    _check(x, weights, out, tiles)
    if not sorted_tokens.tokens:
        return out
    parts = 16 // BITS[weights.kind]
    expert, start, count = tiled(sorted_tokens, tiles.tokens)
    grid = (weights.outputs // tiles.outputs, len(expert))
    pdl = overlaps_launches(x.device)
    channel_kernels.grouped_gemm[grid](
        x.view({1: torch.int16, 2: torch.int32, 4: torch.int64}[parts]), weights.words,
        x if weights.scales is None else weights.scales, x if factors is None else factors, out,
        expert, start, count, sorted_tokens.order, sorted_tokens.num_experts,
        KIND=KINDS.index(weights.kind), PARTS=parts, TYPE=_gluon_type(x.dtype), OUTPUTS=weights.outputs,
        ROW_WORDS=weights.words.shape[2], ROWS=tiles.outputs, TOKENS=tiles.tokens, AHEAD=tiles.ahead,
        DIRECT=sorted_tokens.direct, GATHER=gather, SCATTER=factors is not None, RELU=relu, PDL=pdl, ROUTED=routed,
        num_warps=tiles.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _gluon_type(dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    return {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]


def _check(x: Tensor, weights: ChannelWeights, out: Tensor, tiles: ChannelTiles) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16) or not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"inputs are {x.dtype}: contiguous float16 or bfloat16 is needed, and a contiguous result")
    if x.shape[1] != weights.inputs or out.shape != (x.shape[0], weights.outputs):
        raise ValueError(f"{tuple(x.shape)} times {weights.inputs} x {weights.outputs} into {tuple(out.shape)}: no fit")
    if weights.inputs % _K_STEP or weights.outputs % tiles.outputs:
        raise ValueError(f"weights of {weights.inputs} x {weights.outputs}: inputs must be a multiple of {_K_STEP}, outputs of {tiles.outputs}")  # fmt: skip


def expert_ffn(x: Tensor, experts: Tensor, factors: Tensor, wi: ChannelWeights, wo: ChannelWeights,
               *, tiles: ChannelTiles | None = None) -> Tensor:  # fmt: skip
    """factor * wo(relu(wi x)) of each token's expert.

    Args:
        x: [T, H] float16 or bfloat16 on the GPU.
        experts: [T] expert of each token; outside 0 .. E-1: the result is zero, nothing is computed or read.
        factors: [T] router probability of the expert.
        wi: H to F of every expert.
        wo: F to H.

    Returns:
        [T, H] of the type of `x`; what lies between the two layers is rounded to it, sums are float32.
    """
    out, sorted_tokens = torch.zeros_like(x), sort_tokens(experts, wi.experts)  # nothing runs between the two layers
    act = torch.empty(x.shape[0], wi.outputs, dtype=x.dtype, device=x.device)  # [T, F], sorted by expert
    linear(x, wi, sorted_tokens, act, gather=True, relu=True, tiles=tiles)
    return linear(act, wo, sorted_tokens, out, factors=factors, routed=True, tiles=tiles)
