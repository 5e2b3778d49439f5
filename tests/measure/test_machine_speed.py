"""Host and disk measurements: small and quick here, so only bounds that hold on any machine."""

import time

import pytest
import torch

from specter_lab.errors import UserError
from specter_lab.measure import disk_speed, host_speed
from specter_lab.measure.disk_speed import FADVISE, O_DIRECT, measure_disk
from specter_lab.measure.host_speed import Load, copy_rates, fastest_s, low_s, matmul_tflop_s, measure_host, operator_us


def test_the_time_of_a_call():
    calls = []
    assert low_s(calls.append, 0.0) < 1e-3 and calls == [0, 1, 2, 3]
    assert 0.01 <= low_s(lambda _: time.sleep(0.01), 0.05) < 0.1


def test_interrupted_calls_do_not_count():
    """Three calls of four take five times as long, as on a busy machine: a median would say so."""
    assert 0.002 <= low_s(lambda i: time.sleep(0.01 if i % 4 else 0.002), 0.2) < 0.009


def test_threads_that_wait_for_each_other_do_not_count(monkeypatch):
    """Where all cores together are slower than one, one is what the machine can do; and the other way round."""
    monkeypatch.setattr(host_speed, "usable_cores", lambda: 3)
    before = torch.get_num_threads()
    for slow in (1, 3):
        monkeypatch.setattr(
            host_speed, "low_s", lambda f, b, slow=slow: 8.0 if torch.get_num_threads() == slow else 2.0
        )
        assert fastest_s(lambda _: None, 0.0) == 2.0
    assert torch.get_num_threads() == before


def test_busy_is_more_than_half_of_the_cores():
    assert Load(2.7, 2).busy and Load(1.1, 2).busy and not Load(1.0, 2).busy and not Load(2.7, 16).busy
    assert host_speed.load().cores >= 1 and host_speed.load().average >= 0


def test_host_speeds_are_plausible():
    """A number in the wrong unit is off by a thousand; a machine that is busy for a moment may try again."""
    for attempt in range(5):
        steps, before = [], torch.get_num_threads()
        found = measure_host(steps.append, budget_s=0.02 * 2**attempt, pool_bytes=2**25)
        assert torch.get_num_threads() == before and len(steps) == 4
        assert [rate.num_bytes for rate in found.copy] == [65_536, 262_144, 1_048_576, 4_194_304]
        if plausible(found):
            return
    raise AssertionError(f"five times implausible: {found}")


def plausible(found):
    return (
        all(0.02 < rate.gb_s < 2000 for rate in found.copy)  # a cache may hold so small a pool
        and 0.5 < found.read_gb_s < 2000
        and 0.005 < found.fp32_tflop_s < 50
        and 0.0005 < found.bf16_tflop_s < 200
        and 0.1 < found.operator_us < 200
    )


def test_rates_are_work_over_time(monkeypatch):
    monkeypatch.setattr(host_speed, "low_s", lambda function, budget_s: (function(0), 2e-3)[1])
    assert [rate.gb_s for rate in copy_rates((1_000_000,), 0, 4_000_000)] == pytest.approx([0.5])
    assert operator_us("cpu", 0) == pytest.approx(2000 / 140)  # 20 layers of 7 operators
    monkeypatch.setattr(host_speed, "LONG_CALL_S", 1e-3)
    assert matmul_tflop_s(torch.float32, 0) == pytest.approx(2 * 512**3 / 2e-3 * 1e-12)


@pytest.mark.parametrize("direct", [True, False])
def test_disk_reads(direct, tmp_path, monkeypatch):
    if not direct:
        monkeypatch.delattr("os.O_DIRECT")
    found = measure_disk(tmp_path / "cache", budget_s=0.02, file_bytes=2**25)
    assert found.method == FADVISE or (direct and found.method == O_DIRECT)
    assert [rate.num_bytes for rate in found.read] == [65_536, 1_048_576]
    assert all(1e-3 < rate.gb_s < 200 for rate in found.read)
    assert list((tmp_path / "cache").iterdir()) == []
    assert 0 < found.free_bytes <= found.size_bytes


def test_blocks_fit_o_direct():
    assert all(size % disk_speed.BLOCK == 0 for size in disk_speed.READ_SIZES)


def test_a_full_disk_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="GB are free in .* measuring the disk takes .* SPECTER_LAB_OUT"):
        measure_disk(tmp_path, file_bytes=2**60)


@pytest.mark.gpu
def test_gpu_speeds_are_plausible():
    from specter_lab.measure.gpu_speed import measure_gpu

    found = measure_gpu(lambda text: None, budget_s=0.05)
    assert 4 < found.memory_gb < 1000 and 50 < found.copy_gb_s < 20_000 and 1 < found.bf16_tflop_s < 5000
    assert 0.5 < found.launch_us <= 100 and 0.5 < found.operator_us <= 200
    assert all(0.1 < rate.gb_s < 1000 for rate in (*found.h2d, *found.d2h))
    assert 3e-6 < found.d2h[0].num_bytes / found.d2h[0].gb_s * 1e-9 < 1e-3
