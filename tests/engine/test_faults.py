"""A thousand rounds in which everything about the copies goes wrong: right tokens, no dead-lock, no leak."""

import numpy as np
import pytest
import torch

from specter_lab.engine import api
from specter_lab.engine.decode import Meter, decode
from specter_lab.engine.experts import ExpertMemory
from specter_lab.plan.depth_control import FixedDepth
from specter_lab.plan.policy import NO_LOADS, Prefetcher
from specter_lab.plan.residency import ABSENT

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROUNDS = {"cpu": 60, "cuda": 1000}
SLOW_CYCLES = 2_000_000  # about a millisecond, against ten microseconds for a copy of this size


class Saboteur(Prefetcher):
    """Prefetches experts nobody named, too many of them, at random moments; pins some and forgets others."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    def begin(self, slots, depth, clock):
        self._slots = slots
        return self._anything()

    def drafted(self, step, experts, weights, clock):
        return self._anything()

    def rest(self, clock):
        return self._anything()

    def _anything(self):
        if self._draw.random() < 0.3:
            return NO_LOADS
        layers, experts = np.nonzero(self._slots.slot_of == ABSENT)
        chosen = np.sort(
            self._draw.permutation(len(layers))[: self._draw.integers(1, 2 * int(self._slots.count.sum()) + 1)]
        )
        pins = chosen[self._draw.random(len(chosen)) < 0.2]
        self._slots.pinned[layers[pins], experts[pins]] = True
        return layers[chosen], experts[chosen]


def slow_down(memory: ExpertMemory, draw: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
    """Every tenth copy takes a hundred times as long."""
    bring = memory.transport.bring

    def slow(layers: np.ndarray, experts: np.ndarray, slots: np.ndarray, stream: torch.cuda.Stream | None) -> int:
        each = max(1, len(slots)) if stream is None else 2
        moved = 0
        for first in range(0, len(slots), each):
            if stream is not None and draw.random() < 0.1:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLOW_CYCLES)
            moved += bring(*(part[first : first + each] for part in (layers, experts, slots)), stream)
        return moved

    patch.setattr(memory.transport, "bring", slow)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transport", [api.WHOLE, api.RESIDUAL])
@pytest.mark.parametrize("mode", ["fast", "paper"])
def test_a_thousand_bad_rounds(mode, transport, device, monkeypatch):
    weights = api.load_weights("qwen-nano", device=device)
    ids = torch.randint(3, 2000, (20,), generator=torch.Generator().manual_seed(0))
    resident = api.engine_for(weights, expert_budget=60, in_slots=True, draft="none")
    resident.fill_slots()
    expected = resident.generate(ids, 160, ignore_eos=True)[0, 20:].tolist()
    rounds, seed, held = 0, 0, None
    while rounds < ROUNDS[device]:
        engine = api.engine_for(weights, expert_budget=1 + seed % 3, in_slots=True, mode=mode, transport=transport)
        engine.memory.device.fill_(float("nan"))
        if device == "cuda":
            torch.cuda.synchronize()  # copies run on a stream of their own
        slow_down(engine.memory, np.random.default_rng(seed), monkeypatch)
        prefetcher = Saboteur(seed)
        if mode == "paper":
            engine.target.prefetcher = prefetcher
        session = engine.session_for(200, 4, 0.0)
        for _ in range(2 if device == "cpu" else 10):
            with torch.inference_mode():
                pieces = decode(session, engine.memory, prefetcher, FixedDepth(int(seed % 5)), ids.to(device), new_tokens=160,
                                generator=torch.Generator(device), meter=engine.stats)  # fmt: skip
                assert [token for piece in pieces for token in piece][:160] == expected
        rounds, seed = rounds + engine.stats.rounds, seed + 1
        assert not engine.memory.slots.pinned.any()
        assert (engine.memory.slots.filled <= engine.memory.slots.count).all()
        engine.stats = Meter()
        monkeypatch.undo()
        del engine, session
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            now = torch.cuda.memory_allocated()
            held = now if held is None else held
            assert now <= held  # nothing of an engine outlives it
