"""`specter_lab.load(...)`: a model served with its routed experts in host memory.

engine = specter_lab.load("qwen-nano", expert_budget="1MiB")
for text in engine.generate("Once upon a time", max_new_tokens=64, stream=True):
    print(text, end="")
engine.stats
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from specter_lab.engine.arena import Budget
from specter_lab.engine.batch import Piece, Request, Take, decode_batch, in_order
from specter_lab.engine.decode import Meter, OnRound, decode
from specter_lab.engine.draft import NONE, ROUNDED, prepare_draft
from specter_lab.engine.expert_math import DraftExperts
from specter_lab.engine.experts import ExpertMemory, new_expert_memory
from specter_lab.engine.host_experts import new_host_experts
from specter_lab.engine.kernels.launch import MAX_TOKENS
from specter_lab.engine.ops import Ops, TorchOps
from specter_lab.engine.served import OnDemand, ReadThrough, TargetExperts
from specter_lab.engine.session import Session, new_session
from specter_lab.engine.weights import Weights, load_weights
from specter_lab.errors import UserError
from specter_lab.models.anatomy import anatomy
from specter_lab.plan.depth_control import DepthController, FixedDepth, OnlineDepth
from specter_lab.plan.hardware import PAPERS_GPU, read_profile
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Policy, Prefetcher, Scene
from specter_lab.plan.serve import ADMIT, CPU_IF_SOONER, LOAD, READ_THROUGH
from specter_lab.plan.step_costs import StepCosts, Transport

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
MAX_DEPTH = 16
MAX_LANES = 32  # requests at a time
SESSION = "KV cache and distributions"  # in the budget
SESSION_TOKENS = 256  # a session's room for tokens is a multiple of this
TRANSPORTS = WHOLE, RESIDUAL = "whole", "residual"
MODES = {"fast": "specter-fast", "paper": "specter", "shared": "specter-shared"}  # and their policies


@dataclass
class Engine:
    """A loaded model. `stats` counts everything since it was loaded; `budget.taken` says where the memory went."""

    weights: Weights
    memory: ExpertMemory
    target: TargetExperts
    draft: DraftExperts
    policy: Policy
    prefetcher: Prefetcher
    depth: int | None  # drafted tokens per round where `generate` is not told: the policy's; None: chosen online
    budget: Budget
    ops: Ops
    stats: Meter = field(default_factory=Meter)
    on_round: OnRound | None = None  # told of every round's routing and work
    online: OnlineDepth = field(default_factory=lambda: OnlineDepth(MAX_DEPTH))  # learns from one text after another
    _session: Session | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.weights.tokenizer

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def generate(
        self, prompt: str | Tensor, max_new_tokens: int = 128, *, temperature: float = 0.0, depth: int | None = None,
        seed: int = 0, stream: bool = False, ignore_eos: bool = False,
    ) -> str | Tensor | Iterator:  # fmt: skip
        """Continue `prompt`: text gives text, token ids [P] or [1, P] give ids [1, P + N] as transformers' `generate` does.

        Args:
            temperature: 0 is greedy; otherwise samples follow the target's distribution exactly.
            depth: drafted tokens per round; None: the policy's, or chosen online from what rounds have taken so far, also those of
                earlier texts.
            seed: of sampling; the same seed gives the same text at a fixed depth.
            ignore_eos: go on after the end-of-text token; by default it is the last one.
            stream: yield pieces (text, or lists of ids) as they are committed, and return nothing else.

        Raises:
            UserError: a prompt of fewer than two tokens, or a depth where nothing drafts.
        """
        self.check_depth(depth)
        of_text, ids = isinstance(prompt, str), self._ids(prompt)
        pieces = self._rounds(ids, max_new_tokens, temperature, depth, seed)
        if not ignore_eos:
            pieces = _until(pieces, _ends(self.weights.config.eos_token_id))
        if stream:
            return self._text(pieces) if of_text else pieces
        new = [token for piece in pieces for token in piece]
        return self.tokenizer.decode(new) if of_text else torch.cat([ids.cpu(), torch.tensor(new)])[None]

    def generate_batch(
        self, prompts: Sequence[str | Tensor], max_new_tokens: int | Sequence[int] = 128, *,
        temperature: float | Sequence[float] = 0.0, depth: int | None | Sequence[int | None] = None, seed: int = 0,
        lanes: int = MAX_LANES, stream: bool = False, ignore_eos: bool = False,
    ) -> list[str] | list[Tensor] | Iterator[tuple[int, list[int]]]:  # fmt: skip
        """Continue many prompts, at most `lanes` at a time. Greedy text is what `generate` gives for each alone (but in mode
        "shared", whose sums depend on what the host computes); samples follow the same distribution.

        Args:
            prompts: texts, or token ids [P] each.
            max_new_tokens: of all, or of each; so are temperature and depth.
            depth: drafted tokens per round; None: the policy's, or chosen online from what a request's rounds take.
            seed: of the first prompt's samples; the next one has the next.
            stream: yield (number of the prompt, its new tokens) round by round, and return nothing else.

        Raises:
            UserError: as `generate`; not one value for each prompt; no lanes; or more than the mode serves (`check_lanes`).
        """
        each = {"limits": max_new_tokens, "temperatures": temperature, "depths": depth}
        limits, warmths, depths = (_of_each(name, value, len(prompts)) for name, value in each.items())
        if not prompts or lanes < 1:
            raise UserError("a batch needs at least one prompt and one lane")
        ends = frozenset() if ignore_eos else _ends(self.weights.config.eos_token_id)
        requests = [
            self.request(self._ids(prompt), limit, temperature=warmth, depth=k, seed=seed + number, ends=ends)
            for number, (prompt, limit, warmth, k) in enumerate(zip(prompts, limits, warmths, depths))
        ]
        room, lanes = max(len(each.ids) + each.new_tokens for each in requests), min(lanes, len(requests))
        deepest = max(map(self.deepest, depths))
        self.check_lanes(lanes, deepest)
        session = self.session_for(room, deepest, warmths[0] if len(set(warmths)) == 1 else None, lanes)
        pieces, numbers = self.batch(session, in_order(requests)), {id(each): n for n, each in enumerate(requests)}
        if stream:
            return ((numbers[id(piece.request)], piece.tokens) for piece in pieces)
        new: list[list[int]] = [[] for _ in requests]
        for piece in pieces:
            new[numbers[id(piece.request)]] += piece.tokens
        if isinstance(prompts[0], str):
            return [self.tokenizer.decode(tokens) for tokens in new]
        return [torch.cat([each.ids.cpu(), torch.tensor(tokens)])[None] for each, tokens in zip(requests, new)]

    def request(
        self, ids: Tensor, new_tokens: int, *, temperature: float, depth: int | None, seed: int, ends: frozenset[int],
        wanted: Callable[[], bool] = lambda: True,
    ) -> Request:  # fmt: skip
        """A request of a batch; arguments as `generate_batch`'s and `batch.Request`'s."""
        self.check_depth(depth)
        k = self.depth if depth is None else depth
        control = OnlineDepth(MAX_DEPTH) if k is None else FixedDepth(k)
        generator = Generator(self.device).manual_seed(seed) if temperature else None
        return Request(ids, new_tokens, control, temperature, generator, ends, wanted)

    def batch(self, session: Session, take: Take) -> Iterator[Piece]:
        """Write what `take` gives in a session of this engine."""
        with torch.inference_mode():
            yield from decode_batch(session, self.memory, self.prefetcher, take, self.stats)

    def check_lanes(self, lanes: int, depth: int) -> None:
        """Raise UserError for more lanes than the mode serves at that depth."""
        if lanes > MAX_TOKENS:
            raise UserError(f"{lanes} lanes draft {lanes} tokens a step, and {MAX_TOKENS} are the most: use fewer")
        if isinstance(self.target, ReadThrough) and lanes * (depth + 1) > MAX_TOKENS:
            raise UserError(f"in fast mode kernels read missing experts once for every {MAX_TOKENS} tokens, and {lanes} windows of "
                            f"{depth + 1} are more: use mode 'paper' or 'shared', or fewer lanes")  # fmt: skip

    def deepest(self, depth: int | None) -> int:
        """Drafted tokens of the deepest window of a request with that depth."""
        k = self.depth if depth is None else depth
        return MAX_DEPTH if k is None else k

    def _ids(self, prompt: str | Tensor) -> Tensor:
        """[P] on the device."""
        ids = torch.tensor(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt.flatten()
        if len(ids) < 2:
            raise UserError("a prompt needs at least 2 tokens: one for the prefix and one to go on from")
        return ids.to(self.device)

    def check_depth(self, depth: int | None) -> None:
        """Raise UserError for a depth where nothing drafts."""
        if depth and not self.draft.nbytes:
            raise UserError(
                f"nothing drafts here (policy '{self.policy.id}'), so there is no depth of {depth}: leave it out"
            )

    def fill_slots(self) -> None:
        """Fill every free slot now, experts in order, instead of as decoding needs them."""
        for layer, count in enumerate(self.memory.slots.count.tolist()):
            absent = np.flatnonzero(self.memory.slots.slot_of[layer] < 0)[
                : count - int(self.memory.slots.filled[layer])
            ]
            self.memory.load((np.full(len(absent), layer), absent))
        self.memory.settled()

    def _rounds(
        self, ids: Tensor, new_tokens: int, temperature: float, depth: int | None, seed: int
    ) -> Iterator[list[int]]:
        depth = self.depth if depth is None else depth
        control: DepthController = self.online if depth is None else FixedDepth(depth)
        session = self.session_for(len(ids) + new_tokens, MAX_DEPTH if depth is None else depth, temperature)
        generator = Generator(self.device).manual_seed(seed)
        left = new_tokens
        with torch.inference_mode():
            rounds = decode(session, self.memory, self.prefetcher, control, ids, new_tokens=new_tokens,
                            generator=generator, meter=self.stats, on_round=self.on_round)  # fmt: skip
            for tokens in rounds:
                yield tokens[:left]
                left -= len(tokens)

    def session_for(self, tokens: int, depth: int, temperature: float | None, lanes: int = 1) -> Session:
        """Room for so many tokens of every lane; temperature None: of each lane its own."""
        kept = self._session
        fits = kept is not None and kept.kv.max_tokens > tokens + depth and kept.depth >= depth and kept.lanes == lanes
        if not fits or (None if isinstance(kept.temperature, Tensor) else kept.temperature) != temperature:
            tokens = SESSION_TOKENS * math.ceil(tokens / SESSION_TOKENS)  # the next, longer request may find it fits
            self.budget.taken.pop(SESSION, None)
            kept = self._session = None  # its memory first; and none is kept that the budget refuses
            session = new_session(self.weights.decoder, self.draft, self.target, self.ops, max_tokens=tokens, depth=depth,
                                  temperature=temperature, lanes=lanes)  # fmt: skip
            self.budget.take(SESSION, session.nbytes, "ask for fewer tokens, or fewer lanes")
            self._session = session
        return self._session

    def _text(self, pieces: Iterator[list[int]]) -> Iterator[str]:
        """Text as far as its characters are complete."""
        ids: list[int] = []
        shown = 0
        for piece in pieces:
            ids += piece
            text = self.tokenizer.decode(ids)
            if not text.endswith("\ufffd"):
                yield text[shown:]
                shown = len(text)


def _of_each(name: str, value: object, count: int) -> list:
    """`count` times the same, or one for each of them."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise UserError(f"{len(value)} {name} for {count} prompts: give one, or one for each")
    return list(value)


def _ends(told: int | list[int] | None) -> frozenset[int]:
    """Tokens that end a text, as a config names them."""
    return frozenset({told} if isinstance(told, int) else told or ())


def _until(pieces: Iterator[list[int]], ends: frozenset[int]) -> Iterator[list[int]]:
    """Pieces up to the first of `ends`, which is kept."""
    for piece in pieces:
        stop = next((place for place, token in enumerate(piece) if token in ends), None)
        yield piece if stop is None else piece[: stop + 1]
        if stop is not None:
            return


def load(model: str, *, device: str | None = None, widen_to: str | None = None, **how) -> Engine:
    """Load a zoo model, checkpoint folder or hub id with its routed experts in host memory.

    Args:
        model: zoo name, folder or hub id of an architecture in `engine.shape.ENGINE_ARCHITECTURES`.
        device: default: the GPU if there is one.
        widen_to: grow a zoo model to the sizes of this original on the way (`models.widen`): same function, full-size bytes.
        **how: arguments of `engine_for`: expert_budget, mode, policy, draft, transport, memory_budget.

    Raises:
        UserError: unknown model or policy, or a budget that does not suffice.
    """
    prepare_draft(model, how.get("draft", ROUNDED))
    return engine_for(load_weights(model, device=device, widen_to=widen_to), **how)


def engine_for(
    weights: Weights, *, expert_budget: str | int, in_slots: bool = False, mode: str | None = None, policy: str | Policy | None = None,
    draft: str = ROUNDED, transport: str = WHOLE, memory_budget: str | int = 2**62, profile: str = PAPERS_GPU,
) -> Engine:  # fmt: skip
    """An engine over loaded weights.

    Args:
        expert_budget: device memory for expert slots, in bytes or like "6GiB"; every layer gets at least one slot. Some
            policies divide it otherwise (`Policy.slots`).
        in_slots: `expert_budget` counts expert slots per layer instead.
        mode: "fast": kernels read missing experts over the link themselves; "paper": the host copies them, layer by layer;
            "shared": and its cores compute some of them, which rounds differently. Default: "shared" for policies that share;
            "fast" with a draft or where every expert has a slot; else "paper", because what kernels read by themselves takes no
            slot and is not there the next time.
        policy: an exact policy, or the id of one in `plan.policies`; default: the mode's.
        draft: "int4": the experts rounded to nearest; "gptq-int4" or another of `draft.draft_names`: a quantiser's codes, which
            are made first if the cache lacks them; folder or hub id of a GPTQ checkpoint of this model; "none": plain decoding.
        transport: "residual": experts cross the link without what the draft's codes say, about 9 of 16 bits (beside GPTQ's 10 to 10.3,
            since its codes lie further from the weights), and are restored bit for bit; needs the codes on the device and host
            memory for both forms. What kernels read by themselves crosses whole.
        memory_budget: of everything the engine holds on the device.
        profile: of this machine, for policies that plan with its numbers.

    Raises:
        UserError: unknown mode, policy or draft, a policy the engine cannot run, a draft that does not fit (`int4_stored`), or a
            budget that does not suffice.
    """
    shape, slots = weights.shape, _slots_per_layer(weights, expert_budget, in_slots)
    policy = find_policy(policy) if isinstance(policy, str) else policy
    drafts = draft != NONE and (policy is None or policy.draft is not None)
    if mode is None:
        shared = policy is not None and policy.miss == CPU_IF_SOONER
        mode = "shared" if shared else "fast" if drafts or slots >= shape.num_experts else "paper"
    if mode not in MODES:
        raise UserError(f"no mode '{mode}': choose {' or '.join(MODES)}")
    chosen = _runnable(policy or find_policy(MODES[mode]), mode)
    if transport not in TRANSPORTS:
        raise UserError(f"no transport '{transport}': choose {' or '.join(TRANSPORTS)}")
    if drafts or transport == RESIDUAL:
        prepare_draft(weights.name, draft)
    codes = draft if draft != NONE else ROUNDED  # beside which experts cross the link
    records = weights.records(codes) if transport == RESIDUAL else None
    crossing = Transport(records.bits) if records else Transport()
    costs = StepCosts(anatomy(weights.config, weights.name), read_profile(profile), transport=crossing)
    scene = Scene(costs, slots, MAX_DEPTH)
    budget, count = Budget(in_bytes(memory_budget)), chosen.slots(scene)
    if records and chosen.draft is None:  # the codes are there all the same, their memory is no slots
        count = np.minimum(count, slots)
    memory = new_expert_memory(
        shape, weights.host, count, budget, device=weights.device, order=chosen.order, records=records
    )
    pool = weights.draft(draft if drafts else NONE)
    codes_bytes = weights.draft(codes).nbytes if records else pool.nbytes
    budget.take("draft's INT4 experts", codes_bytes, "use draft='none' and transport='whole', or a larger budget")
    prefetcher = chosen.prefetch(scene)
    host = new_host_experts(memory) if mode == "shared" else None
    target = ReadThrough(memory) if mode == "fast" else OnDemand(memory, prefetcher, host)
    depth = 0 if not drafts else chosen.depth if mode == "fast" else chosen.depth_in(scene)
    return Engine(weights, memory, target, pool, chosen, prefetcher, depth, budget, _ops(weights.device))


def _runnable(policy: Policy, mode: str) -> Policy:
    if policy.miss == CPU_IF_SOONER and mode != "shared":
        raise UserError(f"policy '{policy.id}' lets the host's cores compute misses: give mode='shared'")
    cannot = [
        (policy.lossy, "changes the output"),
        (policy.draft not in ("int4", None), "drafts with fewer of the target's experts"),
        (policy.miss == ADMIT, "has kernels load misses into slots"),
        (
            policy.miss not in (LOAD, READ_THROUGH, CPU_IF_SOONER, ADMIT),
            "computes misses on the CPU whatever the link does",
        ),
        (policy.scores is not None, "scores its victims"),
    ]
    for is_so, what in cannot:
        if is_so:
            raise UserError(f"policy '{policy.id}' {what}: simulate it instead, the engine has no code for that")
    return policy


def _ops(device: torch.device) -> Ops:
    if device.type != "cuda":
        return TorchOps()
    from specter_lab.engine.kernel_ops import kernel_ops

    return kernel_ops(device)


def _slots_per_layer(weights: Weights, budget: str | int, in_slots: bool) -> int:
    """Equal slots per layer that the budget holds."""
    one_each = len(weights.host) * weights.host[0, 0].nbytes
    per_layer = int(budget) if in_slots else in_bytes(budget) // one_each
    if per_layer < 1:
        raise UserError(f"an expert budget of {budget} does not hold one expert in every layer: {one_each:,} bytes is "
                        f"the least")  # fmt: skip
    return min(per_layer, weights.shape.num_experts)


def in_bytes(size: str | int) -> int:
    """Bytes of a size like 4096, "6GiB" or "500 MB".

    Raises:
        UserError: no such size.
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?)B?\s*", size.upper())
    if not match or match[2] not in UNITS:
        raise UserError(f"'{size}' is no size: write bytes, or a number with KB, MB, GB, KiB, MiB or GiB")
    return int(float(match[1]) * UNITS[match[2]])
