"""How the runtime runs: data only. Baselines are settings of the same runtime."""

from __future__ import annotations

from dataclasses import dataclass

from specter_lab.engine.store.reader import DIRECT
from specter_lab.plan.zipmoe.pools import Pools

FIELDS, RAW_COPY = "fields", "raw"
FROM_HISTORY, FROM_MODEL = "history", "model"


@dataclass(frozen=True)
class Settings:
    """One way of serving experts from a store."""

    name: str
    form: str = FIELDS  # what is read: bit fields (E and SM chunks), or the raw copy
    rule: str = "rank"  # of eviction
    pools: Pools | None = None  # per layer; None: the planner's
    planner: str = FROM_HISTORY  # or the paper's model of hits
    scheduled: bool = True  # ZipMoE's order, else the router's
    overlapped: bool = True  # reading, decompressing and executing at the same time
    caching: bool = True  # off: every use reads
    read_mode: str = DIRECT
    workers: int = 2  # L
    in_flight: int = 3  # experts being put together at the same time
    prefetch: int = 0  # experts of the next layer that are read ahead
    in_place: bool = False  # use the raw copy where the page cache holds all of it
    timeout_s: float = 30.0  # of every wait


ZIPMOE = Settings("zipmoe", in_place=True)
BASELINES = {
    s.name: s
    for s in (
        Settings("load-on-demand", form=RAW_COPY, caching=False, overlapped=False, scheduled=False, in_flight=1),
        Settings("lru", form=RAW_COPY, rule="lru", overlapped=False, scheduled=False, in_flight=1),
        Settings("lfu", form=RAW_COPY, rule="lfu", overlapped=False, scheduled=False, in_flight=1),
    )
}  # whole experts, one read after the other; what the pools are is decided by the budget
