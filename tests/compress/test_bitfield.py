"""The bit-field codec: every pattern, every codec, whole checkpoints, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from specter_lab.compress import bitfield, planes
from specter_lab.compress.codecs import CODECS, codec
from specter_lab.errors import UserError
from specter_lab.models.load import resolve

ALL_PATTERNS = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("name", [*CODECS, "zstd-3", "zstd--5", "lz4hc-12"])
@pytest.mark.parametrize("shards", [1, 3, 7])
def test_every_pattern_comes_back(name, shards):
    fields = bitfield.encode(ALL_PATTERNS, codec(name), shards)
    assert len(fields.shards) == shards
    assert same_bits(bitfield.decode(fields, codec(name)), ALL_PATTERNS)


@pytest.mark.parametrize("model", ["qwen-nano", "phi-nano", "deepseek-nano"])
def test_whole_checkpoints_come_back_smaller(model):
    stored = raw = 0
    with safe_open(resolve(model) / "model.safetensors", framework="pt") as file:
        for name in file.keys():
            weight = file.get_tensor(name)
            fields = bitfield.encode(weight, codec("huffman"))
            assert same_bits(bitfield.decode(fields, codec("huffman")), weight), name
            stored, raw = stored + fields.stored_bytes, raw + weight.nbytes
    assert 0.65 < stored / raw < 0.70


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2**16 - 1), max_size=20_000), st.integers(1, 5), st.sampled_from(CODECS))
def test_any_patterns_and_sizes(patterns, shards, name):
    weight = torch.tensor(patterns, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert same_bits(bitfield.decode(bitfield.encode(weight, codec(name), shards), codec(name)), weight)


def unpacked(stored, n):
    """Exponents by `decompress`, and those of what `decompress_and_recover` makes of them, or that each raises: two that agree."""
    patterns = np.empty(n, np.uint16)
    try:
        planes.decompress_and_recover(stored, np.zeros(n, np.uint8), patterns)
    except ValueError:
        with pytest.raises(ValueError):
            planes.decompress(stored, n)
        return None
    exponents = planes.decompress(stored, n)
    assert len(exponents) == n and np.array_equal(patterns >> 7, exponents)
    return exponents.tobytes()


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=9000), st.integers(0, 255), st.integers(0, 2**31))
def test_bit_planes_hold_any_bytes_and_damage_raises_or_stays_inside(data, byte, seed):
    stored = bytearray(planes.compress(data))
    assert unpacked(bytes(stored), len(data)) == data
    assert unpacked(bytes(stored[:-1]), len(data)) is None
    stored[seed % len(stored)] = byte
    unpacked(bytes(stored), len(data))


def test_bit_planes_are_small_and_say_when_exceptions_are_out_of_order():
    weight = (0.02 * torch.randn(300_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    assert bitfield.encode(weight, codec("planes")).stored_bytes < 0.71 * weight.nbytes
    _, exponents = bitfield.split(weight)
    stored = bytearray(planes.compress(exponents.tobytes()))
    blocks = -(-len(exponents) // planes.BLOCK)
    stored[planes.HEADER.size + blocks * planes.BITS * planes.PLANE] += 1  # the first group's count
    with pytest.raises(ValueError, match="counts"):
        planes.decompress(bytes(stored), len(exponents))
    with pytest.raises(ValueError, match="counts"):
        planes.decompress_and_recover(bytes(stored), exponents, np.empty(len(exponents), np.uint16))
    stored[planes.HEADER.size - 1] = 249
    with pytest.raises(ValueError, match="window"):
        planes.decompress(bytes(stored), len(exponents))


def test_bit_planes_without_a_compiler():
    """Plain Python and its scalars, which overflow where machine code does not."""
    data = np.random.default_rng(0).integers(0, 256, planes.BLOCK, np.uint8)
    out, plain = np.empty(planes.BLOCK, np.uint8), getattr(planes._block, "py_func", planes._block)
    with np.errstate(over="raise"):
        parts = planes._parts(planes.compress(data.tobytes()), len(data))
        assert plain(*parts, 0, 0, out) == len(parts[-1]) and np.array_equal(out, data)


def test_half_of_the_fields_without_the_other():
    patterns = bitfield.bit_patterns(ALL_PATTERNS)
    out = np.zeros(len(patterns) + 1, np.uint8)
    bitfield.sign_mantissa_of(patterns, out)
    assert np.array_equal(out[:-1], bitfield.split(ALL_PATTERNS)[0]) and out[-1] == 0
    with pytest.raises(ValueError, match="fewer"):
        bitfield.sign_mantissa_of(patterns, out[:-2])


def test_recovery_is_the_papers_formula():
    sign_mantissa, exponents = bitfield.split(ALL_PATTERNS)
    expected = bitfield.bit_patterns(ALL_PATTERNS)
    assert np.array_equal(bitfield.recover_reference(sign_mantissa, exponents), expected)
    one = bitfield.split(torch.tensor([-1.5], dtype=torch.bfloat16))  # 1 01111111 1000000
    assert (one[0][0], one[1][0]) == (0b1_1000000, 0b01111111)


def test_views_that_are_not_contiguous():
    weight = ALL_PATTERNS.reshape(256, 256).t()
    assert same_bits(bitfield.decode(bitfield.encode(weight, codec("lz4")), codec("lz4")), weight.contiguous())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_other_types_are_refused(dtype):
    with pytest.raises(UserError, match=str(dtype).removeprefix("torch.")):
        bitfield.encode(torch.ones(4, dtype=dtype), codec("zstd"))


@pytest.mark.parametrize("name", ["zip", "zstd-23", "zstd-0", "zstd-x", "lz4-3", "huffman-1", "lz4hc-0"])
def test_unknown_codecs_and_levels(name):
    with pytest.raises(UserError):
        codec(name)


def test_shards_cover_everything_once():
    for n in (0, 1, 4095, 4096, 4097, 786_432):
        for shards in (1, 3, 8):
            bounds = bitfield.shard_bounds(n, shards)
            assert len(bounds) == shards and bounds[0][0] == 0 and bounds[-1][1] == n
            assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))


@pytest.mark.parametrize("name", [name for name in CODECS if name != "none"])
def test_a_shard_of_another_size_or_damaged_is_refused(name):
    used = codec(name)
    shard = used.compress(bytes(100))
    for stored, n in ((shard, 99), (shard, 101), (shard[:-1], 100), (b"", 100), (bytes(len(shard)), 100)):
        with pytest.raises(ValueError):
            bitfield.exponents_of(stored, n, used)
        with pytest.raises(ValueError):
            bitfield.decode_part(stored, np.zeros(n, np.uint8), used, np.empty(n, np.uint16))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("fields", [99, 101])
def test_fields_and_patterns_of_different_length_are_refused(name, fields):
    shard = codec(name).compress(bytes(100))
    with pytest.raises(ValueError):
        bitfield.decode_part(shard, np.zeros(fields, np.uint8), codec(name), np.empty(100, np.uint16))


def test_entropy_of_known_weights():
    found = bitfield.field_entropies(ALL_PATTERNS)
    assert found == {"sign": 1.0, "exponent": 8.0, "mantissa": 7.0}
    assert bitfield.field_entropies(torch.ones(8, dtype=torch.bfloat16))["exponent"] == 0
    gaussian = (0.02 * torch.randn(200_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    assert bitfield.field_entropies(gaussian)["exponent"] == pytest.approx(2.54, abs=0.03)
