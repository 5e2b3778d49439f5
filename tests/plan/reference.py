"""The simulator once more, with lists and dicts: slow, and meant to be obviously right. Same stream rules.

Knows demand policies (LRU, FIFO, LFU; all kinds of misses), Specter's chunked prefetch with its barrier, and rolling prefetch.
"""

from collections import Counter
from math import ceil, floor

import numpy as np


class Link:
    """One layer's slots: what is there, since when, and who goes first."""

    def __init__(self, count, order):
        self.count, self.order = count, order
        self.ready, self.came, self.linked, self.uses = {}, {}, {}, Counter()
        self.pinned = set()

    def victim(self):
        key = {
            "lru": lambda e: self.linked[e],
            "fifo": lambda e: self.came[e],
            "lfu": lambda e: (self.uses[e], self.linked[e]),
        }[self.order]
        return min((e for e in self.ready if e not in self.pinned), key=key, default=None)


class Reference:
    def __init__(self, windows, costs, *, slots, order="lru", miss="load", prefetch=None, barrier=False, depth=0):
        self.w, self.costs, self.miss, self.prefetch, self.barrier, self.depth = (
            windows,
            costs,
            miss,
            prefetch,
            barrier,
            depth,
        )
        self.layers = [Link(slots, order) for _ in range(costs.model.moe_layers)]
        self.free = {"compute": 0.0, "h2d": 0.0, "d2h": 0.0, "cpu": 0.0, "disk": 0.0}
        self.told = (
            miss not in ("read through", "admit", "int4") or costs.disk_ms > 0
        )  # the host learns a layer's routing
        self.clock, self.copies, self.stall, self.hits, self.needed = 0, 0, 0.0, 0, 0
        self.bandwidth, self.step_ms = 12.0, 1.0
        self.pass_costs, self.early = costs.of_pass(1), prefetch == "chunks, early"

    def run(self, stream, ms, after=0.0):
        self.free[stream] = max(self.free[stream], after) + ms
        return self.free[stream]

    def tick(self):
        self.clock += 1
        return self.clock

    def on_disk(self, expert):
        return self.costs.disk_ms > 0 and expert >= self.costs.on_host

    def fetch(self, expert, asked):
        """When host memory holds an expert that is asked for then."""
        return self.run("disk", self.costs.disk_ms, asked) if self.on_disk(expert) else asked

    def put(self, layer, expert, asked, ms, free_ms=0.0):
        """Copy an absent expert into a slot, not before `free_ms`; returns its arrival, or None when everyone is pinned."""
        link = self.layers[layer]
        if len(link.ready) == link.count:
            victim = link.victim()
            if victim is None:
                return None
            del link.ready[victim]
        link.came[expert] = link.linked[expert] = self.tick()
        link.ready[expert] = self.run("h2d", ms, max(free_ms, self.fetch(expert, asked)))
        self.copies += 1
        return link.ready[expert]

    def touch(self, layer, expert):
        self.layers[layer].uses[expert] += 1
        self.layers[layer].linked[expert] = self.tick()

    def compute(self, arrival, ms):
        self.stall += max(0.0, arrival - self.free["compute"])
        return self.run("compute", ms, arrival)

    def layer(self, layer, used, counted):
        """One MoE layer of a target pass; returns when the host knew its routing."""
        c, link = self.pass_costs, self.layers[layer]
        now = self.run("compute", c.layer_ms)
        host = self.run("d2h", c.routing_ms, now) if self.told else now
        uses = Counter(np.ravel(used).tolist())
        needed = sorted(uses)
        if counted:
            self.needed += len(needed)
            self.hits += sum(link.ready.get(e, np.inf) <= now for e in needed)
        link.pinned.clear()
        absent = [e for e in needed if e not in link.ready]
        for expert in needed:
            if expert in link.ready:
                self.touch(layer, expert)
        present = [e for e in needed if e in link.ready]
        ready = [e for e in present if link.ready[e] <= now]
        done, leaving, turned, there_first = [], [], 0.0, len(present)  # (expert, its end), (expert, its slot's)
        if ready:
            end = self.run("compute", c.read_ms * len(ready))
            done += [(e, end) for e in ready]
        for expert in sorted((e for e in present if e not in ready), key=lambda e: link.ready[e]):
            done.append((expert, self.compute(link.ready[expert], c.read_ms)))
        link.pinned = {e for e, _ in done}
        cpu_end = 0.0
        for expert in absent:
            there = max(self.free["disk"], host) + self.costs.disk_ms if self.on_disk(expert) else host
            queued = self.free["h2d"] - turned
            sooner = max(self.free["cpu"], there) + c.cpu_read_ms < max(queued, there) + c.copy_ms
            on_cpu = {"cpu if sooner": sooner, "cpu if shorter": c.cpu_read_ms < c.copy_ms}.get(self.miss, False)
            if on_cpu:
                cpu_end = self.run("cpu", c.cpu_read_ms, self.fetch(expert, host))
            elif self.miss == "read through":
                asked = self.fetch(expert, host if self.on_disk(expert) else now)
                self.compute(self.run("h2d", c.read_through_ms, asked), c.read_ms)
            elif self.miss == "int4":
                self.run("compute", c.read_ms / 4)
            else:
                by_kernel = self.miss == "admit"
                ms = c.read_through_ms if by_kernel else c.copy_ms
                free = asked = now if by_kernel and not self.on_disk(expert) else host
                in_turns = not by_kernel and c.turn_ms > 0
                queue = self.free["h2d"]
                while (arrival := self.put(layer, expert, asked, ms, free)) is None:
                    if not leaving:  # another turn: of those that are there, or of half the slots
                        size = (there_first or max(1, link.count // 2)) if in_turns else 1
                        turn, done, there_first = done[:size], done[size:], 0
                        leaving = [(e, turn[-1][1] + c.turn_ms if in_turns else end) for e, end in turn]
                    first, end = leaving.pop(0)
                    link.pinned.discard(first)
                    free = max(free, end)
                there = self.free["disk"] if self.on_disk(expert) else asked
                turned += max(0.0, free - max(queue, there)) if in_turns else 0.0
                self.touch(layer, expert)
                link.pinned.add(expert)
                done.append((expert, self.compute(arrival, c.read_ms)))
        link.pinned.clear()
        if cpu_end:  # the GPU takes the host's rows
            self.compute(cpu_end + c.turn_ms, 0.0)
        return host

    def target_pass(self, used, counted=True):
        """used: [T, L, k]"""
        if self.barrier:
            self.stall += max(0.0, self.free["h2d"] - self.free["compute"])
            self.free["compute"] = max(self.free["compute"], self.free["h2d"])
        begun = self.free["compute"]
        for layer in range(len(self.layers)):
            if self.prefetch == "rolling" and self.miss in ("read through", "admit"):
                self.bring(layer, begun)
            now = self.layer(layer, used[:, layer], counted)
            if self.prefetch == "rolling" and self.miss not in ("read through", "admit"):
                self.hand_out_while_verifying(layer, now)
        return self.free["compute"]

    # Specter's chunks

    def plan(self, counts):
        loads = []
        for layer, (link, of_layer) in enumerate(zip(self.layers, counts)):
            top = sorted(of_layer, key=lambda e: (-of_layer[e], e))[: link.count]
            link.pinned = set(top)
            loads += [(layer, e) for e in top if e not in link.ready]
        return loads

    def copy(self, loads, asked):
        begun = sum(self.put(layer, e, asked, self.costs.copy_ms) is not None for layer, e in loads)
        if begun:
            now = begun * self.costs.expert_bytes / (begun * self.costs.pace_ms) * 1e-6
            self.bandwidth = 0.75 * self.bandwidth + 0.25 * now

    def draft_in_chunks(self, drafted):
        counts = [Counter() for _ in self.layers]
        following, full, known = max(1, floor(0.2 * self.depth)), False, 0.0
        for step, token in enumerate(drafted, 1):
            self.run("compute", self.costs.draft_step_ms)
            self.step_ms = 0.75 * self.step_ms + 0.25 * self.costs.draft_step_ms
            known = self.run("d2h", self.costs.told_ms, self.free["compute"])
            for of_layer, experts in zip(counts, token):
                of_layer.update(experts.tolist())
            if not full and following <= step < self.depth:
                loads = self.plan(counts)
                size = len(loads) * self.costs.expert_bytes
                following = step + max(1, ceil(size / self.bandwidth * 1e-6 / self.step_ms))
                full = all(len(of_layer) >= link.count for of_layer, link in zip(counts, self.layers))
                self.copy(loads, known)
        if self.depth and not (full and self.early):
            self.copy(self.plan(counts), known)

    # Rolling prefetch

    def draft_rolling(self, drafted, weights):
        self.wanted, room = [], [link.count for link in self.layers]
        for step, (token, of_token) in enumerate(zip(drafted, weights), 1):
            self.run("compute", self.costs.draft_step_ms)
            for layer, (experts, shares) in enumerate(zip(token.tolist(), of_token)):
                for expert, share in zip(experts, shares):
                    pinned = self.layers[layer].pinned
                    if share >= 0.25 * (shares.sum() / len(shares)) and expert not in pinned and room[layer]:
                        pinned.add(expert)
                        room[layer] -= 1
                        if expert not in self.layers[layer].ready:
                            self.wanted.append((layer, step, expert))
            now = self.run("d2h", self.costs.told_ms, self.free["compute"])
            behind = max(0.0, self.free["h2d"] - now)
            count = max(0, int((self.costs.draft_step_ms - behind) / self.costs.pace_ms + 2))
            self.wanted.sort()
            for layer, _, expert in self.wanted[:count]:
                self.put(layer, expert, now, self.costs.copy_ms)
            self.wanted = self.wanted[count:]

    def bring(self, layer, begun):
        """What is wanted of this layer, asked for when the pass began: nobody hears of misses that would go first."""
        for _, _, expert in sorted(row for row in self.wanted if row[0] == layer):
            self.put(layer, expert, begun, self.costs.copy_ms)
        self.wanted = [row for row in self.wanted if row[0] > layer]

    def hand_out_while_verifying(self, layer, now):
        self.wanted = [row for row in self.wanted if row[0] > layer]
        while self.wanted and self.free["h2d"] - now <= self.costs.pace_ms:
            at, _, expert = self.wanted.pop(0)
            self.put(at, expert, now, self.costs.copy_ms)

    def simulate(self, requests, new_tokens):
        """Rows (start, draft ended, end, stall, copies) of every round."""
        rows = []
        for request in requests:
            self.wanted = []
            self.target_pass(self.w.prompt[request], counted=False)
            position = 0
            while position < new_tokens:
                start, stall, copies = self.free["compute"], self.stall, self.copies
                drafted = self.w.draft[request, position, : self.depth]
                weights = self.w.draft_weights[request, position, : self.depth].astype(np.float32)
                if self.prefetch in ("chunks", "chunks, early"):
                    self.draft_in_chunks(drafted)
                elif self.prefetch == "rolling":
                    self.draft_rolling(drafted, weights)
                else:
                    for _ in drafted:
                        self.run("compute", self.costs.draft_step_ms)
                ended = self.free["compute"]
                end = self.target_pass(self.w.target[request, position, : self.depth + 1])
                rows.append((start, ended, end, self.stall - stall, self.copies - copies))
                position += min(int(self.w.accepted[request, position]), self.depth) + 1
        return np.array(rows)
