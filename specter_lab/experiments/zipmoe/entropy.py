"""zipmoe-entropy: what the bit fields of BF16 experts hold, and what codecs leave of them (ZipMoE, entropy and size).

Trained experts stand beside two controls of as many weights: Gaussian ones and ones drawn as `nn.Linear` draws them. If
Gaussian weights compress as well, the saving is a property of BF16 and not of training. The floor is what the exponents'
entropy leaves when signs and mantissas stay raw. zipnn is measured where it is installed; DFloat11's size is the published one.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure
from torch import Tensor

from specter_lab.compress.bench_bitfield import CHUNK_WEIGHTS, expert_tensor, measure_zipnn
from specter_lab.compress.bitfield import SHARDS, bit_patterns, decode, encode, field_entropies
from specter_lab.compress.codecs import codec
from specter_lab.engine.store.pack import DEFAULT_CODEC
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.models.load import shown_name

CODECS = ("lz4", "lz4hc", "zstd-1", "zstd-3", "zstd-9", "huffman", DEFAULT_CODEC)
JUDGED = {"zstd": "zstd-1", "lz4hc": "lz4hc"}  # which of them the paper's names are judged on
GAUSSIAN, UNIFORM = "Gaussian", "uniform"
CONTROL_WEIGHTS, FAN_IN = 6_000_000, 2048
PAPER_BITS, DFLOAT11 = (2.55, 2.65), 0.70  # arXiv 2504.11651, whole models

inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Rows: source of weights x codec -> size share; entropies repeat."""
    work = [
        jobs.Job(name, measure, {"source": name, "digest": routing.model_digest(name), "seed": 0})
        for name in context.models
    ]
    work += [
        jobs.Job(name, measure, {"source": name, "digest": "", "seed": context.seed}) for name in (GAUSSIAN, UNIFORM)
    ]
    return pd.DataFrame(jobs.run(context, work))


def weights_of(source: str, seed: int) -> Tensor:
    """All experts of a model, or a control: [n] bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    if source == GAUSSIAN:
        return (0.02 * torch.randn(CONTROL_WEIGHTS, generator=generator)).bfloat16()
    if source == UNIFORM:
        return ((2 * torch.rand(CONTROL_WEIGHTS, generator=generator) - 1) / FAN_IN**0.5).bfloat16()
    return expert_tensor(source)


def measure(source: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one source; every chunk is decoded again and compared. `digest` names the weights."""
    weights = weights_of(source, seed)
    bits = field_entropies(weights)
    base = {
        "source": shown_name(source), "n_weights": weights.numel(), "sign_bits": round(bits["sign"], 4),
        "exponent_bits": round(bits["exponent"], 4), "mantissa_bits": round(bits["mantissa"], 4),
        "floor_share": round((8 + bits["exponent"]) / 16, 5),
    }  # fmt: skip
    rows = []
    for name in CODECS:
        stored = 0
        for chunk in weights.split(CHUNK_WEIGHTS):
            fields = encode(chunk, codec(name), SHARDS)
            if (bit_patterns(decode(fields, codec(name))) != bit_patterns(chunk)).any():
                raise RuntimeError(f"{name} did not give the weights of {source} back")
            stored += fields.stored_bytes
        rows.append(base | {"codec": name, "size_share": round(stored / weights.nbytes, 5), "note": ""})
    peer = measure_zipnn(weights)
    share, note = (None, peer) if isinstance(peer, str) else (round(peer.size_share, 5), "")
    return [*rows, base | {"codec": "zipnn", "size_share": share, "note": note}]


def sizes(rows: pd.DataFrame) -> pd.DataFrame:
    """Size share by source (rows) and codec (columns), the floor last."""
    order = list(dict.fromkeys(rows["source"]))
    table = rows.pivot(index="source", columns="codec", values="size_share")
    return table.assign(floor=rows.groupby("source")["floor_share"].first()).loc[order, [*CODECS, "zipnn", "floor"]]


def models(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of trained weights."""
    return rows[~rows["source"].isin([GAUSSIAN, UNIFORM])]


def plot(rows: pd.DataFrame) -> Figure:
    """Left: bits per field. Right: what every codec leaves, the floor as a line."""
    table, first = sizes(rows), rows.drop_duplicates("source").set_index("source")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4), width_ratios=(2, 3), constrained_layout=True)
    colors = sns.color_palette("colorblind", len(table.columns))
    left.plot(first.index, first["exponent_bits"], "o", color=colors[0])
    left.axhspan(*PAPER_BITS, color="0.5", alpha=0.35, label="the paper's trained models")
    for i, bits in enumerate(first["exponent_bits"]):
        left.annotate(f"{bits:.2f}", (i, bits), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8)
    left.set(ylabel="entropy of the exponent (of 8 bits)", ylim=(2.2, 2.75))
    left.tick_params(axis="x", rotation=25)
    left.legend(fontsize=8, loc="lower left")
    columns = [c for c in table.columns if c != "floor" and table[c].notna().any()]
    for j, name in enumerate(columns):
        at = [i + 0.11 * (j - len(columns) / 2 + 0.5) for i in range(len(table))]
        right.plot(at, table[name], "o", color=colors[j], label="zstd without matches" if name == "huffman" else name)
    for i, floor in enumerate(table["floor"]):
        right.hlines(
            floor, i - 0.42, i + 0.42, color="black", linewidth=1.2, label="entropy's floor" if i == 0 else None
        )
    right.axhline(DFLOAT11, color="0.5", linestyle=":", linewidth=1.2, label="DFloat11 (published)")
    right.set_xticks(range(len(table)), labels=table.index, rotation=25)
    right.set(ylabel="compressed size / BF16 size", ylim=(0.63, 0.84), xlim=(-0.6, len(table) - 0.4))
    right.grid(alpha=0.25, axis="y")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=9)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Means over the trained models with their range, and the controls; sizes are judged on the paper's codecs."""
    table, bits = sizes(rows), rows.drop_duplicates("source").set_index("source")["exponent_bits"]
    trained = models(rows).drop_duplicates("source")["source"].tolist()
    above = table["huffman"] - table["floor"]
    found = [_range("exponent", bits[trained])]
    for paper, name in JUDGED.items():
        found.append(
            _range(
                f"size@{paper}",
                table.loc[trained, name],
                _beside(name, table.loc[trained, ["huffman", DEFAULT_CODEC]].mean()),
            )
        )
        found.append(Measured(f"zipmoe-entropy/gaussian-size@{paper}", float(table.loc[GAUSSIAN, name]), n=CONTROL_WEIGHTS,
                              note=_beside(name, table.loc[GAUSSIAN])))  # fmt: skip
    note = f"bound 1/sqrt({FAN_IN}); the entropy depends on where the bound lies between two powers of two"
    return [
        *found,
        Measured("zipmoe-entropy/gaussian-exponent", float(bits[GAUSSIAN]), n=CONTROL_WEIGHTS),
        Measured("zipmoe-entropy/uniform-exponent", float(bits[UNIFORM]), n=CONTROL_WEIGHTS, note=note),
        Measured("zipmoe-entropy/near-floor", float(above.max()), n=len(above), note=f"largest: {above.idxmax()}"),
    ]  # fmt: skip


def _beside(name: str, shares: pd.Series) -> str:
    """The codec that is judged, and the sizes of those it is not judged on: the smallest, and the one of stores."""
    return f"{name}; without matches {shares['huffman']:.3f}, {DEFAULT_CODEC} (of stores) {shares[DEFAULT_CODEC]:.3f}"


def _range(name: str, values: pd.Series, note: str = "") -> Measured:
    return Measured(f"zipmoe-entropy/{name}", float(values.mean()), float(values.min()), float(values.max()), n=len(values),
                    note="; ".join(filter(None, [note, "interval: range over models"])))  # fmt: skip
