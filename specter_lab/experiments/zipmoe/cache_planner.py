"""zipmoe-cache-planner: does the planner foresee hits (ZipMoE, cache planner)?

The planner knows use by rank from earlier prompts and promises a law: how many of a layer's active experts fall into a pool
of the first s ranks. Held-out prompts tell what happened. Two kinds of ranks: *causal*, by recent use before the token, which
is what a runtime can have, and *hindsight*, by use in the very prompts that are counted, which is what a plot shows. A router
that draws at random is the null. The paper's released code plans for 22, 21 and 10 active experts instead of 6, 4 and 2; what
its pools cost is the expected makespan of a layer with the right number, by this machine-independent cost model: simulated.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from specter_lab.experiments import jobs
from specter_lab.experiments.context import Context, Measured
from specter_lab.experiments.specter import routing
from specter_lab.measure.bootstrap import ratio_interval
from specter_lab.measure.decode import decode
from specter_lab.measure.prompts import select, tokenize
from specter_lab.measure.trace import Origin, Trace
from specter_lab.models.load import load, placement, shown_name
from specter_lab.plan.zipmoe.cache import RULES, PoolCache
from specter_lab.plan.zipmoe.pools import Pools, Sizes, expected_makespan, grid, plan_pools
from specter_lab.plan.zipmoe.popularity import causal_ranks
from specter_lab.plan.zipmoe.ranks import (
    bernoulli_weights,
    conditional_law,
    inclusion,
    poisson_binomial,
    success_probabilities,
)
from specter_lab.plan.zipmoe.schedule import by_blocks, timeline
from specter_lab.plan.zipmoe.work import Costs, State, work_of

TRAIN_PER_SET, HELD_OUT_PER_SET = 50, 50
# Greedy text of small models repeats itself, and recent use would look like a better guide than it is.
TEMPERATURE = 1.0
NEW_TOKENS = 128
POOL_SHARES = (0.1, 0.25, 0.5)  # of the experts of a layer
RELEASED = {"deepseek": 22, "qwen": 21, "phi": 10}  # active experts in the paper's released code (Switch: 10 for 1)
RULE_REQUESTS = 20
CAUSAL, HINDSIGHT = "causal", "hindsight"
TRAINED, NULL = "trained router", "uniform router"
HISTORY, CONDITIONAL, INDEPENDENT = LAWS = ("from history", "conditional Bernoulli", "Poisson-binomial")
COSTS = Costs(read_sm_s=3.0, read_shard_s=0.35, decompress_s=0.7, recover_s=0.2, execute_s=1.0, shards=3, workers=2)
SIZES = Sizes(full=200, sign_mantissa=100, exponents=33)

inputs = routing.inputs_of


def run(context: Context) -> pd.DataFrame:
    """Rows: model x router x ranks x pool x law x hits -> predicted and observed probability; and plans."""
    return routing.rows_per_model(context, measure)


def traces(model: str, seed: int) -> tuple[Trace, Trace]:
    """Routing while earlier and held-out prompts are continued; different requests of the same sets."""
    source = load(model, **placement(model))
    requests = select(TRAIN_PER_SET + HELD_OUT_PER_SET, seed=seed)
    per_set = TRAIN_PER_SET + HELD_OUT_PER_SET
    halves = ([r for i, r in enumerate(requests) if (i % per_set < TRAIN_PER_SET) == first] for first in (True, False))
    return tuple(
        decode(source.model, tokenize(half, source.tokenizer, routing.PREFIX_TOKENS).at_least(routing.PREFIX_TOKENS),
               Origin(source.name, source.digest, seed=seed), prefix_tokens=routing.PREFIX_TOKENS, new_tokens=NEW_TOKENS, temperature=TEMPERATURE)
        for half in halves
    )  # fmt: skip


def ranks_of(indices: np.ndarray, priors: np.ndarray, experts: int, kind: str) -> np.ndarray:
    """Ranks of all uses: indices [T, L, k] -> [T, L, k].

    `priors` [L, E] are long-term shares: the order of causal ranks before anything is used.
    """
    layers = range(indices.shape[1])
    if kind == CAUSAL:
        return np.stack([causal_ranks(indices[:, i], priors[i]) for i in layers], axis=1)
    counts = [np.bincount(indices[:, i].ravel(), minlength=experts) for i in layers]
    return np.stack([np.argsort(np.argsort(-counts[i], kind="stable"))[indices[:, i]] for i in layers], axis=1)


def measure(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read."""
    train, held_out = traces(model, seed)
    experts, k = train.num_experts, train.top_k
    rows: jobs.Rows = []
    for router in (TRAINED, NULL):
        pair = [train.indices.astype(np.int64), held_out.indices.astype(np.int64)]
        if router == NULL:
            rng = np.random.default_rng(seed)
            pair = [rng.random((*i.shape[:2], experts)).argsort(axis=-1)[..., :k] for i in pair]
        counts = np.stack([np.bincount(pair[0][:, i].ravel(), minlength=experts) + 1 for i in range(pair[0].shape[1])])
        priors = counts / counts.sum(axis=1, keepdims=True)
        for kind in (CAUSAL, HINDSIGHT):
            ours = ranks_of(pair[0], priors, experts, kind)
            theirs = ranks_of(pair[1], priors, experts, CAUSAL)  # what a runtime has
            pi = inclusion(np.bincount(ours.ravel(), minlength=experts), k)
            weights = bernoulli_weights(pi, k)
            base = {"model": shown_name(model), "family": routing.family(model), "router": router, "ranks": kind}
            rows += _law_rows(base, weights, ours, theirs, held_out.request_index, k)
            if router == TRAINED and kind == CAUSAL:
                rows += _plan_rows(base, pi, weights, experts, k)
            if kind == CAUSAL:
                rows += _rule_rows(base, pair[1], priors, held_out.request_index)
    return rows


def _law_rows(
    base: dict, weights: np.ndarray, history: np.ndarray, ranks: np.ndarray, request: np.ndarray, k: int
) -> jobs.Rows:
    rows = []
    for share in POOL_SHARES:
        size = round(share * len(weights))
        hits = (ranks < size).sum(axis=-1)  # [T, L]
        observed = np.bincount(hits.ravel(), minlength=k + 1) / hits.size
        per_request = np.array([hits[request == r].mean() / k for r in np.unique(request)])
        predicted = {
            HISTORY: np.bincount((history < size).sum(axis=-1).ravel(), minlength=k + 1) / history[..., 0].size,
            CONDITIONAL: conditional_law(weights, slice(0, size), k),
            INDEPENDENT: poisson_binomial(success_probabilities(weights, k)[:size], k),
        }
        for name, law in predicted.items():
            law = np.append(law[:-1], 1 - law[:-1].sum()) if name == INDEPENDENT else law  # more than k counts as k
            for count in range(k + 1):
                rows.append(base | {
                    "kind": "law", "law": name, "pool_share": share, "pool": size, "hits": count,
                    "predicted": round(float(law[count]), 6), "observed": round(float(observed[count]), 6),
                    "predicted_hit_rate": round(float(law @ np.arange(k + 1) / k), 6),
                    "observed_hit_rate": round(float(hits.mean() / k), 6),
                    "hit_rate_sd": round(float(per_request.std(ddof=1) / len(per_request) ** 0.5), 6),
                    "n_requests": len(per_request), "n_calls": int(hits.size),
                })  # fmt: skip
    return rows


def _rule_rows(base: dict, indices: np.ndarray, priors: np.ndarray, request: np.ndarray) -> jobs.Rows:
    """Hit rates of all eviction rules with whole experts only, replayed on held-out requests one after the other."""
    experts, rows = priors.shape[1], []
    kept = request < RULE_REQUESTS
    for share in POOL_SHARES:
        for rule in RULES:
            hits = np.zeros(RULE_REQUESTS)
            for layer in range(indices.shape[1]):
                cache = PoolCache(Pools(round(share * experts)), rule, priors[layer])
                for used, of in zip(indices[kept, layer].tolist(), request[kept].tolist()):
                    hits[of] += sum(cache.state(expert) is State.F for expert in used)
                    cache.use(used)
            uses = np.bincount(request[kept], minlength=RULE_REQUESTS) * indices.shape[1] * indices.shape[2]
            found = ratio_interval(hits, uses.astype(float))
            rows.append(base | {
                "kind": "rule", "rule": rule, "pool_share": share, "hit_rate": round(float(found.estimate), 5),
                "hit_rate_ci_low": round(float(found.low), 5), "hit_rate_ci_high": round(float(found.high), 5),
                "n_requests": RULE_REQUESTS,
            })  # fmt: skip
    return rows


def rules(rows: pd.DataFrame) -> pd.DataFrame:
    """Hit rate with interval: model, router and pool (rows) by eviction rule (columns)."""
    mine = rows[rows["kind"] == "rule"]
    cells = [f"{r.hit_rate:.1%} [{r.hit_rate_ci_low:.1%}, {r.hit_rate_ci_high:.1%}]" for r in mine.itertuples()]
    return mine.assign(cell=cells).pivot(index=["model", "router", "pool_share"], columns="rule", values="cell")[
        list(RULES)
    ]


def _plan_rows(base: dict, pi: np.ndarray, weights: np.ndarray, experts: int, k: int) -> jobs.Rows:
    """Pools planned for the right and for the released code's number of active experts, judged with the right one."""
    wrong = min(RELEASED.get(base["family"], k), experts - 1)
    shares = pi / pi.sum()
    rows = []
    for share in POOL_SHARES:
        budget = int(share * experts * SIZES.full)
        right = plan_pools(weights, k, COSTS, SIZES, budget)
        other = _plan_for(shares, wrong, budget)
        rows.append(base | {
            "kind": "plan", "pool_share": share, "active": k, "released_active": wrong, "pools": str(right.pools),
            "released_pools": str(other), "simulated_makespan": round(right.makespan_s, 5),
            "released_simulated_makespan": round(expected_makespan(weights, other, k, COSTS), 5),
            "full_only_simulated_makespan": round(expected_makespan(weights, Pools(budget // SIZES.full), k, COSTS), 5),
        })  # fmt: skip
    return rows


def _plan_for(shares: np.ndarray, active: int, budget: int) -> Pools:
    """What a planner would choose that takes `active` experts to be needed: makespans of that many, sampled by composition.

    All compositions of 22 experts over five states are too many to try; the planner's grid is searched with the
    expected number of experts per pool instead, which is what matters when many are drawn.
    """
    pi = inclusion(shares * 1e6, active)

    def makespan(pools: Pools) -> float:
        edges = np.minimum(np.cumsum([0, *pools, len(pi)]), len(pi))
        means = [pi[a:b].sum() for a, b in zip(edges, edges[1:])]
        counts = np.round(np.diff(np.round(np.cumsum([0, *means])))).astype(int)
        states = [s for s, count in zip((State.F, State.C, State.S, State.E, State.M), counts) for _ in range(count)]
        works = [work_of(i, s, COSTS) for i, s in enumerate(states)]
        return timeline(by_blocks(works, COSTS.workers), COSTS.workers).makespan_s

    return min(grid(len(pi), SIZES, budget), key=lambda pools: (makespan(pools), -pools.full))


def laws(rows: pd.DataFrame, law: str = HISTORY) -> pd.DataFrame:
    """The rows of predicted and observed laws."""
    return rows[(rows["kind"] == "law") & (rows["law"] == law)]


def distances(rows: pd.DataFrame, law: str = HISTORY) -> pd.DataFrame:
    """Per model, router, ranks and pool: error of the hit rate, largest error of a probability, total variation."""
    mine = laws(rows, law).assign(error=lambda r: (r["predicted"] - r["observed"]).abs())
    groups = mine.groupby(["model", "router", "ranks", "pool_share"], sort=False)
    return pd.DataFrame({
        "predicted_hit_rate": groups["predicted_hit_rate"].first(), "observed_hit_rate": groups["observed_hit_rate"].first(),
        "hit_rate_sd": groups["hit_rate_sd"].first(), "largest_error": groups["error"].max(), "total_variation": groups["error"].sum() / 2,
    }).reset_index()  # fmt: skip


def plans(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of plans, with the ratio of their makespans."""
    mine = rows[rows["kind"] == "plan"].dropna(axis=1, how="all")
    return mine.assign(ratio=mine["released_simulated_makespan"] / mine["simulated_makespan"])


def plot(rows: pd.DataFrame) -> Figure:
    """Top: predicted and observed law at a quarter of the experts. Bottom: predicted against observed hit rate."""
    models = list(dict.fromkeys(rows["model"]))
    figure, axes = plt.subplots(
        2, len(models), figsize=(3.9 * len(models), 6.4), squeeze=False, constrained_layout=True
    )
    colors = sns.color_palette("colorblind", 4)
    for column, model in enumerate(models):
        axis = axes[0, column]
        mine = rows[
            (rows["model"] == model)
            & (rows["router"] == TRAINED)
            & (rows["ranks"] == CAUSAL)
            & (rows["pool_share"] == 0.25)
        ]
        first = mine[mine["law"] == HISTORY]
        axis.bar(first["hits"], first["observed"], color="0.75", label="observed, held-out prompts")
        for name, color in zip(LAWS, colors):
            law = mine[mine["law"] == name]
            axis.plot(law["hits"], law["predicted"], marker="o", color=color, label=f"predicted, {name}")
        axis.set(title=model, xlabel="active experts in the pool", ylabel="probability" if column == 0 else "")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis = axes[1, column]
        found = distances(rows)
        found = found[found["model"] == model]
        axis.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
        styles = [
            (TRAINED, CAUSAL, "o", colors[0]),
            (TRAINED, HINDSIGHT, "s", colors[1]),
            (NULL, CAUSAL, "^", colors[2]),
            (NULL, HINDSIGHT, "v", colors[3]),
        ]
        for router, kind, marker, color in styles:
            part = found[(found["router"] == router) & (found["ranks"] == kind)]
            axis.plot(
                part["predicted_hit_rate"],
                part["observed_hit_rate"],
                marker,
                color=color,
                label=f"{router}, {kind} ranks",
                alpha=0.85,
            )
        axis.set(
            xlabel="predicted hit rate", ylabel="observed hit rate" if column == 0 else "", xlim=(0, 1), ylim=(0, 1)
        )
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylim(top=1.55 * axes[0, 0].get_ylim()[1])
    axes[0, 0].legend(fontsize=7, loc="upper left")
    axes[1, 0].legend(fontsize=7, loc="upper left")
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Trained routers, causal ranks, the worst of models and pools: the paper's law, and our planner's."""
    found = distances(rows)
    ours = found[(found["router"] == TRAINED) & (found["ranks"] == CAUSAL)]
    hindsight = found[(found["router"] == TRAINED) & (found["ranks"] == HINDSIGHT)]
    errors = (ours["predicted_hit_rate"] - ours["observed_hit_rate"]).abs()
    promised = (hindsight["predicted_hit_rate"] - hindsight["observed_hit_rate"]).mean()
    independent = distances(rows, INDEPENDENT)
    independent = independent[(independent["router"] == TRAINED) & (independent["ranks"] == CAUSAL)]
    n = int(laws(rows)["n_requests"].min())
    ratios = plans(rows)["ratio"]
    return [
        Measured("zipmoe-cache-planner/hit-law", float(independent["total_variation"].max()), n=n,
                 note=f"Poisson-binomial, as in the paper; mean {independent['total_variation'].mean():.3f}; our planner's law, "
                 f"from history: mean {ours['total_variation'].mean():.3f}, largest {ours['total_variation'].max():.3f}"),
        Measured("zipmoe-cache-planner/hit-rate", float(errors.max()), n=n,
                 note=f"law from history; mean {errors.mean():.4f}; ranks in hindsight promise {promised:+.3f} too much"),
        Measured("zipmoe-cache-planner/law-within-two-points", float(ours["largest_error"].max()), n=n,
                 note=f"law from history; mean {ours['largest_error'].mean():.4f}"),
        Measured("zipmoe-cache-planner/wrong-number", float(ratios.mean()), float(ratios.min()), float(ratios.max()), n=len(ratios),
                 simulated=True, note="interval: range over models and budgets"),
    ]  # fmt: skip
