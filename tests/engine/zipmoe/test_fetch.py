"""Putting experts together: which shard comes next, what its time is counted as, and the memory it takes."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from specter_lab.compress.bitfield import bit_patterns
from specter_lab.compress.codecs import codec
from specter_lab.engine.store.layout import EXPERTS, read_index
from specter_lab.engine.store.pack import expert_weights, open_source, pack, reading
from specter_lab.engine.store.reader import BUFFERED, Reader
from specter_lab.engine.zipmoe.costs import _buffers
from specter_lab.engine.zipmoe.fetch import Fetch, Fetcher
from specter_lab.engine.zipmoe.memory import staging_bytes
from specter_lab.engine.zipmoe.settings import ZIPMOE

MODEL, WAIT_S = "phi-nano", 10.0
AT_ONCE, APART = "planes", "huffman"  # recovers at once; needs `recover`


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for name in (AT_ONCE, APART):
        pack(MODEL, folder / name, codec=name)
    return folder


def put_together(reader, used, index, keys):
    """The fetches of these experts by one worker, in the order they became ready, and the fetcher's counters."""
    fetcher = Fetcher(reader, used, 1, lambda held: None)
    try:
        for key in keys:
            fetcher.start(Fetch(index.experts[key], _buffers(index), True, True))
        ready = [fetcher.ready.get(timeout=WAIT_S) for _ in keys]
    finally:
        fetcher.close()
        reader.close()
    assert [fetch.error for fetch in ready] == [None] * len(keys)
    return ready, fetcher.counters


def test_shards_that_waited_come_before_later_experts(stores):
    """The first expert's SM-chunk comes while the second's shards are being read: they are not all read before it."""
    index, used, done = read_index(stores / AT_ONCE), codec(AT_ONCE), []
    first, second = index.experts[0, 0], index.experts[0, 1]
    reader = Reader(stores / AT_ONCE / EXPERTS, BUFFERED)
    read, begun, again, ended = reader.read_into, threading.Event(), threading.Event(), threading.Event()

    def read_into(buffer, offset):
        if offset == first.sign_mantissa.offset:
            assert begun.wait(WAIT_S)
        elif offset == second.shards[0].offset:
            begun.set()
            assert again.wait(WAIT_S)
        elif offset == second.sign_mantissa.offset:  # the I/O thread is done with the first expert
            again.set()
            assert ended.wait(WAIT_S)
        elif offset == second.shards[-1].offset:
            ended.set()
        done.append(offset)
        read(buffer, offset)

    def recover(*parts):
        done.append("recovered")
        used.recover(*parts)

    reader.read_into = read_into
    ready, _ = put_together(reader, replace(used, recover=recover), index, [first.key, second.key])
    assert [fetch.key for fetch in ready] == [first.key, second.key]
    assert done[: done.index(second.shards[1].offset)].count("recovered") == len(first.shards)


@pytest.mark.parametrize("name", [AT_ONCE, APART])
def test_recovery_at_once_counts_as_decompression(stores, name):
    index, key = read_index(stores / name), (1, 3)
    (fetch,), counters = put_together(Reader(stores / name / EXPERTS, BUFFERED), codec(name), index, [key])
    assert counters.decompress_s > 0 and (counters.recover_s == 0) == (name == AT_ONCE)
    source = open_source(MODEL)
    with reading(source) as read:
        expected = bit_patterns(expert_weights(source, read, *key))
    assert np.array_equal(fetch.held.full.view(np.uint16)[: index.num_weights], expected)


def test_exponents_take_memory_only_where_a_codec_leaves_some(stores):
    apart, at_once = (staging_bytes(replace(read_index(stores / AT_ONCE), codec=c), ZIPMOE) for c in (APART, AT_ONCE))
    assert apart - at_once == ZIPMOE.in_flight * read_index(stores / AT_ONCE).num_weights
