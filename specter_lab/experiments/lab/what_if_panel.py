"""The sliders of lab-what-if and the bars they move."""

from __future__ import annotations

import time
from dataclasses import replace

import ipywidgets as widgets
import matplotlib.pyplot as plt
import seaborn as sns
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specter_lab.errors import UserError
from specter_lab.experiments.lab import what_if
from specter_lab.experiments.lab.what_if import CONTROLS, PARTS, Answer, Question
from specter_lab.experiments.specter.offload import MAX_DEPTH
from specter_lab.experiments.specter.setting import priced_as
from specter_lab.plan.hardware import profile_names

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _BROWN = sns.color_palette("colorblind", 6)
PART_COLORS = dict(zip(PARTS, (_BLUE, _GREEN, _ORANGE)))
MEMORY_COLORS = {
    "weights": "0.55",
    "int4 pool": _BLUE,
    "own copies": _RED,
    "kv cache": _PURPLE,
    "workspace": "0.8",
    "expert slots": _GREEN,
}


def draw(answers: dict[str, Answer]) -> Figure:
    """TPOT by part, stall by what hides it, and memory against what the machine has; one bar per answer."""
    figure, (times, copies, memory) = plt.subplots(
        1, 3, figsize=(12.5, 0.55 * len(answers) + 1.9), constrained_layout=True
    )
    names = list(answers)
    _stack(times, [answer.simulated_ms for answer in answers.values()], PART_COLORS, "{:.1f}")
    times.set(title="SIMULATED ms per token", xlabel="ms")
    for place, answer in enumerate(answers.values()):
        hidden = max(0.0, answer.simulated_hidden_share) if answer.simulated_h2d_mb_per_token else 0.0
        mb = answer.simulated_h2d_mb_per_token
        copies.barh(place, mb, color="0.85")
        copies.barh(place, mb * hidden, color=_PURPLE)
        copies.annotate(f" {mb:.0f} MB, {hidden:.0%} hidden", (0, place), va="center", fontsize=8)
    copies.set(title="SIMULATED copies per token", xlabel="MB (purple: behind other work)")
    _stack(memory, [answer.memory_gb for answer in answers.values()], MEMORY_COLORS, "{:.1f}")
    memory.axvline(next(iter(answers.values())).profile_gb, color="black", linestyle=":", linewidth=1.2)
    memory.set(title="GPU memory (dotted: the machine's)", xlabel="GB")
    for axis in (times, copies, memory):
        axis.set_yticks(range(len(names)), names if axis is times else [""] * len(names), fontsize=9)
        axis.invert_yaxis()
        axis.margins(x=0.14)
        axis.grid(axis="x", alpha=0.25)
    plt.close(figure)
    return figure


def _stack(axis: Axes, bars: list[dict[str, float]], colors: dict[str, object], total: str) -> None:
    for place, parts in enumerate(bars):
        left = 0.0
        for name, value in parts.items():
            axis.barh(place, value, left=left, color=colors[name], label=name)
            left += value
        axis.annotate(f" {total.format(left)}", (left, place), va="center", fontsize=9)
    handles = dict(zip(*axis.get_legend_handles_labels()[::-1]))
    axis.legend(handles.values(), handles.keys(), fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=3)


class Panel:
    """Widgets for one question, and the figure of its answer beside two that stay: the paper's setting and plain LRU."""

    def __init__(self, start: Question, zoo: tuple[str, ...]) -> None:
        choices, wide = what_if.policy_choices(), {"description_width": "110px"}
        layout = widgets.Layout(width="460px")
        say = {"style": wide, "layout": layout, "continuous_update": False}
        self.model = widgets.Dropdown(options=zoo, value=start.model, description="model", style=wide, layout=layout)
        self.policy = widgets.Dropdown(
            options=choices, value=start.policy, description="policy", style=wide, layout=layout
        )
        self.profile = widgets.Dropdown(
            options=profile_names(), value=start.profile, description="hardware", style=wide, layout=layout
        )
        self.slots = widgets.IntSlider(
            start.slots, min=1, max=priced_as(start.model).num_experts, description="slots per layer", **say
        )
        self.gb = widgets.FloatSlider(
            1, min=1, max=2, step=0.1, description="= budget, GB", readout_format=".1f", **say
        )
        self.depth = widgets.IntSlider(start.depth, min=0, max=MAX_DEPTH, description="depth K", **say)
        self.control = widgets.Dropdown(
            options={text: name for name, text in CONTROLS.items()},
            value=start.control,
            description="who sets K",
            style=wide,
            layout=layout,
        )
        self.seed, self.out, self.redraw_s, self.answer = start.seed, widgets.Output(), 0.0, None
        self._busy = False
        self._set_budget()
        for widget in (self.model, self.policy, self.profile, self.slots, self.depth, self.control):
            widget.observe(self._changed, "value")
        self.gb.observe(self._budget_moved, "value")
        left = widgets.VBox([self.model, self.policy, self.profile])
        right = widgets.VBox([self.slots, self.gb, self.depth, self.control])
        self.widget = widgets.VBox([widgets.HBox([left, right]), self.out])
        self.redraw()

    def question(self) -> Question:
        """What the widgets say."""
        return Question(self.model.value, self.policy.value, self.profile.value, self.slots.value, self.depth.value,
                        self.control.value, self.seed)  # fmt: skip

    def redraw(self) -> None:
        """Ask again and show the bars, with the seconds it took."""
        begun = time.perf_counter()
        with self.out:
            self.out.clear_output(wait=True)
            try:
                self.answer, figure = self._answers()
                display(figure)
                self.redraw_s = time.perf_counter() - begun
                print(_sentence(self.answer), f"Redrawn in {self.redraw_s:.2f} s.")
            except UserError as error:
                print(error)

    def _answers(self) -> tuple[Answer, Figure]:
        question = self.question()
        paper = replace(what_if.setting_of(question.model, question.profile, self.seed), slots=question.slots)
        mine = what_if.ask(question)
        shown = {
            "yours": mine,
            "Specter, paper mode, K*": what_if.ask(paper),
            "LRU, no draft": what_if.ask(replace(paper, policy="lru")),
        }
        return mine, draw(shown)

    def _changed(self, change: dict) -> None:
        if self._busy:
            return
        self._busy = True
        if change["owner"] is self.model:
            start = what_if.setting_of(self.model.value, self.profile.value, self.seed)
            self.slots.max = priced_as(self.model.value).num_experts
            self.slots.value, self.depth.value = start.slots, start.depth
        self._set_budget()
        self._busy = False
        self.redraw()

    def _budget_moved(self, change: dict) -> None:
        if not self._busy:
            self.slots.value = what_if.slots_within(self.question(), change["new"])

    def _set_budget(self) -> None:
        """The budget that the slots are, with the range that the slots' range is."""
        busy, self._busy = self._busy, True
        ends = [what_if.budget_gb(replace(self.question(), slots=count)) for count in (1, self.slots.max)]
        self.gb.min, self.gb.max = 0, ends[1] + 0.1  # first apart, so that no end crosses the other
        self.gb.min = ends[0]
        self.gb.value = what_if.budget_gb(self.question()) + 0.05
        self._busy = busy


def _sentence(answer: Answer) -> str:
    fits = "" if answer.fits else f" Does NOT fit: {sum(answer.memory_gb.values()):.1f} of {answer.profile_gb:g} GB."
    lossy = " This policy changes the output." if answer.lossy else ""
    return (
        f"SIMULATED: {answer.simulated_ms_per_token:.1f} ms/token, of which stall {answer.simulated_ms['stall']:.1f}; "
        f"mean K {answer.mean_depth:.1f}, {answer.tokens_per_round:.1f} tokens per round.{fits}{lossy}"
    )
