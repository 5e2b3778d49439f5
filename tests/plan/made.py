"""Made-up windows, models and costs for planner tests: small enough to follow by hand, or random with locality."""

from dataclasses import dataclass

import numpy as np

from specter_lab.measure.windows import Windows
from specter_lab.models.anatomy import Anatomy
from specter_lab.plan.policy import Scene
from specter_lab.plan.serve import Disk, Needs, PassCosts
from specter_lab.plan.workload import Workload


def tiny_model(layers=3, experts=8, top_k=2) -> Anatomy:
    """A model of MoE layers only, whose expert takes 3 x 128 x 128 weights."""
    per_expert = 3 * 128 * 128
    return Anatomy(
        name="tiny", layers=layers, moe_layers=layers, num_experts=experts, top_k=top_k, hidden_size=128,
        expert_width=128, embedding=1000, head=0, attention=layers * 1000, norms=100, routers=layers * 100,
        shared_experts=0, dense_mlp=0, routed_experts=layers * experts * per_expert, kv_bytes_per_token=64,
    )  # fmt: skip


@dataclass
class RoundNumbers:
    """Costs as `StepCosts` gives them, in whole milliseconds."""

    model: Anatomy
    draft_step_ms: float = 4.0
    copy_ms: float = 10.0
    layer_ms: float = 1.0
    read_ms: float = 2.0  # one expert; tokens cost nothing
    read_through_ms: float = 12.0
    cpu_read_ms: float = 5.0
    told_ms: float = 0.0  # routing, GPU to host: a layer's or a drafted token's
    turn_ms: float = 0.0  # the host launches once more
    disk_ms: float = 0.0
    on_host: int = 0  # experts of a layer that are not on disk, where there is one
    context_tokens: int = 0

    @property
    def disk(self) -> Disk:
        everyone = self.model.num_experts
        first = self.on_host if self.disk_ms else everyone
        return Disk(first, self.disk_ms, self.disk_ms * (1 - first / everyone))

    @property
    def pace_ms(self) -> float:
        return max(self.copy_ms, self.disk.pace_ms)

    def draft_pass_ms(self, tokens: int, distinct_experts: float) -> float:
        """A millisecond more for every further token and every expert beyond the first token's."""
        return self.draft_step_ms + (tokens - 1) + (distinct_experts - self.model.top_k)

    def routing_ms(self, tokens: int, layers: int) -> float:
        return self.told_ms

    def placed(self, gpu_bytes: int) -> "RoundNumbers":
        return self

    @property
    def expert_bytes(self) -> int:
        return self.model.expert_bytes

    @property
    def link_bytes(self) -> int:
        return self.model.expert_bytes

    def of_pass(self, tokens: int) -> PassCosts:
        return PassCosts(
            layer_ms=self.layer_ms, read_ms=self.read_ms, flop_ms=0.0, launch_ms=0.0, copy_ms=self.copy_ms,
            read_through_ms=self.read_through_ms, cpu_read_ms=self.cpu_read_ms, cpu_flop_ms=0.0,
            routing_ms=self.told_ms, turn_ms=self.turn_ms, disk=self.disk,
        )  # fmt: skip


def windows_of(
    seed=0, *, requests=3, positions=12, depth=4, layers=3, experts=8, top_k=2, prompt=5, fewer=False, agree=0.9
) -> Windows:
    """Random windows: every request has its favourites, a token repeats most of the one before, the draft mostly agrees."""
    generator = np.random.default_rng(seed)
    taste = generator.gumbel(size=(requests, 1, layers, experts)) * 1.5
    noise = generator.gumbel(size=(requests, prompt - 1 + positions + depth, layers, experts))
    noise[:, 1:] = np.where(generator.random(noise[:, 1:].shape) < 0.5, noise[:, :-1], noise[:, 1:])
    chosen = (taste + noise).argsort(axis=-1)[..., ::-1][..., :top_k]  # [R, P - 1 + N + K, L, k]
    prompt_used, text = chosen[:, : prompt - 1], chosen[:, prompt - 1 :]
    target = np.stack([text[:, n : n + depth + 1] for n in range(positions)], axis=1) if depth else text[:, :, None]
    draft = target[:, :, :depth].copy()
    others = np.roll(draft, 1, axis=0)
    draft = np.where(generator.random((*draft.shape[:3], 1, 1)) < agree, draft, others)
    draft = draft[..., : top_k // 2] if fewer else draft

    def weights(shape):
        raw = np.sort(generator.random(shape), axis=-1)[..., ::-1]
        return (raw / raw.sum(axis=-1, keepdims=True)).astype(np.float16)

    return Windows(
        num_experts=experts, prompt=prompt_used.astype(np.uint8), draft=draft.astype(np.uint8),
        draft_weights=weights(draft.shape), target=target.astype(np.uint8), target_weights=weights(target.shape),
        accepted=generator.integers(0, depth + 1, size=(requests, positions)), prompt_set=("made up",) * requests,
    )  # fmt: skip


def scene_of(windows: Windows, slots=4, *, depth=None, history=None, **costs) -> tuple[Workload, Scene]:
    """The windows as a workload of a tiny model, and a scene with whole-number costs."""
    model = tiny_model(windows.layers, windows.num_experts, windows.target.shape[-1])
    workload = Workload(windows, windows.layers)
    learned = Workload(history if history is not None else windows_like(windows), windows.layers)
    numbers = RoundNumbers(model, **costs)
    return workload, Scene(numbers, slots, windows.depth if depth is None else depth, learned, workload)


def windows_like(windows: Windows) -> Windows:
    """Other requests of the same shape."""
    return windows_of(
        99, requests=2, positions=windows.positions, depth=windows.depth, layers=windows.layers,
        experts=windows.num_experts, top_k=windows.target.shape[-1],
    )  # fmt: skip


def needs_of(*layers, weights=None) -> Needs:
    """Needs of one pass in which every token uses all the experts named; one list per layer."""
    experts = np.concatenate([np.sort(layer) for layer in layers]).astype(np.int64)
    first = np.cumsum([0, *(len(layer) for layer in layers)])
    tokens = np.zeros((len(layers), 1, max(len(layer) for layer in layers)), np.int64)
    for row, layer in zip(tokens, layers):
        row[0] = [*layer, *[layer[0]] * (row.shape[1] - len(layer))]
    return Needs(first, experts, np.ones(len(experts), np.int64), np.ones(len(experts)), tokens)
