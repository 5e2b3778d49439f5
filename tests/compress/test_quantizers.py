"""The registry, and a cache whose entries are whole or not there."""

import errno
import json
import multiprocessing
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors import SafetensorError
from torch.nn.functional import silu

from specter_lab.compress import gguf, gptq, int4, quantizers, rtn
from specter_lab.compress.cache import build_once, verify_manifest
from specter_lab.compress.checkpoint import load_quantized
from specter_lab.compress.gptq import LayerInputs
from specter_lab.compress.quantizers import QUANTIZERS, not_run_reason, quantize
from specter_lab.errors import UserError
from specter_lab.models.experts import read_bank

OURS = [name for name, row in QUANTIZERS.items() if row.job is None]


def test_the_rows_of_table_1_are_there():
    assert set(QUANTIZERS) == {
        "gptq-int8", "gptq-int4", "gptq-int3", "gptq-int4-batched", "awq-int4", "autoawq-int4", "gguf-q8_0",
        "gguf-q6_k", "gguf-q5_k", "gguf-q4_k", "gguf-q4_0", "gguf-q3_k", "gguf-q2_k", "rtn-int8", "rtn-int4",
        "rtn-int3", "rtn-int2",
    }  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_every_own_quantiser_makes_a_whole_checkpoint(qwen, ids, tmp_path, name):
    folder = quantize(qwen, name, ids, tmp_path)
    loaded = load_quantized(folder, qwen)
    report = json.loads((folder / "report.json").read_text())
    assert loaded.quantizer == report["quantizer"] == name
    assert QUANTIZERS[name].bits <= loaded.bits_per_weight < QUANTIZERS[name].bits + 1.3
    assert report["model_digest"] == qwen.digest and report["versions"]
    assert len(loaded.coverage.tokens_per_expert) == 4
    assert sum(loaded.coverage.tokens_per_expert[0]) == ids.numel() * qwen.top_k
    assert not list(tmp_path.glob("*.partial"))


def test_a_second_call_finds_the_first_ones_work(qwen, ids, tmp_path):
    first = quantize(qwen, "rtn-int4", ids, tmp_path)
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert quantize(qwen, "rtn-int4", ids, tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written


def test_whatever_decides_the_content_decides_the_name(qwen, ids, tmp_path, monkeypatch):
    folders = {quantize(qwen, "rtn-int4", ids, tmp_path), quantize(qwen, "rtn-int4", ids[:4], tmp_path)}
    folders.add(quantize(replace(qwen, digest="another"), "rtn-int4", ids, tmp_path))
    monkeypatch.setattr(quantizers, "_code_digest", lambda: "another program")
    folders.add(quantize(qwen, "rtn-int4", ids, tmp_path))
    monkeypatch.setattr(quantizers, "_versions", lambda row: {"torch": "0.0"})
    folders.add(quantize(qwen, "rtn-int4", ids, tmp_path))
    assert len(folders) == 5


@pytest.mark.parametrize("name", ["gptq-int4-batched", "gguf-q3_k", "rtn-int2"])
def test_the_same_files_twice(qwen, ids, tmp_path, name):
    folders = [quantize(qwen, name, ids, tmp_path / run) for run in ("a", "b")]
    first, second = (json.loads((folder / "MANIFEST.json").read_text()) for folder in folders)
    assert first.pop("report.json") and second.pop("report.json")  # says how long it took
    assert first == second


@pytest.mark.parametrize("name", ["rtn-int4", "gguf-q4_0"])
def test_an_altered_file_is_refused(qwen, ids, tmp_path, name):
    folder = quantize(qwen, name, ids, tmp_path)
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file.name} was altered .* delete"):
        load_quantized(folder, qwen)
    file.unlink()
    with pytest.raises(UserError, match="missing"):
        load_quantized(folder, qwen)


def test_unknown_and_unavailable_quantisers_are_named(qwen, ids, tmp_path):
    with pytest.raises(UserError, match="no quantiser 'gptq-int5'.*rtn-int2"):
        quantize(qwen, "gptq-int5", ids, tmp_path)
    assert not_run_reason("rtn-int4", "qwen2_moe") is None
    assert "qwen2_moe" in not_run_reason("autoawq-int4", "qwen2_moe")
    with pytest.raises(UserError, match="autoawq-int4 on qwen-nano not run: .*qwen2_moe"):
        quantize(qwen, "autoawq-int4", ids, tmp_path)


def quantise_router(bank):
    inputs = LayerInputs(torch.zeros(1, 256), torch.zeros(1, 1, dtype=torch.int64), silu)
    return [
        lambda: rtn.quantize_bank(bank, 4),
        lambda: gptq.quantize_bank(bank, inputs, 4),
        lambda: gguf.quantize_bank(bank, GgmlType.Q4_0),
        lambda: int4.quantize_bank(bank),
    ]


def test_routers_norms_and_bare_tensors_are_a_type_error(qwen):
    layer = qwen.adapter.moe_layers(qwen.model)[0]
    for wrong in (layer.router, layer.router.weight, layer.experts, layer.experts.gate_up_proj, qwen.model):
        for attempt in quantise_router(wrong):
            with pytest.raises(TypeError, match="only routed experts are quantised"):
                attempt()
    quantise_router(read_bank(layer))[0]()


def test_a_starved_expert_is_reported_with_what_it_got(qwen, tmp_path):
    loaded = load_quantized(quantize(qwen, "gptq-int4-batched", torch.full((1, 1), 7), tmp_path), qwen)
    counts = loaded.coverage.tokens_per_expert
    assert [sum(row) for row in counts] == [qwen.top_k] * 4
    assert len(loaded.coverage.starved) == 4 * (8 - qwen.top_k)
    assert loaded.coverage.fallback == "rounded to nearest"
    nearest = load_quantized(quantize(qwen, "rtn-int4", torch.full((1, 1), 7), tmp_path), qwen)
    for layer, expert in loaded.coverage.starved:
        assert torch.equal(loaded.banks[layer].gate[expert], nearest.banks[layer].gate[expert])


def write_short(folder):
    np.zeros(1 << 16).tofile("/dev/full")


def write_errno(folder):
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def write_safetensors(folder):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("write", [write_short, write_errno, write_safetensors])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, write):
    def build(folder):
        (folder / "half.safetensors").write_bytes(b"half")
        write(folder)

    with pytest.raises(UserError, match="no space left .* SPECTER_LAB_OUT"):
        build_once(tmp_path / "entry", build)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(errno.EIO, "broken disk"), RuntimeError("bug")])
def test_any_other_failure_passes_through_and_leaves_nothing(tmp_path, failure):
    def build(folder):
        (folder / "half.safetensors").write_bytes(b"half")
        raise failure

    with pytest.raises(failure if isinstance(failure, type) else type(failure)):
        build_once(tmp_path / "entry", build)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def half_and_wait(folder, started):
    (folder / "half.safetensors").write_bytes(b"half")
    started.set()
    threading.Event().wait()


def hang(entry, started):
    build_once(entry, lambda folder: half_and_wait(folder, started))


def test_what_a_killed_process_left_is_never_taken_for_whole(tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=hang, args=(tmp_path / "entry", started))
    process.start()
    assert started.wait(60)
    process.kill()
    process.join()
    assert (tmp_path / "entry.partial" / "half.safetensors").exists() and not (tmp_path / "entry").exists()
    folder = build_once(tmp_path / "entry", lambda folder: (folder / "whole.safetensors").write_bytes(b"whole"))
    assert sorted(path.name for path in folder.iterdir()) == ["MANIFEST.json", "whole.safetensors"]


def test_two_at_once_build_once(tmp_path):
    builds, barrier = [], threading.Barrier(4)

    def build(folder):
        builds.append(folder)
        (folder / "w.safetensors").write_bytes(b"w")

    def run():
        barrier.wait()
        assert (build_once(tmp_path / "entry", build) / "w.safetensors").exists()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "lost", "manifest lost", "manifest empty"])
def test_a_damaged_entry_is_built_again(tmp_path, damage):
    builds = []

    def build(folder):
        builds.append(folder)
        (folder / "report.json").write_bytes(b"report")

    file = build_once(tmp_path / "entry", build) / ("MANIFEST.json" if "manifest" in damage else "report.json")
    assert build_once(tmp_path / "entry", build) and len(builds) == 1
    if "lost" in damage:
        file.unlink()
    else:
        file.write_bytes({"flipped": b"rePort", "truncated": b"repo"}.get(damage, b""))
    assert (build_once(tmp_path / "entry", build) / "report.json").read_bytes() == b"report" and len(builds) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"report.json": "0"}'])
def test_a_damaged_manifest_is_one_sentence(tmp_path, content):
    folder = build_once(tmp_path / "entry", lambda folder: (folder / "report.json").write_text("{}"))
    (folder / "MANIFEST.json").write_text(content)
    with pytest.raises(UserError, match="delete .*entry and make or fetch it again"):
        verify_manifest(folder)
