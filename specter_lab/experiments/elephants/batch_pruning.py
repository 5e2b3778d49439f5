"""elephants-batch-pruning: finished sentences leave the expert computation (Elephants, batch pruning).

On a CPU the *counts* are measured: `switch-nano` translates batches of real sentences with and without pruning, and the
experts that each decoder step reads are counted. What that is worth in time is simulated for the paper's geometry: a
decoder step bound by memory takes as long as its bytes, non-expert weights and output layer included. On a GPU the
time itself is measured, in the paper's geometry with random weights, for lengths that spread more and more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured, need_gpu
from specter_lab.experiments.elephants.setting import DOMAIN, MAX_TOKENS, digest_of, sentences, translators
from specter_lab.experiments.elephants.setting import inputs as zoo_inputs
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.models.load import load_translator, shown_name
from specter_lab.models.switch import ELEPHANTS, SwitchGeometry
from specter_lab.models.zoo.translation import DIRECTIONS

BATCHES = (8, 20, 32, 64, 96)
SENTENCES = 480
AS_THEY_COME, BY_LENGTH = ORDERS = ("as they come", "by length")
GPU_BATCHES, SPREADS = (8, 32, 96), (0.0, 0.25, 0.5, 0.75, 1.0)
SIMULATED, MEASURED = "simulated", "measured"


def inputs(context: Context) -> dict[str, str]:
    """On a CPU the translators and the sentences; on a GPU nothing: weights are random."""
    return {} if context.tier == "gpu" else zoo_inputs(context)


def run(context: Context) -> pd.DataFrame:
    """CPU: one row per model, direction, batch size and order. GPU: one per system, batch size and spread of lengths."""
    if context.tier == "gpu":
        return pd.DataFrame(_gpu_rows(context))
    work = [
        jobs.Job(f"{shown_name(model)}, {direction}, batch {batch}, {order}", measure,
                 {"model": model, "digest": digest_of(model), "direction": direction, "batch": batch, "order": order,
                  "sentences_used": SENTENCES, "seed": context.seed}, cost=1 + 8 / batch)
        for model in translators(context) for direction in DIRECTIONS for batch in BATCHES for order in ORDERS
    ]  # fmt: skip
    return pd.DataFrame(jobs.run(context, work))


def step_bytes(geometry: SwitchGeometry, experts: np.ndarray) -> np.ndarray:
    """Bytes that decoder steps read, given the distinct experts per sparse layer: FP16, output layer included, no cache."""
    expert = 2 * geometry.hidden * geometry.ffn
    sparse = geometry.decoder_layers // 2
    attention = geometry.decoder_layers * (4 + 2) * geometry.hidden**2  # cross attention: queries and output only
    dense = (geometry.decoder_layers - sparse) * expert
    return 2 * (attention + dense + geometry.vocab * geometry.hidden + sparse * expert * experts)


def measure(
    model: str, digest: str, direction: str, batch: int, order: str, sentences_used: int, seed: int
) -> jobs.Rows:
    """One row: experts and simulated speed-up over all batches, with an interval over batches. `digest` names the weights."""
    from specter_lab.engine.bench_translate import distinct
    from specter_lab.engine.switch_model import read_switch
    from specter_lab.engine.translate import Options
    from specter_lab.engine.translate_text import translate_batches

    loaded = load_translator(model)
    network = read_switch(loaded.model)
    texts, _ = sentences(direction, sentences_used, seed)
    seconds, batches = {}, {}
    for prune in (False, True):
        began = time.perf_counter()
        batches[prune] = translate_batches(network, loaded.tokenizer, texts, direction, Options(max_tokens=MAX_TOKENS, prune=prune),
                                           batch, by_length=order == BY_LENGTH)  # fmt: skip
        seconds[prune] = time.perf_counter() - began
    counts = {prune: [distinct(b.result.experts, network.num_experts).double().mean(1).numpy() for b in found]
              for prune, found in batches.items()}  # per batch: [steps], mean over layers  # fmt: skip
    read = {prune: np.array([step_bytes(ELEPHANTS, steps).sum() for steps in found]) for prune, found in counts.items()}
    loads = {prune: np.array([steps.sum() for steps in found]) for prune, found in counts.items()}
    lengths = [(b.result.tokens != network.pad).sum(1).double() for b in batches[False]]
    speedup, kept = (
        ratio_interval(read[False], read[True], seed=seed),
        ratio_interval(loads[True], loads[False], seed=seed),
    )
    return [{
        "kind": SIMULATED, "model": loaded.name, "direction": direction, "batch": batch, "order": order, "domain": DOMAIN,
        "sentences": len(texts), "batches": len(lengths),
        "length_cv": float(np.mean([float(l.std() / l.mean()) for l in lengths if len(l) > 1])),
        "experts_per_step": float(loads[False].sum() / sum(map(len, counts[False]))),
        "experts_per_step_pruned": float(loads[True].sum() / sum(map(len, counts[True]))),
        "loads_kept_share": float(kept.estimate), "loads_kept_low": float(kept.low), "loads_kept_high": float(kept.high),
        "speedup": float(speedup.estimate), "speedup_low": float(speedup.low), "speedup_high": float(speedup.high),
        "cpu_seconds": round(seconds[False], 3), "cpu_seconds_pruned": round(seconds[True], 3),
        "equal_translations_share": _equal_share(batches[False], batches[True]),
    }]  # fmt: skip


def _equal_share(plain: Sequence, pruned: Sequence) -> float:
    same = [(a.result.tokens == b.result.tokens).all(1).double() for a, b in zip(plain, pruned)]
    return float(sum(s.sum() for s in same) / sum(len(s) for s in same))


def _gpu_rows(context: Context) -> list[dict]:
    """Measured in the paper's geometry.

    Raises:
        UserError: no CUDA GPU.
    """
    import torch

    need_gpu(context)
    from specter_lab.engine import bench_translate as bench

    rows = []
    for system in (bench.GROUPED, bench.INT4):
        model = bench.random_model(system)
        for row in bench.pruning_rows(system, model, batches=GPU_BATCHES, spreads=SPREADS, seed=context.seed):
            rows.append({
                "kind": MEASURED, "model": f"random 5.3B, {system}", "direction": "", "batch": row.batch, "order": f"spread {row.spread:g}",
                "domain": "random tokens", "sentences": row.batch, "batches": 1, "length_cv": row.length_cv,
                "experts_per_step": row.experts, "experts_per_step_pruned": row.experts_pruned,
                "loads_kept_share": row.experts_pruned / row.experts, "speedup": row.seconds / row.seconds_pruned,
                "seconds": row.seconds, "seconds_pruned": row.seconds_pruned, "equal_translations_share": float(row.equal),
            })  # fmt: skip
        del model
        torch.cuda.empty_cache()
    return rows


def plot(rows: pd.DataFrame) -> Figure:
    """a: expert loads that remain, against the spread of lengths within a batch; b: speed-up, and the paper's most."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    kind = rows["kind"].iloc[0]
    batches = sorted(rows["batch"].unique())
    colors = dict(zip(batches, sns.color_palette("viridis", len(batches))))
    named = rows["direction"].fillna("")
    for (group, part), mark in zip(rows.groupby(named.where(named != "", rows["model"])), "osD^"):
        for batch, points in part.groupby("batch"):
            for axis, column in ((left, "loads_kept_share"), (right, "speedup")):
                axis.plot(
                    points["length_cv"],
                    points[column],
                    mark,
                    color=colors[batch],
                    ms=5,
                    label=f"{group}, batch {batch}",
                )
    left.set(
        xlabel="spread of lengths within a batch (standard deviation / mean)",
        ylabel="expert loads that remain",
        ylim=(0, 1.05),
    )
    left.set_title("a  Experts that a step still reads", loc="left", fontsize=10)
    right.axhline(1.14, color="black", ls="--", lw=1, label="the paper: up to 1.14x")
    right.set(xlabel="spread of lengths within a batch", ylabel="decoder speed-up")
    right.set_title(f"b  What it is worth, {kind}", loc="left", fontsize=10)
    right.legend(fontsize=7, ncols=2)
    for axis in (left, right):
        axis.grid(alpha=0.25)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """The most that pruning gains, among batches of sentences as they come (or, on a GPU, of any spread)."""
    simulated = rows["kind"].iloc[0] == SIMULATED
    kept = rows[rows["order"] == AS_THEY_COME] if simulated else rows
    best = kept.loc[kept["speedup"].idxmax()]
    low, high = (float(best[name]) if simulated else None for name in ("speedup_low", "speedup_high"))
    where = f"{best['model']}, {best['direction']} batch {best['batch']}, {best['order']}; {best['loads_kept_share']:.0%} of expert loads remain"
    note = f"{where}; translations equal with and without: {rows['equal_translations_share'].min():.1%}"
    return [
        Measured(
            "elephants-batch-pruning/speedup",
            float(best["speedup"]),
            low,
            high,
            n=int(best["batches"]),
            simulated=simulated,
            note=note,
        )
    ]
