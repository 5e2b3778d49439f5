"""The runtime's memory: one slab for pools and staging, cut into buffers of three sizes that change hands without copies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specter_lab.compress.bitfield import sign_mantissa_of
from specter_lab.compress.codecs import codec
from specter_lab.engine.store.layout import Index, padded
from specter_lab.engine.store.reader import PagedMemory
from specter_lab.engine.zipmoe.settings import RAW_COPY, Settings
from specter_lab.errors import UserError
from specter_lab.plan.zipmoe.cache import Move
from specter_lab.plan.zipmoe.pools import Pools, Sizes
from specter_lab.plan.zipmoe.work import State

Buffer = np.ndarray  # [bytes] uint8, from a page boundary on


def sizes_of(index: Index) -> Sizes:
    """Buffer bytes of every form of an expert, whole pages."""
    return Sizes(padded(index.expert_bytes), padded(index.num_weights), index.max_exponent_bytes)


def staging_bytes(index: Index, settings: Settings) -> int:
    """What experts being put together take beside the pools: buffers, and exponents that wait for their SM-chunk decompressed.

    A codec that recovers at once leaves no exponents.
    """
    sizes = sizes_of(index)
    if settings.form == RAW_COPY:
        return settings.in_flight * sizes.full
    parts = staged_parts(settings) * (sizes.sign_mantissa + sizes.exponents)
    decompressed = index.num_weights if codec(index.codec).recover is None else 0
    return settings.in_flight * (sizes.full + decompressed) + parts


def staged_parts(settings: Settings) -> int:
    """SM and E buffers of the staging; a dropped read-ahead may still be read into while its successors are."""
    if settings.form == RAW_COPY:
        return 0
    return settings.in_flight + (settings.prefetch + 1 if settings.prefetch else 0)


def layer_budget(index: Index, settings: Settings, budget_bytes: int) -> int:
    """What is left for the pools of one layer.

    Raises:
        UserError: not even the staging fits.
    """
    staging = staging_bytes(index, settings)
    if staging > budget_bytes:
        raise UserError(f"a budget of {budget_bytes / 1e6:.1f} MB is less than the {staging / 1e6:.1f} MB that "
                        f"{settings.in_flight} experts in flight take: give more memory")  # fmt: skip
    return (budget_bytes - staging) // len(index.layers)


@dataclass
class Held:
    """The buffers that one expert occupies."""

    full: Buffer | None = None
    sign_mantissa: Buffer | None = None
    exponents: Buffer | None = None

    def parts(self) -> list[str]:
        return [name for name in PARTS if getattr(self, name) is not None]


PARTS = ("full", "sign_mantissa", "exponents")
NEEDED = {State.F: {"full"}, State.C: {"sign_mantissa", "exponents"}, State.S: {"sign_mantissa"}, State.E: {"exponents"},
          State.M: set()}  # fmt: skip


@dataclass
class Memory:
    """All buffers that are not held by an expert."""

    num_bytes: int  # of the slab
    free: dict[str, list[Buffer]] = field(default_factory=dict)

    def take(self, part: str) -> Buffer:
        """A free buffer. Raises RuntimeError when there is none: the counts of `allocate` were wrong."""
        if not self.free[part]:
            raise RuntimeError(f"no free {part} buffer: pools and staging hold more than was planned")
        return self.free[part].pop()

    def give(self, held: Held, part: str) -> None:
        """Free one part of an expert, if it has it."""
        buffer = getattr(held, part)
        if buffer is not None:
            self.free[part].append(buffer)
            setattr(held, part, None)

    def give_all(self, held: Held) -> None:
        for part in PARTS:
            self.give(held, part)


def allocate(index: Index, settings: Settings, pools: Pools) -> Memory:
    """The slab for the pools of all layers and the staging, cut up."""
    sizes, layers = sizes_of(index), len(index.layers)
    staged = staged_parts(settings)
    counts = {
        "full": (layers * pools.full + settings.in_flight, sizes.full),
        "sign_mantissa": (layers * (pools.compressed + pools.sign_mantissa) + staged, sizes.sign_mantissa),
        "exponents": (layers * (pools.compressed + pools.exponents) + staged, sizes.exponents),
    }
    total = sum(count * size for count, size in counts.values())
    slab = PagedMemory(total)
    free = {part: [slab.take(size) for _ in range(count)] for part, (count, size) in counts.items()}
    return Memory(total, free)


def carry_out(
    moves: list[Move], memory: Memory, held: dict[int, Held], index: Index, staged: Held | None = None
) -> None:
    """Do what a layer's cache decided: buffers change hands, are split off, or become free.

    Args:
        moves: of one admission; the last is that of the expert that caused it.
        held: buffers of the layer's experts; changed.
        staged: buffers that the expert which caused it was put together in; what the pools take is gone from it.

    Raises:
        RuntimeError: an expert would have to become what it has not the parts for.
    """
    for number, move in enumerate(moves, start=1):
        mine = held.setdefault(move.expert, Held())
        if staged is not None and number == len(moves):
            for part in NEEDED[move.after]:
                if getattr(mine, part) is None:
                    setattr(mine, part, getattr(staged, part))
                    setattr(staged, part, None)
        if "sign_mantissa" in NEEDED[move.after] and mine.sign_mantissa is None and mine.full is not None:
            mine.sign_mantissa = memory.take("sign_mantissa")
            _split_off(mine, index.num_weights)
        for part in set(PARTS) - NEEDED[move.after]:
            memory.give(mine, part)
        if missing := NEEDED[move.after] - set(mine.parts()):
            raise RuntimeError(f"expert {move.expert} cannot become {move.after}: no {', '.join(sorted(missing))}")


def _split_off(held: Held, num_weights: int) -> None:
    sign_mantissa_of(held.full.view(np.uint16)[:num_weights], held.sign_mantissa)
