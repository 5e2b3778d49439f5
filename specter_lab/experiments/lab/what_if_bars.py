"""The bars of lab-what-if: where the time goes, what is copied, what memory is taken; one row per answer."""

from __future__ import annotations

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from specter_lab.experiments.lab.what_if import PARTS, Answer
from specter_lab.experiments.specter import panels

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _BROWN, _PINK, _GREY, _YELLOW, _CYAN = sns.color_palette("colorblind")
PART_COLORS = dict(zip(PARTS, (_BLUE, _GREEN, _ORANGE)))
COPY_COLORS = {"copied behind other work": _PURPLE, "copied while compute waits": "0.85"}
MEMORY_COLORS = {  # a colour means one thing in the whole figure
    "weights": "0.55",
    "int4 pool": _CYAN,
    "own copies": _RED,
    "kv cache": _PINK,
    "workspace": "0.3",
    "expert slots": _BROWN,
    "host copies": _YELLOW,
}
HEIGHT = 0.7
ROOM = (1.25, 1.65, 1.6)  # of each panel, over its longest bar: for the numbers behind the bars
CAPACITY = {"color": "black", "linewidth": 1.6}


def draw(answers: dict[str, Answer]) -> Figure:
    """Time by part, copies by what hides them, and memory, with a mark at what each answer's machine has."""
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 0.42 * len(answers) + 1.7), sharey=True, constrained_layout=True)
    times, copies, memory = axes
    for place, answer in enumerate(answers.values()):
        _stack(times, place, answer.simulated_ms, PART_COLORS)
        _say(times, place, answer.simulated_ms_per_token, f"{answer.simulated_ms_per_token:.1f}")
        mb, hidden = answer.simulated_h2d_mb_per_token, _hidden(answer)
        _stack(copies, place, dict(zip(COPY_COLORS, (mb * hidden, mb * (1 - hidden)))), COPY_COLORS)
        _say(copies, place, mb, f"{mb:.0f}" + (f", {hidden:.0%} hidden" if mb else ""))
        held = sum(answer.memory_gb.values())
        _stack(memory, place, answer.memory_gb, MEMORY_COLORS)
        _say(memory, place, max(held, answer.profile_gb), f"{held:.1f}" + ("" if answer.fits else ": does not fit"))
        memory.plot([answer.profile_gb] * 2, [place - HEIGHT / 2, place + HEIGHT / 2], **CAPACITY)
    for place, (axis, said) in enumerate(zip(axes, ("ms per token", "MB copied per token", "GB of GPU memory"))):
        panels.title(axis, place, said if axis is memory else f"{said} (simulated)")
        axis.set_xlim(0, ROOM[place] * max(text.xy[0] for text in axis.texts))
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", alpha=0.25)
    times.set_yticks(range(len(answers)), list(answers), fontsize=8)
    times.set_ylim(len(answers) - 0.5, -0.5)
    figure.legend(handles=_legend(answers), loc="outside lower center", ncols=6, fontsize=7.5)
    plt.close(figure)
    return figure


def _hidden(answer: Answer) -> float:
    return max(0.0, answer.simulated_hidden_share) if answer.simulated_h2d_mb_per_token else 0.0


def _legend(answers: dict[str, Answer]) -> list:
    held = {name for answer in answers.values() for name in answer.memory_gb}
    colors = PART_COLORS | COPY_COLORS | {name: color for name, color in MEMORY_COLORS.items() if name in held}
    return [
        *(Patch(color=color, label=name) for name, color in colors.items()),
        Line2D([], [], marker="|", markersize=9, markeredgewidth=1.6, color="black", linestyle="none",
               label="memory of the machine"),
    ]  # fmt: skip


def _stack(axis: Axes, place: int, parts: dict[str, float], colors: dict[str, object]) -> None:
    left = 0.0
    for name, value in parts.items():
        axis.barh(place, value, left=left, height=HEIGHT, color=colors[name])
        left += value


def _say(axis: Axes, place: int, x: float, text: str) -> None:
    axis.annotate(f" {text}", (x, place), va="center", fontsize=8)
