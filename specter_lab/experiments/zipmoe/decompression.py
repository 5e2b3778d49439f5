"""zipmoe-decompression: how many workers keep up with the disk (ZipMoE, decompression).

Every thread decompresses and recovers shards of its own, as the engine's workers do. The disk's rate is that of compressed
bytes, so a worker pool keeps up when its BF16 output is at least the read rate over the compressed size. On the page cache
the same store is read through memory: the fast end of what storage can be. zipnn stands beside where it is installed. Claims
are judged on the codec that stores have unless another is asked for; the paper's (LZ4HC, ZSTD) stand beside it.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure

from specter_lab import paths
from specter_lab.compress.bench_bitfield import Speed, bounds, expert_tensor, measure_zipnn
from specter_lab.compress.bench_bitfield import measure as speeds
from specter_lab.engine.store.pack import DEFAULT_CODEC
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.measure.disk_speed import measure_disk
from specter_lab.measure.host_speed import cpu_name, usable_cores

CODECS = ("lz4", "lz4hc", "zstd-1", "huffman", DEFAULT_CODEC)
THREADS = (1, 2, 3, 4)
SOURCE, COPIES = "qwen-nano", 4  # 47 MB: longer than caches
READ_BYTES = 1_048_576  # of the disk measurement that is compared
DECODED, READ, BOUND = "decoded", "disk", "bound"


def inputs(context: Context) -> dict[str, str]:
    return {SOURCE: routing.model_digest(SOURCE)}


def run(context: Context) -> pd.DataFrame:
    """Rows: codec x threads -> GB/s of BF16 output, the disk's rate, and bounds."""
    work = [
        jobs.Job("all codecs", measure, {"digest": routing.model_digest(SOURCE), "machine": cpu_name()}, alone=True)
    ]
    return pd.DataFrame(jobs.run(context, work))


def measure(digest: str, machine: str) -> jobs.Rows:
    """All rows. `digest` and `machine` name what they hold for."""
    torch.set_num_threads(1)
    weights = expert_tensor(SOURCE).repeat(COPIES)  # chunks are compressed one by one, so copies are not found
    disk = measure_disk(Path(paths.OUT))
    rate = next(r.gb_s for r in disk.read if r.num_bytes == READ_BYTES)
    rows = [{"kind": READ, "codec": disk.method, "threads": 1, "gb_s": round(rate, 4)}]
    rows += [
        {"kind": BOUND, "codec": name, "threads": 1, "gb_s": round(value, 4)} for name, value in bounds(weights).items()
    ]
    found: list[Speed] = [speed for name in CODECS for speed in speeds(weights, name, THREADS)]
    peers = [measure_zipnn(weights, count) for count in (1, 2)]
    found += [peer for peer in peers if not isinstance(peer, str)]
    for s in found:
        rows.append({"kind": DECODED, "codec": s.codec, "threads": s.threads, "gb_s": round(s.decode_gb_s, 4), "low_gb_s": round(s.ci_low_gb_s, 4),
                     "high_gb_s": round(s.ci_high_gb_s, 4), "encode_gb_s": round(s.encode_gb_s, 4), "size_share": round(s.size_share, 5),
                     "n_repeats": 5, "cores": usable_cores()})  # fmt: skip
    return rows


def decoded(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["kind"] == DECODED]


def disk_gb_s(rows: pd.DataFrame) -> float:
    """Compressed bytes that the disk delivers."""
    return float(rows.loc[rows["kind"] == READ, "gb_s"].iloc[0])


def output_rate_to_match(rows: pd.DataFrame, codec: str) -> float:
    """BF16 output at which a codec keeps up with the disk."""
    share = decoded(rows).set_index("codec")["size_share"]
    return disk_gb_s(rows) / float(share[codec].iloc[0] if hasattr(share[codec], "iloc") else share[codec])


def crossover(rows: pd.DataFrame, codec: str) -> int | None:
    """The smallest number of threads that keeps up; None: none of those measured."""
    mine = decoded(rows)[decoded(rows)["codec"] == codec]
    enough = mine[mine["gb_s"] >= output_rate_to_match(rows, codec)]
    return None if enough.empty else int(enough["threads"].min())


def plot(rows: pd.DataFrame) -> Figure:
    """BF16 output against threads, and what the disk asks for."""
    figure, axis = plt.subplots(figsize=(7.2, 4.2), constrained_layout=True)
    names = list(dict.fromkeys(decoded(rows)["codec"]))
    for color, name in zip(sns.color_palette("colorblind", len(names)), names):
        mine = decoded(rows)[decoded(rows)["codec"] == name]
        errors = (mine["gb_s"] - mine["low_gb_s"], mine["high_gb_s"] - mine["gb_s"])
        label = "zstd without matches" if name == "huffman" else name
        axis.errorbar(mine["threads"], mine["gb_s"], yerr=errors, marker="o", capsize=3, color=color, label=label,
                      linestyle=":" if name == "zipnn" else "-")  # fmt: skip
    needed = output_rate_to_match(rows, DEFAULT_CODEC)
    axis.axhline(
        needed,
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"keeps up with the disk ({disk_gb_s(rows):.2f} GB/s read)",
    )
    cores = int(decoded(rows)["cores"].iloc[0])
    axis.axvline(cores, color="0.6", linewidth=1, linestyle=":")
    axis.annotate(
        f"{cores} cores",
        (cores, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=8,
        color="0.4",
    )
    axis.set(xlabel="decompression threads", ylabel="BF16 output, GB/s", ylim=(0, None), xticks=THREADS)
    axis.grid(alpha=0.25)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", fontsize=8, ncols=3)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Judged on the store's own codec; the notes have the others' values, those of the paper's codecs among them."""
    cores, most = int(decoded(rows)["cores"].iloc[0]), max(THREADS)
    found = {name: crossover(rows, name) for name in CODECS}
    none = f"not even {most} keep up; " if found[DEFAULT_CODEC] is None else ""
    others = "; ".join(f"{name}: {found[name] or f'more than {most}'}" for name in CODECS if name != DEFAULT_CODEC)
    note = f"{none}{DEFAULT_CODEC}, {cores} cores; {others}"
    return [
        Measured("zipmoe-decompression/crossover", found[DEFAULT_CODEC], n=5, note=note),
        _output("keeps-up", rows, min(cores, most), {name: output_rate_to_match(rows, name) for name in CODECS}),
        _output("one-core", rows, 1, dict.fromkeys(CODECS, 1.0)),
        _output("two-cores", rows, 2, dict.fromkeys(CODECS, 1.0)),
    ]


def _output(name: str, rows: pd.DataFrame, threads: int, over: dict[str, float]) -> Measured:
    """BF16 output of so many threads over each codec's number of GB/s."""
    mine = decoded(rows)
    mine = mine[mine["threads"] == threads].set_index("codec")[["gb_s", "low_gb_s", "high_gb_s"]]
    shares = {codec: tuple((mine.loc[codec] / gb_s).tolist()) for codec, gb_s in over.items()}
    own = shares.pop(DEFAULT_CODEC)
    others = "; ".join(f"{codec}: {v:.2f} [{low:.2f}, {high:.2f}]" for codec, (v, low, high) in shares.items())
    return Measured(f"zipmoe-decompression/{name}", *own, n=5,
                    note=f"{DEFAULT_CODEC}, median of the repeats and their range; {others}")  # fmt: skip
