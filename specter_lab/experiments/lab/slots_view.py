"""One round as a film: what lies in the expert slots while the draft writes, the link copies and the target verifies.

    filmed = film(question)                    # or film(question, a_policy_of_yours)
    slider = show(filmed)                      # move through the round

The simulator runs as always; a listener at the policy's prefetcher notes the slots whenever it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from specter_lab.experiments.lab import what_if
from specter_lab.experiments.lab.player import player
from specter_lab.experiments.lab.what_if import Question
from specter_lab.experiments.specter.timeline import ACCEPT, round_rows, shown_round
from specter_lab.experiments.specter.timeline_figure import lanes, work_colors
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Policy, Prefetcher, Scene
from specter_lab.plan.residency import ABSENT, Slots
from specter_lab.plan.serve import Needs

PICTURES = 48  # of a film
EMPTY, NOT_NEEDED, NEEDED, PREFETCHED, MISSED = range(5)
STATES = {  # what a slot holds -> colour
    "empty": "white", "an expert this round does not need": "0.8", "an expert it needs": "#029e73",
    "one on its way, prefetched": "#cc78bc", "one on its way, missed": "#de8f05",
}  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """What the slots held from some time on."""

    from_ms: float
    expert_in: np.ndarray  # [L, S] or ABSENT
    ready_ms: np.ndarray  # [L, S] when its copy ends


@dataclass(frozen=True)
class Film:
    """One round of a simulation."""

    title: str
    rows: pd.DataFrame  # its work, as `timeline.round_rows` has it
    start_ms: float
    end_ms: float
    moments: tuple[Moment, ...]  # as long as the draft writes, and what the verification begins with
    after: Moment  # when the round has ended
    needed: np.ndarray  # [L, E] bool, experts of the verification

    @property
    def times_ms(self) -> np.ndarray:
        """Of the pictures, from the round's start: [PICTURES]."""
        return np.linspace(0, (self.end_ms - self.start_ms) * (1 - 1e-6), PICTURES)


def film(question: Question, policy: Policy | None = None) -> Film:
    """A usual round of a question, under `policy` or the one it names.

    Raises:
        UserError: as `what_if.simulated`.
    """
    policy = policy or find_policy(question.policy)
    found = what_if.simulated(question, policy)
    number = shown_round(found)
    start, end = float(found.rounds.start_ms[number]), float(found.rounds.end_ms[number])
    notes = _Notes(start, end)
    recorded = what_if.simulated(question, replace(policy, prefetch=notes.listening(policy.prefetch)), record=True)
    rows = pd.DataFrame(round_rows(recorded, number))
    title = f"{policy.title}, {question.profile}, {question.slots} slots per layer, K = {rows['depth'].max():.0f}"
    return Film(title, rows, start, end, tuple(notes.moments), notes.after(), notes.needed)


@dataclass
class _Notes:
    """Listens to the calls of one round. A call finds the slots as the one before it has left them."""

    start_ms: float
    end_ms: float
    moments: list[Moment] = field(default_factory=list)
    needed: np.ndarray | None = None
    _slots: Slots | None = None
    _last_ms: float | None = None  # of the latest call within the round
    _after: Moment | None = None

    def listening(self, prefetch: Callable[[Scene], Prefetcher]) -> Callable[[Scene], Prefetcher]:
        """The same prefetcher, overheard. Its class stays, for the simulator asks only what a class answers."""

        def make(scene: Scene) -> Prefetcher:
            prefetcher = prefetch(scene)
            begin, drafted, finish, ahead = prefetcher.begin, prefetcher.drafted, prefetcher.finish, prefetcher.ahead

            def at_begin(slots, depth, clock):
                self._slots = slots
                if self._last_ms is not None and self._after is None:
                    self._after = self._now(clock.now_ms)
                if clock.now_ms == self.start_ms and self._last_ms is None:
                    self._last_ms = clock.now_ms
                return begin(slots, depth, clock)

            def at_drafted(step, experts, weights, clock):
                self._note(clock.now_ms)
                return drafted(step, experts, weights, clock)

            def at_finish(clock):
                self._note(clock.now_ms)
                return finish(clock)

            def at_ahead(needs):
                self._verification(needs)
                return ahead(needs)

            prefetcher.begin, prefetcher.drafted = at_begin, at_drafted
            prefetcher.finish, prefetcher.ahead = at_finish, at_ahead
            return prefetcher

        return make

    def after(self) -> Moment:
        """The slots when the round had ended."""
        return self._after or self._now(self.end_ms)

    def _now(self, from_ms: float) -> Moment:
        return Moment(from_ms, self._slots.expert_in.copy(), self._slots.ready_ms.copy())

    def _note(self, now_ms: float) -> None:
        if self._last_ms is not None and self.needed is None:
            self.moments.append(self._now(self._last_ms))
            self._last_ms = now_ms

    def _verification(self, needs: Needs) -> None:
        if self._last_ms is None or self.needed is not None:
            return
        self.moments.append(self._now(self._last_ms))
        layer = np.repeat(np.arange(len(needs.first) - 1), np.diff(needs.first))
        self.needed = np.zeros(self._slots.slot_of.shape, bool)
        self.needed[layer, needs.experts] = True


def states(filmed: Film, at_ms: float) -> np.ndarray:
    """What every slot holds `at_ms` after the round's start: [L, S], numbers as STATES has them.

    A layer's slots are shown as the verification finds them until it computes, and as it leaves them afterwards. In between,
    those of its missing experts that stay have their slots.
    """
    now = filmed.start_ms + at_ms
    moment = [m for m in filmed.moments if m.from_ms <= now][-1]
    found = _held(filmed, moment, now)
    later, computing = _held(filmed, filmed.after, now), filmed.rows[filmed.rows["stream"] == "compute"]
    missed = filmed.rows[filmed.rows["work"].isin(["miss", "zero-copy"])]
    for layer, work in computing[computing["layer"] >= 0].groupby("layer"):
        begun, ended = work["simulated_start_ms"].min(), work["simulated_end_ms"].max()
        if at_ms >= ended:
            found[layer] = later[layer]
        elif at_ms >= begun:
            coming = missed[(missed["layer"] == layer) & (missed["simulated_start_ms"] <= at_ms)]
            for copy in coming.itertuples():
                slot = filmed.after.expert_in[layer] == copy.expert
                found[layer, slot] = NEEDED if copy.simulated_end_ms <= at_ms else MISSED
    return found


def _held(filmed: Film, moment: Moment, now_ms: float) -> np.ndarray:
    layers = np.arange(len(moment.expert_in))[:, None]
    held = np.where(filmed.needed[layers, moment.expert_in], NEEDED, NOT_NEEDED)
    held[moment.ready_ms > now_ms] = PREFETCHED
    held[moment.expert_in == ABSENT] = EMPTY
    return held


def show(filmed: Film) -> widgets.IntSlider:
    """The film, with a slider and a play button; returns the slider."""
    return player(lambda picture: [draw(filmed, float(filmed.times_ms[picture]))], last=PICTURES - 1, label="picture")


def draw(filmed: Film, at_ms: float) -> Figure:
    """The slots at one time, and below them the streams with a line there."""
    held = states(filmed, at_ms)
    streams = [name for name in ("compute", "H2D", "D2H", "CPU", "disk") if name in set(filmed.rows["stream"])]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9.5, 1.9 + 0.13 * len(held) + 0.3 * len(streams)), constrained_layout=True,
        height_ratios=(0.13 * len(held) + 0.3, 0.3 * len(streams)),
    )  # fmt: skip
    top.pcolormesh(
        held, cmap=ListedColormap(list(STATES.values())), vmin=-0.5, vmax=4.5, edgecolors="0.93", linewidth=0.3
    )
    top.invert_yaxis()
    top.set(xlabel="slot", ylabel="MoE layer")
    top.set_title(_said(filmed, held, at_ms), loc="left", fontsize=9)
    _streams(bottom, filmed, streams, at_ms)
    handles = [Patch(facecolor=color, edgecolor="0.8", label=name) for name, color in STATES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    plt.close(figure)
    return figure


def _said(filmed: Film, held: np.ndarray, at_ms: float) -> str:
    there = (held == NEEDED).sum() / filmed.needed.sum()
    coming = int(np.isin(held, (PREFETCHED, MISSED)).sum())
    return f"{filmed.title}\n{at_ms:.1f} ms (simulated): {there:.0%} of the needed experts are there, {coming} slots wait for a copy"


def _streams(axis: Axes, filmed: Film, streams: list[str], at_ms: float) -> None:
    axis.set_xlim(0, filmed.rows.loc[filmed.rows["work"] == ACCEPT, "simulated_end_ms"].iloc[0])
    lanes(axis, filmed.rows, streams, work_colors(filmed.rows), edge=0.5)
    axis.axvline(at_ms, color="black", linewidth=1.4)
    axis.set_xlabel("simulated ms since the round began (colours as in specter-timeline)", fontsize=8)
