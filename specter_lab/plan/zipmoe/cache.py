"""Which form of which expert is kept: four pools per layer, one victim rule (ZipMoE, admission and eviction).

`PoolCache` knows names, not bytes. The engine asks it for states, tells it what was used, and carries out the moves it names;
a replay of a trace does the same without bytes.

Rules: `rank` is the planner's (the pool that an expert's rank belongs to, the victim the one of the worst rank), `lru`, `lfu`
and `fifo` are the classical ones, and `marking` evicts an unmarked expert, a new phase beginning when all are marked. By the
classical rules an expert enters the best pool, and what a pool evicts moves on to the next one that it can become part of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from specter_lab.errors import UserError
from specter_lab.plan.zipmoe.pools import KEPT, Pools
from specter_lab.plan.zipmoe.ranks import RankTracker
from specter_lab.plan.zipmoe.work import State

RULES = ("rank", "lru", "lfu", "fifo", "marking")
CAN_BECOME = {  # what is left of a form when parts of it are dropped
    State.F: (State.S,), State.C: (State.S, State.E), State.S: (), State.E: (), State.M: (),
}  # fmt: skip


@dataclass(frozen=True)
class Move:
    """One expert changes its form."""

    expert: int
    before: State
    after: State


class PoolCache:
    """The pools of one layer.

    Raises:
        UserError: no such rule.
    """

    def __init__(self, pools: Pools, rule: str, prior: np.ndarray) -> None:
        """`prior` [E]: shares of long-term use; `rank` starts from it."""
        if rule not in RULES:
            raise UserError(f"no eviction rule '{rule}': give one of {', '.join(RULES)}")
        self.rule, self.pools = rule, pools
        self.tracker = RankTracker(prior)
        self._room = pools.by_state
        self._where: dict[int, State] = {}
        self._members: dict[State, dict[int, None]] = {state: {} for state in KEPT}
        self._clock = 0
        self._last_use = np.full(len(prior), -1, np.int64)
        self._uses = np.zeros(len(prior), np.int64)
        self._entered = np.zeros(len(prior), np.int64)
        self._marked: set[int] = set()

    def state(self, expert: int) -> State:
        return self._where.get(expert, State.M)

    def members(self, state: State) -> list[int]:
        return list(self._members[state])

    def use(self, experts: Iterable[int]) -> list[Move]:
        """One layer call has used these distinct experts, all of which are whole in memory now; what moves, in order."""
        used = list(experts)
        ranks = self.tracker.ranks()
        self.observe(used)
        return [move for expert in sorted(used, key=lambda e: ranks[e]) for move in self.admit(expert)]

    def observe(self, experts: Iterable[int]) -> None:
        """A layer call needs these distinct experts."""
        used = np.fromiter(experts, np.int64)
        self._clock += 1
        self.tracker.observe(used)
        self._last_use[used] = self._clock
        self._uses[used] += 1
        for expert in used.tolist():
            self._mark(expert)

    def admit(self, expert: int, pinned: Collection[int] = ()) -> list[Move]:
        """An expert is whole in memory; what moves because of it, in order.

        A move frees the place of what it leaves before the next one takes it. `pinned` experts stay as they are.
        """
        moves: list[Move] = []
        before, keys = self.state(expert), self._keys()
        for target in KEPT:
            if self._room[target] == 0:
                continue
            if target is before or before in KEPT[: KEPT.index(target)]:
                break  # it stays, rather than take a worse form
            members = self._members[target]
            if len(members) < self._room[target]:
                self._put(expert, target, moves)
                break
            victim = min((m for m in members if m not in pinned), key=lambda m: keys[m], default=None)
            if victim is not None and (self.rule != "rank" or keys[victim] < keys[expert]):
                self._evict(victim, target, keys, {*pinned, expert}, moves)
                self._put(expert, target, moves)
                break
        return moves

    def _evict(self, victim: int, state: State, keys: np.ndarray, pinned: Collection[int], moves: list[Move]) -> None:
        """Out of its pool, into the next one that it can become part of and that has room or something worse."""
        for target in CAN_BECOME[state]:
            members = self._members[target]
            if self._room[target] == 0:
                continue
            if len(members) >= self._room[target]:
                worst = min((m for m in members if m not in pinned), key=lambda m: keys[m], default=victim)
                if keys[worst] >= keys[victim]:
                    continue
                self._put(worst, State.M, moves)
            self._put(victim, target, moves)
            return
        self._put(victim, State.M, moves)

    def _put(self, expert: int, target: State, moves: list[Move]) -> None:
        before = self.state(expert)
        moves.append(Move(expert, before, target))
        if before is not State.M:
            del self._members[before][expert]
            del self._where[expert]
        if target is not State.M:
            self._members[target][expert] = None
            self._where[expert] = target
            if before is State.M:
                self._entered[expert] = self._clock

    def _keys(self) -> np.ndarray:
        """[E], the smallest is the next victim."""
        if self.rule == "rank":
            return self.tracker.score
        if self.rule == "lru":
            return self._last_use
        if self.rule == "lfu":
            return self._uses
        if self.rule == "fifo":
            return self._entered
        marked = np.zeros(len(self._uses))
        marked[list(self._marked)] = 1
        return marked + 1e-9 * self._last_use  # unmarked first, the oldest of them

    def _mark(self, expert: int) -> None:
        if self.rule != "marking":
            return
        self._marked.add(expert)
        if len(self._marked) > max(1, sum(self._room.values())):
            self._marked = {expert}
