import pytest

from specter_lab.errors import UserError
from specter_lab.plan import hardware
from specter_lab.plan.hardware import PAPERS_GPU, PROFILES, read_profile

NAMES = sorted(file.stem for file in PROFILES.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name):
    profile = read_profile(name)
    fields = ["memory_gb", "memory_bandwidth_gb_s", "bf16_tflop_s", "launch_us"]
    assert set(profile.sources) == {*fields, *(f"h2d at {size} bytes" for size in profile.h2d_bytes)}
    assert all(len(source) > 10 for source in profile.sources.values())
    assert all(getattr(profile, field) > 0 for field in fields)


@pytest.mark.parametrize("name", NAMES)
def test_larger_copies_take_longer_and_use_the_link_better(name):
    profile = read_profile(name)
    sizes = [2**k for k in range(18, 31)]
    times = [profile.h2d_ms(size) for size in sizes]
    bandwidths = [size / time for size, time in zip(sizes, times)]
    assert times == sorted(times)
    assert bandwidths == pytest.approx(sorted(bandwidths), rel=1e-3)


def test_the_curve_goes_through_its_points():
    profile = read_profile(PAPERS_GPU)
    for size, gb_s in zip(profile.h2d_bytes, profile.h2d_gb_s):
        assert size / profile.h2d_ms(size) * 1e-6 == pytest.approx(gb_s)
    middle = (profile.h2d_bytes[1] + profile.h2d_bytes[2]) / 2
    ends = (profile.h2d_ms(profile.h2d_bytes[1]), profile.h2d_ms(profile.h2d_bytes[2]))
    assert profile.h2d_ms(middle) == pytest.approx(sum(ends) / 2)
    assert profile.h2d_ms(1) == pytest.approx(profile.h2d_ms(profile.h2d_bytes[0]))  # a copy has a least time


def test_unknown_and_incomplete_profiles(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no hardware profile 'b200': choose from .*a100-40gb-pcie4"):
        read_profile("b200")
    monkeypatch.setattr(hardware, "PROFILES", tmp_path)
    (tmp_path / "half.toml").write_text('gpu = "G"\nlink = "L"\n[memory_gb]\nvalue = 1\nsource = "none at all"\n')
    with pytest.raises(UserError, match="half.toml lacks 'memory_bandwidth_gb_s'"):
        read_profile("half")
