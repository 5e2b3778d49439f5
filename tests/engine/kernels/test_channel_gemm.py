"""The per-channel grouped GEMM: packing and sorting anywhere, the kernel against its reference on a GPU."""

import pytest
import torch

from specter_lab.compress import i2f, per_channel
from specter_lab.engine.kernels import channel_gemm as gemm
from specter_lab.engine.kernels import reference
from tests.engine.kernels.inputs import normal, relative_error

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 8e-3}  # two roundings to the type
QUANTISED = [kind for kind in gemm.KINDS if kind != gemm.HALF]


def packed(weights, kind):
    if kind == gemm.HALF:
        return gemm.half_weights(weights)
    return gemm.packed_weights(per_channel.quantize(weights, gemm.BITS[kind]), kind)


def ffn(x, experts, factors, wi, wo, **options):
    return gemm.expert_ffn(x, experts, factors, wi, wo, torch.zeros_like(x), **options)


@pytest.mark.parametrize("kind", QUANTISED)
def test_what_is_packed_is_what_was_quantised(kind):
    weights = normal(3, 128, 64, scale=0.05, dtype=torch.float32)
    coded = per_channel.quantize(weights, gemm.BITS[kind])
    found = gemm.packed_weights(coded, kind)
    assert found.words.shape == (3, 64, 128 * coded.bits // 16) and found.words.dtype == torch.int16
    assert torch.equal(gemm.unpacked(found, torch.float16), per_channel.dequantize(coded))
    assert found.expert_bytes * 3 == coded.stored_bytes


def test_16_bits_are_the_weights_themselves():
    weights = normal(2, 128, 64, dtype=torch.bfloat16)
    found = gemm.half_weights(weights)
    assert torch.equal(gemm.unpacked(found, torch.bfloat16), weights.float()) and found.expert_bytes == 128 * 64 * 2


@pytest.mark.parametrize(("kind", "convert"), [(gemm.INT8_I2F, i2f.int8_to_fp16), (gemm.INT8_I2F, i2f.int8_to_bf16)])
def test_the_bit_tricks_read_the_kernels_words(kind, convert):
    coded = per_channel.quantize(normal(1, 128, 16, dtype=torch.float32), 8)
    words = gemm.packed_weights(coded, kind).words.view(torch.int32)  # [1, N, M / 4]
    assert torch.equal(convert(words).float(), coded.codes.transpose(1, 2).float())


def test_a_width_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="cannot be read as"):
        gemm.packed_weights(per_channel.quantize(torch.ones(1, 8, 8), 8), gemm.INT4_I2F)


def test_tiles_depend_on_where_the_inputs_lie():
    """Layers that narrow read long rows: their programs have more warps, and more of a row on its way."""
    there, back = (
        gemm.packed_weights(per_channel.quantize(torch.randn(2, inputs, outputs), 4), gemm.INT4_I2F)
        for inputs, outputs in ((128, 512), (512, 128))
    )
    assert gemm.tiles_for(there, 8).warps < gemm.tiles_for(back, 8).warps
    assert gemm.tiles_for(there, 8).tokens == gemm.tiles_for(back, 8).tokens < gemm.tiles_for(there, 40).tokens


def tiles_of(work):
    """(expert, tokens) of the tiles in use, which come before all others."""
    used = int((work.count > 0).sum())
    assert not work.count[used:].any()
    slots = zip(*(part[:used].tolist() for part in (work.expert, work.start, work.count)))
    return [(expert, work.order[start : start + count].tolist()) for expert, start, count in slots]


@pytest.mark.parametrize("tile", [8, 16, 500])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 500])
def test_tokens_are_sorted_cut_into_tiles_and_finished_ones_left_out(count, tile):
    for experts in (torch.randint(-1, 33, (count,)), torch.full((count,), 32), torch.full((count,), 5)):
        assert tiles_of(gemm.sort_tokens(experts, 32, tile)) == reference.token_tiles(experts, 32, tile)


@pytest.mark.parametrize("kind", gemm.KINDS)
@pytest.mark.parametrize("outputs", [64, 256, 384, 4096])
def test_tiles_fit_the_layer_and_one_sorting_serves_both(kind, outputs):
    there, back = (
        gemm.ChannelWeights(kind, torch.empty(32, size, 0), None, other)
        for size, other in ((outputs, 128), (128, outputs))
    )
    for tokens in (1, 2, 96, 256, 257, 1024, 3072, 10**6):
        wi, wo = (gemm.tiles_for(weights, tokens) for weights in (there, back))
        assert wi.tokens == wo.tokens and outputs % wi.outputs == 0 and 128 % wo.outputs == 0
        assert all(tile.outputs >= 16 * tile.warps > 0 for tile in (wi, wo))


def test_the_reference_is_a_switch_layer():
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    layer = SwitchTransformersSparseMLP(
        SwitchTransformersConfig(d_model=32, d_ff=48, num_experts=6, expert_capacity=100)
    ).eval()
    torch.nn.init.normal_(layer.router.classifier.weight)
    x = normal(1, 20, 32, dtype=torch.float32)
    with torch.no_grad():
        expected = layer(x)[0]
        factors, experts = layer.router.classifier(x[0]).softmax(-1).max(-1)
        wi, wo = (torch.stack([getattr(e, n).weight.t() for e in layer.experts.values()]) for n in ("wi", "wo"))
        found = reference.channel_ffn(x[0], experts, factors, wi, wo)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
class TestOnAGpu:
    pytestmark = pytest.mark.usefixtures("poisoned")

    @pytest.mark.parametrize("tile", [8, 16, 64])
    @pytest.mark.parametrize(("tokens", "experts"), [(2, 32), (40, 32), (64, 5), (500, 32), (3072, 40)])
    def test_tiles_are_the_references(self, tokens, experts, tile):
        from specter_lab.engine.kernels.token_tiles import most_tiles

        for chosen in (
            torch.randint(-1, experts + 1, (tokens,)),
            torch.full((tokens,), 3),
            torch.full((tokens,), experts),
        ):
            work = gemm.sort_tokens(chosen.cuda(), experts, tile)
            assert len(work.count) == most_tiles(experts, tokens, tile)
            assert tiles_of(work) == reference.token_tiles(chosen, experts, tile)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("kind", gemm.KINDS)
    @pytest.mark.parametrize(
        ("tokens", "experts"), [(1, 4), (2, 32), (40, 1), (40, 32), (64, 8), (130, 16), (512, 32), (600, 6)]
    )
    def test_it_is_the_reference(self, tokens, experts, kind, dtype):
        wi, wo = normal(experts, 256, 384, scale=0.06, dtype=dtype), normal(experts, 384, 256, scale=0.05, dtype=dtype)
        x, ids, factors = normal(tokens, 256, dtype=dtype), torch.randint(0, experts + 1, (tokens,)), torch.rand(tokens)
        parts = [packed(w, kind) for w in (wi, wo)]
        found = ffn(x.cuda(), ids.cuda(), factors.cuda(), *(part.to("cuda") for part in parts))
        expected = reference.channel_ffn(x, ids, factors, *(gemm.unpacked(part, dtype) for part in parts))
        assert found.dtype == dtype and not found[ids.cuda() == experts].any()
        if expected.any():
            assert relative_error(found, expected) < TOLERANCE[dtype]

    @pytest.mark.parametrize(
        "tiles",
        [
            gemm.ChannelTiles(128, 8, 4, 4),
            gemm.ChannelTiles(64, 16, 2, 1),
            gemm.ChannelTiles(64, 8, 2, 3),
            gemm.ChannelTiles(128, 32, 8),
            gemm.ChannelTiles(256, 8, 4),
            gemm.ChannelTiles(128, 64, 8, 1),
        ],
    )
    def test_tiles_change_nothing(self, tiles):
        wi, wo = (packed(normal(8, 256, 256, scale=0.06), gemm.INT4_I2F).to("cuda") for _ in range(2))
        x, ids, factors = normal(40, 256).cuda(), torch.randint(0, 9, (40,)).cuda(), torch.rand(40).cuda()
        plain = ffn(x, ids, factors, wi, wo)
        assert relative_error(ffn(x, ids, factors, wi, wo, tiles=tiles), plain.cpu()) < 1e-3

    @pytest.mark.parametrize("tiles", [gemm.ChannelTiles(128, 64, 4, 4, True), gemm.ChannelTiles(64, 128, 8, 3, True)])
    def test_shared_memory_changes_nothing(self, tiles):
        wi, wo = (packed(normal(4, 256, 256, scale=0.06), gemm.HALF).to("cuda") for _ in range(2))
        for tokens in (2, 40, 500):
            x, ids, factors = (
                normal(tokens, 256).cuda(),
                torch.randint(0, 5, (tokens,)).cuda(),
                torch.rand(tokens).cuda(),
            )
            ids[0] = 0
            plain = ffn(x, ids, factors, wi, wo, tiles=gemm.ChannelTiles(64, 16, 4))
            found = ffn(x, ids, factors, wi, wo, tiles=tiles)
            assert relative_error(found, plain.cpu()) < TOLERANCE[torch.bfloat16] and not found[ids == 4].any()

    def test_shared_memory_is_for_16_bits(self):
        weights = packed(normal(4, 256, 256), gemm.INT4_I2F).to("cuda")
        x, ids, factors = normal(40, 256).cuda(), torch.zeros(40, dtype=torch.int64).cuda(), torch.rand(40).cuda()
        with pytest.raises(ValueError, match="shared memory"):
            ffn(x, ids, factors, weights, weights, tiles=gemm.ChannelTiles(128, 64, 4, 4, True))

    @pytest.mark.parametrize("kind", QUANTISED)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_every_code_is_exact(self, kind, dtype):
        """The unit vector picks one input: the result is its code, times a scale of one."""
        bits = gemm.BITS[kind]
        codes = torch.arange(128 * 64, dtype=torch.int32).view(1, 128, 64) * 7 % 2**bits - 2 ** (bits - 1)
        coded = per_channel.ChannelCodes(codes.to(torch.int8), torch.ones(1, 1, 64).half(), bits)
        x = torch.eye(128, dtype=dtype, device="cuda")
        found = gemm.linear(x, gemm.packed_weights(coded, kind).to("cuda"), gemm.sort_tokens(torch.zeros(128, dtype=torch.int64, device="cuda"), 1, 16),
                            torch.empty(128, 64, dtype=torch.float32, device="cuda"), gather=True)  # fmt: skip
        assert torch.equal(found.cpu(), codes[0].float())

    @pytest.mark.parametrize("tokens", [40, 500])
    def test_it_adds_to_what_is_there(self, tokens):
        wi, wo = (packed(normal(4, 256, 256, scale=0.06), gemm.HALF).to("cuda") for _ in range(2))
        x, ids, factors = normal(tokens, 256).cuda(), torch.randint(0, 5, (tokens,)).cuda(), torch.rand(tokens).cuda()
        residual = normal(tokens, 256, dtype=torch.float32).cuda()
        found = gemm.expert_ffn(x, ids, factors, wi, wo, residual.clone())
        alone = gemm.expert_ffn(x, ids, factors, wi, wo, torch.zeros_like(residual))
        torch.testing.assert_close(found, residual + alone, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[ids == 4], residual[ids == 4])

    def test_a_graph_holds_it(self):
        wi, wo = (packed(normal(8, 256, 256, scale=0.06), gemm.INT8_I2F).to("cuda") for _ in range(2))
        x, ids, factors = normal(40, 256).cuda(), torch.randint(0, 8, (40,)).cuda(), torch.rand(40).cuda()
        ffn(x, ids, factors, wi, wo)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ffn(x, ids, factors, wi, wo)
        ids.copy_(torch.randint(0, 9, (40,)))  # other experts, some tokens finished
        graph.replay()
        assert torch.equal(out, ffn(x, ids, factors, wi, wo))
