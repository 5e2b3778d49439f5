"""What lies where in a store: a folder of

    experts.bin        per expert its K E-chunks, then its SM-chunk, every chunk at a multiple of 4096 bytes
    raw.bin            optional: every expert as it was, for machines whose page cache can hold them
    rest.safetensors   every other tensor of the checkpoint
    config.json, tokenizer files
    index.json         written last: a folder without it is not a store

An expert's weights are its matrices one after the other, as the fused layer wants them: gate [I, H], up [I, H] and down
[H, I], or wi [I, H] and wo [H, I]. Layers are numbered through, an encoder's before the decoder's (`models.stacks`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from specter_lab.errors import UserError
from specter_lab.files import write_whole

FORMAT, GATED_ONLY = 2, 1  # stores of format 1 have three matrices per expert and do not say so
PAGE = 4096
EXPERTS, RAW, REST, INDEX = "experts.bin", "raw.bin", "rest.safetensors", "index.json"
Key = tuple[int, int]  # layer, expert


def padded(num_bytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


@dataclass(frozen=True)
class Chunk:
    """A run of bytes in experts.bin or raw.bin, from a page boundary on."""

    offset: int
    num_bytes: int
    crc32: int

    @property
    def padded_bytes(self) -> int:
        return padded(self.num_bytes)


@dataclass(frozen=True)
class Record:
    """Where one expert lies."""

    layer: int
    expert: int
    shards: tuple[Chunk, ...]  # K E-chunks, in experts.bin
    sign_mantissa: Chunk  # in experts.bin, behind the shards
    raw: Chunk | None = None  # in raw.bin

    @property
    def key(self) -> Key:
        return self.layer, self.expert

    @property
    def exponent_bytes(self) -> int:
        """All E-chunks as they lie, padding included."""
        return sum(chunk.padded_bytes for chunk in self.shards)

    def chunks(self) -> list[tuple[str, str, Chunk]]:
        """Name, file and place of every chunk."""
        found = [(f"exponent shard {k}", EXPERTS, chunk) for k, chunk in enumerate(self.shards)]
        found.append(("sign-mantissa chunk", EXPERTS, self.sign_mantissa))
        return found + ([("raw copy", RAW, self.raw)] if self.raw else [])


@dataclass(frozen=True)
class Index:
    """One store."""

    model: str
    source_sha256: str  # of the checkpoint it was packed from
    codec: str
    num_shards: int
    matrices: int  # per expert: 3 with a gate, 2 without
    hidden: int  # H
    width: int  # I
    layers: tuple[int, ...]  # those with experts
    num_experts: int  # per layer
    rest_sha256: str
    file_bytes: Mapping[str, int]  # experts.bin, raw.bin -> size
    experts: Mapping[Key, Record]

    @property
    def num_weights(self) -> int:
        """Weights of one expert, n."""
        return self.matrices * self.hidden * self.width

    @property
    def expert_bytes(self) -> int:
        """One expert in BF16."""
        return 2 * self.num_weights

    @property
    def total_bytes(self) -> int:
        """All experts in BF16."""
        return len(self.experts) * self.expert_bytes

    @property
    def max_exponent_bytes(self) -> int:
        """The largest expert's E-chunks, padding included."""
        return max(record.exponent_bytes for record in self.experts.values())

    @property
    def stored_share(self) -> float:
        """Compressed size over BF16 size, without padding."""
        stored = sum(chunk.num_bytes for r in self.experts.values() for _, file, chunk in r.chunks() if file == EXPERTS)
        return stored / self.total_bytes


def write_index(folder: Path, index: Index) -> None:
    """Write index.json, whole, with a hash of itself."""
    content = asdict(index) | {"format": FORMAT, "experts": [asdict(record) for record in index.experts.values()]}
    content["sha256"] = _digest(content)
    write_whole(folder / INDEX, json.dumps(content).encode())


def read_index(folder: Path) -> Index:
    """The index of a store; what it says is checked against the sizes of the files.

    Raises:
        UserError: no store, half-packed, damaged, of another format, or a file is missing, cut or too long.
    """
    if not (folder / INDEX).exists():
        raise UserError(f"{folder} is not a store, or packing it did not end: `specter-lab pack MODEL {folder}` makes it "
                        f"or goes on")  # fmt: skip
    damaged = UserError(f"{folder / INDEX} is damaged: pack the model again into another folder")
    try:
        content = json.loads((folder / INDEX).read_bytes())
        digest, version = content.pop("sha256"), content.pop("format")
    except (ValueError, KeyError, AttributeError) as error:
        raise damaged from error
    if version not in (FORMAT, GATED_ONLY):
        raise UserError(f"{folder} has store format {version!r}, this program reads {FORMAT!r}: pack the model again")
    if digest != _digest(content | {"format": version}):
        raise damaged
    if version == GATED_ONLY:
        content["matrices"] = 3
    records = [record_of(entry) for entry in content.pop("experts")]
    content["layers"] = tuple(content["layers"])
    index = Index(**content, experts={record.key: record for record in records})
    _check_sizes(folder, index)
    return index


def record_of(entry: dict) -> Record:
    """A record as `dataclasses.asdict` and JSON left it."""
    shards = tuple(Chunk(**chunk) for chunk in entry["shards"])
    raw = entry["raw"] and Chunk(**entry["raw"])
    return Record(entry["layer"], entry["expert"], shards, Chunk(**entry["sign_mantissa"]), raw)


def _check_sizes(folder: Path, index: Index) -> None:
    expected = {(layer, expert) for layer in index.layers for expert in range(index.num_experts)}
    if missing := sorted(expected - index.experts.keys()):
        raise UserError(f"{folder} lacks {len(missing)} experts, the first is layer {missing[0][0]}, expert "
                        f"{missing[0][1]}: pack the model again")  # fmt: skip
    for name, size in index.file_bytes.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            layer, expert, what = _first_beyond(index, name, found)
            raise UserError(f"{path} {'ends after' if path.exists() else 'is missing: it has'} {found:,} of {size:,} bytes, "
                            f"which cuts off the {what} of layer {layer}, expert {expert} and all behind it: copy the "
                            f"file again, or pack the model again")  # fmt: skip
        if found > size:
            raise UserError(f"{path} has {found - size:,} bytes too many: it is not the file that was packed")


def _first_beyond(index: Index, file: str, size: int) -> tuple[int, int, str]:
    cut = [
        (chunk.offset, record, what)
        for record in index.experts.values()
        for what, where, chunk in record.chunks()
        if where == file and chunk.offset + chunk.num_bytes > size
    ]
    if not cut:  # padding only
        record = max(index.experts.values(), key=lambda r: r.sign_mantissa.offset)
        return record.layer, record.expert, "padding"
    _, record, what = min(cut, key=lambda entry: entry[0])
    return record.layer, record.expert, what


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
