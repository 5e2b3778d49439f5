"""The figure of specter-timeline: a Gantt chart per model and mode, with hits and misses in colours."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE = sns.color_palette("colorblind", 5)
COLORS = {
    "draft step": _BLUE, "attention": "0.75", "dense layers": "0.75", "resident experts": _GREEN, "expert": _RED,
    "prefetch": _PURPLE, "miss": _ORANGE,
}  # fmt: skip
LABELS = {
    "draft step": "draft step (INT4)", "attention": "attention and shared weights", "resident experts": "experts that are there (hits)",
    "expert": "expert that was waited for", "prefetch": "copy, prefetched", "miss": "copy, demanded (miss)",
}  # fmt: skip
COMPUTE, H2D = 1, 0  # lanes, from below
HEIGHT = 0.8


def draw(rows: pd.DataFrame) -> Figure:
    """A row per model and mode: the whole round, and one layer of the verification."""
    rounds = list(rows.groupby(["model", "mode"], sort=False))
    figure, axes = plt.subplots(
        len(rounds),
        2,
        figsize=(12.5, 1.45 * len(rounds) + 0.9),
        squeeze=False,
        width_ratios=(2.4, 1),
        constrained_layout=True,
    )
    longest = rows.groupby("model")["simulated_end_ms"].max()
    for (whole, detail), ((model, mode), found) in zip(axes, rounds):
        _lanes(whole, found, edge=0.5)
        whole.set_xlim(0, 1.04 * longest[model])
        whole.set_title(f"{model}, {mode}: {_copies(found)}", fontsize=9, loc="left", pad=3)
        _events(whole, found)
        window = layer_window(found)
        _lanes(detail, found, edge=1.2)
        detail.set_xlim(*window)
        detail.set_title(f"layer {layer_shown(found) + 1} of the verification", fontsize=8, loc="left", pad=3)
        detail.set_yticks([])
        whole.axvspan(*window, color="0.5", alpha=0.25, linewidth=0)
    for axis in axes[-1]:
        axis.set_xlabel("simulated ms since the round began", fontsize=9)
    handles = [Patch(color=COLORS[work], label=label) for work, label in LABELS.items()]
    handles.append(Patch(facecolor="0.5", alpha=0.25, label="enlarged at the right"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    plt.close(figure)
    return figure


def layer_shown(found: pd.DataFrame) -> int:
    """The middle one of the layers that had both hits and misses; the middle one of all where there is none."""
    layers = [set(found.loc[found["work"] == work, "layer"]) for work in ("attention", "resident experts", "miss")]
    both = sorted(set.intersection(*layers)) or sorted(layers[0])
    return int(both[len(both) // 2])


def layer_window(found: pd.DataFrame) -> tuple[float, float]:
    """From the start of the shown layer to its end, with a little room."""
    layer = layer_shown(found)
    computing = found[(found["stream"] == "compute") & (found["layer"] == layer)]
    start, end = computing["simulated_start_ms"].min(), computing["simulated_end_ms"].max()
    room = 0.04 * (end - start)
    return start - room, end + room


def _lanes(axis: Axes, found: pd.DataFrame, edge: float) -> None:
    for stream, lane in (("compute", COMPUTE), ("H2D", H2D)):
        for work, color in COLORS.items():
            mine = found[(found["stream"] == stream) & (found["work"] == work)]
            if len(mine):
                start, end = mine["simulated_start_ms"].to_numpy(), mine["simulated_end_ms"].to_numpy()
                thin = stream == "compute" and work != "draft step"  # so that microseconds are seen at all
                edges = (
                    {"edgecolors": color, "linewidth": edge}
                    if thin
                    else {"edgecolors": "white", "linewidth": 0.4 if len(mine) < 60 else 0}
                )
                axis.broken_barh(list(zip(start, end - start)), (lane - HEIGHT / 2, HEIGHT), facecolors=color, **edges)
    axis.set(ylim=(-0.5, 1.5))
    axis.set_yticks([H2D, COMPUTE], ["H2D", "compute"], fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _copies(found: pd.DataFrame) -> str:
    counts = found["work"].value_counts()
    return f"{counts.get('prefetch', 0)} experts prefetched, {counts.get('miss', 0)} loaded on demand"


def _events(axis: Axes, found: pd.DataFrame) -> None:
    drafted = found.loc[found["work"] == "draft step", "simulated_end_ms"].max()
    verifies = found.loc[found["work"] == "attention", "simulated_start_ms"].min()
    accept = found[found["work"] == "accept"].iloc[0]
    end = accept["simulated_end_ms"]
    for x in (drafted, verifies, end):
        axis.axvline(x, color="black", linewidth=0.8, linestyle=":")
    text = f"{accept['committed']:.0f} tokens,\n{accept['rolled_back']:.0f} rolled back"
    axis.annotate(
        text, (end, 0.5), xytext=(3, 0), textcoords="offset points", fontsize=7, va="center", annotation_clip=False
    )
