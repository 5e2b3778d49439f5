"""SS-MoE: the draft is the target itself with half the experts per token, out of the same slots.

No INT4 experts: their memory becomes slots. But a draft step reads BF16 experts, waits for the missing ones, and what it
loads is what verification finds. Simplified: nothing is prefetched beyond that, and half of top-k is the only draft.
Needs windows that were recorded with such a draft.
"""

from __future__ import annotations

from specter_lab.plan.policy import Policy, slots_without_draft

POLICY = Policy("ss-moe", "SS-MoE, fewer experts draft", "SS-MoE", draft="fewer", slots=slots_without_draft)
