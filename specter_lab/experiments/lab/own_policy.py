"""lab-write-a-policy: a policy of yours beside shipped ones, in the simulator, on recorded windows of a zoo model.

    rows = beside({"mine": POLICY}, question)      # one row per policy, with what no policy can exceed
    bars(rows)

Times are simulated. The limits are counted, or follow from counted copies and the machine's rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps

import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import display
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specter_lab.errors import UserError
from specter_lab.experiments.lab import what_if
from specter_lab.experiments.lab.what_if import Question
from specter_lab.experiments.specter import hit_ceilings, panels
from specter_lab.experiments.specter.offload import MAX_DEPTH
from specter_lab.plan.bounds import best_hit_rate, most_hits, passes_of
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Loads, Policy, Prefetcher, Scene
from specter_lab.plan.residency import ABSENT, Slots
from specter_lab.plan.serve import BY_KERNEL, LOAD
from specter_lab.plan.workload import Workload

SHIPPED = ("specter", "specter-fast", "sp-l", "lru", "oracle")
JUDGED = hit_ceilings.TOKEN_WEIGHTED
ANSWERS = ("begin", "drafted", "finish", "rest", "verifying")  # of a prefetcher: each says what to copy now


def checked(policy: Policy) -> Policy:
    """The same policy, its answers looked at first: a slot that is asked for twice would spoil the simulation in silence."""

    def make(scene: Scene) -> Prefetcher:
        prefetcher = policy.prefetch(scene)
        held: list[Slots] = []

        def looked_at(name: str, answer: Callable[..., Loads]) -> Callable[..., Loads]:
            @wraps(answer)
            def call(*arguments):
                if name == "begin":
                    held[:] = arguments[:1]
                loads = answer(*arguments)
                check_loads(loads, held[0], f"{policy.id}: {name}")
                return loads

            return call

        for name in ANSWERS:
            setattr(prefetcher, name, looked_at(name, getattr(prefetcher, name)))
        return prefetcher

    return replace(policy, prefetch=make)


def check_loads(loads: Loads, slots: Slots, who: str) -> None:
    """Raise UserError when an answer is not distinct absent experts, given as two arrays of equal length."""
    try:
        layers, experts = (np.asarray(part) for part in loads)
    except (TypeError, ValueError):
        raise UserError(f"{who} answered {loads!r}: give two arrays, layers and experts, or NO_LOADS") from None
    if (
        layers.shape != experts.shape
        or layers.ndim != 1
        or not all(np.issubdtype(a.dtype, np.integer) for a in (layers, experts))
    ):
        raise UserError(f"{who} answered arrays of shapes {layers.shape} and {experts.shape}, kinds {layers.dtype} and "
                        f"{experts.dtype}: give layers and experts as whole numbers, as many of each")  # fmt: skip
    for values, limit, what in zip((layers, experts), slots.slot_of.shape, ("layer", "expert")):
        if len(values) and not (0 <= values.min() and values.max() < limit):
            raise UserError(f"{who} asked for {what} {values.max() if values.max() >= limit else values.min()}: there are 0 to {limit - 1}")  # fmt: skip
    there = slots.slot_of[layers, experts] != ABSENT
    if there.any():
        raise UserError(f"{who} asked for expert {experts[there][0]} of layer {layers[there][0]}, which has a slot already: "
                        f"ask for those with `slots.slot_of == ABSENT` only")  # fmt: skip
    if len(set(zip(layers.tolist(), experts.tolist()))) < len(layers):
        raise UserError(f"{who} asked for an expert twice in one answer: name each once")


def beside(mine: Mapping[str, Policy], question: Question, shipped: Sequence[str] = SHIPPED) -> pd.DataFrame:
    """Policies of yours and shipped ones at the question's slots, depth and machine, one row each.

    Columns: what is simulated (`simulated_`), counted hits and bytes, and after each its limit:

        hit_rate, hit_ceiling                      token-weighted; the best contents of the slots for every window
        h2d_mb_per_token, fewest_mb_per_token      the fewest copies that these slots allow at this depth (`plan.bounds`)
        simulated_ms_per_token, fewest_ms_per_token   its own computing, or these copies on the link, whichever takes longer

    A limit is NaN for a policy that it does not bind: one that leaves experts out, or computes some on the CPU.

    Raises:
        UserError: as `what_if.simulated`, or `check_loads` about an answer of your policy.
    """
    policies = {title: checked(policy) for title, policy in mine.items()}
    policies |= {find_policy(name).title: find_policy(name) for name in shipped}
    rows = []
    for title, policy in policies.items():
        found = what_if.simulated(question, policy)
        answer = what_if.answer_of(question, policy, found)
        computing_ms = answer.simulated_ms["draft"] + answer.simulated_ms["compute"]
        rows.append(
            {
                "policy": title, "yours": title in mine, "lossy": policy.lossy,
                "simulated_ms_per_token": answer.simulated_ms_per_token,
                "simulated_stall_ms_per_token": answer.simulated_ms["stall"],
                "h2d_mb_per_token": answer.simulated_h2d_mb_per_token,
                "hit_rate": found.hits.rates()[JUDGED],
                "tokens_per_round": answer.tokens_per_round,
            }
            | limits(question, policy, computing_ms)
        )  # fmt: skip
    return pd.DataFrame(rows)


def limits(question: Question, policy: Policy, computing_ms: float) -> dict[str, float]:
    """What this policy cannot exceed at its depth, whatever it plans; see `beside`.

    Args:
        computing_ms: per token, what it computes.
    """
    scene, traffic = what_if.scene_of(question), what_if.traffic_of(question.model, question.seed)
    chosen = np.array(what_if.requests_of(traffic.requests))
    few = Workload(traffic.requests.windows.of(chosen), traffic.requests.layers)
    depth, slots = (0 if policy.draft is None else question.depth), policy.slots(scene)
    passes = passes_of(few, range(few.requests), what_if.NEW_TOKENS, depth=depth)
    if policy.verify_experts is not None or policy.miss not in (LOAD, *BY_KERNEL) or policy.draft == "fewer":
        return dict.fromkeys(("hit_ceiling", "fewest_mb_per_token", "fewest_ms_per_token"), float("nan"))
    if hit_ceilings.demand_only(policy):
        ceiling = best_hit_rate(passes, slots)
    else:
        ceiling = hit_ceilings.best_window_rates(few, slots, depth, what_if.NEW_TOKENS)[JUDGED]
    tokens = sum(_tokens(few, request, depth) for request in range(few.requests))
    copies = (int(passes.used[passes.counted].sum()) - int(most_hits(passes, slots).sum())) / tokens
    costs = scene.costs
    return {
        "hit_ceiling": ceiling,
        "fewest_mb_per_token": copies * costs.expert_bytes / 1e6,
        "fewest_ms_per_token": max(computing_ms, copies * min(costs.pace_ms, costs.of_pass(1).read_through_ms)),
    }


def _tokens(workload: Workload, request: int, depth: int) -> int:
    """Tokens that a request commits until it has NEW_TOKENS or more."""
    position = 0
    while position < what_if.NEW_TOKENS:
        position += workload.round([request], [position], depth).accepted[0] + 1
    return position


def bars(rows: pd.DataFrame) -> Figure:
    """Time, bytes and hits of every policy, yours in colour, each with a black mark at its limit."""
    shown = (
        ("simulated_ms_per_token", "fewest_ms_per_token", "ms per token (simulated)"),
        ("h2d_mb_per_token", "fewest_mb_per_token", "MB copied per token"),
        ("hit_rate", "hit_ceiling", "hit rate, token-weighted"),
    )
    mine, others, *_ = sns.color_palette("colorblind")[1::-1]
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 0.34 * len(rows) + 1.3), sharey=True, constrained_layout=True)
    for place, (axis, (value, limit, said)) in enumerate(zip(axes, shown)):
        axis.barh(rows.index, rows[value], color=[mine if own else others for own in rows["yours"]], height=0.66)
        for y, x in rows[limit].dropna().items():
            axis.plot([x, x], [y - 0.42, y + 0.42], color="black", linewidth=2)
        for y, x in rows[value].items():
            said_there = f"{x:.0%} " if value == "hit_rate" else f"{x:.0f} "
            axis.annotate(said_there, (x, y), va="center", ha="right", fontsize=8, color="white")
        axis.set_xlim(0, 1.05 * max(rows[value].max(), rows[limit].max()))
        panels.title(axis, place, said)
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", alpha=0.25)
    axes[0].set_yticks(rows.index, rows["policy"] + np.where(rows["lossy"], " (lossy)", ""), fontsize=8)
    axes[0].invert_yaxis()
    mark = Line2D([], [], marker="|", markersize=9, markeredgewidth=2, color="black", linestyle="none")
    figure.legend([mark], ["limit at these slots and this K"], loc="outside lower center", fontsize=8)
    plt.close(figure)
    return figure


def panel(mine: Mapping[str, Policy], start: Question, shipped: Sequence[str] = SHIPPED) -> widgets.VBox:
    """`bars` with sliders for the slots, which are a budget, and for K; shown at once.

    Returns:
        The sliders, `slots` first.
    """
    scene, wide = what_if.scene_of(start), widgets.Layout(width="460px")
    how = {"continuous_update": False, "layout": wide, "style": {"description_width": "110px"}}
    slots = widgets.IntSlider(start.slots, 1, scene.num_experts, description="slots per layer", **how)
    depth = widgets.IntSlider(start.depth, 0, MAX_DEPTH, description="depth K", **how)
    said = widgets.Label()

    def answer() -> Figure:
        question = replace(start, slots=slots.value, depth=depth.value)
        said.value = f"= {what_if.budget_gb(question):.1f} GB of GPU memory for {find_policy(question.policy).title}"
        return bars(beside(mine, question, shipped))

    box = widgets.VBox([widgets.HBox([slots, said]), depth])
    display(box)
    place = display(answer(), display_id=True)
    for slider in (slots, depth):
        slider.observe(lambda _: place.update(answer()), "value")
    return box
