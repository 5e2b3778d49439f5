import pytest

from specter_lab.models.anatomy import anatomy_of
from specter_lab.plan.memory import LEVELS, footprints

QWEN = anatomy_of("Qwen1.5-MoE-A2.7B")


def levels(draft_experts=4, target_experts=4, context_tokens=12288):
    return footprints(QWEN, context_tokens=context_tokens, draft_experts=draft_experts, target_experts=target_experts)


def test_the_papers_table():
    """Specter, memory at 12K context: draft, target, shared, total in GB of 2^30 bytes."""
    paper = {
        "independent": (6.13, 7.27, 0, 13.40), "+ shared experts": (4.58, 5.72, 1.55, 11.85),
        "+ other parameters": (2.66, 3.80, 3.47, 9.93), "+ KV cache": (0.41, 1.55, 5.72, 7.68),
    }  # fmt: skip
    for level in levels():
        ours = (level.draft, level.target, level.shared, level.total)
        assert [size / 2**30 for size in ours] == pytest.approx(paper[level.level], abs=0.035)


def test_sharing_moves_bytes_and_saves_one_copy():
    found = levels()
    assert tuple(level.level for level in found) == LEVELS
    for before, after in zip(found, found[1:]):
        moved = after.shared - before.shared
        assert moved > 0
        assert before.draft - after.draft == before.target - after.target == before.total - after.total == moved


def test_what_counts_changes_the_answer():
    def left(**counted):
        found = levels(**counted)
        return found[-1].total / found[0].total

    assert left() == pytest.approx(0.573, abs=0.001)  # the paper: -43 %
    assert left(draft_experts=60) == pytest.approx(0.70, abs=0.005)
    shares = [left(), *(left(draft_experts=60, target_experts=experts) for experts in (4, 8, 15, 60))]
    assert shares == sorted(shares)
    assert levels(context_tokens=0)[-1].total < levels()[-1].total
