"""The translator's bench in small, on the CPU: shapes of its rows, and that pruning saves experts and no token."""

import torch

from specter_lab.engine import bench_translate as bench
from specter_lab.engine.switch_experts import SortedExperts
from specter_lab.engine.switch_model import random_switch
from specter_lab.models.switch import SwitchGeometry

SMALL = SwitchGeometry(hidden=128, ffn=128, encoder_layers=2, decoder_layers=2, experts=8, vocab=300)


def small():
    return random_switch(SMALL, SortedExperts, dtype=torch.float32, device="cpu")


def test_speed_rows_count_tokens(monkeypatch):
    monkeypatch.setattr(bench, "SOURCE_TOKENS", 5)
    monkeypatch.setitem(bench.REPEATS, bench.GROUPED, 2)
    rows = list(bench.speed_rows(bench.GROUPED, small(), batches=(1, 3), beams=(1, 2)))
    assert [(row.batch, row.beam, row.input_tokens, row.steps) for row in rows] == [
        (1, 1, 5, 5),
        (3, 1, 15, 5),
        (1, 2, 5, 5),
        (3, 2, 15, 5),
    ]
    assert all(0 < row.seconds_low <= row.seconds <= row.seconds_high for row in rows)


def test_pruning_saves_experts_only_where_lengths_differ():
    rows = list(bench.pruning_rows(bench.GROUPED, small(), batches=(16,), spreads=(0.0, 1.0), repeats=1, mean_tokens=6))
    equal, apart = rows
    assert equal.experts == equal.experts_pruned and equal.length_cv == 0
    assert apart.experts_pruned < apart.experts and apart.length_cv > 0.3
    assert all(row.equal for row in rows) and apart.experts > 4  # many experts are in use


def test_distinct_experts():
    ids = torch.tensor([[[0, 0, 3]], [[4, 4, 4]]])
    assert bench.distinct(ids, 4).tolist() == [[2], [0]]
