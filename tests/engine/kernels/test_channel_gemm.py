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


def sorting_checks(experts, num_experts):
    found = gemm.sort_tokens(experts, num_experts)
    experts = experts.cpu()
    if found.direct:
        assert found.expert.tolist() == experts.tolist()
        return
    seen = []
    for expert, start, count in zip(found.expert.tolist(), found.start.tolist(), found.count.tolist()):
        if count:
            tokens = found.order[start : start + count].tolist()
            assert tokens == [t for t, e in enumerate(experts.tolist()) if e == expert]
            seen += tokens
    assert sorted(seen) == [t for t, e in enumerate(experts.tolist()) if 0 <= e < num_experts]


@pytest.mark.parametrize("count", [0, 1, 7, 64, 500])
def test_tokens_are_sorted_and_finished_ones_left_out(count):
    sorting_checks(torch.randint(-1, 33, (count,)), 32)
    sorting_checks(torch.full((count,), 32), 32)


def test_tiles_hold_every_token_once():
    work = gemm.sort_tokens(torch.randint(0, 9, (200,)), 8)
    tiles = reference.token_tiles(work.expert, work.start, work.count, 16)
    places = [place for _, start, count in tiles for place in range(start, start + count)]
    assert places == list(range(int(work.count.sum()))) and max(count for *_, count in tiles) <= 16
    assert len(tiles) <= 8 + 200 // 16  # the grid


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

    @pytest.mark.parametrize("tile", [8, 16, 32])
    @pytest.mark.parametrize("tokens", [2, 40, 64, 500])
    def test_tiles_are_the_references(self, tokens, tile):
        from specter_lab.engine.kernels.token_tiles import most_tiles, token_tiles

        for experts in (torch.randint(-1, 33, (tokens,)), torch.full((tokens,), 5), torch.full((tokens,), 32)):
            work = gemm.sort_tokens(experts.cuda(), 32)
            found = token_tiles(work.expert, work.start, work.count, tokens, tile)
            assert all(len(part) == most_tiles(len(work.count), tokens, tile) for part in found)
            expected = reference.token_tiles(work.expert, work.start, work.count, tile)
            rows = list(zip(*(part.tolist() for part in found)))
            assert rows[: len(expected)] == expected and not any(count for *_, count in rows[len(expected) :])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("kind", gemm.KINDS)
    @pytest.mark.parametrize(("tokens", "experts"), [(1, 4), (2, 32), (40, 1), (40, 32), (64, 8), (130, 16), (512, 32)])
    def test_it_is_the_reference(self, tokens, experts, kind, dtype):
        wi, wo = normal(experts, 256, 384, scale=0.06, dtype=dtype), normal(experts, 384, 256, scale=0.05, dtype=dtype)
        x, ids, factors = normal(tokens, 256, dtype=dtype), torch.randint(0, experts + 1, (tokens,)), torch.rand(tokens)
        parts = [packed(w, kind) for w in (wi, wo)]
        found = gemm.expert_ffn(x.cuda(), ids.cuda(), factors.cuda(), *(part.to("cuda") for part in parts))
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
        ],
    )
    def test_tiles_change_nothing(self, tiles):
        wi, wo = (packed(normal(8, 256, 256, scale=0.06), gemm.INT4_I2F).to("cuda") for _ in range(2))
        x, ids, factors = normal(40, 256).cuda(), torch.randint(0, 9, (40,)).cuda(), torch.rand(40).cuda()
        plain = gemm.expert_ffn(x, ids, factors, wi, wo)
        assert relative_error(gemm.expert_ffn(x, ids, factors, wi, wo, tiles=tiles), plain.cpu()) < 1e-3

    @pytest.mark.parametrize("kind", QUANTISED)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_every_code_is_exact(self, kind, dtype):
        """The unit vector picks one input: the result is its code, times a scale of one."""
        bits = gemm.BITS[kind]
        codes = torch.arange(128 * 64, dtype=torch.int32).view(1, 128, 64) * 7 % 2**bits - 2 ** (bits - 1)
        coded = per_channel.ChannelCodes(codes.to(torch.int8), torch.ones(1, 1, 64).half(), bits)
        x = torch.eye(128, dtype=dtype, device="cuda")
        found = gemm.linear(x, gemm.packed_weights(coded, kind).to("cuda"), gemm.sort_tokens(torch.zeros(128, dtype=torch.int64, device="cuda"), 1),
                            torch.empty(128, 64, dtype=torch.float32, device="cuda"), gather=True)  # fmt: skip
        assert torch.equal(found.cpu(), codes[0].float())

    def test_a_graph_holds_it(self):
        wi, wo = (packed(normal(8, 256, 256, scale=0.06), gemm.INT8_I2F).to("cuda") for _ in range(2))
        x, ids, factors = normal(40, 256).cuda(), torch.randint(0, 8, (40,)).cuda(), torch.rand(40).cuda()
        gemm.expert_ffn(x, ids, factors, wi, wo)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gemm.expert_ffn(x, ids, factors, wi, wo)
        ids.copy_(torch.randint(0, 9, (40,)))  # other experts, some tokens finished
        graph.replay()
        assert torch.equal(out, gemm.expert_ffn(x, ids, factors, wi, wo))
