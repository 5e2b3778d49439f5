"""The runtime: answers every MoE layer's call with the experts it needs, from pools or from the disk.

    needed experts -> states -> order -> fetch (I/O thread, workers) -> execute what is ready -> admit to the pools

The calling thread is the executor. Experts that are whole in memory are executed while others are put together. Outputs are
added up in the order of the expert numbers, as the model's own loop does, so that logits are the same bit for bit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty

import numpy as np
import torch
from torch import Tensor

from specter_lab.compress.codecs import codec
from specter_lab.engine.store.layout import EXPERTS, RAW, read_index
from specter_lab.engine.store.reader import Mapping as FileMapping
from specter_lab.engine.store.reader import Reader
from specter_lab.engine.zipmoe.costs import Activation, compute_expert, measure_costs
from specter_lab.engine.zipmoe.fetch import Fetch, Fetcher, ReadAhead, read_raw
from specter_lab.engine.zipmoe.memory import PARTS, Buffer, Held, allocate, carry_out, layer_budget, sizes_of
from specter_lab.engine.zipmoe.settings import FROM_HISTORY, RAW_COPY, Settings
from specter_lab.errors import UserError
from specter_lab.models.stacks import DROPPED
from specter_lab.plan.zipmoe.cache import PoolCache
from specter_lab.plan.zipmoe.pools import Pools, plan_from_history, plan_pools
from specter_lab.plan.zipmoe.popularity import Popularity
from specter_lab.plan.zipmoe.schedule import as_given, by_blocks
from specter_lab.plan.zipmoe.work import Costs, State, work_of


@dataclass
class Report:
    """Counters of everything since the start, or since `reset`."""

    layer_calls: int = 0
    uses: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*State, "in place", "read ahead"), 0))
    stall_s: float = 0.0  # the executor had nothing to do
    execute_s: float = 0.0
    layers_s: float = 0.0  # inside the runtime altogether
    read_ahead: int = 0
    read_ahead_unused: int = 0
    hits_by_call: list[tuple[int, int]] = field(default_factory=list)  # experts in memory in any form, experts needed


class ExpertRuntime:
    """Serves the experts of one store under a budget; a context manager that ends its threads.

    Args:
        store: folder.
        budget_bytes: of pools and staging together.
        settings: how.
        popularity: long-term use per layer, and by rank; from earlier prompts.
        batch: tokens of a typical layer call, for the planner.

    Raises:
        UserError: damaged store, a budget below the staging, raw copies asked for that the store has not.
    """

    def __init__(self, store: Path, budget_bytes: int, settings: Settings, popularity: Popularity, batch: int) -> None:
        self.index, self.settings = read_index(store), settings
        self.raw = settings.form == RAW_COPY
        if self.raw and RAW not in self.index.file_bytes:
            raise UserError(f"{store} has no raw copies: pack the model with --raw into another folder")
        self.budget_bytes, self._sizes = budget_bytes, sizes_of(self.index)
        self.reader = Reader(store / (RAW if self.raw else EXPERTS), settings.read_mode)
        in_place = settings.in_place and RAW in self.index.file_bytes
        self._mapping = FileMapping(store / RAW) if in_place else None
        self._codec = codec(self.index.codec)
        self._fetcher = Fetcher(self.reader, self._codec, settings.workers, self._give)
        self._closed = False
        try:
            if self.raw:  # one state only: nothing to choose or to order by
                self.costs = Costs(1, 1, 1, 1, 1, self.index.num_shards, settings.workers)
            else:
                self.costs = measure_costs(self.index, self.reader, settings)
            self.pools = self._choose_pools(popularity, batch)
            self.memory = allocate(self.index, settings, self.pools)
        except BaseException:
            self.close()
            raise
        self._held: dict[int, dict[int, Held]] = {layer: {} for layer in self.index.layers}
        self._caches = {
            layer: PoolCache(self.pools, settings.rule, popularity.shares[i])
            for i, layer in enumerate(self.index.layers)
        }
        self._ahead: dict[int, dict[int, ReadAhead]] = {layer: {} for layer in self.index.layers}
        self._routers: Mapping[int, Callable[[Tensor], Tensor]] = {}
        self.report = Report()

    def __enter__(self) -> ExpertRuntime:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and close the file; twice does no harm."""
        if not self._closed:
            self._closed = True
            self._fetcher.close()
            self.reader.close()

    def reset(self) -> None:
        """Counters to zero; what is in memory stays."""
        self.report = Report()
        self.reader.read_bytes, self.reader.read_s = 0, 0.0
        self._fetcher.counters.decompress_s = self._fetcher.counters.recover_s = 0.0

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds by kind of work, threads summed."""
        counters = self._fetcher.counters
        return {"read": self.reader.read_s, "decompress": counters.decompress_s, "recover": counters.recover_s,
                "execute": self.report.execute_s}  # fmt: skip

    def foresee(self, routers: Mapping[int, Callable[[Tensor], Tensor]]) -> None:
        """Routers by layer, [T, H] -> chosen experts [T, k]; read-ahead asks the next layer's if it is among them."""
        self._routers = routers

    def _choose_pools(self, popularity: Popularity, batch: int) -> Pools:
        left = layer_budget(self.index, self.settings, self.budget_bytes)
        if not self.settings.caching:
            return Pools()
        if self.raw:
            return Pools(min(self.index.num_experts, left // self._sizes.full))
        if (given := self.settings.pools) is not None:
            if given.num_bytes(self._sizes) > left:
                raise UserError(f"pools of {given} per layer take {given.num_bytes(self._sizes) / 1e6:.1f} MB, the budget "
                                f"leaves {left / 1e6:.1f} MB: give more memory or smaller pools")  # fmt: skip
            return given
        experts = self.index.num_experts
        if self.settings.planner == FROM_HISTORY:
            return plan_from_history(popularity.sets(batch), experts, self.costs, self._sizes, left).pools
        active = min(experts, batch * popularity.rank_sets.shape[1])
        return plan_pools(popularity.weights(active), active, self.costs, self._sizes, left).pools

    @torch.inference_mode()
    def layer(self, layer: int, hidden: Tensor, indices: Tensor, weights: Tensor, activation: Activation) -> Tensor:
        """What the layer's experts make of T tokens.

        Args:
            layer: its number.
            hidden: [T, H] bfloat16.
            indices: [T, k] experts used; DROPPED where nobody computes a token.
            weights: [T, k] their factors.
            activation: between the two products.

        Returns:
            [T, H].

        Raises:
            RuntimeError: nothing arrived within the time-out (the message has every thread's stack), or a read or a
                decompression failed; the message names the expert.
        """
        start = time.perf_counter()
        table = indices.numpy().T  # [k, T]
        needed = np.unique(table[table != DROPPED]).tolist()
        rows = {expert: np.where(table == expert) for expert in needed}  # slots, tokens

        def execute(expert: int, full: Buffer) -> None:
            begun = time.perf_counter()
            slots, tokens = (torch.from_numpy(part) for part in rows[expert])
            out = compute_expert(self.index, hidden[tokens], full, activation) * weights[tokens, slots, None]
            outputs[expert] = (tokens, out)
            self.report.execute_s += time.perf_counter() - begun

        outputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._serve(layer, needed, execute, hidden)
        result = torch.zeros_like(hidden)
        for expert in needed:
            tokens, out = outputs[expert]
            result.index_add_(0, tokens, out.to(result.dtype))
        self.report.layer_calls += 1
        self.report.layers_s += time.perf_counter() - start
        return result

    def _serve(self, layer: int, needed: list[int], execute: Callable[[int, Buffer], None], hidden: Tensor) -> None:
        """Execute every needed expert once, in whatever order they become ready, and let the pools change."""
        cache, held = self._caches[layer], self._held[layer]
        ahead = self._collect_ahead(layer, needed)
        states = {expert: cache.state(expert) for expert in needed}
        self.report.hits_by_call.append((sum(s is not State.M for s in states.values()), len(needed)))
        cache.observe(needed)
        pinned = set(needed)
        whole: deque[tuple[int, Buffer]] = deque()
        waiting: list[int] = []
        for expert in needed:
            if states[expert] is State.F:
                whole.append((expert, held[expert].full))
                self.report.uses[State.F] += 1
            elif expert not in ahead and (place := self._in_place(layer, expert)) is not None:
                whole.append((expert, place))
                self.report.uses["in place"] += 1
            else:
                waiting.append(expert)
                self.report.uses["read ahead" if expert in ahead else states[expert]] += 1
        order = deque(self._order(waiting, states, ahead))
        flying: dict[int, Fetch] = {}
        done_whole = [expert for expert, _ in whole if states[expert] is State.F]
        placed = len(whole) > sum(state is State.F for state in states.values())  # the page cache serves this layer
        looked = not self.settings.prefetch or (placed and not waiting)
        try:
            while order or flying or whole:
                while order and len(flying) < self.settings.in_flight:
                    fetch = self._begin(layer, order.popleft(), states, ahead)
                    flying[fetch.record.expert] = fetch
                if not order and not looked:
                    looked = self._look_ahead(layer, hidden)
                if whole and (not flying or self._fetcher.ready.empty()):
                    execute(*whole.popleft())
                    continue
                fetch = self._next_ready(flying)
                expert = fetch.record.expert
                execute(expert, fetch.held.full)
                pinned.discard(expert)
                del flying[expert]
                self._settle(layer, expert, fetch, pinned)
        except BaseException:
            self.close()  # no thread may write into buffers that would be handed out again
            raise
        for expert in done_whole:
            pinned.discard(expert)
            carry_out(cache.admit(expert, pinned), self.memory, held, self.index)

    def _order(self, waiting: list[int], states: Mapping[int, State], ahead: Mapping[int, ReadAhead]) -> list[int]:
        def state(expert: int) -> State:
            return State.C if expert in ahead else states[expert]

        works = [work_of(expert, state(expert), self.costs) for expert in waiting]
        arrange = by_blocks if self.settings.scheduled else as_given
        return [work.expert for work in arrange(works, self.settings.workers)]

    def _in_place(self, layer: int, expert: int) -> Buffer | None:
        if self._mapping is None:
            return None
        raw = self.index.experts[layer, expert].raw
        if not self._mapping.resident(raw.offset, raw.num_bytes):
            return None
        return self._mapping.bytes[raw.offset : raw.offset + raw.num_bytes]

    def _begin(self, layer: int, expert: int, states: Mapping[int, State], ahead: Mapping[int, ReadAhead]) -> Fetch:
        record, state = self.index.experts[layer, expert], states[expert]
        staged = Held(full=self.memory.take("full"))
        if self.raw:
            fetch = Fetch(record, staged, False, False, raw=True)
            if self.settings.overlapped:
                self._fetcher.start(fetch)
            else:
                begun = time.perf_counter()
                read_raw(self.reader, record, staged.full)
                self.report.stall_s += time.perf_counter() - begun
                self._fetcher.ready.put(fetch)
            return fetch
        if expert in ahead:
            source = ahead[expert].held
            staged.sign_mantissa, staged.exponents = source.sign_mantissa, source.exponents
            fetch = Fetch(record, staged, False, False)
        else:
            pool = self._held[layer].get(expert, Held())
            staged.sign_mantissa = pool.sign_mantissa if state.has_sign_mantissa else self.memory.take("sign_mantissa")
            staged.exponents = pool.exponents if state.has_exponents else self.memory.take("exponents")
            lent = {part for part in PARTS if getattr(pool, part) is not None}
            fetch = Fetch(record, staged, not state.has_sign_mantissa, not state.has_exponents, frozenset(lent))
        self._fetcher.start(fetch)
        return fetch

    def _next_ready(self, flying: Mapping[int, Fetch]) -> Fetch:
        begun = time.perf_counter()
        try:
            fetch = self._fetcher.ready.get(timeout=self.settings.timeout_s)
        except Empty:
            raise RuntimeError(
                f"no expert arrived within {self.settings.timeout_s:.0f} s\n{self.dump(flying)}"
            ) from None
        finally:
            self.report.stall_s += time.perf_counter() - begun
        if fetch.error is not None:
            layer, expert = fetch.key
            raise RuntimeError(f"layer {layer}, expert {expert} could not be put together ({fetch.error}): check the store "
                               f"with `specter-lab verify`") from fetch.error  # fmt: skip
        return fetch

    def dump(self, flying: Mapping[int, Fetch]) -> str:
        """Everything one needs to see why nothing moves."""
        lines = [
            f"layer {f.key[0]}, expert {f.key[1]}: {f.left} shards left, {sorted(f.waiting)} wait for the SM-chunk, "
            f"SM-chunk {'here' if f.sign_mantissa_here else 'not here'}"
            for f in flying.values()
        ]
        free = {part: len(buffers) for part, buffers in self.memory.free.items()}
        return "\n".join([*lines, f"free buffers: {free}", self._fetcher.stacks()])

    def _settle(self, layer: int, expert: int, fetch: Fetch, pinned: set[int]) -> None:
        """An expert has been executed: its buffers go to the pools as far as the cache wants them, else back."""
        for part in fetch.borrowed:
            setattr(fetch.held, part, None)  # the pool has it
        if self.settings.caching:
            moves = self._caches[layer].admit(expert, pinned)
            carry_out(moves, self.memory, self._held[layer], self.index, fetch.held)
        self.memory.give_all(fetch.held)

    def _give(self, held: Held) -> None:
        self.memory.give_all(held)

    def _look_ahead(self, layer: int, hidden: Tensor) -> bool:
        """Read experts that the next layer's router would choose for these tokens; False while the I/O thread is busy."""
        after = self.index.layers.index(layer) + 1
        following = self.index.layers[after] if after < len(self.index.layers) else None
        if following not in self._routers:
            return True
        if not self._fetcher.idle():
            return False
        cache = self._caches[following]
        chosen = self._routers[following](hidden).numpy()
        votes = np.bincount(chosen[chosen != DROPPED], minlength=self.index.num_experts)
        ranked = [e for e in np.argsort(-votes, kind="stable").tolist() if votes[e] and cache.state(e) is State.M]
        for expert in ranked[: self.settings.prefetch]:
            if self._in_place(following, expert) is not None:
                continue
            held = Held(None, self.memory.take("sign_mantissa"), self.memory.take("exponents"))
            self._ahead[following][expert] = ahead = ReadAhead(self.index.experts[following, expert], held)
            self._fetcher.read_ahead(ahead)
            self.report.read_ahead += 1
        return True

    def _collect_ahead(self, layer: int, needed: list[int]) -> dict[int, ReadAhead]:
        """What was read ahead for this layer and is needed; the rest is dropped."""
        found = {}
        for expert, ahead in self._ahead[layer].items():
            if expert in needed and ahead.started and self._caches[layer].state(expert) is State.M:
                begun = time.perf_counter()
                if not ahead.done.wait(self.settings.timeout_s):
                    raise RuntimeError(
                        f"a read-ahead did not end within {self.settings.timeout_s:.0f} s\n{self.dump({})}"
                    )
                self.report.stall_s += time.perf_counter() - begun
                if ahead.error is not None:
                    raise RuntimeError(
                        f"layer {layer}, expert {expert} could not be read ({ahead.error})"
                    ) from ahead.error
                found[expert] = ahead
            else:
                self._fetcher.drop(ahead)
                self.report.read_ahead_unused += 1
        self._ahead[layer] = {}
        return found
