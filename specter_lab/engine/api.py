"""`specter_lab.load(...)`: a model served with its routed experts in host memory.

engine = specter_lab.load("qwen-nano", expert_budget="1MiB")
for text in engine.generate("Once upon a time", max_new_tokens=64, stream=True):
    print(text, end="")
engine.stats
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Generator, Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from specter_lab.compress.int4 import quantize_bank
from specter_lab.engine.arena import Budget
from specter_lab.engine.decode import Meter, decode
from specter_lab.engine.decoder import Decoder
from specter_lab.engine.expert_math import DraftExperts, TargetExperts
from specter_lab.engine.experts import ExpertMemory, fill, new_expert_memory
from specter_lab.engine.load import checkpoint_tensors, read_decoder
from specter_lab.engine.ops import Ops, TorchOps
from specter_lab.engine.session import Session, new_session
from specter_lab.engine.shape import Shape, shape_of
from specter_lab.errors import UserError
from specter_lab.models.anatomy import anatomy
from specter_lab.models.experts import ExpertBank
from specter_lab.models.load import read_config, read_tokenizer, resolve
from specter_lab.models.originals import config_for
from specter_lab.models.widen import widened_config, widened_tensors
from specter_lab.plan.depth_control import DepthController, FixedDepth, OnlineDepth
from specter_lab.plan.hardware import PAPERS_GPU, read_profile
from specter_lab.plan.policies import find_policy
from specter_lab.plan.policy import Policy, Scene
from specter_lab.plan.step_costs import StepCosts

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
MAX_DEPTH = 16


@dataclass
class Engine:
    """A loaded model. `stats` counts everything since it was loaded; `budget.taken` says where the memory went."""

    decoder: Decoder
    memory: ExpertMemory
    target: TargetExperts
    draft: DraftExperts
    policy: Policy
    scene: Scene
    tokenizer: PreTrainedTokenizerBase | None  # None: token ids only
    budget: Budget
    ops: Ops
    stats: Meter = field(default_factory=Meter)
    _session: Session | None = None

    @property
    def device(self) -> torch.device:
        return self.decoder.embedding.device

    def generate(
        self, prompt: str | Tensor, max_new_tokens: int = 128, *, temperature: float = 0.0, depth: int | None = None,
        seed: int = 0, stream: bool = False,
    ) -> str | Tensor | Iterator:  # fmt: skip
        """Continue `prompt`: text gives text, token ids [P] or [1, P] give ids [1, P + N] as transformers' `generate` does.

        Args:
            temperature: 0 is greedy; otherwise samples follow the target's distribution exactly.
            depth: drafted tokens per round; None: chosen online, from measured times.
            seed: of sampling; the same seed gives the same text at a fixed depth.
            stream: yield pieces (text, or lists of ids) as they are committed, and return nothing else.

        Raises:
            UserError: a prompt of fewer than two tokens.
        """
        of_text = isinstance(prompt, str)
        ids = torch.tensor(self.tokenizer(prompt)["input_ids"]) if of_text else prompt.flatten()
        if len(ids) < 2:
            raise UserError("a prompt needs at least 2 tokens: one for the prefix and one to go on from")
        pieces = self._rounds(ids.to(self.device), max_new_tokens, temperature, depth, seed)
        if stream:
            return self._text(pieces) if of_text else pieces
        new = [token for piece in pieces for token in piece]
        return self.tokenizer.decode(new) if of_text else torch.cat([ids.cpu(), torch.tensor(new)])[None]

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
        control: DepthController = OnlineDepth(MAX_DEPTH) if depth is None else FixedDepth(depth)
        session = self._session_for(len(ids) + new_tokens, depth or MAX_DEPTH, temperature)
        generator = Generator(self.device).manual_seed(seed)
        left = new_tokens
        with torch.inference_mode():
            rounds = decode(session, self.memory, self.policy.prefetch(self.scene), control, ids, new_tokens=new_tokens,
                            generator=generator, meter=self.stats)  # fmt: skip
            for tokens in rounds:
                yield tokens[:left]
                left -= len(tokens)

    def _session_for(self, tokens: int, depth: int, temperature: float) -> Session:
        kept = self._session
        if kept is None or len(kept.kv.keys[0]) < tokens + depth + 1 or len(kept.window) != depth + 1 \
                or kept.temperature != temperature:  # fmt: skip
            self.budget.taken.pop("KV cache", None)
            self._session = new_session(self.decoder, self.draft, self.target, self.ops, max_tokens=tokens, depth=depth,
                                        temperature=temperature)  # fmt: skip
            self.budget.take("KV cache", self._session.kv.nbytes, "ask for fewer tokens")
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


def load(
    model: str, *, draft: str = "int4", expert_budget: str | int, in_slots: bool = False, policy: str = "specter-fast", device: str | None = None,
    memory_budget: str | int = 2**62, widen_to: str | None = None,
) -> Engine:  # fmt: skip
    """Load a zoo model, checkpoint folder or hub id with its routed experts in host memory.

    Args:
        model: zoo name, folder or hub id of an architecture in `engine.shape.ENGINE_ARCHITECTURES`.
        draft: "int4", or "none" for plain decoding.
        expert_budget: device memory for expert slots, in bytes or like "6GiB"; every layer gets at least one slot.
        in_slots: `expert_budget` counts expert slots per layer instead.
        policy: id of an exact policy in `plan.policies`.
        device: default: the GPU if there is one.
        memory_budget: of everything the engine holds on the device.
        widen_to: grow a zoo model to the sizes of this original on the way (`models.widen`): same function, full-size bytes.

    Raises:
        UserError: unknown model or policy, or a budget that does not suffice.
    """
    folder = resolve(model)
    config, tensors = read_config(folder), checkpoint_tensors(folder)
    if widen_to is not None:
        small, config = config, widened_config(config, config_for(widen_to))
        tensors = widened_tensors(folder, small, config)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def read(memory: ExpertMemory) -> Decoder:
        dtype = memory.host.dtype
        return read_decoder(config, tensors, lambda *where: fill(memory, *where), device=device, dtype=dtype)

    return assemble(config, model, read, read_tokenizer(folder, config.vocab_size), draft=draft, policy=policy, device=device,
                    expert_budget=expert_budget, in_slots=in_slots, memory_budget=memory_budget)  # fmt: skip


def assemble(
    config: PretrainedConfig, name: str, read: Callable[[ExpertMemory], Decoder], tokenizer: PreTrainedTokenizerBase | None,
    *, draft: str, expert_budget: str | int, in_slots: bool, policy: str, device: str, memory_budget: str | int = 2**62,
) -> Engine:  # fmt: skip
    """An engine whose weights come from `read`, which fills the host slab and returns everything else; see `load`."""
    shape, chosen = shape_of(config), find_policy(policy)
    if chosen.lossy:
        raise UserError(f"policy '{policy}' changes the output: simulate it instead, the engine serves exact ones")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    budget = Budget(in_bytes(memory_budget))
    memory = new_expert_memory(shape, _slots(shape, expert_budget, in_slots, dtype), budget, device=device, dtype=dtype,
                               order=chosen.order)  # fmt: skip
    decoder = read(memory)
    pool = DraftExperts(_int4_banks(memory, device) if draft == "int4" else ())
    budget.take("draft's INT4 experts", pool.nbytes, "use draft='none', or a larger budget")
    scene = Scene(StepCosts(anatomy(config, name), read_profile(PAPERS_GPU)), int(memory.slots.count.min()), MAX_DEPTH)
    return Engine(decoder, memory, TargetExperts(memory), pool, chosen, scene, tokenizer, budget, _ops(device))


def _ops(device: str) -> Ops:
    if not device.startswith("cuda"):
        return TorchOps()
    from specter_lab.engine.kernel_ops import kernel_ops

    return kernel_ops(device)


def _slots(shape: Shape, budget: str | int, in_slots: bool, dtype: torch.dtype) -> np.ndarray:
    """Equal slots per layer that the budget holds: [L]."""
    one_each = len(shape.moe_layers) * shape.expert_numel * dtype.itemsize
    per_layer = int(budget) if in_slots else in_bytes(budget) // one_each
    if per_layer < 1:
        raise UserError(f"an expert budget of {budget} does not hold one expert in every layer: {one_each:,} bytes is "
                        f"the least")  # fmt: skip
    return np.full(len(shape.moe_layers), min(per_layer, shape.num_experts))


def _int4_banks(memory: ExpertMemory, device: str) -> tuple:
    """The draft's experts, layer by layer, rounded to nearest from the host slab."""
    banks, width, hidden = [], memory.shape.expert_width, memory.shape.hidden
    for layer, blocks in enumerate(memory.host):
        gate, up, down = blocks.to(device).unflatten(1, (3, -1)).unbind(1)  # [E, I * H] each
        bank = ExpertBank(layer, gate.unflatten(1, (width, hidden)), up.unflatten(1, (width, hidden)),
                          down.unflatten(1, (hidden, width)))  # fmt: skip
        banks.append(quantize_bank(bank))
    return tuple(banks)


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
