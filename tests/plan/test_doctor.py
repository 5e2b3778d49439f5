import json
from dataclasses import replace

import pytest

from specter_lab import paths
from specter_lab.cli import main
from specter_lab.measure import installation
from specter_lab.measure.gpu_speed import GpuSpeed
from specter_lab.measure.host_speed import Load, Rate
from specter_lab.measure.installation import Part
from specter_lab.plan import doctor
from specter_lab.plan.hardware import CURVES, NUMBERS, read_profile, write_profile

QUICK = {
    "host": {"budget_s": 0.02, "pool_bytes": 2**25},
    "gpu": {"budget_s": 0.02},
    "disk": {"budget_s": 0.02, "file_bytes": 2**25},
}


@pytest.fixture(scope="module")
def speeds(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "CACHE", tmp_path_factory.mktemp("cache"))
        return doctor.measure(lambda text: None, **QUICK)


@pytest.fixture
def measured(speeds, monkeypatch):
    """The command measures nothing again."""
    monkeypatch.setattr(doctor, "measure", lambda on_step, **effort: speeds)
    return speeds


def test_the_command_writes_a_profile_that_reads_back(measured, out, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    profile = read_profile("this-machine")
    assert profile == doctor.profile_of(measured)
    assert str(out / "profiles" / "this-machine.toml") in text and "specter_lab can work here" in text
    for word in ("Python", "torch", "transformers", "autoawq", "Ray", "CUDA", "GB/s by size"):
        assert word in text


def test_units_without_a_gpu(speeds, out):
    profile = doctor.profile_of(replace(speeds, gpu=None))
    assert profile.memory_gb == pytest.approx(speeds.memory_bytes / 1e9, rel=1e-3)
    assert profile.bf16_tflop_s == profile.cpu.bf16_tflop_s == pytest.approx(speeds.host.bf16_tflop_s, rel=1e-3)
    assert profile.launch_us == pytest.approx(speeds.host.operator_us, rel=1e-3)
    assert profile.memory_bandwidth_gb_s == profile.cpu.memory_bandwidth_gb_s
    assert profile.h2d == profile.d2h and profile.h2d.gb_s[0] == pytest.approx(speeds.host.copy[0].gb_s, rel=1e-3)
    assert profile.gpu.startswith("none") and profile.cpu.cores == speeds.cores >= 1
    assert all(source.startswith("measured: specter-lab doctor") for source in profile.sources.values())
    assert speeds.disk.method in profile.sources["disk_read at 65536 bytes"]
    write_profile(profile, out / "profiles" / "this-machine.toml")
    assert read_profile("this-machine") == profile


def test_a_gpu_takes_the_place_of_the_processor(speeds, out):
    gpu = GpuSpeed("G 1", "PCIe 5.0 x16", 141.0, 4300.0, 790.0, 4.0, 9.0, (Rate(2**20, 40.0),), (Rate(4096, 0.4),))
    profile = doctor.profile_of(replace(speeds, gpu=gpu))
    assert [getattr(profile, number) for number in NUMBERS] == [141.0, 4300.0, 790.0, 9.0]
    assert (profile.gpu, profile.link) == ("G 1", "PCIe 5.0 x16")
    assert (profile.h2d.gb_s, profile.d2h.sizes_bytes) == ((40.0,), (4096,))
    assert not profile.unified_memory
    assert profile.cpu.fp32_tflop_s == pytest.approx(speeds.host.fp32_tflop_s, rel=1e-3)
    assert set(profile.sources) >= {"h2d at 1048576 bytes", "d2h at 4096 bytes"}
    text = doctor.Report([], replace(speeds, gpu=gpu), profile, out, 20.0).to_text()
    assert "790 TFLOP/s" in text and "4300 GB/s" in text


@pytest.mark.parametrize(("average", "busy"), [(0.9, False), (2.7, True)])
def test_a_busy_machine_is_said_where_its_numbers_are(speeds, out, average, busy):
    loaded = replace(speeds, load=Load(average, 2))
    profile = doctor.profile_of(loaded)
    words = f"load {average} on 2 cores"
    assert all((words in source) == busy for source in profile.sources.values())
    text = doctor.Report([], loaded, profile, out, 20.0).to_text()
    assert (f"{words}: numbers are low" in text) == busy


def test_the_memory_without_a_gpu_is_the_hosts(speeds):
    profile = doctor.profile_of(replace(speeds, gpu=None))
    assert profile.unified_memory and profile.cpu.memory_gb == profile.memory_gb


def test_json(measured, out, capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] and found["measured"]["host"]["read_gb_s"] > 0
    assert {part["name"] for part in found["parts"]} == {part.name for part in installation.parts()}
    assert set(found["missing"]) <= {"autoawq", "Ray", "CUDA"}


def test_what_is_missing_is_named_and_the_exit_code_is_1(measured, out, monkeypatch, capsys):
    lacking = [Part("Python", "3.11.9"), Part("packages", "", "torch: `make setup` installs everything"),
               Part("Ray", "", "for many machines: `make setup-ray`", needed=False)]  # fmt: skip
    monkeypatch.setattr(installation, "parts", lambda: lacking)
    assert main(["doctor"]) == 1
    assert "cannot work here. Missing: torch: `make setup` installs everything.\n" in capsys.readouterr().out
    monkeypatch.setattr(installation, "parts", lambda: [lacking[0], lacking[2]])
    assert main(["doctor"]) == 0  # what is not needed is told, no more


def test_absent_packages_and_files_are_found(monkeypatch, tmp_path, out):
    assert installation.works(installation.parts())
    lock = tmp_path / "lock"
    lock.write_text("numpy==0.0.1\nno-such-package==1.0\n")
    monkeypatch.setattr(installation, "LOCK", lock)
    monkeypatch.setattr(paths, "DATA", tmp_path)
    found = {part.name: part for part in installation.parts()}
    assert found["packages"].missing.startswith("no-such-package:") and "(locked: 0.0.1)" in found["packages"].found
    assert "and" in found["models and texts"].missing and "git checkout" in found["models and texts"].missing
    assert not installation.works(list(found.values()))


def test_every_number_is_positive(speeds):
    profile = doctor.profile_of(speeds)
    assert all(getattr(profile, number) > 0 for number in NUMBERS)
    assert all(gb_s > 0 for curve in CURVES for gb_s in getattr(profile, curve).gb_s)
