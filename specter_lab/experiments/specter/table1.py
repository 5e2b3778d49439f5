"""specter-table1: how much of the routing survives each quantiser (Specter, Table 1).

Every quantiser replaces the routed experts only, so that all differences in routing come from them. Two protocols:
teacher-forced (both models read the same requests) for all, and free-running (the draft continues from its own
tokens, the target verifies) for the 4-bit ones, which are the drafts of the paper.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.compress.quantizers import QUANTIZERS, not_run_reason
from specter_lab.experiments import jobs
from specter_lab.experiments.claims import share_of_pairs_in_order
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.measure import fidelity
from specter_lab.measure.capture import capture
from specter_lab.measure.draft import free_running_draft
from specter_lab.measure.fidelity import Fidelity
from specter_lab.measure.prompts import PROMPT_SETS, TokenizedRequests
from specter_lab.models.experts import with_experts
from specter_lab.models.load import shown_name
from specter_lab.paths import CACHE

REQUESTS_PER_SET = 40  # five sets: 200 requests
TEACHER_FORCED, FREE_RUNNING = "teacher-forced", "free-running"
GGUF_BY_BITS = ("gguf-q2_k", "gguf-q3_k", "gguf-q4_0", "gguf-q4_k", "gguf-q5_k", "gguf-q6_k", "gguf-q8_0")
COSTS = {"gptqmodel-gptq": 26.0, "gptqmodel-awq": 35.0, "autoawq": 40.0, None: 4.0}  # seconds, roughly
TICKS = (0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)  # of the figure
PAPER_MEANS = {"GGUF Q2": 0.9296, "GGUF Q8": 0.9938}  # Specter [S]; the table's cells are not known


def inputs(context: Context) -> dict[str, str]:
    """Models and texts read, name -> sha256; and which quantisers cannot run here."""
    absent = {job.name: job.arguments["not_run"] for job in _jobs(context) if job.arguments["not_run"]}
    return routing.inputs(context.models) | absent


def run(context: Context) -> pd.DataFrame:
    """Rows of every model x quantiser x protocol x prompt set ("all" and each of the five)."""
    return pd.DataFrame(jobs.run(context, _jobs(context)))


def _jobs(context: Context) -> list[jobs.Job]:
    return [
        jobs.Job(
            f"{model}, {name}",
            measure,
            {
                "model": model, "digest": routing.inputs_digest(model), "quantizer": name, "seed": context.seed,
                "not_run": not_run_reason(name, routing.model_type(model)),
            },
            cost=COSTS[quantizer.job],
        )
        for model in context.models
        for name, quantizer in QUANTIZERS.items()
    ]  # fmt: skip


def measure(model: str, digest: str, quantizer: str, seed: int, not_run: str | None) -> jobs.Rows:
    """All rows of one model and one quantiser. `digest` is here to name what it reads in the cache key."""
    bits = QUANTIZERS[quantizer].bits
    base = {"model": shown_name(model), "quantizer": quantizer, "bits": bits}
    if not_run:
        return [base | {"protocol": TEACHER_FORCED, "prompt_set": "all", "status": not_run}]
    question = routing.ask(model, REQUESTS_PER_SET, seed)
    source = question.source
    experts = routing.quantized(question, quantizer, CACHE)
    draft = with_experts(source.model, experts.banks)
    base |= {"bits_per_weight": round(experts.bits_per_weight, 4), "status": "ok"}
    if experts.coverage is not None:
        base |= {"starved_experts": len(experts.coverage.starved)}
    base |= {"notes": "; ".join(experts.notes)}

    trace = capture(draft, question.tokens, question.origin(quantizer))
    rows = _rows(fidelity.compare(routing.reference_trace(question, CACHE), trace), question.tokens, seed)
    rows = [base | {"protocol": TEACHER_FORCED} | row for row in rows]
    if bits == 4:
        tokens = question.tokens.at_least(routing.PREFIX_TOKENS)
        windows = free_running_draft(
            source.model, draft, tokens, question.origin(), question.origin(quantizer),
            prefix_tokens=routing.PREFIX_TOKENS, depth=routing.DEPTH, token_budget=routing.DRAFT_BUDGET,
        )  # fmt: skip
        for row in _rows(fidelity.compare(windows.target, windows.draft), tokens, seed):
            of_set = [row["prompt_set"] in ("all", request.prompt_set) for request in tokens.requests]
            accepted = {"accepted_per_window": round(float(windows.accepted[of_set].mean()), 3)}
            rows.append(base | {"protocol": FREE_RUNNING} | row | accepted)
    return rows


def _rows(match: Fidelity, tokens: TokenizedRequests, seed: int) -> jobs.Rows:
    """One row for all requests and one per prompt set, every definition of a match with its name."""
    set_of_request = np.array([request.prompt_set for request in tokens.requests])  # [R]
    rows = []
    for name in ("all", *PROMPT_SETS):
        in_set = np.isin(set_of_request, PROMPT_SETS if name == "all" else name)  # [R]
        chosen = in_set[match.request_index]  # [T]
        request_index = match.request_index[chosen]  # [T]
        row: dict = {"prompt_set": name}
        for definition in fidelity.DEFINITIONS:
            row[f"{definition}_mean"] = getattr(match, definition)[chosen].mean(dtype=np.float64)
        overlap = match.overlap[chosen]  # [T, L]
        interval = fidelity.mean_interval(overlap, request_index, seed=seed)
        row |= {"overlap_ci_low": interval.low, "overlap_ci_high": interval.high}
        # The first MoE layer sees no quantised expert before it routes, so it always matches.
        row |= {"overlap_after_first_layer_mean": overlap[:, 1:].mean(dtype=np.float64)}
        row = {key: value if key == "prompt_set" else round(float(value), 6) for key, value in row.items()}
        rows.append(row | {"n_requests": len(np.unique(request_index)), "n_tokens": len(request_index)})
    return rows


def summary(rows: pd.DataFrame, protocol: str = TEACHER_FORCED) -> pd.DataFrame:
    """The rows over all prompt sets that were run, in the order of the registry."""
    kept = rows[(rows["prompt_set"] == "all") & (rows["protocol"] == protocol) & (rows["status"] == "ok")]
    order = {name: i for i, name in enumerate(QUANTIZERS)}
    return kept.sort_values(["model", "quantizer"], key=lambda c: c.map(order) if c.name == "quantizer" else c)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Specter's Table 1: mean overlap per quantiser (rows) and model (columns); the mean only where all models ran."""
    wide = rows[(rows["prompt_set"] == "all") & (rows["protocol"] == TEACHER_FORCED)]
    wide = wide.pivot(index="quantizer", columns="model", values="overlap_mean")
    wide = wide.reindex(index=list(QUANTIZERS), columns=list(dict.fromkeys(rows["model"])))
    bits = summary(rows).groupby("quantizer")["bits_per_weight"].mean()
    return wide.assign(mean=wide.mean(axis=1, skipna=False)).pipe(
        lambda t: t.assign(bits_per_weight=bits.reindex(t.index))
    )


def plot(rows: pd.DataFrame) -> Figure:
    """Mean overlap (on a scale that is logarithmic in the misses) against measured bits per weight, one panel a model."""
    shown = summary(rows).assign(family=lambda t: t["quantizer"].map(_family))
    models = list(dict.fromkeys(rows["model"]))
    families = list(dict.fromkeys(shown["family"]))
    colors = dict(zip(families, sns.color_palette("colorblind", len(families))))
    markers = dict(zip(families, "osD^vPX"))
    figure, axes = plt.subplots(
        1, len(models), figsize=(3.9 * len(models), 4), sharey=True, squeeze=False, constrained_layout=True
    )
    for axis, model in zip(axes[0], models):
        for name, part in shown[shown["model"] == model].groupby("family", sort=False):
            part = part.sort_values("bits_per_weight")
            missed = 1 - part[["overlap_mean", "overlap_ci_low", "overlap_ci_high"]].T.to_numpy()
            axis.errorbar(
                part["bits_per_weight"], missed[0], yerr=np.abs(missed[1:] - missed[0]), label=name, color=colors[name],
                marker=markers[name], markersize=5, linewidth=1, capsize=2, alpha=0.9,
            )  # fmt: skip
        for label, value in PAPER_MEANS.items():
            axis.axhline(1 - value, color="0.5", linewidth=0.8, linestyle=":")
            axis.annotate(f"paper, {label} mean", (9.4, 1 - value), fontsize=7, color="0.35", ha="right", va="bottom")
        axis.set(title=model, xlabel="measured bits per expert weight", xlim=(1.8, 9.5), yscale="log")
        axis.grid(alpha=0.25)
    axes[0, 0].invert_yaxis()
    axes[0, 0].set_yticks([1 - tick for tick in TICKS], [f"{100 * tick:g} %" for tick in TICKS])
    axes[0, 0].minorticks_off()
    axes[0, 0].set_ylabel("routed experts kept\n(mean overlap, 95 % interval over requests)")
    handles = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    plt.close(figure)
    return figure


def _family(quantizer: str) -> str:
    if quantizer == "gguf-q4_0":
        return "GGUF Q4_0"
    if quantizer == "gptq-int4-batched":
        return "GPTQ, batched (ours)"
    return {"gptq": "GPTQ", "awq": "AWQ", "autoawq": "AutoAWQ", "gguf": "GGUF K-quants", "rtn": "round to nearest"}[
        quantizer.split("-")[0]
    ]


def claims(rows: pd.DataFrame) -> list[Measured]:
    """What the rows say about the claims on Table 1."""
    shown = summary(rows)
    by_quantizer = shown.set_index(["quantizer", "model"])

    def mean_over_models(name: str, quantizer: str) -> Measured:
        cells = by_quantizer.loc[quantizer]
        means = cells[["overlap_mean", "overlap_ci_low", "overlap_ci_high"]].mean()
        notes = ("interval: ends averaged over models", *dict.fromkeys(cells["notes"].dropna()))
        note = "; ".join(filter(None, notes))
        return Measured(f"specter-table1/{name}", *map(float, means), n=int(cells["n_requests"].min()), note=note)

    orders = [share_of_pairs_in_order([by_quantizer.loc[(q, m), "overlap_mean"] for q in GGUF_BY_BITS])
              for m in dict.fromkeys(shown["model"])]  # fmt: skip
    worst = shown[shown["bits"] == 4].sort_values("overlap_mean").iloc[0]
    return [
        mean_over_models("gguf-q2-mean", "gguf-q2_k"),
        mean_over_models("gguf-q8-mean", "gguf-q8_0"),
        Measured("specter-table1/gguf-ordering", float(np.mean(orders)), n=len(orders)),
        Measured(
            "specter-table1/int4-above-90", *map(float, worst[["overlap_mean", "overlap_ci_low", "overlap_ci_high"]]),
            n=int(worst["n_requests"]), note=f"smallest: {worst['quantizer']} on {worst['model']}",
        ),
    ]  # fmt: skip
