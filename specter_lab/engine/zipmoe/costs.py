"""What using an expert costs on this machine and disk: measured when a runtime opens, for the planner and the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from specter_lab.compress.bitfield import exponents_of, recover, shard_bounds
from specter_lab.compress.codecs import codec
from specter_lab.engine.store.layout import Index, Record
from specter_lab.engine.store.reader import PagedMemory, Reader
from specter_lab.engine.zipmoe.memory import Buffer, Held, sizes_of
from specter_lab.plan.zipmoe.work import Costs

COSTED = 8  # experts that are measured; the median counts
Activation = Callable[[Tensor], Tensor]


def measure_costs(index: Index, reader: Reader, workers: int) -> Costs:
    """Seconds of every operation on one expert, the median over a few experts of the store."""
    sizes, records = sizes_of(index), list(index.experts.values())
    buffers = Held(*(PagedMemory(size).take(size) for size in (sizes.full, sizes.sign_mantissa, sizes.exponents)))
    _time_one(index, reader, records[0], buffers)  # first use compiles and warms up
    step = max(1, len(records) // COSTED)
    timed = np.median([_time_one(index, reader, record, buffers) for record in records[::step]], axis=0)
    return Costs(*timed.tolist(), index.num_shards, workers)


def _time_one(index: Index, reader: Reader, record: Record, buffers: Held) -> list[float]:
    """Seconds to read the SM-chunk, to read an E-chunk, to decompress one, to recover and to execute the expert."""
    used, bounds, marks = codec(index.codec), shard_bounds(index.num_weights, index.num_shards), [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    reader.read_into(buffers.sign_mantissa[: record.sign_mantissa.padded_bytes], record.sign_mantissa.offset)
    mark()
    places = [chunk.offset - record.shards[0].offset for chunk in record.shards]
    for at, chunk in zip(places, record.shards):
        reader.read_into(buffers.exponents[at : at + chunk.padded_bytes], chunk.offset)
    mark()
    shards = [buffers.exponents[at : at + chunk.num_bytes] for at, chunk in zip(places, record.shards)]
    parts = zip(shards, bounds)
    out = buffers.full.view(np.uint16)
    if used.recover is None:
        exponents = [exponents_of(shard, last - first, used) for shard, (first, last) in parts]
        mark()
        for part, (first, last) in zip(exponents, bounds):
            recover(buffers.sign_mantissa[first:last], part, out[first:last])
    else:  # both at once: all of it counts as decompression
        for shard, (first, last) in parts:
            used.recover(shard, buffers.sign_mantissa[first:last], out[first:last])
        mark()
    mark()
    compute_expert(index, torch.ones(1, index.hidden, dtype=torch.bfloat16), buffers.full, silu)
    mark()
    read_sm_s, read_s, decompress_s, recover_s, execute_s = np.diff(marks)
    return [read_sm_s, read_s / index.num_shards, decompress_s / index.num_shards, recover_s, execute_s]


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
