"""What using an expert costs in each of its compression states (ZipMoE).

    F  full tensor in memory             execute
    C  SM-chunk and E-chunks in memory   decompress, recover, execute
    S  SM-chunk in memory                read E-chunks, decompress, recover, execute
    E  E-chunks in memory                read SM-chunk, decompress, recover, execute
    M  nothing                           read both, ...

Three kinds of machine do it: one I/O thread reads SM-chunks; L workers read E-chunks where they must, and decompress them;
one executor executes. Who recovers? The paper's executor, and it is counted there; in our runtime the workers do, and what a
codec does at once with decompression is counted as that. An expert is ready for the executor when its SM-chunk and all its
E-chunks are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Which parts of an expert are in memory."""

    F = "F"
    C = "C"
    S = "S"
    E = "E"
    M = "M"

    @property
    def has_sign_mantissa(self) -> bool:
        return self in (State.C, State.S)

    @property
    def has_exponents(self) -> bool:
        return self in (State.C, State.E)


@dataclass(frozen=True)
class Costs:
    """Measured seconds of every operation on one expert."""

    read_sm_s: float
    read_shard_s: float  # one E-chunk
    decompress_s: float  # one E-chunk
    recover_s: float  # the whole expert
    execute_s: float  # for the tokens of one layer call
    shards: int
    workers: int  # L
    # Whose work executor and workers do together while one disk reads for all; None: nobody waits for another.
    cores: float | None = None
    ahead: int = 0  # experts of M that a layer call usually finds read ahead, while attention computed


@dataclass(frozen=True)
class Work:
    """What is to be done before one expert has computed."""

    expert: int
    io_s: float  # of the I/O thread; 0: the SM-chunk is in memory
    shard_s: tuple[float, ...]  # of the workers, one number per E-chunk; empty: nothing to decompress
    execute_s: float  # of the executor

    @property
    def type_one(self) -> bool:
        """Type-I: the SM-chunk must be read."""
        return self.io_s > 0

    @property
    def cpu_s(self) -> float:
        return sum(self.shard_s)


def work_of(expert: int, state: State, costs: Costs) -> Work:
    """The work of one expert in a state."""
    if state is State.F:
        return Work(expert, 0.0, (), costs.execute_s)
    shard_s = costs.decompress_s + (0.0 if state.has_exponents else costs.read_shard_s)
    io_s = 0.0 if state.has_sign_mantissa else costs.read_sm_s
    return Work(expert, io_s, (shard_s,) * costs.shards, costs.recover_s + costs.execute_s)


def shared_work_of(expert: int, state: State, costs: Costs) -> Work:
    """As `work_of`, on a machine whose cores, memory and disk are shared: what a thread would do alone takes longer.

    Reads queue at one disk, whoever asks. The executor has a core; the workers share what else there is, and have no less than
    L / (L + 1) of a core: what L of L + 1 threads get that share one fairly. Without `cores` nothing is shared.
    """
    alone = work_of(expert, state, costs)
    if costs.cores is None or not alone.shard_s:
        return alone
    io_s = alone.io_s + (0.0 if state.has_exponents else costs.shards * costs.read_shard_s)
    lag = max(1.0, costs.workers / max(costs.cores - 1, costs.workers / (costs.workers + 1)))
    return Work(expert, io_s, (lag * costs.decompress_s,) * costs.shards, alone.execute_s)
