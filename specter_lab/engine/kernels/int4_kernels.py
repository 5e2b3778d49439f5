"""Device code of the INT4 experts; `int4_experts` launches it.

Written in Gluon, Triton's dialect with explicit layouts, because what makes it fast is a layout: 16-bit words of four
codes are loaded from memory straight into the registers in which the tensor cores want them (the order of the inputs
within a sum is free, so each thread takes 16 contiguous bytes of a row). No shared memory, no barrier.

A nibble n becomes the BF16 number 128 + n by one logical instruction; -136 times the input, summed by the tensor cores
as well, takes the offset back out. The group's scale multiplies the FP32 sum, so no weight is ever rounded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_WORDS = gl.constexpr(32)  # 16-bit words of a group of 128


@gluon.jit
def _codes(words):
    """[M, W] int16 of four nibbles n -> four [M, W] BF16 of 128 + n, number j those of inputs 4 w + j."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 second, third, fourth;
        shr.b32 second, $4, 4;
        shr.b32 third, $4, 8;
        shr.b32 fourth, $4, 12;
        lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $1, second, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $2, third, 0x000F000F, 0x43004300, 0xEA;
        lop3.b32 $3, fourth, 0x000F000F, 0x43004300, 0xEA;
        }""",
        "=r,=r,=r,=r,r", [words], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _inputs(quads):
    """[W, N] int64 of four BF16 -> four [W, N] BF16."""
    x0 = quads.to(gl.int16).to(gl.bfloat16, bitcast=True)
    x1 = (quads >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    x2 = (quads >> 32).to(gl.int16).to(gl.bfloat16, bitcast=True)
    x3 = (quads >> 48).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return x0, x1, x2, x3


@gluon.jit
def _dot(words, x, offset):
    """Codes [M, W] times inputs [W, N] in four parts -> [M, N] float32, in two chains that run side by side."""
    c0, c1, c2, c3 = _codes(words)
    return mma_v2(c1, x[1], mma_v2(c0, x[0], offset[0])) + mma_v2(c3, x[3], mma_v2(c2, x[2], offset[1]))


@gluon.jit
def _offset(x, like, zero):
    """-136 times the sums of the inputs, [M, N] float32 for each chain of `_dot`: what turns 128 + n into a code."""
    minus = gl.full(like.shape, -136.0, gl.bfloat16, layout=like.type.layout)
    return mma_v2(minus, x[1], mma_v2(minus, x[0], zero)), mma_v2(minus, x[3], mma_v2(minus, x[2], zero))


@gluon.jit
def _diagonal(acc, ROWS: gl.constexpr, SPREAD: gl.constexpr, TOKENS: gl.constexpr, MMA: gl.constexpr):
    """[(row, g), (token, g')] -> [row, token], summed over g = g'."""
    g_row = gl.arange(0, ROWS * SPREAD, layout=gl.SliceLayout(1, MMA)) % SPREAD
    g_column = gl.arange(0, TOKENS * SPREAD, layout=gl.SliceLayout(0, MMA)) % SPREAD
    kept = gl.where(g_row[:, None] == g_column[None, :], acc, 0.0)
    kept = gl.sum(gl.reshape(kept, [ROWS, SPREAD, TOKENS, SPREAD]), axis=3)
    return gl.sum(kept, axis=1)


@gluon.jit
def _slot(expert_of, start_of, count_of, slot, num_experts, DIRECT: gl.constexpr):
    """Expert, first pair and number of pairs of a slot (`routes.slot_work`)."""
    if DIRECT:
        expert = gl.load(expert_of + slot).to(gl.int64)
        count = ((expert >= 0) & (expert < num_experts)).to(gl.int32)
        start = slot
    else:
        count = gl.load(count_of + slot)
        start = gl.load(start_of + slot, mask=count > 0, other=0)
        expert = gl.load(expert_of + slot, mask=count > 0, other=0).to(gl.int64)
    return expert, start, count


@gluon.jit
def _gate_up_tile(
    gate_codes, gate_scales, up_codes, up_scales, first_group, row, row_scale, width, tile: gl.constexpr,
    GROUPS: gl.constexpr, WORDS: gl.constexpr, SPREAD: gl.constexpr, A: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Codes [M, W] and scales [M] of gate and up for groups tile * SPREAD and on."""
    m = gl.arange(0, row.shape[0], layout=gl.SliceLayout(1, A))
    w = gl.arange(0, MAX_WORDS, layout=gl.SliceLayout(0, A))
    group = tile * SPREAD + m % SPREAD
    words = ((row * GROUPS + group) * WORDS)[:, None] + w[None, :]  # 32 bits from the expert's first
    mask = ((row < width) & (group < GROUPS))[:, None] & (w < WORDS)[None, :]
    m_scale = gl.arange(0, row.shape[0], layout=gl.SliceLayout(1, MMA))
    group_scale = tile * SPREAD + m_scale % SPREAD
    scales = row_scale * GROUPS + group_scale
    good = (row_scale < width) & (group_scale < GROUPS)
    return (
        gl.load(gate_codes + first_group * WORDS + words, mask=mask, other=0),
        gl.load(up_codes + first_group * WORDS + words, mask=mask, other=0),
        gl.load(gate_scales + first_group + scales, mask=good, other=0.0),
        gl.load(up_scales + first_group + scales, mask=good, other=0.0),
    )  # fmt: skip


@gluon.jit
def gate_up(
    x, gate_codes, gate_scales, up_codes, up_scales, act, expert_of, start_of, count_of, order,
    first_slot, num_experts, width,
    TOP_K: gl.constexpr, GROUPS: gl.constexpr, WORDS: gl.constexpr, OUT_WORDS: gl.constexpr, ROWS: gl.constexpr,
    SPREAD: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr, DIRECT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """silu(gate x) * up x of one expert, [TOKENS, ROWS] of `act` [P, I] per program.

    Within a group of `act`, values 4 w + j of one j lie side by side, which is how `down` multiplies them.
    """
    WARPS: gl.constexpr = [gl.num_warps(), 1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=WARPS, instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, k_width=8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, k_width=8)
    TILES: gl.constexpr = (GROUPS + SPREAD - 1) // SPREAD
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, start, count = _slot(expert_of, start_of, count_of, first_slot + gl.program_id(1), num_experts, DIRECT)
    first_token = gl.program_id(2) * TOKENS
    if first_token >= count:
        return
    first_row = gl.program_id(0) * ROWS
    first_group = expert * width * GROUPS
    row = first_row + gl.arange(0, ROWS * SPREAD, layout=gl.SliceLayout(1, A)) // SPREAD
    row_scale = first_row + gl.arange(0, ROWS * SPREAD, layout=gl.SliceLayout(1, MMA)) // SPREAD
    n = gl.arange(0, TOKENS * SPREAD, layout=gl.SliceLayout(0, B))
    w = gl.arange(0, MAX_WORDS, layout=gl.SliceLayout(1, B))
    place = first_token + n // SPREAD  # [N] among the expert's pairs
    if DIRECT:
        token = n * 0
    else:
        token = gl.load(order + start + place, mask=place < count, other=0) // TOP_K
    zero = gl.zeros([ROWS * SPREAD, TOKENS * SPREAD], gl.float32, layout=MMA)
    acc_gate, acc_up = zero, zero
    tiles = ()
    for tile in gl.static_range(min(DEPTH, TILES)):
        tiles = tiles + (_gate_up_tile(
            gate_codes, gate_scales, up_codes, up_scales, first_group, row, row_scale, width, tile,
            GROUPS, WORDS, SPREAD, A, MMA,
        ),)  # fmt: skip
    for tile in gl.static_range(TILES):
        if tile + DEPTH < TILES:
            tiles = tiles + (_gate_up_tile(
                gate_codes, gate_scales, up_codes, up_scales, first_group, row, row_scale, width, tile + DEPTH,
                GROUPS, WORDS, SPREAD, A, MMA,
            ),)  # fmt: skip
        column = tile * SPREAD + n % SPREAD  # [N]
        quads = gl.load(
            x + (token * GROUPS + column)[None, :] * WORDS + w[:, None],
            mask=((place < count) & (column < GROUPS))[None, :] & (w < WORDS)[:, None], other=0,
        )  # fmt: skip
        inputs = _inputs(quads)
        gate, up, gate_scale, up_scale = tiles[tile]
        offset = _offset(inputs, gate, zero)
        acc_gate += _dot(gate, inputs, offset) * gate_scale.to(gl.float32)[:, None]
        acc_up += _dot(up, inputs, offset) * up_scale.to(gl.float32)[:, None]
    gate = _diagonal(acc_gate, ROWS, SPREAD, TOKENS, MMA)  # [ROWS, TOKENS]
    value = gate / (1.0 + gl.exp(-gate)) * _diagonal(acc_up, ROWS, SPREAD, TOKENS, MMA)
    out_row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, value.type.layout))
    out_place = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, value.type.layout))
    OUT_GROUP: gl.constexpr = 4 * OUT_WORDS
    in_group = out_row % OUT_GROUP
    column = out_row - in_group + in_group % 4 * OUT_WORDS + in_group // 4
    target = act + (start + out_place)[None, :] * width + column[:, None]
    gl.store(target, value.to(gl.bfloat16), mask=(out_row < width)[:, None] & (out_place < count)[None, :])


@gluon.jit
def _of_slot(values, group, tile: gl.constexpr, FUSED: gl.constexpr, GROUPS: gl.constexpr, SPREAD: gl.constexpr):
    """Of the values of FUSED slots, the one to whose GROUPS groups each of `group` [M], in a tile, belongs."""
    LAST: gl.constexpr = min(FUSED - 1, (tile * SPREAD + SPREAD - 1) // GROUPS)
    found = gl.zeros_like(group).to(values[LAST].dtype) + values[LAST]
    for slot in gl.static_range(tile * SPREAD // GROUPS, LAST):
        found = gl.where(group // GROUPS == slot, values[slot], found)
    return found


@gluon.jit
def _down_tile(
    codes, scales, first_groups, weights, row, row_scale, hidden, tile: gl.constexpr,
    FUSED: gl.constexpr, GROUPS: gl.constexpr, WORDS: gl.constexpr, SPREAD: gl.constexpr,
    A: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Codes [M, W] and scales [M] of groups tile * SPREAD and on, counted over the groups of FUSED slots."""
    m = gl.arange(0, row.shape[0], layout=gl.SliceLayout(1, A))
    w = gl.arange(0, MAX_WORDS, layout=gl.SliceLayout(0, A))
    group = tile * SPREAD + m % SPREAD
    first = _of_slot(first_groups, group, tile, FUSED, GROUPS, SPREAD)
    good = (row < hidden) & (group < FUSED * GROUPS) & (first >= 0)
    words = ((row * GROUPS + group % GROUPS) * WORDS)[:, None] + w[None, :]
    loaded = gl.load(codes + first[:, None] * WORDS + words, mask=good[:, None] & (w < WORDS)[None, :], other=0)
    m = gl.arange(0, row_scale.shape[0], layout=gl.SliceLayout(1, MMA))
    group = tile * SPREAD + m % SPREAD
    first = _of_slot(first_groups, group, tile, FUSED, GROUPS, SPREAD)
    good = (row_scale < hidden) & (group < FUSED * GROUPS) & (first >= 0)
    scale = gl.load(scales + first + (row_scale * GROUPS + group % GROUPS), mask=good, other=0.0).to(gl.float32)
    return loaded, scale * _of_slot(weights, group, tile, FUSED, GROUPS, SPREAD)


@gluon.jit
def down(
    act, codes, scales, weights, out, expert_of, start_of, count_of, order, first_slot, num_experts, hidden,
    FUSED: gl.constexpr, GROUPS: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr,
    SPREAD: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr, DIRECT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """down act times the routing weight: summed over the FUSED slots of one token, or a row of `out` [P, H] a pair."""
    WARPS: gl.constexpr = [gl.num_warps(), 1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=WARPS, instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, k_width=8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, k_width=8)
    TILES: gl.constexpr = (FUSED * GROUPS + SPREAD - 1) // SPREAD
    slot = first_slot + gl.program_id(1)
    first_token = gl.program_id(2) * TOKENS
    if PDL:
        gdc_launch_dependents()
    first_groups, factors = (), ()  # of every slot: its expert's first group, its routing weight
    if FUSED > 1:
        start, count = slot, 1
        for choice in gl.static_range(FUSED):
            expert = gl.load(expert_of + slot + choice).to(gl.int64)
            valid = (expert >= 0) & (expert < num_experts)
            first_groups = first_groups + (gl.where(valid, expert * hidden * GROUPS, -1),)
            factors = factors + (gl.load(weights + slot + choice).to(gl.float32),)
    else:
        if PDL:
            gdc_wait()
        expert, start, count = _slot(expert_of, start_of, count_of, slot, num_experts, DIRECT)
        first_groups, factors = (expert * hidden * GROUPS,), (gl.to_tensor(1.0),)
    if first_token >= count:
        return
    first_row = gl.program_id(0) * ROWS
    row = first_row + gl.arange(0, ROWS * SPREAD, layout=gl.SliceLayout(1, A)) // SPREAD
    row_scale = first_row + gl.arange(0, ROWS * SPREAD, layout=gl.SliceLayout(1, MMA)) // SPREAD
    n = gl.arange(0, TOKENS * SPREAD, layout=gl.SliceLayout(0, B))
    w = gl.arange(0, MAX_WORDS, layout=gl.SliceLayout(1, B))
    place = first_token + n // SPREAD  # [N] among the expert's pairs
    zero = gl.zeros([ROWS * SPREAD, TOKENS * SPREAD], gl.float32, layout=MMA)
    acc = zero
    tiles = ()
    for tile in gl.static_range(min(DEPTH, TILES)):
        tiles = tiles + (_down_tile(
            codes, scales, first_groups, factors, row, row_scale, hidden, tile,
            FUSED, GROUPS, WORDS, SPREAD, A, MMA,
        ),)  # fmt: skip
    if PDL and FUSED > 1:
        gdc_wait()  # of what is read here, only `act` comes from the kernel before
    for tile in gl.static_range(TILES):
        if tile + DEPTH < TILES:
            tiles = tiles + (_down_tile(
                codes, scales, first_groups, factors, row, row_scale, hidden, tile + DEPTH,
                FUSED, GROUPS, WORDS, SPREAD, A, MMA,
            ),)  # fmt: skip
        column = tile * SPREAD + n % SPREAD  # [N]; the activations of one token's slots lie one after the other
        written = (place < count) & (column < FUSED * GROUPS)
        if FUSED > 1:
            written = written & (_of_slot(first_groups, column, tile, FUSED, GROUPS, SPREAD) >= 0)
        source = act + ((start + place) * GROUPS + column)[None, :] * (4 * WORDS) + w[:, None]
        mask = written[None, :] & (w < WORDS)[:, None]
        inputs = (
            gl.load(source, mask=mask, other=0.0), gl.load(source + WORDS, mask=mask, other=0.0),
            gl.load(source + 2 * WORDS, mask=mask, other=0.0), gl.load(source + 3 * WORDS, mask=mask, other=0.0),
        )  # fmt: skip
        loaded, scale = tiles[tile]
        acc += _dot(loaded, inputs, _offset(inputs, loaded, zero)) * scale[:, None]
    value = _diagonal(acc, ROWS, SPREAD, TOKENS, MMA)  # [ROWS, TOKENS]
    out_row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, value.type.layout))
    out_place = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, value.type.layout))
    if FUSED > 1:
        pair = out_place
    else:
        if DIRECT:
            pair = start + out_place
        else:
            pair = gl.load(order + start + out_place, mask=out_place < count, other=0)
        value *= gl.load(weights + pair, mask=out_place < count, other=0.0).to(gl.float32)[None, :]
    target = out + pair[None, :].to(gl.int64) * hidden + out_row[:, None]
    gl.store(target, value.to(out.dtype.element_ty), mask=(out_row < hidden)[:, None] & (out_place < count)[None, :])
