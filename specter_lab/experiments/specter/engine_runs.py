"""The engine's systems on the GPU of this machine: times, bytes and hits as measured, and what the simulator says of the same rounds.

Models are the zoo's proxies, as deep as their originals, widened to the originals' sizes: the same function, full-size bytes.
Every system runs the same kernels over the same weights on the same prompts, at the paper's slots. Text is sampled, for small
models repeat themselves greedily, which flatters a cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from specter_lab.engine.api import RESIDUAL, WHOLE, Engine, engine_for
from specter_lab.engine.decode import Meter
from specter_lab.engine.weights import Weights, load_weights
from specter_lab.errors import UserError
from specter_lab.experiments import jobs
from specter_lab.experiments.specter import routing
from specter_lab.experiments.specter.ablation import policy_with
from specter_lab.experiments.specter.dilution import diluted
from specter_lab.experiments.specter.engine_machine import PROMPT_TOKENS, Machine, measure_machine, simulated_ms
from specter_lab.experiments.specter.setting import BUDGETS, priced_as, slots_of
from specter_lab.measure.prompts import PROMPT_SETS, select, tokenize
from specter_lab.models.load import shown_name
from specter_lab.models.zoo.shapes import SHAPES
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Policy, Scene, no_prefetch
from specter_lab.plan.replay import Replay

REPEATS, TEMPERATURE = 3, 1.0
NEW_TOKENS = {"phi": 12}  # its experts are nine times as large; others USUAL_TOKENS
USUAL_TOKENS, EXACT_TOKENS = 24, 512
LARGE_REPEATS = 1  # of models named in NEW_TOKENS
RESIDENT, ONLINE, SHARED = "all-resident", "specter-fast, online depth", "specter-shared"
ALL_IDEAS = "specter-shared, residual transport, online depth"
SYSTEMS = {  # name -> mode, policy, transport
    RESIDENT: ("fast", "specter-fast", WHOLE), "specter-fast": ("fast", "specter-fast", WHOLE),
    ONLINE: ("fast", "specter-fast", WHOLE), "specter-fast, residual transport": ("fast", "specter-fast", RESIDUAL),
    SHARED: ("shared", "specter-shared", WHOLE), "lru-shared": ("shared", "lru-shared", WHOLE),
    "specter-shared, residual transport": ("shared", "specter-shared", RESIDUAL),
    ALL_IDEAS: ("shared", "specter-shared", RESIDUAL), "specter": ("paper", "specter", WHOLE),
    "specmoeoff": ("paper", "specmoeoff", WHOLE), "lru": ("paper", "lru", WHOLE), "lru-s": ("paper", "lru-s", WHOLE),
}  # fmt: skip
ONLINE_DEPTH = (ONLINE, ALL_IDEAS)
BASELINES = ("specmoeoff", "lru", "lru-s", "lru-shared")
PARTS = {  # what is left of paper mode -> its parts; SEE is the engine's kernels, and stays
    "paper mode": frozenset({"SIC", "PIO"}), "without PIO": frozenset({"SIC"}), "without SIC": frozenset({"PIO"}),
    "without PIO, SIC": frozenset(),
}  # fmt: skip
NO_PREFETCH = "fast mode without prefetch"
PRECISIONS = (0.7, 0.41)  # of the plans, before what the draft itself gets wrong
DRAWN = ("specter", "specter-fast", SHARED)  # systems of which one round is kept, work by work
DRAWN_ROUND = 3  # the first ones fill the slots
ALL_SETS = "all"
REFUSED = "refused"  # rows about systems that were not run
_WIDE: dict[str, Weights] = {}
EXACT = {"fast": (4, 8), "paper": (6, 5)}  # mode -> slots per layer, depth


def exact_rows(model: str, digest: str, seed: int) -> jobs.Rows:
    """Greedy text, bitwise: the proxy with its own sizes, all experts resident and one token at a time, against both modes.

    `digest` names what is read in the cache key, here and below.
    """
    forget_weights()
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
    return [named(model) | row for row in rows]


def system_rows(model: str, digest: str, seed: int, budget: str) -> jobs.Rows:
    """Systems at one budget, and at the high one the passes, systems' parts, spoilt plans and one round of some."""
    weights, machine = wide_weights(model), _machine(model)
    slots = slots_of(model, routing.family(model))[budget]
    bench = Bench(weights, model, budget, int(slots), _prompts(weights, seed), machine, seed)
    rows = [row | {"budget": budget} for row in machine.rows()]  # those its simulated times are from
    if budget == "high":
        rows += bench.group_rows([RESIDENT])
    rows += bench.group_rows([name for name in SYSTEMS if name != RESIDENT])
    if budget == "high":
        rows += [row | {"by": "part"} for row in bench.rows(bench.parts(), 1)]
        rows += [row | {"by": "precision"} for row in bench.rows(bench.spoilt(), 1)]
    return [named(model) | row for row in rows]


def wide_weights(model: str) -> Weights:
    """A model at its original's sizes, kept for the next job of this process: they follow each other model by model."""
    if model not in _WIDE:
        forget_weights()
        _WIDE[model] = load_weights(model, widen_to=SHAPES[model].original if model in SHAPES else None)
    return _WIDE[model]


def forget_weights() -> None:
    """Make room: two models of such sizes may not fit this machine."""
    _WIDE.clear()
    gc.collect()
    torch.cuda.empty_cache()


@cache
def _machine(model: str) -> Machine:
    return measure_machine(wide_weights(model), model)


def named(model: str) -> dict[str, str]:
    """The columns that say which model a row is about."""
    return {"model": shown_name(model), "family": routing.family(model), "original": priced_as(model).name}


def refused_row(name: str, budget: str, error: UserError) -> dict:
    """A system that was not run, and why."""
    return {"by": REFUSED, "item": name, "budget": budget, "title": str(error)}


def _prompts(weights: Weights, seed: int) -> dict[str, Tensor]:
    """The first long enough prompt of every set, cut to PROMPT_TOKENS."""
    tokens = tokenize(select(10, seed=seed), weights.tokenizer, PROMPT_TOKENS).at_least(PROMPT_TOKENS)
    found: dict[str, Tensor] = {}
    for request, ids in zip(tokens.requests, tokens.ids):
        found.setdefault(request.prompt_set, ids)
    return found


@dataclass
class Contender:
    """One system at one budget."""

    mode: str
    engine: Engine
    depth: int | None  # drafted tokens per round; None: online


@dataclass(frozen=True)
class Bench:
    """One model at one budget: who is measured, and how."""

    weights: Weights
    model: str
    budget: str
    slots: int  # per layer
    prompts: Mapping[str, Tensor]
    machine: Machine
    seed: int

    @property
    def new_tokens(self) -> int:
        return NEW_TOKENS.get(routing.family(self.model), USUAL_TOKENS)

    @property
    def repeats(self) -> int:
        return LARGE_REPEATS if routing.family(self.model) in NEW_TOKENS else REPEATS

    def group_rows(self, names: Sequence[str]) -> jobs.Rows:
        """Rows of those of these systems that this machine holds, and one for each of the others that says why not.

        Their engines end with the call: the next ones need their memory.
        """
        found, refused = {}, []
        for name in names:
            try:
                found[name] = self.contender(name)
            except UserError as error:
                refused.append(refused_row(name, self.budget, error))
        return [*refused, *self.rows(found, self.repeats)]

    def contender(self, name: str) -> Contender:
        mode, policy, transport = SYSTEMS[name]
        slots = self.weights.shape.num_experts if name == RESIDENT else self.slots
        contender = self._of(mode, find_policy(policy), slots, transport)
        if name == RESIDENT:
            contender.engine.fill_slots()
        return replace(contender, depth=None) if name in ONLINE_DEPTH else contender

    def parts(self) -> dict[str, Contender]:
        """Paper mode without some of its parts, and fast mode without prefetch, over whatever experts come first."""
        found = {name: self._of("paper", policy_with(parts), self.slots) for name, parts in PARTS.items()}
        alone = self._of("fast", replace(find_policy("specter-fast"), prefetch=no_prefetch), self.slots)
        alone.engine.fill_slots()
        return found | {NO_PREFETCH: alone}

    def spoilt(self) -> dict[str, Contender]:
        """Both modes with a share of their planned experts exchanged for others."""
        pairs = [
            (mode, policy, share)
            for mode, policy in (("paper", "specter"), ("fast", "specter-fast"))
            for share in PRECISIONS
        ]
        return {f"{policy} @ {share}": self._of(mode, diluted(find_policy(policy), share, self.seed), self.slots)
                for mode, policy, share in pairs}  # fmt: skip

    def _of(self, mode: str, policy: Policy, slots: int, transport: str = WHOLE) -> Contender:
        engine = engine_for(
            self.weights, expert_budget=slots, in_slots=True, mode=mode, policy=policy, transport=transport
        )
        own = engine.policy.depth_in(Scene(None, slots, BUDGETS[routing.family(self.model)].depth))
        return Contender(mode, engine, 0 if not engine.draft.banks else own)

    def rows(self, contenders: Mapping[str, Contender], repeats: int) -> Iterator[dict]:
        """One row per repeat, contender and prompt set; they take turns."""
        for contender in contenders.values():  # kernels are compiled, graphs captured, slots filled
            self._generate(contender, self.prompts[PROMPT_SETS[0]])
        for repeat in range(repeats):
            for name, contender in contenders.items():
                yield from self._rows(name, contender, repeat)
        torch.cuda.empty_cache()

    def _generate(self, contender: Contender, ids: Tensor) -> tuple[Meter, dict[str, float]]:
        """What was counted, and TPOT by its definitions (`plan.depth`)."""
        engine, count = contender.engine, self.new_tokens
        engine.stats, began = Meter(), time.perf_counter()
        pieces = engine.generate(ids, count, temperature=TEMPERATURE, depth=contender.depth, seed=self.seed, ignore_eos=True,
                                 stream=True)  # fmt: skip
        ends_ms = [(time.perf_counter() - began) * 1e3 for _ in pieces]
        return engine.stats, {"measured_ttft_ms": ends_ms[0], "measured_paper_tpot_ms": (ends_ms[-1] - ends_ms[0]) / (count - 1),
                              "measured_end_to_end_ms_per_token": ends_ms[-1] / count}  # fmt: skip

    def _rows(self, name: str, contender: Contender, repeat: int) -> Iterator[dict]:
        engine, total = contender.engine, Meter()
        replay, work = Replay(engine.memory.shape.num_experts, priced_as(self.model).moe_layers), []
        held = sum(engine.budget.taken.get(part, 0) for part in ("expert slots", "draft's INT4 experts"))
        base = {
            "by": "system", "item": name, "title": engine.policy.title, "mode": contender.mode, "budget": self.budget,
            "repeat": repeat, "slots_per_layer": float(engine.memory.slots.count.mean()), "gpu_expert_gb": round(held / 1e9, 3),
        }  # fmt: skip
        engine.on_round = partial(_note, replay, work)
        for prompt_set, ids in self.prompts.items():
            replay.begin_request()
            meter, tpot = self._generate(contender, ids)
            total.add(meter)
            yield base | {"prompt_set": prompt_set} | _meter_row(meter, self.machine) | _rounded(tpot)
        engine.on_round = None
        simulated = simulated_ms(engine, replay, self.model, self.machine, self.new_tokens)
        yield (
            base
            | {"prompt_set": ALL_SETS, "simulated_ms_per_token": round(simulated, 4)}
            | _meter_row(total, self.machine)
        )
        if name in DRAWN and repeat == 0 and self.budget == "high":
            for span in work[min(DRAWN_ROUND, len(work) - 1)]:
                yield {"by": "work", "item": name, "budget": self.budget, "stream": span.stream, "work": span.work,
                       "measured_start_ms": round(span.start_ms, 4), "measured_end_ms": round(span.end_ms, 4)}  # fmt: skip


def _note(replay: Replay, work: list, routed: tuple, spans: list) -> None:
    replay.add(*routed)
    work.append(spans)


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def _meter_row(meter: Meter, machine: Machine) -> dict:
    moved, tokens = meter.h2d_bytes + meter.read_through_bytes, meter.tokens
    busy_ms = {work: meter.busy_ms.get(work, 0.0) for work in ("draft step", "verify", "prefetch", "miss", "stall")}
    return {
        "n_tokens": tokens, "n_rounds": meter.rounds, "acceptance": round(meter.acceptance, 4) if meter.drafted else None,
        **_rounded({
            "measured_ms_per_token": 1e3 * meter.seconds / tokens, "tokens_per_round": meter.tokens_per_round,
            "distinct_per_pass": meter.needed / meter.rounds, "hit_rate": meter.hits / meter.needed,
            "by_host_share": meter.by_host / meter.needed, "link_mb_per_token": moved / tokens / 1e6,
            "read_through_mb_per_token": meter.read_through_bytes / tokens / 1e6, "link_gb_s": moved / meter.seconds / 1e9,
            "link_busy_share": moved / meter.seconds / 1e9 / machine.link_gb_s,
            "floor_link_ms_per_token": moved / tokens / machine.link_gb_s / 1e6,
            "copies_ms_per_token": (busy_ms["prefetch"] + busy_ms["miss"]) / tokens,
            **{f"{work.replace(' ', '_')}_ms_per_token": ms / tokens for work, ms in busy_ms.items()},
        }),
    }  # fmt: skip
