"""Size and speed of the bit-field codec, per codec and thread count, beside zipnn.

    python -m specter_lab.compress.bench_bitfield [--model qwen-nano] [--threads 1 2]

Output bytes are BF16 bytes. `recover` alone, and `decode` (decompression and recovery, shard by shard) as it runs in the
engine's workers. The floor of the size is 8 bits of sign and mantissa and the exponents' entropy; the floor of the time is
`copy`, the same bytes from memory to memory. DFloat11's published size is 70 % (arXiv 2504.11651), for whole models.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from specter_lab.compress.bitfield import (
    SHARDS,
    BitFields,
    bit_patterns,
    decode_shard,
    encode,
    field_entropies,
    recover,
    split,
)
from specter_lab.compress.codecs import codec as codec_named
from specter_lab.models.load import resolve

CODECS = ("none", "lz4", "lz4hc", "zstd-1", "zstd-3", "zstd-9", "huffman", "planes")
CHUNK_WEIGHTS = 3 * 1024 * 256  # one expert of the engine's runs; the last one may be longer
REPEATS = 5


@dataclass(frozen=True)
class Speed:
    """One codec on one set of weights."""

    codec: str
    threads: int
    size_share: float  # compressed over BF16
    encode_gb_s: float  # one thread
    decode_gb_s: float  # decompression and recovery, BF16 bytes over time
    ci_low_gb_s: float  # smallest and largest of the repeats
    ci_high_gb_s: float


def expert_tensor(model: str) -> Tensor:
    """All routed experts of a checkpoint, one after the other: [n] bfloat16."""
    tensors = []
    for path in sorted(resolve(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors += [file.get_tensor(name).reshape(-1) for name in file.keys() if ".experts." in name]
    return torch.cat(tensors)


def gaussian(num_weights: int, seed: int = 0) -> Tensor:
    """Weights as an untrained model with normal initialisation has them: [n] bfloat16, standard deviation 0.02."""
    return (0.02 * torch.randn(num_weights, generator=torch.Generator().manual_seed(seed))).bfloat16()


def uniform(num_weights: int, seed: int = 0) -> Tensor:
    """Weights as `nn.Linear` initialises them: [n] bfloat16, uniform."""
    return (0.04 * (torch.rand(num_weights, generator=torch.Generator().manual_seed(seed)) - 0.5)).bfloat16()


def times_s(work: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Seconds of every repeat, the first, untimed one left out."""
    work()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found


def encoded(weights: Tensor, codec: str) -> list[BitFields]:
    """The weights in chunks of one expert each."""
    return [encode(chunk, codec_named(codec), SHARDS) for chunk in weights.split(CHUNK_WEIGHTS)]


def measure(weights: Tensor, codec: str, threads: Sequence[int]) -> list[Speed]:
    """Speeds of one codec; every thread decodes shards of its own."""
    start = time.perf_counter()
    chunks = encoded(weights, codec)
    encode_s = time.perf_counter() - start
    share = sum(chunk.stored_bytes for chunk in chunks) / weights.nbytes
    out = [np.empty(len(chunk.sign_mantissa), np.uint16) for chunk in chunks]
    tasks = [(i, k) for i, chunk in enumerate(chunks) for k in range(len(chunk.shards))]
    used = codec_named(codec)

    def decode(mine: list[tuple[int, int]]) -> None:
        for i, k in mine:
            decode_shard(chunks[i].shards, k, chunks[i].sign_mantissa, used, out[i])

    speeds = []
    for count in threads:
        with ThreadPoolExecutor(count) as pool:
            seconds = sorted(times_s(lambda: list(pool.map(decode, [tasks[t::count] for t in range(count)]))))
        gb_s = [weights.nbytes / s * 1e-9 for s in seconds]
        speeds.append(
            Speed(codec, count, share, weights.nbytes / encode_s * 1e-9, gb_s[len(gb_s) // 2], gb_s[-1], gb_s[0])
        )
    if not np.array_equal(np.concatenate(out), bit_patterns(weights)):
        raise RuntimeError(f"{codec} did not give the weights back")
    return speeds


def bounds(weights: Tensor) -> dict[str, float]:
    """What no codec of this kind can beat: the size at the exponents' entropy, and memory speed (one thread)."""
    sign_mantissa, exponents = split(weights)
    out, copy = np.empty(len(exponents), np.uint16), np.empty(weights.nbytes, np.uint8)
    source = bit_patterns(weights).view(np.uint8)
    return {
        "size_share_floor": (8 + field_entropies(weights)["exponent"]) / 16,
        "recover_gb_s": weights.nbytes / min(times_s(lambda: recover(sign_mantissa, exponents, out))) * 1e-9,
        "split_gb_s": weights.nbytes / min(times_s(lambda: split(weights))) * 1e-9,
        "copy_gb_s": weights.nbytes / min(times_s(lambda: np.copyto(copy, source))) * 1e-9,
    }


def measure_zipnn(weights: Tensor, threads: int = 1) -> Speed | str:
    """zipnn on the same weights, or why it is not measured.

    zipnn 0.5.4 has threads of its own; one call takes all weights at once, as its users do.
    """
    try:
        import zipnn
    except ImportError:
        return "not run: zipnn is not installed (`.venv/bin/pip install zipnn==0.5.4`, needs a C compiler)"
    packer = zipnn.ZipNN(input_format="torch", threads=threads)
    start = time.perf_counter()
    packed = packer.compress(weights.clone())  # it works in its input
    encode_s = time.perf_counter() - start
    if not torch.equal(packer.decompress(packed).view(torch.int16), weights.view(torch.int16)):
        raise RuntimeError("zipnn did not give the weights back")
    gb_s = sorted(weights.nbytes / s * 1e-9 for s in times_s(lambda: packer.decompress(packed)))
    share = len(packed) / weights.nbytes
    return Speed("zipnn", threads, share, weights.nbytes / encode_s * 1e-9, gb_s[len(gb_s) // 2], gb_s[0], gb_s[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen-nano")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = expert_tensor(options.model)
    print(json.dumps(bounds(weights)))
    for codec in CODECS:
        for speed in measure(weights, codec, options.threads):
            print(json.dumps(asdict(speed)))
    for count in options.threads:
        found = measure_zipnn(weights, count)
        print(found if isinstance(found, str) else json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
