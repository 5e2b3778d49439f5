"""Transformers' and vLLM's offload as closed forms."""

import pytest

from specter_lab.errors import UserError
from specter_lab.models.anatomy import anatomy_of
from specter_lab.models.geometry import BF16_BYTES
from specter_lab.plan.budget import WORKSPACE_BYTES
from specter_lab.plan.cost import verify_ms
from specter_lab.plan.hardware import read_profile
from specter_lab.plan.layer_offload import PAGEABLE_GB_S, transformers_ms, vllm_ms

QWEN, A100, CONTEXT = anatomy_of("Qwen1.5-MoE-A2.7B"), read_profile(), 144
COMPUTE_MS = verify_ms(QWEN, A100, 1, QWEN.top_k, CONTEXT)
LINK_GB_S = A100.h2d.gb_s[-1]


def test_by_hand_at_20_gb():
    """20 GB less workspace, KV cache, embedding and head leave room for 17 of 24 layers, one held back: 8 are streamed."""
    layer = (QWEN.parameters - QWEN.embedding - QWEN.head) * BF16_BYTES / 24
    room = 20e9 - WORKSPACE_BYTES - CONTEXT * QWEN.kv_bytes_per_token - (QWEN.embedding + QWEN.head) * BF16_BYTES
    streamed = 24 - (int(room / layer) - 1)
    expected = streamed * layer / PAGEABLE_GB_S * 1e-6 + COMPUTE_MS
    assert transformers_ms(QWEN, A100, int(20e9), CONTEXT) == pytest.approx(expected)
    offloaded = QWEN.parameters * BF16_BYTES - (20e9 - WORKSPACE_BYTES - CONTEXT * QWEN.kv_bytes_per_token)
    assert vllm_ms(QWEN, A100, int(20e9), CONTEXT) == pytest.approx(offloaded / LINK_GB_S * 1e-6 + COMPUTE_MS)


@pytest.mark.parametrize("system", [transformers_ms, vllm_ms])
def test_more_memory_is_never_slower_and_all_of_it_is_compute(system):
    times = [system(QWEN, A100, int(gb * 1e9), CONTEXT) for gb in (6, 12, 20, 28, 40)]
    assert times == sorted(times, reverse=True) and times[-1] == pytest.approx(COMPUTE_MS)


def test_who_is_faster():
    """Pinned beats pageable; a share of all weights beats whole layers with one held back; reading only what is used beats all."""
    budget = int(16e9)
    assert transformers_ms(QWEN, A100, budget, CONTEXT) > transformers_ms(QWEN, A100, budget, CONTEXT, pinned=True)
    assert transformers_ms(QWEN, A100, budget, CONTEXT, pinned=True) > vllm_ms(QWEN, A100, budget, CONTEXT)
    assert vllm_ms(QWEN, A100, budget, CONTEXT) > vllm_ms(QWEN, A100, budget, CONTEXT, only_used=True)


def test_too_small_a_budget_is_one_sentence():
    with pytest.raises(
        UserError, match=r"2.00 GB leave 0.\d\d GB for layers of Qwen1.5-MoE-A2.7B, and one takes 1.\d\d GB: give"
    ):
        transformers_ms(QWEN, A100, int(2e9), CONTEXT)
    with pytest.raises(
        UserError, match=r"0.40 GB hold no weights beside 0.54 GB of workspace and the KV cache of 144 tokens"
    ):
        vllm_ms(QWEN, A100, int(0.4e9), CONTEXT)
