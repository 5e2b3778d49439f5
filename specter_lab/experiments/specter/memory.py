"""specter-memory: GPU memory of draft and target at 12K context, apart and shared (Specter, memory table).

Bytes follow exactly from the models' configurations, so no weights are needed. What the paper counts of the routed
experts is the top-k of every layer; a draft that routes freely needs its whole INT4 pool
on the GPU, and the target its expert slots. Every accounting stands here side by side. On the zoo the same arithmetic
is checked against the storages of a draft and a target that are really built.
"""

from __future__ import annotations

import hashlib

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter.routing import model_digest
from specter_lab.experiments.specter.setting import BUDGETS
from specter_lab.measure.allocation import allocated_bytes
from specter_lab.models.anatomy import Anatomy, anatomy_of
from specter_lab.models.geometry import GEOMETRY
from specter_lab.models.load import ZOO_MODELS, load, shown_name
from specter_lab.models.originals import config_for
from specter_lab.plan.memory import LEVELS, PARTS, Footprint, footprints

CONTEXT_TOKENS = 12 * 1024
ZOO_CONTEXT_TOKENS = 1024
GIB = 2**30  # what the paper calls GB
TOP_K, POOL, ALL = "top-k experts", "INT4 pool, top-k target experts", "INT4 pool, all target experts"
HIGH, LOW = "INT4 pool, slots at the high budget", "INT4 pool, slots at the low budget"
COUNTED, ALLOCATED = "counted", "allocated"
COLUMNS = ("draft", "target", "shared", "total")
PAPERS = {"Qwen1.5-MoE-A2.7B": "qwen", "Phi-3.5-MoE": "phi", "DeepSeek-V2-Lite": "deepseek"}  # model -> family
QWEN = "Qwen1.5-MoE-A2.7B"
PAPER = {  # Specter, "GB" of 2^30 bytes: draft, target, shared, total
    LEVELS[0]: (6.13, 7.27, None, 13.40), LEVELS[1]: (4.58, 5.72, 1.55, 11.85), LEVELS[2]: (2.66, 3.80, 3.47, 9.93),
    LEVELS[3]: (0.41, 1.55, 5.72, 7.68),
}  # fmt: skip
CLAIM_OF_LEVEL = dict(zip(LEVELS, ("independent", "shared-experts", "other-parameters", "kv")))


def inputs(context: Context) -> dict[str, str]:
    """Configurations counted and zoo weights allocated, name -> sha256."""
    configs = {name: config_for(name).to_json_string().encode() for name in _counted(context)}
    return {name: hashlib.sha256(config).hexdigest() for name, config in configs.items()} | {
        name: model_digest(name) for name in _zoo(context)
    }


def run(context: Context) -> pd.DataFrame:
    """Rows of every model x accounting x level of sharing, in bytes and GiB."""
    rows = [row for name in _counted(context) for row in count(name)]
    work = [jobs.Job(name, allocate, {"model": name, "digest": model_digest(name)}) for name in _zoo(context)]
    return pd.DataFrame(rows + jobs.run(context, work))


def _counted(context: Context) -> list[str]:
    """The paper's three models, and whatever else the user names."""
    known = {row.hub_id for row in GEOMETRY.values() if row.name in PAPERS} | set(ZOO_MODELS) | set(PAPERS)
    return [*PAPERS, *(name for name in context.models if name not in known)]


def _zoo(context: Context) -> list[str]:
    return [name for name in context.models if name in ZOO_MODELS]


def count(model: str) -> jobs.Rows:
    """Rows of one model under every accounting, from its configuration alone."""
    anatomy = anatomy_of(model)
    return [
        _row(shown_name(model), accounting, CONTEXT_TOKENS, level)
        for accounting, (draft, target) in _accountings(anatomy).items()
        for level in footprints(anatomy, context_tokens=CONTEXT_TOKENS, draft_experts=draft, target_experts=target)
    ]


def _accountings(model: Anatomy) -> dict[str, tuple[int, int]]:
    """Name -> INT4 experts of the draft and BF16 experts of the target that are counted per layer."""
    experts, top_k = model.num_experts, model.top_k
    found = {TOP_K: (top_k, top_k), POOL: (experts, top_k)}
    if model.name in PAPERS:
        budget = BUDGETS[PAPERS[model.name]]
        found |= {LOW: (experts, budget.low_slots), HIGH: (experts, budget.high_slots)}
    return found | {ALL: (experts, experts)}


def allocate(model: str, digest: str) -> jobs.Rows:
    """Rows of one zoo model: counted, and in the storages of tensors. `digest` is here to name the weights."""
    anatomy, live = anatomy_of(model), load(model, dtype=torch.bfloat16).model
    experts = anatomy.num_experts
    rows = []
    counted = footprints(anatomy, context_tokens=ZOO_CONTEXT_TOKENS, draft_experts=experts, target_experts=experts)
    for shared_parts, level in enumerate(counted):
        row = _row(model, ALL, ZOO_CONTEXT_TOKENS, level)
        found = allocated_bytes(live, ZOO_CONTEXT_TOKENS, PARTS[:shared_parts])
        rows += [row, row | {"source": ALLOCATED, "draft_bytes": None, "target_bytes": None, "shared_bytes": None,
                             "total_bytes": found}]  # fmt: skip
    return rows


def _row(model: str, accounting: str, context_tokens: int, counted: Footprint) -> dict:
    return {
        "model": model, "source": COUNTED, "accounting": accounting, "context_tokens": context_tokens,
        "level": counted.level, "draft_bytes": counted.draft, "target_bytes": counted.target,
        "shared_bytes": counted.shared, "total_bytes": counted.total,
    }  # fmt: skip


def table(rows: pd.DataFrame, model: str, accounting: str) -> pd.DataFrame:
    """Draft, target, shared and total in GiB (columns) by level of sharing (rows), as in the paper."""
    kept = (rows["model"] == model) & (rows["accounting"] == accounting) & (rows["source"] == COUNTED)
    return rows[kept].set_index("level")[[f"{c}_bytes" for c in COLUMNS]].set_axis(COLUMNS, axis=1) / GIB


def remaining(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of the independent memory that is left when everything is shared: accounting (rows), model (columns)."""
    totals = rows[rows["source"] == COUNTED].pivot(index=["accounting", "model"], columns="level", values="total_bytes")
    left = (totals[LEVELS[-1]] / totals[LEVELS[0]]).unstack("model")
    return left.reindex(index=[a for a in (TOP_K, POOL, LOW, HIGH, ALL) if a in left.index],
                        columns=list(dict.fromkeys(rows["model"])))  # fmt: skip


def plot(rows: pd.DataFrame) -> Figure:
    """Stacked bars: one panel per original, sharing level by level, in the paper's accounting and with the pool."""
    models = [name for name in dict.fromkeys(rows["model"]) if name not in ZOO_MODELS]
    size = (4.3 * len(models), 4.2)
    figure, axes = plt.subplots(1, len(models), figsize=size, squeeze=False, constrained_layout=True)
    colors = dict(zip(("shared", "target", "draft"), sns.color_palette("colorblind", 3)))
    for axis, model in zip(axes[0], models):
        ticks, labels = [], []
        for group, accounting in enumerate((TOP_K, POOL)):
            sizes = table(rows, model, accounting)
            at = group * (len(LEVELS) + 0.8) + pd.RangeIndex(len(LEVELS)).to_numpy()
            bottom = 0
            for part, color in colors.items():
                axis.bar(at, sizes[part], bottom=bottom, color=color, width=0.8, label=part if group == 0 else None)
                bottom = bottom + sizes[part]
            for x, total in zip(at, bottom):
                axis.annotate(f"{total:.1f}", (x, total), ha="center", va="bottom", fontsize=7)
            if model == QWEN and group == 0:
                axis.scatter(at, [PAPER[level][3] for level in LEVELS], marker="_", s=260, color="black", zorder=3,
                             label="the paper's total")  # fmt: skip
            axis.text(at.mean(), -0.30, f"{accounting}\n{bottom.iloc[-1] / bottom.iloc[0]:.0%} left", ha="center",
                      va="top", fontsize=8, transform=axis.get_xaxis_transform())  # fmt: skip
            if bottom.iloc[0] == bottom.iloc[1]:  # Phi
                axis.annotate("no shared\nexperts", (at[1], bottom.iloc[1] / 2), ha="center", va="center", fontsize=6)
            ticks += list(at)
            labels += list(LEVELS)
        axis.set_xticks(ticks, labels=labels, rotation=40, ha="right", fontsize=7)
        axis.set(title=model)
        axis.margins(y=0.12)
        axis.grid(alpha=0.25, axis="y")
    axes[0, 0].set_ylabel(f"GiB at {CONTEXT_TOKENS // 1024}K tokens of context")
    axes[0, 0].legend(fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Qwen in the paper's accounting, value by value, and what sharing leaves with and without the whole pool."""
    sizes = table(rows, QWEN, TOP_K)
    note = "the paper's GB are 2^30 bytes, its context 12,288 tokens"
    found = [
        Measured(f"specter-memory/{CLAIM_OF_LEVEL[level]}@{part}", float(sizes.loc[level, part]), n=1, note=note)
        for level, parts in PAPER.items()
        for part, value in zip(COLUMNS, parts)
        if value is not None
    ]
    left = remaining(rows)[QWEN]
    slots = f"{left[LOW]:.3f} and {left[HIGH]:.3f} with the target's slots at the low and high budget"
    return found + [
        Measured("specter-memory/saving", float(left[TOP_K]), n=1),
        Measured("specter-memory/saving-whole-pool", float(left[POOL]), n=1, note=slots),
    ]
