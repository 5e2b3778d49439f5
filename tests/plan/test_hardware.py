from dataclasses import replace

import pytest

from specter_lab.errors import UserError
from specter_lab.plan import hardware
from specter_lab.plan.hardware import (
    CPU_NUMBERS,
    CURVES,
    KINDS,
    NUMBERS,
    PAPERS_GPU,
    PROFILES,
    THIS_MACHINE,
    own_profiles,
    profile_names,
    read_profile,
    write_profile,
)

NAMES = sorted(file.stem for file in PROFILES.glob("*.toml"))
SHIPPED = (PROFILES / f"{PAPERS_GPU}.toml").read_text(encoding="utf-8")


def test_the_shipped_machines():
    assert NAMES == ["a100-40gb-pcie4", "h200-pcie5", "jetson-orin", "rtx3060-12gb", "rtx4090"]


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_that_says_its_kind(name):
    profile = read_profile(name)
    points = {f"{curve} at {size} bytes" for curve in CURVES for size in getattr(profile, curve).sizes_bytes}
    assert set(profile.sources) == {*NUMBERS, *(f"cpu.{number}" for number in CPU_NUMBERS), *points}
    assert all(source.startswith(KINDS) and len(source) > 10 for source in profile.sources.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("curve", CURVES)
def test_larger_transfers_take_longer_and_use_the_link_better(name, curve):
    curve = getattr(read_profile(name), curve)
    sizes = [2**k for k in range(18, 31)]
    times = [curve.ms(size) for size in sizes]
    bandwidths = [size / time for size, time in zip(sizes, times)]
    assert times == sorted(times)
    assert bandwidths == pytest.approx(sorted(bandwidths), rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_units_are_plausible(name):
    """A number in the wrong unit is off by a thousand."""
    profile = read_profile(name)
    assert 8 <= profile.memory_gb <= 200
    assert 100 <= profile.memory_bandwidth_gb_s <= 8000
    assert 10 <= profile.bf16_tflop_s <= 2500
    assert 1 <= profile.launch_us <= 100
    assert 20 <= profile.cpu.memory_bandwidth_gb_s <= 600 and 0.05 <= profile.cpu.fp32_tflop_s <= 20
    assert 1 <= profile.disk_read.gb_s[-1] <= 15 < profile.h2d.gb_s[-1] <= 64
    assert 10e-3 < profile.d2h.ms(4) < 50e-3  # what the host waits for one number
    assert profile.h2d.gb_s[-1] < profile.memory_bandwidth_gb_s / 2


def test_the_curve_goes_through_its_points():
    curve = read_profile(PAPERS_GPU).h2d
    for size, gb_s in zip(curve.sizes_bytes, curve.gb_s):
        assert size / curve.ms(size) * 1e-6 == pytest.approx(gb_s)
    middle = (curve.sizes_bytes[1] + curve.sizes_bytes[2]) / 2
    assert curve.ms(middle) == pytest.approx((curve.times_ms[1] + curve.times_ms[2]) / 2)
    assert curve.ms(1) == curve.times_ms[0]  # a copy has a least time
    assert curve.ms(3 * curve.sizes_bytes[-1]) == pytest.approx(3 * curve.times_ms[-1])
    assert read_profile(PAPERS_GPU).h2d_ms(5_000_000) == curve.ms(5_000_000)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_reads_back(name, out):
    profile = replace(read_profile(name), measured={("draft_step", 'a "model"', 1): 4.5, ("expert", "m", 9): 0.25})
    write_profile(profile, own_profiles() / f"{name}.toml")
    assert read_profile(name) == profile  # one's own file comes before the shipped one
    assert list(own_profiles().iterdir()) == [own_profiles() / f"{name}.toml"]


def test_a_rewritten_profile_is_read_again(out):
    profile, file = read_profile(), own_profiles() / "mine.toml"
    write_profile(replace(profile, launch_us=1.0), file)
    assert read_profile("mine").launch_us == 1.0
    write_profile(replace(profile, launch_us=22.5), file)
    assert read_profile("mine").launch_us == 22.5
    assert set(profile_names()) == {"mine", *NAMES}


def test_unknown_and_unmeasured_machines(out):
    with pytest.raises(UserError, match="no hardware profile 'b200': choose from .*a100-40gb-pcie4.*b200.toml"):
        read_profile("b200")
    with pytest.raises(UserError, match="run `specter-lab doctor`"):
        read_profile(THIS_MACHINE)


def without(table):
    """The shipped profile, every `table` or `[[table]]` cut out."""
    kept, cut = [], False
    for line in SHIPPED.splitlines():
        cut = line.strip("[]") == table if line.startswith("[") else cut
        kept += [] if cut else [line]
    return "\n".join(kept)


@pytest.mark.parametrize("table", [*NUMBERS, *CURVES, "cpu.fp32_tflop_s"])
def test_what_is_missing_is_named_with_its_file(table, out):
    own_profiles().mkdir(parents=True)
    (own_profiles() / "half.toml").write_text(without(table))
    with pytest.raises(UserError, match=rf"half\.toml lacks '{table}.*{PAPERS_GPU}\.toml shows"):
        read_profile("half")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("value = 40", "value = -40", "'memory_gb' is -40"),
        ("value = 40", 'value = "40"', "'memory_gb' is '40'"),
        ("gb_s = 12.5", "gb_s = 0", "'h2d.gb_s' is 0"),
        ("gb_s = 12.5", "", "lacks 'h2d.gb_s'"),
        ("bytes = 1_048_576", "bytes = 262_144", "two points of 'h2d' at one size"),
        ("value = 40", "value = inf", "'memory_gb' is inf, give it a number above zero"),
        ("bytes = 262_144", 'bytes = "1MB"', "'h2d.bytes' is '1MB', give it a whole number above zero"),
        ("bytes = 262_144", "bytes = 0.5", "'h2d.bytes' is 0.5"),
        ("cores = 24", "cores = 0", "'cpu.cores' is 0, give it a whole number"),
        ("cores = 24", 'cores = "many"', "'cpu.cores' is 'many'"),
        ('source = "data sheet: NVIDIA A100"', 'source = " "', "'memory_gb.source' is ' ', give it a text"),
        ('gpu = "NVIDIA A100 40 GB"', "gpu = 100", "'gpu' is 100, give it a text"),
        ('gpu = "NVIDIA A100 40 GB"', 'gpu = "g"\nunified_memory = 1', "'unified_memory' is 1, give it true or false"),
        ('gpu = "NVIDIA A100 40 GB"', 'gpu = "g"\nmeasured = 3', "lacks 'measured'"),
        (
            "# Reads",
            '[[measured]]\noperation = "expert"\nmodel = "m"\ntokens = "1"\nms = 1.0\n#',
            "'measured.tokens' is '1'",
        ),
        ("value = 40", "value = ", "is not TOML"),
        ("link = ", "links = ", "lacks 'link'"),
        ("# Reads", '[[measured]]\noperation = "expert"\nmodel = "m"\nms = 1.0\n#', "lacks 'measured.tokens'"),
    ],
)
def test_damaged_profiles(old, new, message, out):
    own_profiles().mkdir(parents=True)
    assert old in SHIPPED
    (own_profiles() / "bad.toml").write_text(SHIPPED.replace(old, new, 1))
    with pytest.raises(UserError, match=f"bad.toml.*{message}"):
        read_profile("bad")


def test_this_machines_profile_is_measured_again(out):
    own_profiles().mkdir(parents=True)
    (own_profiles() / f"{THIS_MACHINE}.toml").write_text(without("cpu.memory_gb"))
    with pytest.raises(UserError, match="lacks 'cpu.memory_gb.source': run `specter-lab doctor` again"):
        read_profile(THIS_MACHINE)


def test_a_curve_may_be_written_in_any_order(out):
    own_profiles().mkdir(parents=True)
    large, small = "bytes = 17_301_504\ngb_s = 24.7", "bytes = 262_144\ngb_s = 12.5"
    swapped = SHIPPED.replace(small, "@", 1).replace(large, small, 1).replace("@", large, 1)
    (own_profiles() / "swapped.toml").write_text(swapped)
    assert read_profile("swapped").h2d == read_profile().h2d


def test_only_the_jetson_shares_its_memory():
    assert [name for name in NAMES if read_profile(name).unified_memory] == ["jetson-orin"]
    a100, jetson = read_profile(), read_profile("jetson-orin")
    assert (a100.host_bytes_beside(24 * 10**9), jetson.host_bytes_beside(24 * 10**9)) == (256e9, 40e9)


def test_profiles_are_found_where_the_package_lies(monkeypatch, tmp_path, out):
    monkeypatch.setattr(hardware, "PROFILES", tmp_path)
    (tmp_path / "elsewhere.toml").write_text(SHIPPED)
    assert read_profile("elsewhere").memory_gb == 40
