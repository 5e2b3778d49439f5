"""`specter-lab pack`."""

from __future__ import annotations

import argparse
from pathlib import Path

from specter_lab.cli.command import Answer, Command, add, add_model, positive


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "zoo name, folder or hub id, in BF16")
    add(parser, "store", files=True, metavar="STORE", help="folder of the store")
    add(parser, "--codec", default="planes", metavar="CODEC",
        help="none, lz4, lz4hc, zstd, with a level as in zstd-3, huffman (smallest), or planes (decompressed fastest of those "
             "that compress, default)")  # fmt: skip
    add(
        parser,
        "--shards",
        type=positive,
        default=3,
        metavar="N",
        help="pieces that exponents are compressed in (default: 3)",
    )
    parser.add_argument("--raw", action="store_true", help="keep the experts as they are beside it, for in-place use while "
                        "the page cache holds them")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a sentence")


def run(options: argparse.Namespace) -> Answer:
    from specter_lab.engine.store.pack import pack

    index = pack(options.model, Path(options.store), codec=options.codec, shards=options.shards, raw=options.raw)
    data = {
        "store": options.store,
        "experts": len(index.experts),
        "bytes": index.total_bytes,
        "stored_share": index.stored_share,
    }
    return Answer(
        data,
        f"{options.store}: {len(index.experts)} experts, {index.total_bytes / 1e6:.1f} MB in {index.stored_share:.1%} of it",
    )


COMMAND = Command(
    "pack", "compress a checkpoint's experts into a store on disk (ZipMoE)",
    "specter-lab pack qwen-nano stores/qwen-nano           # experts by themselves, 29 % smaller, bit for bit\n"
    "specter-lab pack path/to/checkpoint store --codec zstd-3 --raw",
    arguments, run, after_ctrl_c="run the same command again, it goes on where it stopped",
)  # fmt: skip
