"""What using an expert costs on this machine and disk: measured when a runtime opens, for the planner and the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from specter_lab.compress.bitfield import shard_bounds, sign_mantissa_of
from specter_lab.compress.codecs import codec
from specter_lab.engine.store.layout import Index, Record, padded
from specter_lab.engine.store.reader import PagedMemory, Reader
from specter_lab.engine.zipmoe.fetch import Counters, decompress, finish, read_exponents
from specter_lab.engine.zipmoe.memory import Buffer, Held, sizes_of
from specter_lab.engine.zipmoe.settings import Settings
from specter_lab.measure.host_speed import usable_cores
from specter_lab.plan.zipmoe.work import Costs

READERS = 2  # side by side, as I/O thread and workers are
REPEATED_S = 0.05  # of one kind of work
COSTED = 8  # experts that are measured; the median counts
AHEAD_USED = 0.5  # of what is read ahead, per layer call: two of three are used, and no stack's first layer is foreseen
Activation = Callable[[Tensor], Tensor]


def measure_costs(index: Index, reader: Reader, settings: Settings) -> Costs:
    """Seconds of every operation on one expert, the median over a few experts of the store.

    Reads are timed as they come in the runtime, side by side, and first: what was read once comes back faster, from the page
    cache or that of the host. A chunk's time is its share of the bytes.
    """
    records = list(index.experts.values())
    few = records[:: max(1, len(records) // COSTED)]
    buffers = [_buffers(index) for _ in range(1 + max(settings.workers, READERS - 1))]
    begun = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda i: _read(reader, few[i::READERS], buffers[i]), range(READERS)))
    byte_s = (time.perf_counter() - begun) / sum(r.exponent_bytes + r.sign_mantissa.padded_bytes for r in few)
    _time_one(index, reader, few[0], buffers[0])  # first use compiles and warms up
    sign_mantissa_of(buffers[0].full.view(np.uint16)[: index.num_weights], buffers[0].sign_mantissa)  # splitting, too
    timed = np.median([_time_one(index, reader, record, buffers[0]) for record in few], axis=0)
    decompress_s, recover_s, execute_s = timed.tolist()
    for mine in buffers[1:]:
        _read(reader, few[:1], mine)
    return Costs(
        read_sm_s=byte_s * padded(index.num_weights),
        read_shard_s=byte_s * sum(record.exponent_bytes for record in few) / len(few) / index.num_shards,
        decompress_s=decompress_s, recover_s=recover_s, execute_s=execute_s, shards=index.num_shards,
        workers=settings.workers, cores=_cores(index, few[0], buffers), ahead=int(AHEAD_USED * settings.prefetch + 0.5),
    )  # fmt: skip


def _cores(index: Index, record: Record, buffers: Sequence[Held]) -> float:
    """How many cores' work executor and workers do side by side: less than there are where memory or others hold them up.

    `buffers` are the executor's and each worker's; those of the workers hold the expert's chunks.
    Right with one PyTorch thread only: the time of others that help the executor is not counted, and too few cores are found.
    """
    hidden, (executor, *workers) = torch.ones(1, index.hidden, dtype=torch.bfloat16), buffers
    works = [lambda: compute_expert(index, hidden, executor.full, silu)]
    works += [lambda mine=mine: _decode(index, record, mine) for mine in workers]

    def repeated(work: Callable[[], object]) -> tuple[float, float]:
        """How often in a second, and processor seconds of one."""
        begun, used, times, passed_s = time.perf_counter(), time.thread_time(), 0, 0.0
        while passed_s < REPEATED_S:
            work()
            times += 1
            passed_s = time.perf_counter() - begun
        return times / passed_s, (time.thread_time() - used) / times

    alone_s = [repeated(work)[1] for work in works]
    with ThreadPoolExecutor(len(works)) as pool:
        together = list(pool.map(repeated, works))
    return min(sum(per_s * own_s for (per_s, _), own_s in zip(together, alone_s)), usable_cores())


def _buffers(index: Index) -> Held:
    sizes = sizes_of(index)
    return Held(*(PagedMemory(size).take(size) for size in (sizes.full, sizes.sign_mantissa, sizes.exponents)))


def _read(reader: Reader, records: Sequence[Record], buffers: Held) -> None:
    for record in records:
        read_exponents(reader, record, buffers.exponents)
        reader.read_into(buffers.sign_mantissa[: record.sign_mantissa.padded_bytes], record.sign_mantissa.offset)


def _shards(index: Index, record: Record, buffers: Held) -> list[tuple[Buffer, tuple[int, int]]]:
    """The E-chunks in `buffers`, and the first and last + 1 weight of each."""
    places = [chunk.offset - record.shards[0].offset for chunk in record.shards]
    chunks = [buffers.exponents[at : at + chunk.num_bytes] for at, chunk in zip(places, record.shards)]
    return list(zip(chunks, shard_bounds(index.num_weights, index.num_shards)))


def _decode(index: Index, record: Record, buffers: Held) -> Counters:
    """Decompress and recover one expert, whose chunks are in `buffers`."""
    used, spent = codec(index.codec), Counters()
    parts, out = _shards(index, record, buffers), buffers.full.view(np.uint16)
    exponents = [decompress(shard, last - first, used, spent) for shard, (first, last) in parts]
    for found, (shard, (first, last)) in zip(exponents, parts):
        finish(shard, found, buffers.sign_mantissa[first:last], used, out[first:last], spent)
    return spent


def _time_one(index: Index, reader: Reader, record: Record, buffers: Held) -> list[float]:
    """Seconds to decompress an E-chunk, to recover and to execute the expert, read before."""
    _read(reader, [record], buffers)
    spent = _decode(index, record, buffers)
    begun = time.perf_counter()
    compute_expert(index, torch.ones(1, index.hidden, dtype=torch.bfloat16), buffers.full, silu)
    return [spent.decompress_s / index.num_shards, spent.recover_s, time.perf_counter() - begun]


def compute_expert(index: Index, hidden: Tensor, full: Buffer, activation: Activation) -> Tensor:
    """One expert, whole in `full`, on [t, H] tokens: [t, H]; the same operations as the model's own loop."""
    h, inner, n = index.hidden, index.matrices - 1, index.num_weights
    weights = torch.from_numpy(full[: 2 * n]).view(torch.bfloat16)
    first, last = weights[: inner * h * index.width].view(-1, h), weights[inner * h * index.width :].view(h, -1)
    return linear(activated(linear(hidden, first).chunk(inner, dim=-1), activation), last)


def activated(inner: Sequence[Tensor], activation: Activation) -> Tensor:
    """What an expert's last matrix gets, from the products of those before it: of wi, or of a gate and up, [t, I] each."""
    first, *up = inner
    return activation(first) * up[0] if up else activation(first)
