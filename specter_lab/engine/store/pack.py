"""Packing a checkpoint into a store, one expert in memory at a time; a killed run goes on where it stopped.

Experts are appended to `experts.bin.partial`. A journal beside it gets one line per expert, after the expert's bytes are on
the disk, so whoever comes next cuts the file behind the last expert of the journal and goes on. The index is written last.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from specter_lab.compress.bitfield import SHARDS, bit_patterns, encode
from specter_lab.compress.codecs import codec as codec_named
from specter_lab.engine.store.layout import (
    EXPERTS,
    INDEX,
    RAW,
    REST,
    Chunk,
    Index,
    Record,
    padded,
    read_index,
    record_of,
    write_index,
)
from specter_lab.errors import UserError
from specter_lab.files import locked, sha256_of, whole_file
from specter_lab.models.load import DECIDING_FILES, checkpoint_digest, read_config, resolve, shown_name
from specter_lab.models.stacks import Block, Stacks, stacks_of

DEFAULT_CODEC = "planes"
JOURNAL = "packing.jsonl"


@dataclass(frozen=True)
class Source:
    """The checkpoint that is packed."""

    name: str
    folder: Path
    digest: str
    stacks: Stacks
    blocks: dict[int, Block]  # those with experts, by layer
    files: dict[str, Path]  # tensor name -> file


def pack(model: str, out: Path, *, codec: str = DEFAULT_CODEC, shards: int = SHARDS, raw: bool = False) -> Index:
    """Pack a checkpoint's routed experts; a finished store of the same question is left as it is.

    Args:
        model: zoo name, folder or hub id of a BF16 checkpoint.
        out: folder of the store.
        codec: of the exponents (`compress.codecs`).
        shards: E-chunks per expert, K.
        raw: also write the experts as they are; they are executed in place where the page cache holds them.

    Raises:
        UserError: no such model or codec, weights that are not BF16, or `out` holds something else.
    """
    codec = codec_named(codec).name
    source = open_source(model)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        if (out / INDEX).exists():
            index = read_index(out)
            asked = (source.digest, codec, shards)
            if (index.source_sha256, index.codec, index.num_shards) != asked or raw != (RAW in index.file_bytes):
                raise UserError(f"{out} holds another store ({index.model}, {index.codec}): give another folder")
            return index
        return _pack(source, out, codec, shards, raw)


def open_source(model: str) -> Source:
    """The checkpoint of that name. Raises UserError when there is none, or none with experts."""
    folder = resolve(model)
    stacks = stacks_of(read_config(folder))
    digest = checkpoint_digest(folder)
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), path)
    blocks = {block.number: block for block in stacks.blocks if stacks.keys(block, 0)[0] in files}
    if not blocks:
        raise UserError(f"no experts were found in {folder}: give a checkpoint with per-expert tensors")
    return Source(shown_name(model), folder, digest, stacks, blocks, files)


def _pack(source: Source, out: Path, codec: str, shards: int, raw: bool) -> Index:
    question = {"source": source.digest, "codec": codec, "shards": shards, "raw": raw}
    records = _journal(out / JOURNAL, question)
    keys = [(layer, expert) for layer in source.blocks for expert in range(source.stacks.num_experts)]
    names = [EXPERTS, *([RAW] if raw else [])]
    with ExitStack() as stack, reading(source) as read:
        handles = [stack.enter_context((out / f"{name}.partial").open("ab")) for name in names]
        journal = stack.enter_context((out / JOURNAL).open("a"))
        for handle, size in zip(handles, _ends(records, len(names))):
            handle.truncate(size)
            handle.seek(size)
        bar = tqdm(total=len(keys), initial=len(records), desc=f"packing {source.name}", unit="expert", mininterval=1.0)
        with bar:
            for layer, expert in keys[len(records) :]:
                record = _append(layer, expert, expert_weights(source, read, layer, expert), codec, shards, handles)
                for handle in handles:
                    handle.flush()
                    os.fdatasync(handle.fileno())
                journal.write(json.dumps(asdict(record)) + "\n")
                journal.flush()
                records.append(record)
                bar.update()
        _write_rest(source, read, out)
        shape = read(_keys(source, *keys[0])[0]).shape  # [I, H]
    for name in names:
        (out / f"{name}.partial").replace(out / name)
    index = Index(
        source.name, source.digest, codec, shards, len(source.stacks.matrices), shape[1], shape[0], tuple(source.blocks),
        source.stacks.num_experts, sha256_of(out / REST), dict(zip(names, _ends(records, len(names)))),
        {r.key: r for r in records},
    )  # fmt: skip
    write_index(out, index)
    (out / JOURNAL).unlink()
    return index


def _journal(path: Path, question: dict) -> list[Record]:
    """Experts that are packed already; starts over where another question was being answered."""
    try:
        first, *lines = path.read_text().splitlines()
        if json.loads(first) == question:
            return list(_whole_lines(lines))
    except (OSError, ValueError):
        pass
    path.write_text(json.dumps(question) + "\n")
    return []


def _whole_lines(lines: list[str]) -> Iterator[Record]:
    for line in lines:
        try:
            yield record_of(json.loads(line))
        except ValueError:  # cut by the kill
            return


def _ends(records: list[Record], files: int) -> list[int]:
    """Where the last packed expert ends in each file."""
    if not records:
        return [0] * files
    last = records[-1]
    ends = [last.sign_mantissa.offset + last.sign_mantissa.padded_bytes]
    return ends + ([last.raw.offset + last.raw.padded_bytes] if files > 1 else [])


@contextmanager
def reading(source: Source) -> Iterator:
    """A function name -> tensor over all files of the checkpoint."""
    with ExitStack() as stack:
        opened = {
            path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(set(source.files.values()))
        }
        yield lambda name: opened[source.files[name]].get_tensor(name)


def expert_weights(source: Source, read, layer: int, expert: int) -> Tensor:
    """The matrices of one expert, one after the other: [n]."""
    try:
        return torch.cat([read(name).reshape(-1) for name in _keys(source, layer, expert)])
    except KeyError as error:
        raise UserError(f"layer {layer}, expert {expert} is not in the checkpoint ({error}): fetch it again") from error


def _keys(source: Source, layer: int, expert: int) -> list[str]:
    return source.stacks.keys(source.blocks[layer], expert)


def _append(layer: int, expert: int, weights: Tensor, codec: str, shards: int, handles: list[BinaryIO]) -> Record:
    try:
        fields = encode(weights, codec_named(codec), shards)
    except UserError as error:
        raise UserError(f"layer {layer}, expert {expert}: {error}") from error
    chunks = [_write(handles[0], data) for data in (*fields.shards, fields.sign_mantissa.tobytes())]
    raw = _write(handles[1], bit_patterns(weights).tobytes()) if len(handles) > 1 else None
    return Record(layer, expert, tuple(chunks[:-1]), chunks[-1], raw)


def _write(handle: BinaryIO, data: bytes) -> Chunk:
    chunk = Chunk(handle.tell(), len(data), zlib.crc32(data))
    handle.write(data)
    handle.write(bytes(padded(len(data)) - len(data)))
    return chunk


def _write_rest(source: Source, read, out: Path) -> None:
    experts = {
        name for layer in source.blocks for expert in range(source.stacks.num_experts) for name in _keys(source, layer, expert)
    }  # fmt: skip
    with whole_file(out / REST) as half:
        save_file({name: read(name).contiguous() for name in source.files if name not in experts}, half)
    for name in (*DECIDING_FILES, "generation_config.json"):
        if (source.folder / name).exists():
            shutil.copyfile(source.folder / name, out / name)
