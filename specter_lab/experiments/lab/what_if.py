"""lab-what-if: another machine, budget, depth, policy or model, simulated while you move a slider.

    answer = ask(Question("deepseek-nano", "specter", "rtx4090", slots=16, depth=8))
    answer.simulated_ms_per_token          # and where it goes: draft, compute, stall

Routing is replayed from recorded windows of a zoo model; bytes and layers are those of the original it stands for. Every time is
simulated. A few requests stand for all, so that an answer takes a fraction of a second; the experiments use more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from specter_lab.errors import UserError
from specter_lab.experiments.specter import offload
from specter_lab.plan.budget import held_bytes, scene_within
from specter_lab.plan.depth_control import FixedDepth, OnlineDepth, RooflineGovernor, cycle_times
from specter_lab.plan.policies import POLICIES, find_policy
from specter_lab.plan.policy import Policy, Scene
from specter_lab.plan.simulate import DepthControl, Simulation, simulate
from specter_lab.plan.workload import Workload

NEW_TOKENS = 64  # of every request
REQUESTS_PER_SET = 1
CONTEXT_TOKENS = offload.PROMPT_TOKENS + offload.NEW_TOKENS
FIXED, GOVERNOR, ONLINE = "fixed", "governor", "online"
CONTROLS = {FIXED: "K as it is set", GOVERNOR: "roofline governor (MoE-SpeQ)", ONLINE: "online bandit"}
PARTS = ("draft", "compute", "stall")
HOST_COPIES = "host copies"  # a part of the memory where GPU and host share one


@dataclass(frozen=True)
class Question:
    """What the sliders say."""

    model: str  # zoo name
    policy: str
    profile: str
    slots: int  # expert slots per MoE layer
    depth: int  # K where the policy drafts and `control` is fixed; 0: plain decoding
    control: str = FIXED
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What the simulator says; times and bytes are simulated."""

    question: Question
    simulated_ms_per_token: float  # all rounds over all tokens
    simulated_ms: dict[str, float]  # per token, by PARTS: they sum to it
    simulated_hidden_share: float  # of the copies' time
    simulated_h2d_mb_per_token: float
    tokens_per_round: float
    mean_depth: float
    memory_gb: dict[str, float]  # what the system holds in the GPU's memory, by part
    profile_gb: float  # what the machine has
    lossy: bool

    @property
    def fits(self) -> bool:
        return sum(self.memory_gb.values()) <= self.profile_gb


def policy_choices() -> dict[str, str]:
    """Title -> id of the policies whose windows are recorded anyway: plain decoding and INT4 drafts."""
    chosen = [policy for policy in POLICIES.values() if policy.draft in (None, "int4")]
    return {policy.title + (" (lossy)" if policy.lossy else ""): policy.id for policy in chosen}


@lru_cache(maxsize=8)
def traffic_of(model: str, seed: int) -> offload.Traffic:
    """The recorded windows of a model; recorded on the first call ever, which takes minutes."""
    return offload.traffic(model, seed)


def setting_of(model: str, profile: str, seed: int = 0) -> Question:
    """The paper's setting for a model on some machine: its policy, slots of the high budget, K*."""
    scene = offload.scene(traffic_of(model, seed), profile=profile)
    return Question(model, "specter", profile, scene.slots_per_layer, scene.depth, seed=seed)


def budget_gb(question: Question) -> float:
    """GPU memory that holds the question's slots, as its policy makes them, and everything else its system needs there.

    The host's copies are no part of it, whichever memory they lie in.
    """
    held = _held_gb(find_policy(question.policy), scene_of(question))
    return sum(gb for part, gb in held.items() if part != HOST_COPIES)


def slots_within(question: Question, gb: float) -> int:
    """Slots per layer to ask for with so much memory; at least 1: the slider's answer to too little is the least there is."""
    policy, scene = find_policy(question.policy), scene_of(question)
    try:
        slots = scene_within(scene, policy, int(gb * 1e9), CONTEXT_TOKENS).slots_per_layer
    except UserError:
        return 1
    return min(max(1, slots), scene.num_experts)


def scene_of(question: Question) -> Scene:
    """What a policy is told of a question."""
    traffic = traffic_of(question.model, question.seed)
    return offload.scene(traffic, slots=question.slots, profile=question.profile)


def _held_gb(policy: Policy, scene: Scene) -> dict[str, float]:
    """GPU memory by part; the host's copies of all experts are one where CPU and GPU share a memory."""
    return {name: size / 1e9 for name, size in held_bytes(policy, scene, CONTEXT_TOKENS).items()}


def ask(question: Question, policy: Policy | None = None) -> Answer:
    """Simulate it, under `policy` in the place of the shipped one that it names.

    Raises:
        UserError: as `simulated`.
    """
    policy = policy or find_policy(question.policy)
    return answer_of(question, policy, simulated(question, policy))


def answer_of(question: Question, policy: Policy, found: Simulation) -> Answer:
    """What a simulation of the question says."""
    scene = scene_of(question)
    rounds, tokens = found.rounds, found.rounds.tokens.sum()
    whole, draft = (rounds.end_ms - rounds.start_ms).sum(), (rounds.drafted_ms - rounds.start_ms).sum()
    stall = rounds.stall_ms.sum()
    ms = {"draft": draft, "compute": whole - draft - stall, "stall": stall}
    return Answer(
        question=question,
        simulated_ms_per_token=float(whole / tokens),
        simulated_ms={part: float(value / tokens) for part, value in ms.items()},
        simulated_hidden_share=found.hidden_share,
        simulated_h2d_mb_per_token=float(rounds.h2d_bytes.sum() / tokens / 1e6),
        tokens_per_round=float(rounds.tokens.mean()),
        mean_depth=float(rounds.depth.mean()),
        memory_gb=_held_gb(policy, scene),
        profile_gb=scene.costs.profile.memory_gb,
        lossy=policy.lossy,
    )


def simulated(question: Question, policy: Policy | None = None, *, record: bool = False) -> Simulation:
    """The whole run behind an answer; with every piece of work of every stream if it is to be recorded.

    Raises:
        UserError: no such policy, profile, model or way to control the depth; slots or a depth that cannot be.
    """
    policy, traffic = policy or find_policy(question.policy), traffic_of(question.model, question.seed)
    scene = scene_of(question)
    _check(question, policy, scene)
    return simulate(
        traffic.requests, policy, scene, new_tokens=NEW_TOKENS, requests=requests_of(traffic.requests), record=record,
        control=_control(question, policy, traffic.history, scene),
    )  # fmt: skip


def _check(question: Question, policy: Policy, scene: Scene) -> None:
    if question.control not in CONTROLS:
        raise UserError(f"no depth control '{question.control}': there are {', '.join(CONTROLS)}")
    if not 0 <= question.depth <= offload.MAX_DEPTH:
        raise UserError(f"a depth of {question.depth} was not recorded: give 0 to {offload.MAX_DEPTH}")
    if not 1 <= question.slots <= scene.num_experts:
        raise UserError(
            f"{question.slots} slots per layer: give 1 to {scene.num_experts}, the experts of {question.model}"
        )


def requests_of(workload: Workload) -> list[int]:
    """The first requests of every prompt set."""
    sets = np.array(workload.windows.prompt_set)
    return np.concatenate([np.flatnonzero(sets == name)[:REQUESTS_PER_SET] for name in dict.fromkeys(sets)]).tolist()


def _control(question: Question, policy: Policy, history: Workload, scene: Scene) -> DepthControl | None:
    if policy.draft is None:
        return None
    controls: dict[str, Callable[[], DepthControl]] = {
        FIXED: lambda: FixedDepth(question.depth),
        ONLINE: lambda: OnlineDepth(offload.MAX_DEPTH),
        GOVERNOR: lambda: _governor(history, scene),
    }
    return controls[question.control]()


def _governor(history: Workload, scene: Scene) -> RooflineGovernor:
    """MoE-SpeQ's, told by other requests how many experts a depth needs; as many are resident as an even share of the slots."""
    distinct = distinct_by_depth(history)
    share = min(1.0, scene.slots_per_layer / scene.num_experts)
    times = partial(cycle_times, scene.costs.model, scene.costs.profile, slots=scene.slots_per_layer)
    return RooflineGovernor(
        offload.MAX_DEPTH,
        lambda depth: times(depth=depth, distinct_experts=distinct[depth], resident_experts=share * distinct[depth]),
    )


def distinct_by_depth(history: Workload, positions: int = 16) -> np.ndarray:
    """Mean distinct experts per layer that verifying K drafted tokens needs, for K = 0 .. MAX_DEPTH."""
    step = max(1, history.windows.positions // positions)
    rounds = [
        [history.round([request], [position], depth).needs for request in range(history.requests)
         for position in range(0, history.windows.positions, step)]
        for depth in range(offload.MAX_DEPTH + 1)
    ]  # fmt: skip
    return np.array([np.mean([needs.first[-1] for needs in of_depth]) / history.layers for of_depth in rounds])
