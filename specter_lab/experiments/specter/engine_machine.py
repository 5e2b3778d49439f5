"""This machine's numbers for one model, measured with the engine's own passes, and the simulator fed with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from specter_lab.engine.api import MAX_DEPTH, Engine, engine_for
from specter_lab.engine.bench import Pass, passes
from specter_lab.engine.decode import Meter
from specter_lab.engine.kernels.timing import copy_gb_s, link_gb_s
from specter_lab.engine.served import OnDemand
from specter_lab.engine.weights import Weights
from specter_lab.experiments import jobs
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.setting import BUDGETS, priced_as
from specter_lab.plan.cost import OPERATORS_PER_LAYER
from specter_lab.plan.doctor import measure, profile_of
from specter_lab.plan.hardware import Profile
from specter_lab.plan.policy import Scene
from specter_lab.plan.replay import Replay
from specter_lab.plan.serve import READ_THROUGH
from specter_lab.plan.simulate import simulate
from specter_lab.plan.step_costs import StepCosts, Transport

PROMPT_TOKENS, HOST_PASSES = 16, 48
FEW_SLOTS = (
    2  # times as many as one token uses: hardly a layer misses nothing, and a pass does not wait for its own slots
)
GRAPH_LAUNCH_US = 0.01  # per operator of a captured pass: the host launches it as one
HOST_PASS = "host-served pass"  # plain decoding in paper mode with everything resident
TOLD = "told of a miss"  # what a layer of it takes longer when something is missing, beside the copies
TURN = "one more turn"  # what every miss of it takes longer where a layer has a single slot, beside its copy
DRAFT_STEP = "draft step"


@dataclass(frozen=True)
class Machine:
    """What was measured."""

    profile: Profile  # with the engine's passes in place of rooflines
    link_gb_s: float
    passes: list[Pass]
    host_pass_ms: float
    told_ms: float  # of a layer, see TOLD
    turn_ms: float  # of a miss, see TURN

    def rows(self) -> jobs.Rows:
        found = [{"by": "pass", "item": one.what, "measured_ms": round(one.ms, 4), "floor_ms": round(one.floor_ms, 4),
                  "read_gb": round(one.read_bytes / 1e9, 4)} for one in self.passes]  # fmt: skip
        by_host = {HOST_PASS: self.host_pass_ms, TOLD: self.told_ms, TURN: self.turn_ms}
        return [*found, *({"by": "pass", "item": item, "measured_ms": round(ms, 4)} for item, ms in by_host.items())]


def measure_machine(weights: Weights, model: str) -> Machine:
    """The passes with everything resident, and the profile of this machine corrected by them."""
    resident = engine_for(weights, expert_budget=weights.shape.num_experts, in_slots=True)
    resident.fill_slots()
    bandwidth = copy_gb_s()
    found = passes(resident, bandwidth, (1, 4, BUDGETS[routing.family(model)].depth + 1))
    del resident
    host_ms, _, _ = _host_pass_ms(weights, weights.shape.num_experts)
    missing_ms, _, copies_ms = _host_pass_ms(weights, FEW_SLOTS * weights.shape.top_k)
    told_ms = max(0.0, missing_ms - copies_ms - host_ms)  # of all layers, here
    single_ms, copies, copies_ms = _host_pass_ms(weights, 1)
    turn_ms = max(0.0, single_ms - copies_ms - host_ms - told_ms) / copies
    torch.cuda.empty_cache()
    profile, anatomy = profile_of(measure(lambda _: None)), priced_as(model)
    expert_ms = anatomy.moe_layers * anatomy.expert_bytes / bandwidth / 1e6  # one expert in every layer
    table = {("draft_step", anatomy.name, 1): found[0].ms}
    for one in found[1:]:
        tokens = int(one.what.split()[1])
        distinct = (one.read_bytes - found[1].read_bytes) / (anatomy.moe_layers * anatomy.expert_bytes) + anatomy.top_k
        table["every_token", anatomy.name, tokens] = max(0.1, one.ms - distinct * expert_ms)
    return Machine(replace(profile, measured=table), link_gb_s(), found, host_ms, told_ms / anatomy.moe_layers, turn_ms)


def _host_pass_ms(weights: Weights, slots: int) -> tuple[float, float, float]:
    """A token of plain decoding in paper mode with so many slots per layer: milliseconds, its copies, and milliseconds of those."""
    engine = engine_for(weights, expert_budget=slots, in_slots=True, mode="paper", policy="lru")
    engine.fill_slots()
    ids = torch.arange(PROMPT_TOKENS) + 3
    for _ in range(2):  # the first one captures
        engine.stats = Meter()
        engine.generate(ids, HOST_PASSES, ignore_eos=True)
    copies = engine.stats.h2d_bytes / engine.memory.host[0, 0].nbytes / engine.stats.tokens
    return 1e3 * engine.stats.seconds / engine.stats.tokens, copies, copies * engine.memory.transport.copy_ms


def simulated_ms(engine: Engine, replay: Replay, model: str, machine: Machine, new_tokens: int) -> float:
    """Milliseconds per token that the simulator gives the same rounds, requests one after the other; slots begin empty there."""
    anatomy, profile = priced_as(model), machine.profile
    launch_us = (
        GRAPH_LAUNCH_US if engine.target.waits else 1e3 * machine.host_pass_ms / (anatomy.layers * OPERATORS_PER_LAYER)
    )
    if isinstance(engine.target, OnDemand) and engine.target.host:
        rate = anatomy.expert_bytes * 1e-6 / engine.target.host.expert_ms  # GB/s
        profile = replace(profile, cpu=replace(profile.cpu, memory_bandwidth_gb_s=rate))
    crossing = Transport(engine.memory.transport.bits)
    costs = StepCosts(
        anatomy,
        replace(profile, launch_us=launch_us),
        transport=crossing,
        told_ms=machine.told_ms,
        turn_ms=machine.turn_ms,
    )
    scene = Scene(costs, int(engine.memory.slots.count.min()), MAX_DEPTH)
    miss = READ_THROUGH if engine.target.waits else engine.policy.miss
    policy = replace(engine.policy, miss=miss, slots=lambda scene: np.resize(engine.memory.slots.count, scene.layers))
    rounds = simulate(replay, policy, scene, new_tokens=new_tokens).rounds
    return float((rounds.end_ms - rounds.start_ms).sum() / rounds.tokens.sum())
