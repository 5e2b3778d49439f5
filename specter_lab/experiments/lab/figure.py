"""The figure of lab-your-model: what verification needs, what drafting yields, what both would cost."""

from __future__ import annotations

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specter_lab.experiments.lab.report import Estimate, Report
from specter_lab.measure.acceptance import expected_accepted


def plot(report: Report) -> Figure:
    """Distinct experts against K, tokens per round against K, and simulated milliseconds per token against K."""
    figure, (experts, tokens, times) = plt.subplots(1, 3, figsize=(12.5, 3.7), constrained_layout=True)
    blue, orange, green = sns.color_palette("colorblind", 3)
    _experts(experts, report, blue, orange)
    _tokens(tokens, report, green)
    _times(times, report, blue)
    for axis in (experts, tokens, times):
        axis.grid(alpha=0.25)
        axis.set_ylim(bottom=0)
    plt.close(figure)
    return figure


def _experts(axis: Axes, report: Report, blue: tuple, orange: tuple) -> None:
    for name, color in (("prefill", blue), ("decode", orange)):
        rows = [row for row in report.explosion if getattr(row, name) is not None]
        label = "prompts" if name == "prefill" else "continuations"
        _curve(axis, [row.window for row in rows], [getattr(row, name) for row in rows], color, label)
    windows = [row.window for row in report.explosion]
    axis.plot(windows, [row.uniform_routing for row in report.explosion], ":", color="0.4", label="uniform routing")
    slots = report.simulated.slots_per_layer
    axis.axhline(slots, color="0.6", linewidth=0.8)
    axis.annotate(f"{slots} slots fit (simulated machine)", (windows[-1], slots), fontsize=7, color="0.4", ha="right",
                  va="bottom")  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(windows, [str(window) for window in windows])
    axis.set(title="expert explosion, measured", xlabel="tokens in the window, K", ylabel="distinct experts per layer")
    axis.legend(fontsize=8)


def _tokens(axis: Axes, report: Report, green: tuple) -> None:
    rows = [row for row in report.depths if row.depth > 0]
    depths = [row.depth for row in rows]
    _curve(axis, depths, [row.tokens_per_round for row in rows], green, "measured rounds")
    expected = [1 + expected_accepted(row.accepted_per_checked.value, row.depth) for row in rows]
    axis.plot(depths, expected, ":", color="0.4", label="same acceptance at every position")
    axis.plot(depths, [depth + 1 for depth in depths], "--", color="0.7", linewidth=1, label="all accepted")
    axis.set(title="speculative rounds, measured", xlabel="draft depth K", ylabel="tokens per round")
    axis.legend(fontsize=8)


def _times(axis: Axes, report: Report, blue: tuple) -> None:
    depths = [row.depth for row in report.depths]
    _curve(axis, depths, [row.simulated_ms_per_token for row in report.depths], blue, "")
    best = next(row for row in report.depths if row.depth == report.simulated.best_depth)
    axis.plot(best.depth, best.simulated_ms_per_token.value, "*", color="black", markersize=12)
    axis.annotate(f"K* = {best.depth}", (best.depth, best.simulated_ms_per_token.value), xytext=(0, 10),
                  textcoords="offset points", ha="center")  # fmt: skip
    axis.set(title=f"SIMULATED: {report.simulated.profile}, {report.simulated.memory_gb:g} GB",
             xlabel="draft depth K (0: plain decoding)", ylabel="ms per token", xticks=depths)  # fmt: skip


def _curve(axis: Axes, x: list[int], estimates: list[Estimate], color: tuple, label: str) -> None:
    """Values with their intervals as a band."""
    axis.plot(x, [e.value for e in estimates], marker="o", markersize=4, color=color, label=label)
    axis.fill_between(x, [e.low for e in estimates], [e.high for e in estimates], color=color, alpha=0.2, linewidth=0)
