"""The gate in front of every quantiser: routed experts pass, everything else is a type error."""

from __future__ import annotations

from specter_lab.models.experts import ExpertBank


def experts_only(weights: object) -> ExpertBank:
    """Return `weights` if they are the routed experts of one layer.

    Routers, norms, shared experts and attention are the same tensors in draft and target (Specter, section SIC), so
    no quantiser takes a module or a bare tensor that could be one of them.

    Raises:
        TypeError: anything but an `ExpertBank`.
    """
    if not isinstance(weights, ExpertBank):
        raise TypeError(
            f"only routed experts are quantised: an ExpertBank is needed, got {type(weights).__name__}; routers, "
            f"norms, shared experts and attention stay as they are (models.experts.read_banks gives the banks)"
        )
    return weights
