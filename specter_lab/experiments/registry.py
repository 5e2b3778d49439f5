"""One row per figure or table. Standard library only: `make help` reads this file before anything is installed."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from specter_lab.errors import UserError

TIERS = ("cpu", "gpu", "paper")

# What is measured when the user names no model: zoo models, their proxies as deep as the originals (trained by the same
# recipe, not shipped), or the papers' own checkpoints by hub id.
DEFAULT_MODELS = {
    "cpu": ("qwen-nano", "phi-nano", "deepseek-nano"),
    "gpu": ("qwen-proxy", "phi-proxy", "deepseek-proxy"),
    "paper": ("Qwen/Qwen1.5-MoE-A2.7B", "microsoft/Phi-3.5-MoE-instruct", "deepseek-ai/DeepSeek-V2-Lite"),
}


@dataclass(frozen=True)
class Experiment:
    """One reproducible figure or table. `id` names its notebook, make target, results folder and claims as well."""

    id: str
    title: str
    paper: str
    figure: str  # what it is called in the paper
    module: str  # imported only when the experiment runs; see experiments/context.py for what it must define
    minutes: dict[str, int | None] = field(hash=False)  # tier -> minutes on its usual machine; None: never timed
    aliases: tuple[str, ...] = ()

    @property
    def tiers(self) -> tuple[str, ...]:
        return tuple(tier for tier in TIERS if tier in self.minutes)


EXPERIMENTS = {
    row.id: row
    for row in (
        Experiment(
            "specter-table1", "routing similarity of 14 quantisers on three models",
            "Specter", "Table 1", "specter_lab.experiments.specter.table1",
            {"cpu": 6, "paper": None}, aliases=("table1",),
        ),
        Experiment(
            "specter-routing-match", "top-k match per instance, layer and request",
            "Specter", "routing match", "specter_lab.experiments.specter.routing_match",
            {"cpu": 4, "paper": None}, aliases=("routing-match",),
        ),
        Experiment(
            "specter-activation-entropy", "expert heat map and entropy of every layer",
            "Specter", "activation entropy", "specter_lab.experiments.specter.activation_entropy",
            {"cpu": 3, "paper": None}, aliases=("activation-entropy",),
        ),
        Experiment(
            "specter-expert-explosion", "distinct experts per layer against K, and reuse between windows",
            "Specter", "expert explosion", "specter_lab.experiments.specter.expert_explosion",
            {"cpu": 3, "gpu": 5, "paper": None}, aliases=("expert-explosion",),
        ),
        Experiment(
            "specter-memory", "memory of draft and target at 12K context, apart and shared",
            "Specter", "memory table", "specter_lab.experiments.specter.memory",
            {"cpu": 1, "paper": 1}, aliases=("memory",),
        ),
        Experiment(
            "specter-depth", "acceptance of drafted tokens, and the best depth K*",
            "Specter", "depth", "specter_lab.experiments.specter.depth",
            {"cpu": 5, "gpu": None, "paper": None}, aliases=("depth",),
        ),
        Experiment(
            "specter-losslessness", "speculative against plain decoding, greedy and sampled",
            "Specter", "losslessness", "specter_lab.experiments.specter.losslessness",
            {"cpu": 3, "gpu": None, "paper": None}, aliases=("losslessness",),
        ),
        Experiment(
            "specter-dense-vs-moe", "what speculation gains against K under a memory limit, dense and MoE",
            "Specter", "dense against MoE", "specter_lab.experiments.specter.dense_vs_moe",
            {"cpu": 3, "gpu": None, "paper": None}, aliases=("dense-vs-moe",),
        ),
        Experiment(
            "specter-latency-breakdown", "share of memory operations in offloaded decoding",
            "Specter", "latency breakdown", "specter_lab.experiments.specter.latency_breakdown",
            {"cpu": 2, "gpu": 3, "paper": None}, aliases=("latency-breakdown",),
        ),
        Experiment(
            "specter-tpot", "TPOT of all offloading systems, three models, five prompt sets, two budgets",
            "Specter", "TPOT", "specter_lab.experiments.specter.tpot",
            {"cpu": 5, "paper": None}, aliases=("tpot",),
        ),
        Experiment(
            "specter-hit-rate", "expert hit rates by six definitions, all policies, three budgets, both bounds",
            "Specter", "hit rate", "specter_lab.experiments.specter.hit_rate",
            {"cpu": 4, "paper": None}, aliases=("hit-rate",),
        ),
        Experiment(
            "specter-io-hiding", "share of the copies' time that is hidden",
            "Specter", "I/O hiding", "specter_lab.experiments.specter.io_hiding",
            {"cpu": 1, "paper": None}, aliases=("io-hiding",),
        ),
        Experiment(
            "specter-batch", "TPOT by two clocks, throughput and working set for 1 to 32 requests",
            "Specter", "batch", "specter_lab.experiments.specter.batch",
            {"cpu": 1, "paper": None}, aliases=("batch",),
        ),
        Experiment(
            "specter-ablation", "what each part is worth: cumulative removal and Shapley values, simulated",
            "Specter", "ablation", "specter_lab.experiments.specter.ablation",
            {"cpu": 1, "paper": None}, aliases=("ablation",),
        ),
        Experiment(
            "specter-robustness", "TPOT against the precision of the prefetch, simulated; recall of the lookahead, measured",
            "Specter", "robustness", "specter_lab.experiments.specter.robustness",
            {"cpu": 2, "paper": None}, aliases=("robustness",),
        ),
        Experiment(
            "specter-timeline", "one round on its streams, simulated; with a trace for Perfetto",
            "Specter", "timeline", "specter_lab.experiments.specter.timeline",
            {"cpu": 1, "paper": None}, aliases=("timeline",),
        ),
        Experiment(
            "specter-calibration", "how far the simulator is from the paper, three numbers fitted on half of the cells",
            "Specter", "all reported times, hit rates and shares", "specter_lab.experiments.specter.calibration",
            {"cpu": 2, "paper": None}, aliases=("calibration",),
        ),
        Experiment(
            "specter-beyond", "ideas beyond the paper behind PCIe 5: each alone, and what the planner picks, simulated",
            "Specter", "beyond the paper", "specter_lab.experiments.specter.beyond",
            {"cpu": 3, "paper": None}, aliases=("beyond",),
        ),
        Experiment(
            "specter-trees", "drafted trees against chains, and trees that ask what their experts cost, simulated",
            "Specter", "beyond the paper", "specter_lab.experiments.specter.trees",
            {"cpu": 3, "paper": None}, aliases=("trees",),
        ),
        Experiment(
            "specter-kernel", "the fused INT4 multi-expert kernel against one launch per expert and BF16",
            "Specter", "SEE kernel", "specter_lab.experiments.specter.kernel",
            {"gpu": 1}, aliases=("kernel",),
        ),
        Experiment(
            "specter-engine", "the engine on a GPU beside its baselines, its limits and the simulator",
            "Specter", "TPOT, I/O hiding, losslessness", "specter_lab.experiments.specter.engine",
            {"gpu": 8}, aliases=("engine",),
        ),
        Experiment(
            "elephants-dequant", "integers to floating point by bit tricks, over all codes; model sizes",
            "Elephants", "Algorithm 1", "specter_lab.experiments.elephants.dequant",
            {"cpu": 1}, aliases=("dequant",),
        ),
        Experiment(
            "elephants-table1", "grouped GEMM with int8 and int4 weights over FP16, by active experts",
            "Elephants", "Table 1", "specter_lab.experiments.elephants.table1",
            {"gpu": 1}, aliases=("grouped-gemm",),
        ),
        Experiment(
            "elephants-table2", "what int8 and int4 cost in BLEU, by divisor and by what is quantised",
            "Elephants", "Table 2", "specter_lab.experiments.elephants.table2",
            {"cpu": 3}, aliases=("bleu",),
        ),
        Experiment(
            "elephants-table3", "input tokens/s of a 5.3B translator: naive loop, grouped, int8, int4",
            "Elephants", "Table 3", "specter_lab.experiments.elephants.table3",
            {"gpu": 2}, aliases=("translation-speed",),
        ),
        Experiment(
            "elephants-batch-pruning", "finished sentences leave the experts: loads saved, and what it is worth",
            "Elephants", "batch pruning", "specter_lab.experiments.elephants.batch_pruning",
            {"cpu": 3, "gpu": 1}, aliases=("batch-pruning",),
        ),
        Experiment(
            "elephants-table4", "cost per word: an audit of the arithmetic, open for your own price and speed",
            "Elephants", "Table 4", "specter_lab.experiments.elephants.table4",
            {"cpu": 1}, aliases=("cost",),
        ),
        Experiment(
            "zipmoe-entropy", "entropy of the bit fields and size by codec, trained weights beside two controls",
            "ZipMoE", "entropy and size", "specter_lab.experiments.zipmoe.entropy",
            {"cpu": 1},
        ),
        Experiment(
            "zipmoe-decompression", "decompression and recovery against threads, beside the disk's bandwidth and zipnn",
            "ZipMoE", "decompression", "specter_lab.experiments.zipmoe.decompression",
            {"cpu": 1}, aliases=("decompression",),
        ),
        Experiment(
            "zipmoe-scheduler", "makespan of the blocks against bound, optimum and simple orders, simulated",
            "ZipMoE", "scheduler", "specter_lab.experiments.zipmoe.scheduler",
            {"cpu": 1}, aliases=("scheduler",),
        ),
        Experiment(
            "zipmoe-cache-planner", "the planner's law of hits against held-out prompts; the wrong number of experts",
            "ZipMoE", "cache planner", "specter_lab.experiments.zipmoe.cache_planner",
            {"cpu": 2}, aliases=("cache-planner",),
        ),
        Experiment(
            "zipmoe-io-stall", "share of decoding that waits for experts, page cache and disk",
            "ZipMoE", "I/O stall", "specter_lab.experiments.zipmoe.io_stall",
            {"cpu": 2}, aliases=("io-stall",),
        ),
        Experiment(
            "zipmoe-latency-memory", "TTFT and TPOT against the memory budget, batch 1",
            "ZipMoE", "latency against memory", "specter_lab.experiments.zipmoe.latency_memory",
            {"cpu": 5}, aliases=("latency-memory",),
        ),
        Experiment(
            "zipmoe-throughput-batch", "tokens/s against the batch",
            "ZipMoE", "throughput against batch", "specter_lab.experiments.zipmoe.throughput_batch",
            {"cpu": 4}, aliases=("throughput-batch",),
        ),
        Experiment(
            "zipmoe-latency-length", "end-to-end time against the output's length",
            "ZipMoE", "latency against length", "specter_lab.experiments.zipmoe.latency_length",
            {"cpu": 3}, aliases=("latency-length",),
        ),
        Experiment(
            "zipmoe-table1", "what the parts are worth: baseline, core, pools, planner; codec off, scheduler off",
            "ZipMoE", "Table 1", "specter_lab.experiments.zipmoe.table1",
            {"cpu": 3},
        ),
        Experiment(
            "zipmoe-page-cache", "without the page cache, and with a warm one",
            "ZipMoE", "page cache", "specter_lab.experiments.zipmoe.page_cache",
            {"cpu": 6}, aliases=("page-cache",),
        ),
    )
}  # fmt: skip

# They measure times of this machine: nothing else of ours runs meanwhile.
TIMED = frozenset({
    "specter-kernel", "specter-engine", "elephants-table1", "elephants-table3", "zipmoe-decompression", "zipmoe-io-stall",
    "zipmoe-latency-memory", "zipmoe-throughput-batch", "zipmoe-latency-length", "zipmoe-table1", "zipmoe-page-cache",
})  # fmt: skip

# Their notebooks show times as well, in the worked example: nothing runs beside those either.
TIMED_NOTEBOOKS = frozenset({
    "specter-kernel", "specter-engine", "elephants-table1", "elephants-table3", "zipmoe-decompression", "zipmoe-io-stall",
})  # fmt: skip


@dataclass(frozen=True)
class Lab:
    """A notebook to work in. It measures what you give it, so it has no claims; `id` names its make target as well."""

    id: str  # begins with "lab-", but for the first one of the course, which begins with "00-" and so stands above all
    title: str
    minutes: int  # with the notebook's own parameters, on two cores


LABS = {
    row.id: row
    for row in (
        Lab("00-start-here", "the first ten minutes: a model, a quantised copy, one speculative round, a verdict", 1),
        Lab("lab-your-model", "a model of yours: MODEL=... QUANTIZER=... PROMPTS='mine.txt' DEPTH=16 PROFILE=...", 1),
        Lab(
            "lab-what-if",
            "sliders: another GPU, budget, depth, policy; MODEL=... PROFILE=... SLOTS=16 DEPTH=8 POLICY=specter",
            4,
        ),
        Lab("lab-write-a-policy", "a policy of yours beside shipped ones; MODEL=... PROFILE=... SLOTS=16 DEPTH=8", 4),
    )
}


def find_lab(name: str) -> Lab:
    """The lab notebook with that id.

    Raises:
        UserError: there is none.
    """
    if name not in LABS:
        raise UserError(f"no lab notebook '{name}': there are {', '.join(LABS)}")
    return LABS[name]


def find(name: str) -> Experiment:
    """The experiment with that id or alias.

    Raises:
        UserError: there is none; the message names the nearest ones.
    """
    by_name = {**EXPERIMENTS, **{alias: row for row in EXPERIMENTS.values() for alias in row.aliases}}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "there is nothing like it;"
    raise UserError(f"no experiment '{name}': {hint} `make help` lists them all")


def check_tier(experiment: Experiment, tier: str) -> None:
    """Raises UserError when `experiment` cannot run on `tier`."""
    if tier not in experiment.tiers:
        known = " or ".join(experiment.tiers)
        raise UserError(f"{experiment.id} has no '{tier}' tier: give {known} (make: TIER=..., specter-lab: --tier ...)")
