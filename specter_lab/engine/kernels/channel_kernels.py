"""Device code of the per-channel grouped GEMM; `channel_gemm` launches it.

Written in Gluon, like the INT4 experts of the draft: a row of weights (one output, all inputs) is read in 16-bit words,
16 contiguous bytes a thread, straight into the registers in which the tensor cores want them. A word holds one FP16 or
BF16 weight, two int8 codes or four int4 codes; code j of word w belongs to input PARTS w + j, and the order of inputs
within a sum is free, so the codes that one mask takes out of a register need not be neighbours: no reordered layout.

I2F (Elephants): a code stored without sign becomes a float by one logical instruction and one subtraction on two codes
at a time; `compress/i2f.py` proves the same over all codes. The channel's scale multiplies the FP32 sum.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WORDS = gl.constexpr(32)  # 16-bit words of a row in a tile: 64 bytes
HALF, INT8_NATIVE, INT8_I2F, INT4_I2F = (gl.constexpr(kind) for kind in range(4))


@gluon.jit
def _int4_fp16(words):
    """[M, W] int16 of four unsigned nibbles -> four [M, W] FP16 codes: 0x6400 | u = 1024 + u, minus 1032."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 second, third, fourth, offset;
        mov.b32 offset, 0x64086408;
        shr.b32 second, $4, 4;
        shr.b32 third, $4, 8;
        shr.b32 fourth, $4, 12;
        lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $1, second, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $2, third, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $3, fourth, 0x000F000F, 0x64006400, 0xEA;
        sub.f16x2 $0, $0, offset;
        sub.f16x2 $1, $1, offset;
        sub.f16x2 $2, $2, offset;
        sub.f16x2 $3, $3, offset;
        }""",
        "=&r,=&r,=&r,=&r,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _int4_bf16(words):
    """The same for BF16: 0x4300 | u = 128 + u, minus 136."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 second, third, fourth, one, offset;
        mov.b32 one, 0x3F803F80;
        mov.b32 offset, 0xC308C308;
        shr.b32 second, $4, 4;
        shr.b32 third, $4, 8;
        shr.b32 fourth, $4, 12;
        lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $1, second, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $2, third, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $3, fourth, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, $0, one, offset;
        fma.rn.bf16x2 $1, $1, one, offset;
        fma.rn.bf16x2 $2, $2, one, offset;
        fma.rn.bf16x2 $3, $3, one, offset;
        }""",
        "=&r,=&r,=&r,=&r,r", [words], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _int8_fp16(words):
    """[M, W] int16 of two unsigned bytes -> two [M, W] FP16 codes: 0x6400 | u = 1024 + u, minus 1152."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 magic, offset;
        mov.b32 magic, 0x64646464;
        mov.b32 offset, 0x64806480;
        prmt.b32 $0, $2, magic, 0x4240;
        prmt.b32 $1, $2, magic, 0x4341;
        sub.f16x2 $0, $0, offset;
        sub.f16x2 $1, $1, offset;
        }""",
        "=&r,=&r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _int8_bf16(words):
    """The same by way of FP32, because BF16 has no room for eight bits: 0x4B000000 | u = 2^23 + u, minus 2^23 + 128."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, magic;
        .reg .f32 fa, fb, fc, fd;
        mov.b32 magic, 0x4B000000;
        prmt.b32 a, $2, magic, 0x7440;
        prmt.b32 b, $2, magic, 0x7441;
        prmt.b32 c, $2, magic, 0x7442;
        prmt.b32 d, $2, magic, 0x7443;
        mov.b32 fa, a;
        mov.b32 fb, b;
        mov.b32 fc, c;
        mov.b32 fd, d;
        add.f32 fa, fa, 0fCB000080;
        add.f32 fb, fb, 0fCB000080;
        add.f32 fc, fc, 0fCB000080;
        add.f32 fd, fd, 0fCB000080;
        mov.b32 a, fa;
        mov.b32 b, fb;
        mov.b32 c, fc;
        mov.b32 d, fd;
        prmt.b32 $0, a, c, 0x7632;
        prmt.b32 $1, b, d, 0x7632;
        }""",
        "=&r,=&r,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _weights(words, KIND: gl.constexpr, TYPE: gl.constexpr):
    """The PARTS tensors [M, W] of one tile of words, in the type of the inputs."""
    if KIND == HALF:
        return (words.to(TYPE, bitcast=True),)
    elif KIND == INT8_NATIVE:
        return ((words << 8) >> 8).to(TYPE), (words >> 8).to(TYPE)
    elif KIND == INT8_I2F:
        if TYPE == gl.float16:
            return _int8_fp16(words)
        else:
            return _int8_bf16(words)
    else:
        if TYPE == gl.float16:
            return _int4_fp16(words)
        else:
            return _int4_bf16(words)


@gluon.jit
def _inputs(packed, PARTS: gl.constexpr, TYPE: gl.constexpr):
    """[W, N] integers of PARTS inputs each -> PARTS tensors [W, N]."""
    found = ()
    for part in gl.static_range(PARTS):
        found = found + ((packed >> (16 * part)).to(gl.int16).to(TYPE, bitcast=True),)
    return found


@gluon.jit
def _multiply(words, packed, acc, KIND: gl.constexpr, PARTS: gl.constexpr, TYPE: gl.constexpr):
    """acc [M, N] plus a tile of weights times a tile of inputs."""
    weights = _weights(words, KIND, TYPE)
    inputs = _inputs(packed, PARTS, TYPE)
    for part in gl.static_range(PARTS):
        acc = mma_v2(weights[part], inputs[part], acc)
    return acc


@gluon.jit
def _tiles(tile_of, first, TILES: gl.constexpr, AHEAD: gl.constexpr):
    """The next AHEAD tiles of weights; past the last one, nothing is read."""
    found = ()
    for tile in gl.static_range(AHEAD):
        found = found + (gl.load(tile_of + (first + tile) * WORDS, mask=first + tile < TILES, other=0),)
    return found


@gluon.jit
def grouped_gemm(
    x, weights, scales, factors, out, expert_of, start_of, count_of, order, num_experts,
    KIND: gl.constexpr, PARTS: gl.constexpr, TYPE: gl.constexpr, OUTPUTS: gl.constexpr, ROW_WORDS: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, AHEAD: gl.constexpr, DIRECT: gl.constexpr,
    GATHER: gl.constexpr, SCATTER: gl.constexpr, RELU: gl.constexpr, PDL: gl.constexpr, ROUTED: gl.constexpr,
):  # fmt: skip
    """[TOKENS, ROWS] of `out` per program: weights of the slot's expert times its tokens' inputs, at most TOKENS of them.

    GATHER reads `x` through `order` (permute), SCATTER adds each row times its factor to `out` through it (unpermute).
    PDL: the program may start while the kernel before it ends; with ROUTED its first weights are on their way by then,
    for who computes what was known before that kernel.
    """
    WARPS: gl.constexpr = [gl.num_warps(), 1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=WARPS, instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, k_width=8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, k_width=8)
    TILES: gl.constexpr = ROW_WORDS // WORDS
    slot = gl.program_id(1)
    if PDL and not ROUTED:
        gdc_wait()
        gdc_launch_dependents()
    if DIRECT:
        expert = gl.load(expert_of + slot).to(gl.int64)
        count = ((expert >= 0) & (expert < num_experts)).to(gl.int32)
        start = slot
    else:
        count = gl.load(count_of + slot)
        start = gl.load(start_of + slot, mask=count > 0, other=0)
        expert = gl.load(expert_of + slot, mask=count > 0, other=0).to(gl.int64)
    if count == 0:
        if PDL and ROUTED:
            gdc_wait()  # whoever waits for this kernel waits for those before it
        return
    first_row = gl.program_id(0) * ROWS
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, A))
    w_a = gl.arange(0, WORDS, layout=gl.SliceLayout(0, A))
    w_b = gl.arange(0, WORDS, layout=gl.SliceLayout(1, B))
    n = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, B))
    row_out = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    n_out = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))
    tile_of = weights + expert * (OUTPUTS * ROW_WORDS) + (row * ROW_WORDS)[:, None] + w_a[None, :]  # [M, W]
    good = (n < count)[None, :] & (w_b >= 0)[:, None]
    if DIRECT or not GATHER:
        token = start + n
        if DIRECT and GATHER:
            token = n
    else:
        token = gl.load(order + start + n, mask=n < count, other=0)
    inputs_of = x + (token.to(gl.int64) * ROW_WORDS)[None, :] + w_b[:, None]  # [W, N]
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout=MMA)
    here = _tiles(tile_of, 0, TILES, AHEAD)
    if PDL and ROUTED:
        gdc_wait()
        gdc_launch_dependents()
    for first in range(0, TILES, AHEAD):
        later = _tiles(tile_of, first + AHEAD, TILES, AHEAD)
        packed = ()
        for tile in gl.static_range(AHEAD):
            inside = good & (first + tile < TILES)
            packed = packed + (gl.load(inputs_of + (first + tile) * WORDS, mask=inside, other=0),)
        for tile in gl.static_range(AHEAD):
            acc = _multiply(here[tile], packed[tile], acc, KIND, PARTS, TYPE)
        here = later
    if KIND != HALF:
        acc *= gl.load(scales + expert * OUTPUTS + row_out).to(gl.float32)[:, None]
    if RELU:
        acc = gl.maximum(acc, 0.0)
    written = n_out < count
    target = start + n_out
    if SCATTER:
        if not DIRECT:
            target = gl.load(order + start + n_out, mask=written, other=0)
        acc *= gl.load(factors + target, mask=written, other=0.0).to(gl.float32)[None, :]
    out_of = out + target.to(gl.int64)[None, :] * OUTPUTS + row_out[:, None]
    mask = written[None, :] & (row_out >= 0)[:, None]
    if SCATTER:
        acc += gl.load(out_of, mask=mask, other=0.0).to(gl.float32)
    gl.store(out_of, acc.to(out.dtype.element_ty), mask=mask)
