"""What `specter-lab measure` finds out about a model: as data, as a table for a terminal, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from specter_lab.measure.bootstrap import Interval


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, from a bootstrap over `n` prompts."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, interval: Interval) -> Estimate:
        return cls(float(interval.estimate), float(interval.low), float(interval.high), interval.n_requests)


@dataclass(frozen=True)
class Subject:
    """What was measured, on what."""

    model: str
    model_digest: str  # sha256 of the weight files
    architecture: str
    moe_layers: int
    num_experts: int
    top_k: int
    quantizer: str
    bits_per_weight: float  # of routed experts: codes, scales and zero points
    starved_experts: int | None  # calibration did not reach them; None: not known of a downloaded checkpoint
    notes: tuple[str, ...]  # of the quantised checkpoint
    prompts: tuple[str, ...]  # sources
    n_prompts: int
    n_tokens: int
    left_out: tuple[str, ...]  # prompts that were given and are not measured, each with the reason
    prefix_tokens: int  # of each prompt, where the models go on by themselves
    seed: int


@dataclass(frozen=True)
class ExplosionRow:
    """Distinct experts per MoE layer in windows of so many tokens; None: too few texts are that long."""

    window: int  # K
    prefill: Estimate | None  # in the prompts
    decode: Estimate | None  # in the model's own continuation
    uniform_routing: float


@dataclass(frozen=True)
class DepthRow:
    """Speculative rounds of K drafted tokens, run with both models. Depth 0 is plain decoding."""

    depth: int  # K
    accepted_per_checked: Estimate | None  # None: nothing is drafted
    accepted_per_proposed: Estimate | None
    tokens_per_round: Estimate | None
    distinct_experts: float  # per MoE layer, used by the K + 1 verified tokens
    resident_experts: float  # of these, in an LRU cache when the round starts; all of them if every expert fits
    simulated_ms_per_token: Estimate
    simulated_h2d_mb_per_round: float


@dataclass(frozen=True)
class Prediction:
    """What the cost model makes of the measured rounds on a named machine: simulated, all of it."""

    profile: str
    priced_as: str  # whose bytes and FLOPs are counted
    memory_gb: float
    slots_per_layer: int  # routed experts in BF16 that fit beside the other weights, all INT4 experts and the KV cache
    half_fit_gb: float  # GPU memory with room for half the experts of every layer
    best_depth: int  # K*; 0: plain decoding is the best
    best_depth_low: int  # 95 % range of the depths that win in resampled prompts
    best_depth_high: int


@dataclass(frozen=True)
class Report:
    """Everything `measure_model` finds out."""

    subject: Subject
    fidelity_teacher_forced: Mapping[str, Estimate]  # definition -> both models read the prompts
    fidelity_free_running: Mapping[str, Estimate]  # definition -> windows that the draft wrote
    explosion: tuple[ExplosionRow, ...]
    depths: tuple[DepthRow, ...]
    simulated: Prediction

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    def to_text(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    about, plan = report.subject, report.simulated
    yield (f"{about.model}: {about.architecture}, {about.moe_layers} MoE layers, top-{about.top_k} of "
           f"{about.num_experts} experts; draft: {about.quantizer}, {about.bits_per_weight:.2f} bits per expert weight")  # fmt: skip
    yield (f"{about.n_prompts} prompts ({', '.join(about.prompts)}), {about.n_tokens:,} tokens, seed {about.seed}; "
           f"[95 % interval over prompts]")  # fmt: skip
    if about.starved_experts:
        yield f"calibration did not reach {about.starved_experts} experts"
    yield from (f"note: {note}" for note in about.notes)
    yield from (f"left out: {prompt}" for prompt in about.left_out)

    yield "\nROUTING FIDELITY" + 9 * " " + f"{'prompts read by both':<28}windows written by the draft"
    for name, read in report.fidelity_teacher_forced.items():
        yield f"  {name:<22} {_share(read):<27} {_share(report.fidelity_free_running[name])}"

    yield "\nEXPERT EXPLOSION, distinct experts per layer in windows of K tokens (n: texts that long)"
    yield f"  {'K':>3}  {'prompts':<31} {'continuations':<31} uniform routing"
    for row in report.explosion:
        yield f"  {row.window:>3}  {_counted(row.prefill):<31} {_counted(row.decode):<31} {row.uniform_routing:.1f}"

    yield f"\nSPECULATIVE ROUNDS, greedy, after {about.prefix_tokens} tokens of each prompt"
    yield (f"  {'K':>3}  {'accepted / checked':<26} {'tokens per round':<19} {'experts':>7} {'resident':>8}"
           f"   SIMULATED ms/token    MB/round")  # fmt: skip
    for row in report.depths:
        yield (f"  {row.depth:>3}  {_share(row.accepted_per_checked):<26} {number(row.tokens_per_round):<19} "
               f"{row.distinct_experts:>7.1f} {row.resident_experts:>8.1f}   "
               f"{number(row.simulated_ms_per_token):<20} {_digits(row.simulated_h2d_mb_per_round):>9}")  # fmt: skip
    plain = next(row for row in report.depths if row.depth == 0).simulated_ms_per_token
    best = next(row for row in report.depths if row.depth == plan.best_depth).simulated_ms_per_token
    largest = ", the largest tried" if plan.best_depth == report.depths[-1].depth else ""
    yield (f"\nPREDICTED K* = {plan.best_depth}{largest} [{plan.best_depth_low}, {plan.best_depth_high}], SIMULATED: "
           f"{_digits(best.value)} ms/token, {plain.value / best.value:.2f}x plain decoding")  # fmt: skip
    yield (f"  cost model of {plan.profile}, priced as {plan.priced_as}, {plan.memory_gb:g} GB: "
           f"{plan.slots_per_layer} of {about.num_experts} experts per layer fit")  # fmt: skip
    if plan.slots_per_layer == about.num_experts > 1:
        yield (f"  everything fits: nothing to offload, and no copies above; with --memory-gb {plan.half_fit_gb:.3g} half the "
               f"experts would")  # fmt: skip


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.value:.2%} [{100 * estimate.low:.2f}, {100 * estimate.high:.2f}]"


def number(estimate: Estimate | None) -> str:
    """An estimate with its interval."""
    if estimate is None:
        return "-"
    return f"{_digits(estimate.value)} [{_digits(estimate.low)}, {_digits(estimate.high)}]"


def _counted(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{number(estimate)} n = {estimate.n}"


def _digits(value: float) -> str:
    """One decimal, and below ten as many as three digits take: the times of a tiny model differ in the third."""
    return f"{value:,.1f}" if abs(value) >= 10 or value == 0 else f"{value:.3g}"
