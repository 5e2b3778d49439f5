"""Every number of the paper that the simulator can give, and how each is simulated: the cells of specter-calibration."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from specter_lab.experiments.specter.ablation import PAPER_MS as ABLATION_MS
from specter_lab.experiments.specter.ablation import SHALLOW, policy_with, removals
from specter_lab.experiments.specter.dilution import diluted, perfect
from specter_lab.experiments.specter.hit_rate import SLOTS
from specter_lab.experiments.specter.layer_systems import LAYER_SYSTEMS
from specter_lab.experiments.specter.offload import NEW_TOKENS, PROMPT_TOKENS, Traffic, scene
from specter_lab.experiments.specter.robustness import PAPER_MS as ROBUSTNESS_MS
from specter_lab.experiments.specter.setting import BUDGETS
from specter_lab.experiments.specter.tpot_figure import IN_ORDER
from specter_lab.experiments.specter.tpot_figure import PAPER as TPOT_MS
from specter_lab.plan.hardware import Profile
from specter_lab.plan.policies import POLICIES
from specter_lab.plan.policy import Policy, Scene
from specter_lab.plan.serve import PassCosts
from specter_lab.plan.simulate import Simulation, simulate
from specter_lab.plan.step_costs import StepCosts
from specter_lab.plan.workload import Workload

TPOT, THROUGHPUT, HIT_RATE = "TPOT, ms/token", "throughput, tokens/s", "hit rate"
HIDDEN, H2D, EXPOSED = "hidden share of copies", "copies, ms per round", "exposed copies, ms per round"
BATCH = 32
CONTEXT_TOKENS = PROMPT_TOKENS + NEW_TOKENS // 2  # as `offload.scene` has it
HIT_DEFINITION = "token-weighted"  # as specter-hit-rate is judged


@dataclass(frozen=True)
class Fitted:
    """What may be fitted: three numbers for all cells together. The profile as it is: its launch cost, and shares of 1."""

    launch_us: float  # host time per operator
    demand_share: float  # of the profile's link that a copy reaches which a pass waits for
    prefetch_share: float  # that one planned ahead reaches


@dataclass(frozen=True)
class FittedCosts(StepCosts):
    """Step costs whose copies reach a share of the link."""

    demand_share: float = 1.0
    prefetch_share: float = 1.0

    @property
    def copy_ms(self) -> float:
        return self.profile.h2d_ms(self.model.expert_bytes) / self.prefetch_share

    def of_pass(self, tokens: int) -> PassCosts:
        costs, slower = super().of_pass(tokens), self.prefetch_share / self.demand_share
        read_through_ms = costs.read_through_ms / self.demand_share
        return costs._replace(copy_ms=costs.copy_ms * slower, read_through_ms=read_through_ms)


@dataclass(frozen=True)
class Setup:
    """One simulation that cells read numbers off."""

    family: str
    system: str  # id of a policy, a step of the ablation, or one of LAYER_SYSTEMS
    slots: int | None = None  # per layer; None: the high budget's
    batch: int = 1
    precision: float | None = None  # of a diluted lookahead


@dataclass(frozen=True)
class Cell:
    """One number of the paper."""

    experiment: str
    name: str
    quantity: str
    paper: float
    setup: Setup


def cells() -> list[Cell]:
    """All of them, in the order of PAPERS' table. Which cells are fitted follows from this order alone (`fitted_half`)."""
    listed = [
        Cell("specter-tpot", f"{family}, {system}", TPOT, ms, Setup(family, IN_ORDER[system]))
        for family, by_system in TPOT_MS.items()
        for system, ms in by_system.items()
    ]
    batch = {
        "specter": (119.2, 130.3),
        "specmoeoff": (718.0, 40.2),
        "mo-sm": (1262.9, 25.3),
        "transformers": (1493.6, 21.4),
    }
    for system, reported in batch.items():
        setup = Setup("deepseek", IN_ORDER[system], batch=BATCH)
        listed += [
            Cell("specter-batch", f"deepseek, {system}, B = {BATCH}", quantity, value, setup)
            for quantity, value in zip((TPOT, THROUGHPUT), reported)
        ]
    listed.append(
        Cell("specter-batch", f"qwen, specter, B = {BATCH}", TPOT, 260.3, Setup("qwen", "specter", batch=BATCH))
    )
    hit_rates = {
        "lru": (0.292, 0.5094, 0.7656), "lru-s": (0.6113, 0.7656, 0.9577), "sp-e": (0.9604, 0.9544, 0.9198),
        "sp-l": (0.9633, 0.9546, 0.959), "specter": (0.9985, 0.9862, 0.9625),
    }  # fmt: skip
    for system, shares in hit_rates.items():
        listed += [
            Cell(
                "specter-hit-rate", f"deepseek, {system}, {gb}", HIT_RATE, share, Setup("deepseek", system, slots=slots)
            )
            for (gb, slots), share in zip(SLOTS["deepseek"].items(), shares)
        ]
    listed += [
        Cell("specter-ablation", f"deepseek, {step}", TPOT, ms, Setup("deepseek", step))
        for step, ms in ABLATION_MS.items()
    ]
    listed += [
        Cell("specter-io-hiding", family, HIDDEN, share, Setup(family, "specter"))
        for family, share in (("deepseek", 0.555), ("qwen", 0.605), ("phi", 0.224))
    ]
    listed += [
        Cell("specter-io-hiding", "phi", quantity, ms, Setup("phi", "specter"))
        for quantity, ms in ((H2D, 2089.2), (EXPOSED, 1621.3))
    ]
    listed += [
        Cell(
            "specter-robustness",
            f"precision {precision:.2f}",
            TPOT,
            ms,
            Setup("deepseek", "specter", precision=precision),
        )
        for precision, ms in ROBUSTNESS_MS.items()
    ]
    return listed


def fitted_half(listed: list[Cell]) -> list[bool]:
    """Every other cell of each experiment, the first one among them, is fitted; the others are held out."""
    seen: dict[str, int] = {}
    half = []
    for cell in listed:
        seen[cell.experiment] = seen.get(cell.experiment, -1) + 1
        half.append(seen[cell.experiment] % 2 == 0)
    return half


def run_setup(
    setup: Setup, traffic: Traffic, profile: Profile, fitted: Fitted, seed: int, per_set: int | None
) -> Simulation | float:
    """Simulate one set-up; `per_set` requests of every prompt set (batches: BATCH requests in turn), or all.

    Systems that offload layers are no policies: the milliseconds of one step, as specter-tpot and specter-batch have them.
    """
    profile = replace(profile, launch_us=fitted.launch_us)
    if setup.system in LAYER_SYSTEMS:
        budget_bytes = int(BUDGETS[setup.family].high_gb * 1e9)
        link = replace(profile.h2d, gb_s=tuple(gb_s * fitted.demand_share for gb_s in profile.h2d.gb_s))
        where = (scene(traffic).costs.model, replace(profile, h2d=link), budget_bytes, setup.batch * CONTEXT_TOKENS)
        requests = chosen_requests(traffic.requests, setup.batch, None)
        distinct = working_set(traffic.requests, requests, NEW_TOKENS)
        return LAYER_SYSTEMS[setup.system].ms(*where, tokens=setup.batch, distinct_experts=distinct)
    policy, workload, where = _parts(setup, traffic, seed)
    shares = {"demand_share": fitted.demand_share, "prefetch_share": fitted.prefetch_share}
    costs = FittedCosts(where.costs.model, profile, where.costs.fused, where.costs.context_tokens, **shares)
    return simulate(
        workload, policy, replace(where, costs=costs), new_tokens=NEW_TOKENS, batch=setup.batch,
        requests=chosen_requests(workload, BATCH if setup.batch > 1 else None, per_set),
    )  # fmt: skip


def chosen_requests(workload: Workload, most: int | None, per_set: int | None) -> list[int]:
    """Requests of every prompt set in turn: `most` of them, or `per_set` of every set, or all."""
    sets = workload.windows.prompt_set
    seen: dict[str, int] = {}
    turns = []
    for request, name in enumerate(sets):
        seen[name] = seen.get(name, -1) + 1
        turns.append((seen[name], request))
    in_turn = [request for turn, request in sorted(turns) if most or per_set is None or turn < per_set]
    return in_turn[:most]


def working_set(workload: Workload, requests: list[int], new_tokens: int) -> float:
    """Distinct experts per layer and pass of plain decoding, these requests in lockstep: measured."""
    routed = workload.decoding()[requests, :new_tokens]  # [B, N, L, k]
    used = np.zeros((*routed.shape[1:3], workload.windows.num_experts), bool)  # [N, L, E]
    for of_request in routed:
        np.put_along_axis(used, of_request, True, axis=-1)
    return float(used.sum(axis=-1).mean())


def _parts(setup: Setup, traffic: Traffic, seed: int) -> tuple[Policy, Workload, Scene]:
    if setup.system in ABLATION_MS:
        parts = removals()[list(ABLATION_MS).index(setup.system)]
        return policy_with(parts, SHALLOW), traffic.requests, scene(traffic, fused="SEE" in parts)
    policy, workload = POLICIES[setup.system], traffic.requests
    if setup.precision is not None:
        policy = diluted(policy, setup.precision, seed)
        workload = Workload(perfect(workload.windows), workload.layers)
    return policy, workload, scene(traffic, slots=setup.slots)


def read_off(cell: Cell, simulation: Simulation | float) -> float:
    """A cell's number."""
    quantity = cell.quantity
    if isinstance(simulation, float):
        return simulation if quantity == TPOT else cell.setup.batch / simulation * 1e3
    rounds = simulation.rounds
    if quantity == TPOT:
        return simulation.tpot_ms(NEW_TOKENS)["paper"]
    if quantity == THROUGHPUT:
        last = max(commits[-1][0] for commits in simulation.commits.values())
        return len(simulation.commits) * NEW_TOKENS / (last - min(simulation.began_ms.values())) * 1e3
    if quantity == HIT_RATE:
        return simulation.hits.rates()[HIT_DEFINITION]
    if quantity == HIDDEN:
        return simulation.hidden_share
    return float((rounds.h2d_ms if quantity == H2D else rounds.stall_ms).mean())
