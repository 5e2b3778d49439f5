"""Routing while a model writes: its own continuation of a prefix, all in the decode phase (plain decoding protocol).

Every request is cut to the same prefix and continued for the same number of tokens, so that requests batch without
padding. Rows are the inputs of the decode steps: the last prefix token first, then each token the model chose. What
follows an end-of-text token is left out.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from specter_lab.measure.capture import build_trace, check_context, join
from specter_lab.measure.draft import cut_to_prefix
from specter_lab.measure.prefix import join_steps, prefill, write
from specter_lab.measure.prompts import TokenizedRequests
from specter_lab.measure.speculate import check_new_tokens
from specter_lab.measure.trace import DECODE, Origin, Trace

BATCH = 128  # requests decoded side by side


def decode(
    model: PreTrainedModel,
    tokens: TokenizedRequests,
    origin: Origin,
    *,
    prefix_tokens: int = 32,
    new_tokens: int = 128,
    temperature: float = 0.0,
    batch: int = BATCH,
) -> Trace:
    """Routing of `new_tokens` decode steps per request.

    Args:
        model: a causal language model with an adapter, in evaluation mode.
        tokens: requests of at least `prefix_tokens` tokens; the rest of each is not used.
        origin: what the trace says about where it comes from; its seed is also that of the sampling.
        prefix_tokens: P, at least 2.
        temperature: 0 is greedy.
        batch: requests per batch; with sampling, what a request draws depends on the requests beside it.

    Raises:
        UserError: a request is shorter than the prefix, prefix and continuation exceed the context, or a model
            produced NaN.
    """
    prefixes = cut_to_prefix(tokens, prefix_tokens)
    check_new_tokens(new_tokens)
    check_context(model, prefixes, new_tokens)
    generator = Generator(model.device).manual_seed(origin.seed)
    texts, pieces = [], []
    for ids in torch.stack(prefixes.ids).to(model.device).split(batch):  # [B, P]
        with torch.inference_mode():
            prefix, inputs, steps = prefill(model, ids[:, :-1]), [ids[:, -1:]], []
            for token, _, routing in write(model, prefix, inputs[0], new_tokens, temperature, generator):
                inputs.append(token)
                steps.append(routing)
        texts.append(torch.cat(inputs[:-1], dim=1).cpu())
        pieces.append(join_steps(steps))
    text = torch.cat(texts)  # [R, N]
    rows = before_end(text, model.config.eos_token_id).flatten().numpy().nonzero()[0]
    return build_trace(
        model, origin, "sampled-decode" if temperature else "greedy-decode", prefixes, join(pieces, rows),
        request_index=rows // new_tokens,
        position=prefix_tokens - 1 + rows % new_tokens,
        token_id=text.flatten().numpy()[rows],
        phase=DECODE,
    )  # fmt: skip


def before_end(inputs: Tensor, end_of_text: int | list[int] | None) -> Tensor:
    """Which inputs [R, N] come before the first end-of-text token, the prompt's one always: [R, N] bool."""
    ends = torch.isin(inputs, torch.tensor([] if end_of_text is None else end_of_text, dtype=torch.long))
    ends[:, 0] = False
    return ends.long().cumsum(dim=1) == 0
