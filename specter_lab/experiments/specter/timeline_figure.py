"""Rounds on their streams: a Gantt chart per model and mode, with hits and misses in colours."""

from __future__ import annotations

from itertools import cycle

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from specter_lab.experiments.specter import panels
from specter_lab.plan.streams import STREAM_NAMES

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _BROWN, _PINK, _, _YELLOW, _CYAN = sns.color_palette("colorblind")
COLORS = {
    "draft step": _BLUE, "attention": "0.75", "dense layers": "0.75", "resident experts": _GREEN, "expert": _RED,
    "prefetch": _PURPLE, "miss": _ORANGE, "zero-copy": _PINK, "CPU expert": _YELLOW, "routing": _BROWN, "disk read": _CYAN,
}  # fmt: skip
MORE_COLORS = sns.color_palette("husl", 5)  # of work that has no colour yet, in the order it is met
LABELS = {
    "draft step": "draft step (INT4)", "attention": "attention and shared weights", "dense layers": "attention and shared weights",
    "resident experts": "experts that are there (hits)", "expert": "expert that was waited for", "prefetch": "copy, prefetched",
    "miss": "copy, demanded (miss)", "zero-copy": "expert read in host memory", "CPU expert": "expert computed by the CPU",
    "routing": "routing, told to the host", "disk read": "expert read from disk",
}  # fmt: skip
DRAFT, BRIEF = "draft step", ("compute", "D2H")  # work of milliseconds on a stream whose other work takes microseconds
ACCEPT = "accept"  # the round's end; drawn as a line
HEIGHT = 0.8
SEEN = 0.01  # of the axis: narrower pieces of work stand side by side without a line between them
EVENT = {"color": "black", "linewidth": 0.9, "linestyle": ":"}


def draw(rows: pd.DataFrame) -> Figure:
    """A row per model and mode: the whole round, and one layer of the verification."""
    rounds = list(rows.groupby(["model", "mode"], sort=False))
    colors, streams = work_colors(rows), [name for name in STREAM_NAMES if name in set(rows["stream"])]
    figure, axes = plt.subplots(
        len(rounds),
        2,
        figsize=(7.6, (0.55 + 0.33 * len(streams)) * len(rounds) + 1.0),
        squeeze=False,
        width_ratios=(2.4, 1),
        constrained_layout=True,
    )
    longest = rows.groupby("model")["simulated_end_ms"].max()
    for place, ((whole, detail), ((model, mode), found)) in enumerate(zip(axes, rounds)):
        whole.set_xlim(0, 1.04 * longest[model])
        lanes(whole, found, streams, colors, edge=0.5)
        panels.title(whole, 2 * place, f"{model}, {mode}")
        _events(whole, found)
        window = layer_window(found)
        detail.set_xlim(*window)
        lanes(detail, found, streams, colors, edge=1.2)
        panels.title(detail, 2 * place + 1, f"its layer {layer_shown(found) + 1}")
        detail.set_yticks([])
        whole.axvspan(*window, color="0.5", alpha=0.25, linewidth=0)
    axes[-1, 0].set_xlabel("simulated ms since the round began", fontsize=8)
    axes[-1, 1].set_xlabel("simulated ms", fontsize=8)
    named = {LABELS.get(work, work): color for work, color in colors.items()}
    handles: list = [Patch(color=color, label=label) for label, color in named.items()]
    handles.append(Patch(facecolor="0.5", alpha=0.25, label="enlarged at the right"))
    handles.append(Line2D([], [], **EVENT, label="draft ends, verification begins, round ends"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=7.5)
    plt.close(figure)
    return figure


def work_colors(rows: pd.DataFrame) -> dict[str, object]:
    """The colour of every kind of work in these rows."""
    others = [work for work in dict.fromkeys(rows["work"]) if work not in COLORS and work != ACCEPT]
    known = {work: color for work, color in COLORS.items() if work in set(rows["work"])}
    return known | dict(zip(others, cycle(MORE_COLORS)))


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


def lanes(axis: Axes, found: pd.DataFrame, streams: list[str], colors: dict[str, object], edge: float) -> None:
    """The work of one round, a lane per stream; `edge` widens what takes microseconds, in points."""
    left, right = axis.get_xlim()
    for lane, stream in enumerate(reversed(streams)):
        for work, color in colors.items():
            mine = found[(found["stream"] == stream) & (found["work"] == work)]
            if len(mine):
                start, end = mine["simulated_start_ms"].to_numpy(), mine["simulated_end_ms"].to_numpy()
                apart = 0.4 if (end - start).mean() > SEEN * (right - left) else 0
                edges = {"edgecolors": "white", "linewidth": apart}
                if stream in BRIEF and work != DRAFT:  # so that microseconds are seen at all
                    edges = {"edgecolors": color, "linewidth": edge}
                axis.broken_barh(list(zip(start, end - start)), (lane - HEIGHT / 2, HEIGHT), facecolors=color, **edges)
    axis.set(ylim=(-0.5, len(streams) - 0.5))
    axis.set_yticks(range(len(streams)), streams[::-1], fontsize=7.5)
    axis.tick_params(axis="x", labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _events(axis: Axes, found: pd.DataFrame) -> None:
    drafted = found.loc[found["work"] == DRAFT, "simulated_end_ms"].max()
    verifies = found.loc[found["work"] == "attention", "simulated_start_ms"].min()
    accept, counts = found[found["work"] == ACCEPT].iloc[0], found["work"].value_counts()
    end = accept["simulated_end_ms"]
    for x in (drafted, verifies, end):
        if pd.notna(x):  # without a draft there is no end of it
            axis.axvline(x, **EVENT)
    lines = [f"{accept['committed']:.0f} committed", f"{accept['rolled_back']:.0f} rolled back"]
    lines += [f"{counts.get('prefetch', 0)} prefetched", f"{counts.get('miss', 0)} on demand"]
    middle = sum(axis.get_ylim()) / 2
    axis.annotate("\n".join(lines), (end, middle), xytext=(3, 0), textcoords="offset points", fontsize=6.5, va="center",
                  annotation_clip=False)  # fmt: skip
