"""All policies, one file each. To add one, write a file that defines `POLICY` and name it in `MODULES`; README.md has an example."""

from __future__ import annotations

from importlib import import_module

from specter_lab.errors import UserError
from specter_lab.plan.policy import Policy

# File names in this folder, in the order tables show them.
MODULES = (
    "specter", "specter_early", "specter_fast", "specter_read", "specter_admit", "specter_shared", "specter_uneven", "specmoeoff",
    "sp_e", "sp_l", "lru", "lru_s", "lru_shared", "lru_admit", "fifo", "lfu", "adapmoe", "moe_infinity", "promoe", "sp_moe", "ss_moe",
    "hybrimoe", "fiddler", "moe_spec", "moe_apex", "belady", "oracle",
)  # fmt: skip

POLICIES: dict[str, Policy] = {
    policy.id: policy for policy in (import_module(f"{__name__}.{name}").POLICY for name in MODULES)
}


def find_policy(name: str) -> Policy:
    """The policy with that id.

    Raises:
        UserError: there is none.
    """
    if name not in POLICIES:
        raise UserError(f"no policy '{name}': there are {', '.join(POLICIES)}")
    return POLICIES[name]
