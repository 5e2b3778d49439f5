"""elephants-table2: what per-channel int8 and int4 cost in translation quality (Elephants, Table 2).

The paper's model is not public. Measured here on `switch-nano`, a translator of the same kind (32 experts, top-1, every
other layer) for software interface text: BLEU before and after, on the same sentences, with the interval of a paired
bootstrap. Experts only, as in the paper, and all linear layers; both divisors.
"""

from __future__ import annotations

from itertools import product

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.compress import per_channel
from specter_lab.compress.switch import EXPERTS, SCOPES, quantized_share, quantized_switch
from specter_lab.engine.switch_model import read_switch
from specter_lab.engine.translate import Options
from specter_lab.engine.translate_text import translate_texts
from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.elephants.setting import DOMAIN, MAX_TOKENS, digest_of, inputs, sentences, translators
from specter_lab.measure import translation
from specter_lab.models.load import load_translator, shown_name
from specter_lab.models.zoo.translation import DIRECTIONS

__all__ = ["DOMAIN", "claims", "inputs", "plot", "run"]
BEAMS = (1, 2)
SENTENCES = 1000
NONE = "none"  # scope of the full model's rows
PAPER = {  # (direction, beam, bits) -> change of BLEU
    ("en-de", 1, 8): -0.028, ("en-de", 1, 4): -0.052, ("en-de", 2, 8): 0.051, ("en-de", 2, 4): -0.180,
    ("de-en", 1, 8): -0.084, ("de-en", 1, 4): 0.044, ("de-en", 2, 8): -0.027, ("de-en", 2, 4): -0.031,
}  # fmt: skip
PAPER_MEAN = {8: -0.007, 4: -0.167}  # of ten language pairs


def run(context: Context) -> pd.DataFrame:
    """One row per model, direction, beam, bits, divisor and scope; bits 16 is the model as it is."""
    work = [
        jobs.Job(
            f"{shown_name(model)}, {direction}, beam {beam}", measure,
            {"model": model, "digest": digest_of(model), "direction": direction, "beam": beam,
             "sentences_used": SENTENCES, "seed": context.seed}, cost=beam,
        )
        for model in translators(context) for beam in sorted(BEAMS, reverse=True) for direction in DIRECTIONS
    ]  # long ones first: two processes end together  # fmt: skip
    return pd.DataFrame(jobs.run(context, work))


def measure(model: str, digest: str, direction: str, beam: int, sentences_used: int, seed: int) -> jobs.Rows:
    """The model as it is, and quantised in every way. `digest` is here to name the weights."""
    loaded = load_translator(model)
    sources, references = sentences(direction, sentences_used, seed)
    options = Options(beam=beam, max_tokens=MAX_TOKENS, narrow=True)

    def translated(network) -> list[str]:
        return translate_texts(read_switch(network), loaded.tokenizer, sources, direction, options)

    common = {"model": loaded.name, "direction": direction, "beam": beam, "sentences": len(sources), "domain": DOMAIN}
    before = translated(loaded.model)
    full = translation.bleu_statistics(before, references)

    def row(network, after: list[str], statistics, **how) -> dict:
        score, change = translation.bleu(statistics, seed), translation.bleu_change(full, statistics, seed)
        chrf = translation.chrf(after, references, seed)
        return common | how | {
            "bleu": score.estimate, "bleu_low": score.low, "bleu_high": score.high, "chrf": chrf.estimate, "chrf_low": chrf.low,
            "chrf_high": chrf.high, "change": change.estimate, "change_low": change.low, "change_high": change.high,
            "sentences_changed_share": sum(a != b for a, b in zip(before, after)) / len(before),
            "quantised_share": quantized_share(loaded.model, network),
        }  # fmt: skip

    rows = [row(loaded.model, before, full, bits=16, divisor="", scope=NONE)]
    for bits, divisor, scope in product(per_channel.BITS, per_channel.DIVISORS, SCOPES):
        network = quantized_switch(loaded.model, bits, divisor, scope)
        after = translated(network)
        statistics = translation.bleu_statistics(after, references)
        rows.append(row(network, after, statistics, bits=bits, divisor=divisor, scope=scope))
    return [
        {key: value if isinstance(value, str | int) else float(value) for key, value in found.items()} for found in rows
    ]


def papers_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows quantised as in the paper: experts only, the default divisor; of the first model."""
    first = rows["model"].iloc[0]
    return rows[(rows["model"] == first) & (rows["scope"] == EXPERTS) & (rows["divisor"] == per_channel.CLIPPING)]


def changes(rows: pd.DataFrame) -> pd.DataFrame:
    """Change of BLEU with its interval as text: direction, beam, bits (rows) by scope and divisor (columns)."""
    kept = rows[rows["bits"] < 16]
    shown = kept.assign(
        change=[f"{r.change:+.2f} [{r.change_low:+.2f}, {r.change_high:+.2f}]" for r in kept.itertuples()]
    )
    return shown.pivot(index=["model", "direction", "beam", "bits"], columns=["scope", "divisor"], values="change")


def plot(rows: pd.DataFrame) -> Figure:
    """Change of BLEU with its interval for every setting, and the paper's."""
    first = rows["model"].iloc[0]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, constrained_layout=True)
    ways = [(scope, divisor) for scope in SCOPES for divisor in per_channel.DIVISORS]
    colors = sns.color_palette("colorblind", len(ways))
    settings = [(direction, beam) for direction in DIRECTIONS for beam in BEAMS]
    for axis, bits in zip(axes, (8, 4)):
        for number, ((scope, divisor), color) in enumerate(zip(ways, colors)):
            part = rows[
                (rows["model"] == first)
                & (rows["bits"] == bits)
                & (rows["scope"] == scope)
                & (rows["divisor"] == divisor)
            ]
            part = part.set_index(["direction", "beam"]).loc[settings]
            at = [i + 0.17 * (number - 1.5) for i in range(len(settings))]
            error = [part["change"] - part["change_low"], part["change_high"] - part["change"]]
            axis.errorbar(
                at, part["change"], yerr=error, fmt="o", ms=4, color=color, capsize=2, label=f"{scope}, {divisor}"
            )
        axis.scatter(range(len(settings)), [PAPER[*setting, bits] for setting in settings], marker="_", s=300, color="black",
                     label="the paper's (experts only)", zorder=3)  # fmt: skip
        axis.axhline(0, color="0.6", lw=0.8)
        axis.set_xticks(range(len(settings)), [f"{direction}\nbeam {beam}" for direction, beam in settings])
        axis.set_title(f"int{bits}", loc="left", fontsize=10)
        axis.grid(alpha=0.25, axis="y")
    axes[0].set_ylabel(f"change of BLEU\n({first}, {DOMAIN})")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Every change of the table, and the means over directions and beams."""
    kept = papers_rows(rows)
    found = []
    for row in kept.itertuples():
        note = f"{row.model} on {DOMAIN}, BLEU {row.bleu - row.change:.1f} before; the paper's change {PAPER[row.direction, row.beam, row.bits]:+.3f}"
        found.append(Measured(f"elephants-table2/bleu-change@{row.direction}-beam{row.beam}-int{row.bits}", row.change,
                              row.change_low, row.change_high, n=int(row.sentences), note=note))  # fmt: skip
    for bits, part in kept.groupby("bits"):
        mean = float(part["change"].mean())
        half = (
            float((part["change_high"] - part["change_low"]).mean()) / 2
        )  # the settings share their sentences: not narrower
        found.append(Measured(f"elephants-table2/mean-bleu-change@int{bits}", mean, mean - half, mean + half, n=len(part),
                              note="mean over two directions and two beams, not ten pairs"))  # fmt: skip
    return found
