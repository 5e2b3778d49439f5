"""Stores: packed bit for bit, resumed after a kill, damage named with its expert."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specter_lab.engine.store import layout
from specter_lab.engine.store import pack as packing
from specter_lab.engine.store.layout import EXPERTS, INDEX, PAGE, RAW, read_index
from specter_lab.engine.store.pack import JOURNAL, pack
from specter_lab.engine.store.reader import (
    BUFFERED,
    DIRECT,
    Mapping,
    PagedMemory,
    Reader,
    drop_pages,
    unmap_pages,
    warm_pages,
)
from specter_lab.engine.store.verify import verify
from specter_lab.errors import UserError
from specter_lab.models.load import resolve
from specter_lab.paths import ROOT


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "qwen"
    pack("qwen-nano", folder, raw=True)
    return folder


@pytest.fixture
def copy(store, tmp_path):
    for file in store.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("model", ["qwen-nano", "phi-nano", "deepseek-nano", "switch-nano"])
def test_a_store_holds_the_checkpoint(model, tmp_path):
    index = pack(model, tmp_path / model)
    assert verify(tmp_path / model, against=model, progress=False) == index
    assert 0.6 < index.stored_share < 0.75
    for record in index.experts.values():
        assert all(chunk.offset % PAGE == 0 for _, _, chunk in record.chunks())


@pytest.mark.parametrize("codec", ["none", "lz4", "lz4hc-3", "zstd-3", "huffman"])
def test_other_codecs(codec, tmp_path):
    pack("phi-nano", tmp_path, codec=codec, shards=2)
    verify(tmp_path, against="phi-nano", progress=False)


def test_packing_again_changes_nothing_and_other_questions_are_refused(store):
    before = (store / INDEX).stat().st_mtime_ns
    pack("qwen-nano", store, raw=True)
    assert (store / INDEX).stat().st_mtime_ns == before
    with pytest.raises(UserError, match="another store"):
        pack("qwen-nano", store, codec="lz4", raw=True)


def test_a_killed_packing_goes_on(store, tmp_path):
    out = tmp_path / "killed"
    command = [sys.executable, "-c", "from pathlib import Path; import sys; from specter_lab.engine.store.pack import pack;"
               "pack('qwen-nano', Path(sys.argv[1]), raw=True)", str(out)]  # fmt: skip
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and not (out / JOURNAL).exists() or len((out / JOURNAL).read_text().splitlines()) < 5:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / INDEX).exists()
    with pytest.raises(UserError, match="did not end"):
        read_index(out)
    done = len((out / JOURNAL).read_text().splitlines()) - 1
    with (out / f"{EXPERTS}.partial").open("ab") as file:
        file.write(b"half an expert")
    with (out / JOURNAL).open("a") as file:
        file.write('{"layer": 3, "exp')
    appended = []
    original = packing._append
    packing._append = lambda layer, expert, *rest: (appended.append((layer, expert)), original(layer, expert, *rest))[1]
    try:
        pack("qwen-nano", out, raw=True)
    finally:
        packing._append = original
    assert len(appended) == 240 - done < 240
    for name in (EXPERTS, RAW, INDEX):
        assert (out / name).read_bytes() == (store / name).read_bytes()
    assert not (out / JOURNAL).exists()


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_named(copy):
    record = read_index(copy).experts[2, 17]
    flip(copy / EXPERTS, record.sign_mantissa.offset + 1000)
    with pytest.raises(UserError, match="sign-mantissa chunk of layer 2, expert 17"):
        verify(copy, progress=False)
    flip(copy / EXPERTS, record.shards[1].offset)
    with pytest.raises(UserError, match="exponent shard 1 of layer 2, expert 17.* and 1 more"):
        verify(copy, progress=False)


def test_a_cut_or_missing_file_is_named(copy):
    record = read_index(copy).experts[3, 8]
    os.truncate(copy / EXPERTS, record.shards[2].offset + 5)
    with pytest.raises(UserError, match="exponent shard 2 of layer 3, expert 8"):
        read_index(copy)
    (copy / EXPERTS).unlink()
    with pytest.raises(UserError, match="missing.*layer 0, expert 0"):
        read_index(copy)


def test_a_damaged_index_rest_or_format(copy):
    content = json.loads((copy / INDEX).read_text())
    (copy / INDEX).write_text(json.dumps(content | {"codec": "lz4"}))
    with pytest.raises(UserError, match="damaged"):
        read_index(copy)
    (copy / INDEX).write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        read_index(copy)
    (copy / INDEX).write_text(json.dumps(content))
    flip(copy / "rest.safetensors", 5000)
    with pytest.raises(UserError, match="rest.safetensors is damaged"):
        verify(copy, progress=False)


def test_a_store_of_the_first_format_is_read(copy):
    index, content = read_index(copy), json.loads((copy / INDEX).read_text())
    del content["matrices"], content["sha256"]
    content["format"] = layout.GATED_ONLY
    content["sha256"] = layout._digest(content)
    (copy / INDEX).write_text(json.dumps(content))
    assert read_index(copy) == index and pack("qwen-nano", copy, raw=True) == index


def test_a_store_of_another_checkpoint_is_found_out(store):
    with pytest.raises(UserError):
        verify(store, against="phi-nano", progress=False)


def test_a_float16_checkpoint_is_refused_with_its_expert(tmp_path):
    source = tmp_path / "half"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((resolve("qwen-nano") / name).read_bytes())
    with safe_open(resolve("qwen-nano") / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float16)
    tensors[name.replace("up_proj", "gate_proj")] = tensors[name].clone()
    tensors[name.replace("up_proj", "down_proj")] = tensors[name].t().contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="layer 1, expert 3.*float16"):
        pack(str(source), tmp_path / "out")


@pytest.mark.parametrize("mode", [DIRECT, BUFFERED])
def test_both_ways_of_reading(store, mode):
    size = 4 * PAGE
    buffer = PagedMemory(size).take(size)
    reader = Reader(store / EXPERTS, mode)
    reader.read_into(buffer, 2 * PAGE)
    assert buffer.tobytes() == (store / EXPERTS).read_bytes()[2 * PAGE : 6 * PAGE]
    assert (reader.read_bytes, reader.read_s > 0) == (size, True)
    with pytest.raises(OSError, match="ends at"):
        reader.read_into(buffer, (store / EXPERTS).stat().st_size - 2 * PAGE)
    reader.close()


def test_the_mapping_knows_what_is_resident(copy):
    warm_pages(copy / RAW)
    mapping = Mapping(copy / RAW)
    assert mapping.resident(0, 40_000)
    assert np.array_equal(mapping.bytes[:100], np.fromfile(copy / RAW, np.uint8, 100))
    del mapping
    drop_pages(copy / RAW)
    mapping = Mapping(copy / RAW)
    assert not mapping.resident(0, (copy / RAW).stat().st_size // PAGE * PAGE)


def test_mapped_pages_are_dropped_once_they_are_unmapped(copy):
    size = (copy / RAW).stat().st_size // PAGE * PAGE
    mapping, other = Mapping(copy / RAW), Mapping(copy / RAW)
    expected = mapping.bytes.sum()  # every page is mapped
    drop_pages(copy / RAW)
    assert other.resident(0, size)
    unmap_pages(mapping.bytes.ctypes.data, size)
    drop_pages(copy / RAW)
    assert not any(other.resident(at, PAGE) for at in range(0, size, PAGE))
    assert mapping.bytes.sum() == expected


def test_the_slab_is_exact():
    memory = PagedMemory(3 * PAGE)
    assert memory.take(PAGE + 1).ctypes.data % PAGE == 0
    with pytest.raises(ValueError, match="used up"):
        memory.take(PAGE + 1)


def test_from_the_shell(tmp_path, capsys):
    from specter_lab.cli import main

    out = str(tmp_path / "store")
    assert main(["pack", "phi-nano", out, "--codec", "lz4"]) == 0
    assert main(["verify", out, "--against", "phi-nano"]) == 0
    assert "bit for bit those of phi-nano" in capsys.readouterr().out
    assert main(["pack", "phi-nano", out, "--codec", "zstd"]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    assert "is not a store" in capsys.readouterr().err
