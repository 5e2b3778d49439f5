"""What the rows of every simulated system have in common: who can run on a model, and what is said of a run.

Measured on the zoo model: acceptance, tokens per round, distinct experts. Whatever a clock or a cache had a part in is
simulated, and the name of its column begins so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pandas as pd

from specter_lab.errors import UserError
from specter_lab.experiments.specter import offload
from specter_lab.experiments.specter.offload import Traffic
from specter_lab.measure.bootstrap import Interval
from specter_lab.plan import serve
from specter_lab.plan.policies import POLICIES
from specter_lab.plan.policy import Policy
from specter_lab.plan.simulate import Simulation

FULL_DRAFT, FEWER_DRAFT = "int4", "fewer"  # kinds of draft that windows are recorded with


def systems(model: str, seed: int, chosen: Collection[str] | None = None) -> Iterator[tuple[Policy, Traffic]]:
    """Every policy (or those chosen by id) whose draft this model can be, with the windows of that draft.

    Raises:
        UserError: as `offload.traffic`; but where only the draft with fewer experts is impossible, its policies are left out.
    """
    traffic = {FULL_DRAFT: offload.traffic(model, seed, FULL_DRAFT)}
    for policy in POLICIES.values():
        if chosen is not None and policy.id not in chosen:
            continue
        draft = policy.draft or FULL_DRAFT
        if draft not in traffic:
            try:
                traffic[draft] = offload.traffic(model, seed, draft)
            except UserError:
                if draft != FEWER_DRAFT:
                    raise
                continue
        yield policy, traffic[draft]


def name(policy: Policy) -> dict:
    """The columns that name a system."""
    return {"system": policy.id, "title": policy.title, "lossy": policy.lossy}


def requests_by_set(traffic: Traffic) -> dict[str, list[int]]:
    """The simulated requests of every prompt set, in order."""
    sets = np.array(traffic.requests.windows.prompt_set)
    return {of: np.flatnonzero(sets == of).tolist() for of in dict.fromkeys(sets.tolist())}


def per_round(simulations: Sequence[Simulation], layers: int) -> dict:
    """What stands beside every TPOT; simulations of one request at a time, of the same system."""
    depth, tokens, h2d_bytes = (
        np.concatenate([getattr(one.rounds, column) for one in simulations])
        for column in ("depth", "tokens", "h2d_bytes")
    )
    checked = np.minimum(tokens, depth).sum()  # a round of K that accepts a < K has looked at a + 1
    needed = sum(int(one.hits.counts[serve.NEEDED]) for one in simulations)
    return {
        "n_rounds": len(depth),
        "mean_depth": round(float(depth.mean()), 2),
        "acceptance": round(float((tokens - 1).sum() / checked), 4) if checked else None,
        "tokens_per_round": round(float(tokens.mean()), 3),
        "distinct_experts_per_layer": round(needed / (len(depth) * layers), 3),
        "simulated_h2d_mb_per_token": round(float(h2d_bytes.sum() / tokens.sum() / 1e6), 2),
    }


def columns(name: str, interval: Interval, digits: int = 3) -> dict:
    """An estimate and the ends of its interval, as columns of a row."""
    numbers = {name: interval.estimate, f"{name}_ci_low": interval.low, f"{name}_ci_high": interval.high}
    return {key: round(float(value), digits) for key, value in numbers.items()}


def titles(rows: pd.DataFrame) -> dict[str, str]:
    """System -> what figures call it; those that change the output say so."""
    found = rows.drop_duplicates("system").set_index("system")
    return {system: f"{row.title} (lossy)" if row.lossy else row.title for system, row in found.iterrows()}


def model_of(rows: pd.DataFrame, family: str) -> str | None:
    """The first model measured of one of the paper's families."""
    found = rows.loc[rows["family"] == family, "model"]
    return None if found.empty else found.iloc[0]
