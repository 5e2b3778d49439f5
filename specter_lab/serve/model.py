"""A loaded engine with everything a text needs around it: tokens that end it, room, a template for conversations."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from specter_lab.engine.api import Engine
from specter_lab.models.load import resolve, shown_name


@dataclass(frozen=True)
class Served:
    """One model, ready to write."""

    name: str
    engine: Engine
    ends: frozenset[int]  # tokens that end a text
    context_tokens: int  # of prompt and text together
    depth: int | None  # drafted tokens per round; None: the policy's, or chosen online

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.engine.tokenizer


def served(engine: Engine, model: str, *, name: str | None = None, depth: int | None = None) -> Served:
    """An engine over the zoo model, folder or hub id `model`, under the name that clients call it by (default: its own).

    Raises:
        UserError: a depth where nothing drafts.
    """
    engine.check_depth(depth)
    config = engine.weights.config
    return Served(name or shown_name(model), engine, _ends(engine, model), config.max_position_embeddings, depth)


def counted(engine: Engine) -> dict[str, object]:
    """What the engine counted while decoding (prompts left out); None where nothing was."""
    stats, slots = engine.stats, engine.memory.slots.count
    shares = {
        "tokens_per_s": (stats.tokens, stats.seconds), "acceptance": (stats.accepted, stats.drafted),
        "tokens_per_round": (stats.tokens, stats.rounds), "hit_rate": (stats.hits, stats.needed),
        "expert_bytes_per_token": (stats.h2d_bytes + stats.read_through_bytes, stats.tokens),
    }  # fmt: skip
    return {
        "device": str(engine.device), "policy": engine.policy.id, "draft": engine.draft.name, "slots_per_layer": int(slots.min()),
        "experts_per_layer": engine.memory.shape.num_experts,
        **{name: part / whole if whole else None for name, (part, whole) in shares.items()},
    }  # fmt: skip


def _ends(engine: Engine, model: str) -> frozenset[int]:
    """End tokens by all who name one: chat models often do so in generation_config.json or the tokenizer alone."""
    try:
        told = GenerationConfig.from_pretrained(resolve(model)).eos_token_id
    except OSError:  # there is none
        told = None
    ends = (told, engine.weights.config.eos_token_id, engine.tokenizer.eos_token_id)
    listed = [token for end in ends if end is not None for token in (end if isinstance(end, list) else [end])]
    return frozenset(listed)
