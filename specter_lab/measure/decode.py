"""Routing while a model writes: the target's own greedy continuation, all in the decode phase (plain decoding protocol).

Every request is cut to the same prefix and continued for the same number of tokens, so that requests batch without
padding. Rows are the inputs of the decode steps: the last prefix token first, then each token the model chose. What
follows an end-of-text token is left out.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from specter_lab.measure.capture import build_trace, check_context, join
from specter_lab.measure.draft import cut_to_prefix
from specter_lab.measure.prefix import prefill, read
from specter_lab.measure.prompts import TokenizedRequests
from specter_lab.measure.trace import DECODE, Origin, Trace

BATCH = 64  # requests decoded side by side


def decode_greedily(
    model: PreTrainedModel,
    tokens: TokenizedRequests,
    origin: Origin,
    *,
    prefix_tokens: int = 32,
    new_tokens: int = 128,
    batch: int = BATCH,
) -> Trace:
    """Routing of `new_tokens` greedy decode steps per request.

    Args:
        model: a causal language model with an adapter, in evaluation mode.
        tokens: requests of at least `prefix_tokens` tokens; the rest of each is not used.
        origin: what the trace says about where it comes from.

    Raises:
        UserError: a request is shorter than the prefix, prefix and continuation exceed the context, or a router gave
            NaN.
    """
    prefixes = cut_to_prefix(tokens, prefix_tokens)
    check_context(model, prefixes, new_tokens)
    texts, pieces = [], []
    for ids in torch.stack(prefixes.ids).to(model.device).split(batch):  # [B, P]
        with torch.inference_mode():
            prefix, inputs, steps = prefill(model, ids[:, :-1]), [ids[:, -1:]], []
            for _ in range(new_tokens):
                logits, routing = read(model, prefix, inputs[-1])  # [B, 1, V]
                inputs.append(logits[:, -1:].argmax(dim=-1))
                steps.append(routing)
        texts.append(torch.cat(inputs[:-1], dim=1).cpu())
        request_major = np.arange(new_tokens * len(ids)).reshape(new_tokens, -1).T.ravel()  # [N, B] rows -> [B, N]
        pieces.append(join(steps, request_major))
    text = torch.cat(texts)  # [R, N]
    rows = alive(text, model.config.eos_token_id).flatten().numpy().nonzero()[0]
    return build_trace(
        model, origin, "greedy-decode", prefixes, join(pieces, rows),
        request_index=rows // new_tokens,
        position=prefix_tokens - 1 + rows % new_tokens,
        token_id=text.flatten().numpy()[rows],
        phase=DECODE,
    )  # fmt: skip


def alive(inputs: torch.Tensor, end_of_text: int | list[int] | None) -> torch.Tensor:
    """Which of the inputs [R, N] come before the first end-of-text token: [R, N] bool.

    The first input is the prompt's and always counts.
    """
    ends = torch.isin(inputs, torch.tensor(np.atleast_1d([] if end_of_text is None else end_of_text)).long())
    ends[:, 0] = False
    return ends.long().cumsum(dim=1) == 0
