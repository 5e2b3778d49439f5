"""Is a store what was packed? Every chunk's checksum, and bit for bit against the checkpoint where that is at hand."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from specter_lab.compress.bitfield import BitFields, bit_patterns, decode
from specter_lab.compress.codecs import codec
from specter_lab.engine.store.layout import EXPERTS, REST, Index, Record, read_index
from specter_lab.engine.store.pack import expert_weights, open_source, reading
from specter_lab.errors import UserError
from specter_lab.files import sha256_of


@dataclass(frozen=True)
class Damage:
    """One chunk that is not what was packed."""

    layer: int
    expert: int
    what: str
    file: str
    offset: int

    def __str__(self) -> str:
        return f"the {self.what} of layer {self.layer}, expert {self.expert} (byte {self.offset:,} of {self.file})"


def damaged_chunks(folder: Path, index: Index, *, progress: bool = True) -> list[Damage]:
    """Read everything once and compare checksums; the list is empty when all is well."""
    found = []
    handles = {name: (folder / name).open("rb") for name in index.file_bytes}
    records = tqdm(index.experts.values(), desc=f"checking {folder.name}", unit="expert", mininterval=1.0,
                   disable=not progress)  # fmt: skip
    try:
        for record in records:
            for what, file, chunk in record.chunks():
                handles[file].seek(chunk.offset)
                if zlib.crc32(handles[file].read(chunk.num_bytes)) != chunk.crc32:
                    found.append(Damage(record.layer, record.expert, what, file, chunk.offset))
    finally:
        for handle in handles.values():
            handle.close()
    return found


def verify(folder: Path, *, against: str | None = None, progress: bool = True) -> Index:
    """Check a whole store.

    Args:
        folder: the store.
        against: a checkpoint that its experts must equal bit for bit, by name or folder.

    Raises:
        UserError: anything is missing, cut, damaged or different; the message names the expert.
    """
    index = read_index(folder)
    if sha256_of(folder / REST) != index.rest_sha256:
        raise UserError(f"{folder / REST} is damaged: pack the model again into another folder")
    if damages := damaged_chunks(folder, index, progress=progress):
        more = f" and {len(damages) - 1} more chunks" if len(damages) > 1 else ""
        raise UserError(f"{damages[0]}{more} in {folder} fail{'' if more else 's'} the checksum: copy the file again, or "
                        f"pack the model again into another folder")  # fmt: skip
    if against is not None:
        _compare(folder, index, against, progress)
    return index


def _compare(folder: Path, index: Index, model: str, progress: bool) -> None:
    source = open_source(model)
    with (folder / EXPERTS).open("rb") as file, reading(source) as read:
        for record in tqdm(index.experts.values(), desc="comparing", unit="expert", disable=not progress):
            stored = decode(_read(file, record, index), codec(index.codec))
            if not np.array_equal(bit_patterns(stored), bit_patterns(expert_weights(source, read, *record.key))):
                raise UserError(f"layer {record.layer}, expert {record.expert} of {folder} differs from {model}: it was "
                                f"packed from another checkpoint")  # fmt: skip


def _read(file, record: Record, index: Index) -> BitFields:
    def bytes_of(chunk) -> bytes:
        file.seek(chunk.offset)
        return file.read(chunk.num_bytes)

    sign_mantissa = np.frombuffer(bytes_of(record.sign_mantissa), np.uint8)
    return BitFields((index.num_weights,), sign_mantissa, tuple(bytes_of(chunk) for chunk in record.shards))
