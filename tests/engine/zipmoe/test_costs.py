"""Costs as they are measured when a runtime opens: of first reads, of whole experts, and with everything compiled."""

import time
from dataclasses import replace

import numpy as np
import pytest

from specter_lab.engine.store.layout import EXPERTS, read_index
from specter_lab.engine.store.pack import pack
from specter_lab.engine.store.reader import BUFFERED, Reader
from specter_lab.engine.zipmoe import costs
from specter_lab.engine.zipmoe.settings import ZIPMOE

FIRST_S = 5e-3  # that a first read takes longer


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    pack("phi-nano", folder)
    return folder


@pytest.fixture
def measured(store, monkeypatch):
    """A function settings -> costs; nothing waits for others here."""
    monkeypatch.setattr(costs, "REPEATED_S", 1e-3)
    reader = Reader(store / EXPERTS, BUFFERED)
    yield lambda settings=ZIPMOE, reader=reader: costs.measure_costs(read_index(store), reader, settings)
    reader.close()


def test_first_reads_are_timed(store, measured):
    """Behind a cache, as most disks are: what was read once comes at once."""
    reader, seen = Reader(store / EXPERTS, BUFFERED), set()
    read = reader.read_into

    def read_into(buffer, offset):
        if offset not in seen:
            seen.add(offset)
            time.sleep(FIRST_S)
        read(buffer, offset)

    reader.read_into = read_into
    found = measured(reader=reader)
    reader.close()
    expert_s = found.read_sm_s + found.shards * found.read_shard_s  # two reads, two readers
    assert expert_s > 0.9 * FIRST_S


def test_splitting_is_compiled_before_it_is_needed(measured, monkeypatch):
    called = []
    monkeypatch.setattr(costs, "sign_mantissa_of", lambda patterns, out: called.append((patterns.dtype, out.dtype)))
    measured()
    assert called == [(np.uint16, np.uint8)]


@pytest.mark.parametrize("prefetch, used", [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_half_of_what_is_read_ahead_is_used(measured, prefetch, used):
    found = measured(replace(ZIPMOE, prefetch=prefetch))
    assert found.ahead == used
    assert found.recover_s == 0 < found.decompress_s  # the codec does both at once
