"""Systems that offload whole layers or a share of all weights, not experts: milliseconds per token as closed forms.

Plain decoding: every token needs all that is offloaded, whatever its router says, and nothing is cached from one token to
the next. What a token moves is therefore (bytes that do not fit) and its time (what it moves) / bandwidth + compute. All
times are simulated.

    Transformers    `device_map="auto"` (Accelerate, "Big Model Inference"): decoder layers fill the budget in order, room for
                    the largest one is held back; the others are copied before each of their forward passes and dropped after
                    it, from pageable memory, without overlap. With pinned memory it is the same at the link's bandwidth.
    vLLM            `cpu_offload_gb` (its engine arguments): so much of the weights stays in pinned host memory. By default every
                    offloaded weight is streamed at every pass; where kernels read host memory in place (UVA), only the
                    experts that a token uses cross the link.
"""

from __future__ import annotations

from specter_lab.errors import UserError
from specter_lab.models.anatomy import Anatomy
from specter_lab.models.geometry import BF16_BYTES
from specter_lab.plan.budget import WORKSPACE_BYTES
from specter_lab.plan.cost import verify_ms
from specter_lab.plan.hardware import Profile

PAGEABLE_GB_S = 7.0  # host to device, pageable, measured on an H200: the host's own copy to a staging buffer decides


def transformers_ms(
    model: Anatomy, profile: Profile, budget_bytes: int, context_tokens: int, *, pinned: bool = False
) -> float:
    """One token with Accelerate's layer offload.

    Raises:
        UserError: the budget does not hold one layer beside what stays.
    """
    layer = _layers_bytes(model) / model.layers
    outside = (model.embedding + model.head) * BF16_BYTES
    room = budget_bytes - WORKSPACE_BYTES - context_tokens * model.kv_bytes_per_token - outside
    if room < layer:
        raise UserError(f"{budget_bytes / 1e9:.2f} GB leave {room / 1e9:.2f} GB for layers of {model.name}, and one takes "
                        f"{layer / 1e9:.2f} GB: give {(layer - room) / 1e9:.2f} GB more")  # fmt: skip
    resident = model.layers if room >= model.layers * layer else int(room // layer) - 1
    bandwidth = profile.h2d.gb_s[-1] if pinned else min(PAGEABLE_GB_S, profile.h2d.gb_s[-1])
    return (model.layers - resident) * layer / bandwidth * 1e-6 + _compute_ms(model, profile, context_tokens)


def vllm_ms(
    model: Anatomy, profile: Profile, budget_bytes: int, context_tokens: int, *, only_used: bool = False
) -> float:
    """One token with vLLM's CPU offload of as much as does not fit.

    Args:
        only_used: kernels read host memory in place, so of offloaded experts the top-k move.

    Raises:
        UserError: the budget holds no weights at all.
    """
    weights = model.parameters * BF16_BYTES
    room = budget_bytes - WORKSPACE_BYTES - context_tokens * model.kv_bytes_per_token
    if room <= 0:
        raise UserError(f"{budget_bytes / 1e9:.2f} GB hold no weights beside {WORKSPACE_BYTES / 1e9:.2f} GB of workspace and "
                        f"the KV cache of {context_tokens} tokens: give {(1 - room) / 1e9:.2f} GB more")  # fmt: skip
    offloaded = max(0, weights - room)
    if only_used:
        used = model.every_token_parameters + model.moe_layers * model.top_k * model.parameters_per_expert
        offloaded *= used / model.parameters
    return offloaded / profile.h2d.gb_s[-1] * 1e-6 + _compute_ms(model, profile, context_tokens)


def _layers_bytes(model: Anatomy) -> int:
    return (model.parameters - model.embedding - model.head) * BF16_BYTES


def _compute_ms(model: Anatomy, profile: Profile, context_tokens: int) -> float:
    return verify_ms(model, profile, 1, model.top_k, context_tokens)
