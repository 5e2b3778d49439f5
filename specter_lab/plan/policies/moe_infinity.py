"""MoE-Infinity: how a request has used the experts so far says which it will use, by comparison with earlier requests.

Every earlier request left an activation matrix: its uses of every expert [L, E]. The one nearest to the running request's
own matrix (cosine) is the prior; the score of an expert is its expected share of the layer's uses, own uses and prior together,
the prior counting as `PRIOR_TOKENS` tokens. Small scores are evicted first; before its layer comes, a layer's best absent
expert is prefetched, as fast as the link drains. Simplified: requests of a batch share one matrix; the nearest matrix is
looked up once per pass, not per layer; scores have no factor for a layer's depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specter_lab.compiled import compiled
from specter_lab.plan.policy import NO_LOADS, Clock, Loads, Policy, Prefetcher, Scene, Scores, slots_without_draft
from specter_lab.plan.residency import ABSENT, SCORED, Slots
from specter_lab.plan.serve import Ahead, Needs

PRIOR_TOKENS = 16.0
POPULAR = 2.0  # times the even share: what is worth a copy ahead


class Activations(Scores):
    """Expected shares of use, from the requests that are running and the nearest earlier one."""

    def __init__(self, scene: Scene) -> None:
        shape = (scene.layers, scene.num_experts)
        earlier = np.full((1, *shape), scene.costs.model.top_k / scene.num_experts)
        if scene.history is not None:
            experts = scene.history.decoding()  # [R, N, L, k]
            earlier = np.zeros((len(experts), *shape))
            for of_request, uses in zip(experts, earlier):
                np.add.at(uses, (np.arange(scene.layers)[:, None], of_request), 1 / len(of_request))
            earlier = np.concatenate([earlier.mean(axis=0, keepdims=True), earlier])  # the mean, while nothing is known
        self._earlier = earlier  # [R, L, E] uses per token
        self._lengths = np.sqrt((earlier**2).sum(axis=(1, 2)))
        self._own, self._alike, self._tokens = np.zeros(shape), np.zeros(len(earlier)), 0
        self._running: set[int] = set()
        self._last: Needs | None = None

    def update(self, requests: Sequence[int], needs: Needs) -> np.ndarray | None:
        if not self._running.issuperset(requests):  # others begin: what came before is no longer theirs
            self._own[:], self._alike[:], self._tokens, self._last = 0, 0, 0, None
        self._running = set(requests)
        if self._last is not None:
            count_uses(self._own, self._alike, self._earlier, self._last)
            self._tokens += self._last.token_experts.shape[1]
        self._last = needs
        prior = self._earlier[(self._alike / self._lengths).argmax()]
        return (self._own + PRIOR_TOKENS * prior) / (self._tokens + PRIOR_TOKENS)


class BestAbsent(Prefetcher):
    """Copies every layer's best absent expert, if it is clearly popular and scores better than the next victim."""

    def __init__(self, scene: Scene) -> None:
        self._at_least = POPULAR * scene.costs.model.top_k / scene.num_experts

    def begin(self, slots: Slots, depth: int, clock: Clock) -> Loads:
        self._slots = slots
        return NO_LOADS

    def ahead(self, needs: Needs) -> Ahead:
        layers, experts = best_absent(self._slots, self._at_least)
        return Ahead(np.full(len(layers), -1), layers, experts)


@compiled
def count_uses(own: np.ndarray, alike: np.ndarray, earlier: np.ndarray, needs: Needs) -> None:
    """Add a pass's uses to `own` [L, E] and to the products with `earlier` [R, L, E], `alike` [R]."""
    for layer in range(len(own)):
        for row in range(needs.first[layer], needs.first[layer + 1]):
            expert, uses = needs.experts[row], needs.uses[row]
            own[layer, expert] += uses
            for request in range(len(earlier)):
                alike[request] += uses * earlier[request, layer, expert]


@compiled
def best_absent(slots: Slots, at_least: float) -> tuple[np.ndarray, np.ndarray]:
    """Every layer's best absent expert, if it scores `at_least` that and better than the next victim."""
    layers, num_experts = slots.slot_of.shape
    found_in, experts, found = np.empty(layers, np.int64), np.empty(layers, np.int64), 0
    for layer in range(layers):
        victim, best, score = slots.after[layer, num_experts], -1, at_least
        if victim != num_experts and slots.filled[layer] == slots.count[layer]:
            score = max(score, slots.score[layer, victim])
        for expert in range(num_experts):
            if slots.slot_of[layer, expert] == ABSENT and slots.score[layer, expert] > score:
                best, score = expert, slots.score[layer, expert]
        if best >= 0:
            found_in[found], experts[found] = layer, best
            found += 1
    return found_in[:found], experts[:found]


POLICY = Policy(
    "moe-infinity", "MoE-Infinity, activation prior", "MoE-Infinity", draft=None, slots=slots_without_draft, order=SCORED,
    scores=Activations, prefetch=BestAbsent,
)  # fmt: skip
