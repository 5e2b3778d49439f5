"""The sliders of lab-what-if."""

from __future__ import annotations

import time
from dataclasses import replace

import ipywidgets as widgets
from IPython.display import display
from matplotlib.figure import Figure

from specter_lab.errors import UserError
from specter_lab.experiments import results
from specter_lab.experiments.lab import what_if
from specter_lab.experiments.lab.what_if import CONTROLS, Answer, Question
from specter_lab.experiments.lab.what_if_bars import draw
from specter_lab.experiments.lab.what_if_trace import record, timeline
from specter_lab.experiments.specter.offload import MAX_DEPTH
from specter_lab.experiments.specter.setting import priced_as
from specter_lab.plan.hardware import profile_names


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
        self.button = widgets.Button(description="timeline and Chrome trace", layout=widgets.Layout(width="200px"))
        self.button.on_click(lambda _: self.show_trace())
        self._busy = False
        self._set_budget()
        for widget in (self.model, self.policy, self.profile, self.slots, self.depth, self.control):
            widget.observe(self._changed, "value")
        self.gb.observe(self._budget_moved, "value")
        left = widgets.VBox([self.model, self.policy, self.profile, self.button])
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

    def show_trace(self) -> None:
        """Record the run behind the bars: its trace as a file, one of its rounds as a figure below the bars."""
        with self.out:
            try:
                recorded = record(self.question())
                display(timeline(recorded))
                print(f"Chrome trace of the whole run, for Perfetto: {results.shown(recorded.trace)}")
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
