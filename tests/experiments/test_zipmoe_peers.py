"""Peers of the ZipMoE experiments: run as processes where they are installed, and a reason where they are not."""

import pytest

from specter_lab.experiments.installed import NOT_INSTALLED, found
from specter_lab.experiments.run import context_for
from specter_lab.experiments.zipmoe import peers, setting

SMALL = dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=32,
             shared_expert_intermediate_size=128)  # fmt: skip


@pytest.fixture
def small(out, monkeypatch):
    """A store of 24 MB."""
    monkeypatch.setattr(setting, "WIDE", {"qwen-nano": SMALL})
    setting.wide.cache_clear()
    yield
    setting.wide.cache_clear()


def test_what_is_installed_has_a_version_or_a_path():
    assert found("torch")[0].isdigit() and found("sh").endswith("/sh")
    assert found("no-such-package-or-program") is None


def test_an_absent_peer_has_one_row_that_says_so(small):
    rows = peers.peer_rows(context_for("zipmoe-page-cache", tier="cpu", seed=0, models=[]), ["qwen-nano"])
    assert {row["system"] for row in rows} == set(peers.PEERS)
    for row in rows:
        absent = found(peers.PEERS[row["system"]]) is None
        assert (row["note"] == NOT_INSTALLED) == absent and ("tpot_ms" in row) <= (not absent)


def test_the_process_of_a_peer_answers_or_its_last_words_are_the_reason(small):
    (row,) = peers.measure("qwen-nano", "DeepSpeed ZeRO-3", "some release", 0)
    if found("deepspeed"):
        assert row["tpot_ms"] > 0 and "zipmoe.peer_job deepspeed CHECKPOINT" in row["note"]
    else:
        assert row["note"].startswith("not run: deepspeed some release stopped: ModuleNotFoundError")
