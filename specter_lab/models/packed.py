"""Shipped weights as `.xz`: BF16 shrinks by a third, and every clone with it. Unpacked once, into the cache.

python -m specter_lab.models.packed data/zoo/qwen-nano      # pack a trained model's weights in place
"""

from __future__ import annotations

import lzma
import shutil
import sys
from pathlib import Path

from specter_lab import paths
from specter_lab.errors import UserError
from specter_lab.files import locked, sha256_of, whole_file, whole_folder

MANIFEST = "MANIFEST.json"  # file -> sha256, of the unpacked weights
SUFFIX = ".xz"
TWO_BYTE_VALUES = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 3, "lp": 1, "pb": 1}]  # odd and even bytes apart


def unpacked(folder: Path) -> Path:
    """A checkpoint folder whose weights can be read: `folder` itself, or its copy in the cache if they are packed.

    Raises:
        UserError: the packed file is damaged, or the folder has no manifest.
    """
    packed = sorted(folder.glob(f"*.safetensors{SUFFIX}"))
    if not packed:
        return folder
    place = paths.CACHE / "zoo" / sha256_of(folder / MANIFEST)[:12]
    place.mkdir(parents=True, exist_ok=True)
    with locked(place):
        if not (place / folder.name).exists():
            with whole_folder(place / folder.name) as half:
                for file in folder.iterdir():
                    if file in packed:
                        _unpack(file, half / file.name.removesuffix(SUFFIX))
                    else:
                        shutil.copyfile(file, half / file.name)
    return place / folder.name


def _unpack(file: Path, out: Path) -> None:
    try:
        with lzma.open(file) as source, out.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (lzma.LZMAError, EOFError) as error:
        raise UserError(f"{file} is damaged ({error}): restore it with `git checkout`") from error


def pack(folder: Path) -> None:
    """Replace the weights of a checkpoint folder by packed ones."""
    for file in sorted(folder.glob("*.safetensors")):
        with whole_file(file.with_name(file.name + SUFFIX)) as half:
            half.write_bytes(lzma.compress(file.read_bytes(), filters=TWO_BYTE_VALUES))
        file.unlink()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        pack(Path(name))
