"""The engine's systems on the GPU of this machine: times, bytes and hits as measured, and what the simulator says of the same rounds.

Models are the zoo's proxies, as deep as their originals, widened to the originals' sizes: the same function, full-size bytes.
Every system runs the same kernels over the same weights on the same prompts, at the paper's slots. Text is sampled, for small
models repeat themselves greedily, which flatters a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specter_lab.engine.api import MAX_DEPTH, Engine, engine_for
from specter_lab.engine.bench import Pass, passes, tensors_of
from specter_lab.engine.decode import Meter
from specter_lab.engine.kernels.timing import copy_gb_s, link_gb_s
from specter_lab.engine.weights import Weights, load_weights
from specter_lab.experiments import jobs
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.peers import peer_rows
from specter_lab.experiments.specter.setting import BUDGETS, priced_as, slots_of
from specter_lab.measure.prompts import PROMPT_SETS, select, tokenize
from specter_lab.models.load import shown_name
from specter_lab.models.zoo.shapes import SHAPES
from specter_lab.plan.cost import OPERATORS_PER_LAYER
from specter_lab.plan.doctor import measure, profile_of
from specter_lab.plan.hardware import Profile
from specter_lab.plan.policy import Scene
from specter_lab.plan.replay import Replay
from specter_lab.plan.serve import READ_THROUGH
from specter_lab.plan.simulate import simulate
from specter_lab.plan.step_costs import StepCosts

PROMPT_TOKENS, REPEATS, TEMPERATURE = 16, 3, 1.0
NEW_TOKENS = {"phi": 12}  # its experts are nine times as large; others USUAL_TOKENS
USUAL_TOKENS, EXACT_TOKENS = 48, 512
LARGE_REPEATS = 1  # of models named in NEW_TOKENS
RESIDENT, ONLINE = "all-resident", "specter-fast, online depth"
SYSTEMS = {  # name -> mode, policy
    RESIDENT: ("fast", "specter-fast"), "specter-fast": ("fast", "specter-fast"), ONLINE: ("fast", "specter-fast"),
    "specter": ("paper", "specter"), "specmoeoff": ("paper", "specmoeoff"), "lru": ("paper", "lru"), "lru-s": ("paper", "lru-s"),
    "specter-shared": ("shared", "specter-shared"), "lru-shared": ("shared", "lru-shared"),
}  # fmt: skip
ALL_SETS = "all"
GRAPH_LAUNCH_US = 0.01  # per operator of a captured pass: the host launches it as one
HOST_PASS = "host-served pass"  # plain decoding in paper mode with everything resident
DRAFT_STEP = "draft step"
EXACT = {"fast": (4, 8), "paper": (6, 5)}  # mode -> slots per layer, depth


@dataclass(frozen=True)
class Machine:
    """This machine's numbers for one model."""

    profile: Profile  # with the engine's passes in place of rooflines
    link_gb_s: float
    passes: list[Pass]
    host_pass_ms: float


def measure_model(model: str, digest: str, seed: int) -> jobs.Rows:
    """All rows of one model. `digest` names what is read in the cache key."""
    named = {"model": shown_name(model), "family": routing.family(model), "original": priced_as(model).name}
    rows = exact_rows(model, seed)
    weights = load_weights(model, widen_to=SHAPES[model].original if model in SHAPES else None)
    prompts = _prompts(weights, seed)
    machine = measure_machine(weights, model)
    rows += [{"by": "pass", "item": one.what, "measured_ms": round(one.ms, 4), "floor_ms": round(one.floor_ms, 4),
              "read_gb": round(one.read_bytes / 1e9, 4)} for one in machine.passes]  # fmt: skip
    rows.append({"by": "pass", "item": HOST_PASS, "measured_ms": round(machine.host_pass_ms, 4)})
    for budget, slots in slots_of(model, routing.family(model)).items():
        rows += budget_rows(weights, model, budget, int(slots), prompts, machine, seed)
    on_gpu = max(row["gpu_expert_gb"] for row in rows if row.get("item") == ONLINE and row["budget"] == "high")
    gpu_bytes = int(on_gpu * 1e9) + sum({t.data_ptr(): t.nbytes for t in tensors_of(weights.decoder)}.values())
    del weights
    rows += peer_rows(priced_as(model).name, gpu_bytes)
    return [named | row for row in rows]


def exact_rows(model: str, seed: int) -> jobs.Rows:
    """Greedy text, bitwise: the proxy with its own sizes, all experts resident and one token at a time, against both modes."""
    weights, rows = load_weights(model), []
    plain = engine_for(weights, expert_budget=weights.shape.num_experts, in_slots=True, draft="none")
    plain.fill_slots()
    others = {
        mode: engine_for(weights, expert_budget=slots, in_slots=True, mode=mode) for mode, (slots, _) in EXACT.items()
    }
    for prompt_set, ids in _prompts(weights, seed).items():
        expected = plain.generate(ids, EXACT_TOKENS, ignore_eos=True)[0, len(ids) :]
        for mode, engine in others.items():
            found = engine.generate(ids, EXACT_TOKENS, depth=EXACT[mode][1], ignore_eos=True)[0, len(ids) :]
            equal = int((found == expected).long().cumprod(0).sum())
            rows.append(
                {"by": "exact", "item": mode, "prompt_set": prompt_set, "n_tokens": EXACT_TOKENS, "equal_tokens": equal}
            )
    return rows


def _prompts(weights: Weights, seed: int) -> dict[str, Tensor]:
    """The first long enough prompt of every set, cut to PROMPT_TOKENS."""
    tokens = tokenize(select(10, seed=seed), weights.tokenizer, PROMPT_TOKENS).at_least(PROMPT_TOKENS)
    found: dict[str, Tensor] = {}
    for request, ids in zip(tokens.requests, tokens.ids):
        found.setdefault(request.prompt_set, ids)
    return found


def measure_machine(weights: Weights, model: str) -> Machine:
    """The passes with everything resident, and the profile of this machine corrected by them."""
    resident = engine_for(weights, expert_budget=weights.shape.num_experts, in_slots=True)
    resident.fill_slots()
    bandwidth = copy_gb_s()
    found = passes(resident, bandwidth, (1, 4, BUDGETS[routing.family(model)].depth + 1))
    del resident
    host = engine_for(weights, expert_budget=weights.shape.num_experts, in_slots=True, mode="paper", policy="lru")
    host.fill_slots()
    ids = torch.arange(PROMPT_TOKENS) + 3
    host.generate(ids, USUAL_TOKENS, ignore_eos=True)
    host.stats = Meter()
    host.generate(ids, USUAL_TOKENS, ignore_eos=True)
    host_ms = 1e3 * host.stats.seconds / host.stats.tokens
    del host
    torch.cuda.empty_cache()
    profile = profile_of(measure(lambda _: None))
    anatomy = priced_as(model)
    expert_ms = anatomy.moe_layers * anatomy.expert_bytes / bandwidth / 1e6  # one expert in every layer
    table = {("draft_step", anatomy.name, 1): found[0].ms}
    for one in found[1:]:
        tokens = int(one.what.split()[1])
        distinct = (one.read_bytes - found[1].read_bytes) / (anatomy.moe_layers * anatomy.expert_bytes) + anatomy.top_k
        table["every_token", anatomy.name, tokens] = max(0.1, one.ms - distinct * expert_ms)
    return Machine(replace(profile, measured=table), link_gb_s(), found, host_ms)


@dataclass
class Contender:
    """One system at one budget."""

    name: str
    engine: Engine
    depth: int | None  # drafted tokens per round; None: online


def budget_rows(
    weights: Weights, model: str, budget: str, slots: int, prompts: dict[str, Tensor], machine: Machine, seed: int
) -> Iterator[dict]:  # fmt: skip
    """One row per repeat, system and prompt set; the systems take turns. With all experts on the GPU there is room for nobody else."""
    family = routing.family(model)
    new_tokens, repeats = NEW_TOKENS.get(family, USUAL_TOKENS), LARGE_REPEATS if family in NEW_TOKENS else REPEATS
    others = [name for name in SYSTEMS if name != RESIDENT]
    for group in ([RESIDENT], others) if budget == "high" else (others,):
        contenders = [_contender(weights, name, slots, BUDGETS[family].depth) for name in group]
        for contender in contenders:  # kernels are compiled, graphs captured, slots filled
            _generate(contender, prompts[PROMPT_SETS[0]], new_tokens, seed)
        for repeat in range(repeats):
            for contender in contenders:
                yield from _rows(contender, model, budget, repeat, prompts, machine, new_tokens, seed)
        del contenders, contender
        torch.cuda.empty_cache()


def _contender(weights: Weights, name: str, slots: int, depth: int) -> Contender:
    mode, policy = SYSTEMS[name]
    count = weights.shape.num_experts if name == RESIDENT else slots
    engine = engine_for(weights, expert_budget=count, in_slots=True, mode=mode, policy=policy)
    if name == RESIDENT:
        engine.fill_slots()
    own = engine.policy.depth_in(Scene(None, count, depth))
    return Contender(name, engine, None if name == ONLINE else 0 if not engine.draft.banks else own)


def _generate(contender: Contender, ids: Tensor, new_tokens: int, seed: int) -> Meter:
    contender.engine.stats = Meter()
    contender.engine.generate(
        ids, new_tokens, temperature=TEMPERATURE, depth=contender.depth, seed=seed, ignore_eos=True
    )
    return contender.engine.stats


def _rows(
    contender: Contender, model: str, budget: str, repeat: int, prompts: dict[str, Tensor], machine: Machine, new_tokens: int,
    seed: int,
) -> Iterator[dict]:  # fmt: skip
    engine = contender.engine
    replay = Replay(engine.memory.shape.num_experts, priced_as(model).moe_layers)
    engine.on_round = lambda told: replay.add(*told)
    held = sum(engine.budget.taken.get(part, 0) for part in ("expert slots", "draft's INT4 experts"))
    base = {
        "by": "system", "item": contender.name, "title": engine.policy.title, "mode": SYSTEMS[contender.name][0],
        "budget": budget, "repeat": repeat, "slots_per_layer": float(engine.memory.slots.count.mean()),
        "gpu_expert_gb": round(held / 1e9, 3),
    }  # fmt: skip
    total = Meter()
    for prompt_set, ids in prompts.items():
        replay.begin_request()
        meter = _generate(contender, ids, new_tokens, seed)
        total.add(meter)
        yield base | {"prompt_set": prompt_set} | _meter_row(meter, machine)
    engine.on_round = None
    simulated_ms = simulated(engine, replay, model, machine, new_tokens)
    yield base | {"prompt_set": ALL_SETS, "simulated_ms_per_token": round(simulated_ms, 4)} | _meter_row(total, machine)


def simulated(engine: Engine, replay: Replay, model: str, machine: Machine, new_tokens: int) -> float:
    """Milliseconds per token that the simulator gives the same rounds, requests one after the other; slots begin empty there."""
    layers = priced_as(model).layers
    launch_us = GRAPH_LAUNCH_US if engine.target.waits else 1e3 * machine.host_pass_ms / (layers * OPERATORS_PER_LAYER)
    profile = replace(machine.profile, launch_us=launch_us)
    if engine.target.host:
        expert_gb = priced_as(model).expert_bytes * 1e-9
        profile = replace(
            profile, cpu=replace(profile.cpu, memory_bandwidth_gb_s=expert_gb / engine.target.host.expert_ms * 1e3)
        )
    costs = StepCosts(priced_as(model), profile)
    scene = Scene(costs, int(engine.memory.slots.count.min()), MAX_DEPTH)
    miss = READ_THROUGH if engine.target.waits else engine.policy.miss
    policy = replace(engine.policy, miss=miss, slots=lambda scene: np.resize(engine.memory.slots.count, scene.layers))
    rounds = simulate(replay, policy, scene, new_tokens=new_tokens).rounds
    return float((rounds.end_ms - rounds.start_ms).sum() / rounds.tokens.sum())


def _meter_row(meter: Meter, machine: Machine) -> dict:
    moved = meter.h2d_bytes + meter.read_through_bytes
    copies_ms = sum(meter.busy_ms.get(work, 0.0) for work in ("prefetch", "miss"))
    return {
        "n_tokens": meter.tokens, "n_rounds": meter.rounds, "measured_ms_per_token": round(1e3 * meter.seconds / meter.tokens, 4),
        "acceptance": round(meter.acceptance, 4) if meter.drafted else None, "tokens_per_round": round(meter.tokens_per_round, 3),
        "hit_rate": round(meter.hits / meter.needed, 4), 
        "link_mb_per_token": round(moved / meter.tokens / 1e6, 2),
        "read_through_mb_per_token": round(meter.read_through_bytes / meter.tokens / 1e6, 2),
        "link_gb_s": round(moved / meter.seconds / 1e9, 2), "link_busy_share": round(moved / meter.seconds / 1e9 / machine.link_gb_s, 4),
        "floor_link_ms_per_token": round(moved / meter.tokens / machine.link_gb_s / 1e6, 4),
        "by_host_share": round(meter.by_host / meter.needed, 4), "copies_ms_per_token": round(copies_ms / meter.tokens, 4),
        **{f"{work.replace(' ', '_')}_ms_per_token": round(meter.busy_ms.get(work, 0.0) / meter.tokens, 4)
           for work in ("draft step", "verify", "prefetch", "miss", "stall")},
    }  # fmt: skip
