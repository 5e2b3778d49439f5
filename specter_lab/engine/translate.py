"""Translating a batch: the encoder once, then cached decoder steps, greedy or by beam search, with batch pruning.

Batch pruning (Elephants): a finished sentence stays in its row, but its tokens get an expert id past the last: they sort
to the end, no expert computes them, and experts that only they would use are not read. Rows do not see each other, so
translations are the same with and without, as far as a product's rows do not depend on how many there are: the kernels'
do not, a BLAS may differ in the last bit.

All state lies in buffers of fixed size and a step reads nothing on the host, so on a GPU a step is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specter_lab.engine.graphs import captured
from specter_lab.engine.switch_model import SwitchModel, encode, feed_forward, heads_of, mix, position_bias, rms_norm

_NEVER = -1e9  # score of what must not be chosen
_CHECK_EVERY = 4  # steps between questions to a GPU whether all sentences are finished


@dataclass(frozen=True)
class Options:
    """How to translate."""

    beam: int = 1
    max_tokens: int = 64  # of a translation, with its </s>
    prune: bool = True
    graph: bool = True  # capture the step on a GPU; experts that ask the host (`LoopExperts`) cannot be captured


@dataclass(frozen=True)
class Translation:
    """What a batch became."""

    tokens: Tensor  # [B, max_tokens] ids after the start token, padded after </s>
    scores: Tensor  # [B] log probability over length (beam search), or its sum (greedy)
    steps: int
    experts: Tensor  # [steps, sparse decoder layers, B beam] expert used; num_experts: none


class _State:
    """Buffers of one batch."""

    def __init__(self, model: SwitchModel, sources: Tensor, options: Options) -> None:
        batch, beam, steps, device = len(sources), options.beam, options.max_tokens, model.device
        rows = batch * beam
        states, self.cross_mask = encode(model, sources)
        dim = model.decoder[0].attention.q.shape[0] // model.heads
        shape = (rows, model.heads, steps, dim)
        self.self_kv = [tuple(states.new_zeros(shape) for _ in "kv") for _ in model.decoder]
        self.cross_kv = [
            tuple(heads_of(F.linear(states, weight), model.heads) for weight in (layer.cross.k, layer.cross.v))
            for layer in model.decoder
        ]
        later = torch.ones(steps, steps, dtype=torch.bool, device=device).triu(1)
        bias = position_bias(model, model.decoder_bias, steps, steps, causal=True)
        self.bias = bias.masked_fill(later, torch.finfo(bias.dtype).min)  # [heads, steps, steps]
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.last = torch.full((rows,), model.pad, device=device)  # the token each row reads next
        self.tokens = torch.full((batch, beam, steps), model.pad, device=device)
        self.scores = torch.zeros(batch, beam, device=device)
        self.scores[:, 1:] = _NEVER  # all beams start alike: one of them counts
        self.done_tokens, self.done_scores = self.tokens.clone(), torch.full_like(self.scores, _NEVER)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.experts = torch.full((steps, model.sparse_decoder_layers, rows), model.num_experts, device=device)

    def buffers(self) -> list[Tensor]:
        """What a step changes."""
        caches = [part for pair in self.self_kv for part in pair]
        return [
            *caches,
            self.position,
            self.last,
            self.tokens,
            self.scores,
            self.done_tokens,
            self.done_scores,
            self.finished,
            self.experts,
        ]


def translate(
    model: SwitchModel, sources: Tensor, options: Options = Options(), lengths: Tensor | None = None
) -> Translation:
    """Translate sources [B, S], padded on the right.

    Args:
        lengths: [B] tokens after which a sentence counts as finished whatever it says (random weights never end by
            themselves); greedy only.

    Raises:
        ValueError: `lengths` with a beam.
    """
    if lengths is not None and options.beam > 1:
        raise ValueError("given lengths are for greedy decoding")
    with torch.inference_mode():
        return _run(model, _State(model, sources, options), options, lengths)


def _run(model: SwitchModel, state: _State, options: Options, lengths: Tensor | None) -> Translation:
    def step() -> None:
        logits = _decoder_step(model, state, options)
        if options.beam == 1:
            _greedy(model, state, logits, lengths)
        else:
            _beam(model, state, logits, options)
        state.position.add_(1)

    on_gpu = model.device.type == "cuda"
    run: Callable[[], object] = captured(step, state.buffers()) if on_gpu and options.graph else step
    check_every = _CHECK_EVERY if on_gpu else 1
    steps = 0
    while steps < options.max_tokens:
        run()
        steps += 1
        if steps % check_every == 0 and bool(state.finished.all()):
            break
    if options.beam > 1:
        _keep_unfinished(state)
        return Translation(state.done_tokens[:, 0], state.done_scores[:, 0], steps, state.experts[:steps])
    return Translation(state.tokens[:, 0], state.scores[:, 0], steps, state.experts[:steps])


def _decoder_step(model: SwitchModel, state: _State, options: Options) -> Tensor:
    """Logits [B beam, V] after each row's last token."""
    x = F.embedding(state.last, model.embedding)  # [R, H]
    beam = options.beam
    finished = state.finished.repeat_interleave(beam) if options.prune else None
    bias = state.bias.index_select(1, state.position)  # [heads, 1, steps]
    sparse = 0
    for layer, (keys, values), (cross_keys, cross_values) in zip(model.decoder, state.self_kv, state.cross_kv):
        part = layer.attention
        hidden = rms_norm(x, part.norm, model.eps)[:, None]  # [R, 1, H]
        q, k, v = (heads_of(F.linear(hidden, weight), model.heads) for weight in (part.q, part.k, part.v))
        keys.index_copy_(2, state.position, k)
        values.index_copy_(2, state.position, v)
        x = x + F.linear(mix(q, keys, values, bias)[:, 0], part.o)
        part = layer.cross
        hidden = rms_norm(x, part.norm, model.eps).unflatten(0, (-1, beam))  # a sentence's beams share its states
        q = heads_of(F.linear(hidden, part.q), model.heads)  # [B, heads, beam, D]
        x = x + F.linear(mix(q, cross_keys, cross_values, state.cross_mask), part.o).flatten(0, 1)
        x, used = feed_forward(model, layer.feed_forward, x, finished)
        if used is not None:
            state.experts[:, sparse].index_copy_(0, state.position, used[None])
            sparse += 1
    hidden = rms_norm(x, model.decoder_norm, model.eps) * x.shape[-1] ** -0.5
    return F.linear(hidden, model.embedding)


def _greedy(model: SwitchModel, state: _State, logits: Tensor, lengths: Tensor | None) -> None:
    best, token = logits.float().log_softmax(-1).max(-1)  # [B]
    token = token.masked_fill(state.finished, model.pad)
    state.scores[:, 0] += best.masked_fill(state.finished, 0.0)
    state.tokens[:, 0].index_copy_(1, state.position, token[:, None])
    state.last.copy_(token)
    state.finished.logical_or_(token == model.end if lengths is None else state.position + 1 >= lengths)


def _beam(model: SwitchModel, state: _State, logits: Tensor, options: Options) -> None:
    """One step of beam search with length-normalised scores; ends as transformers' does (early_stopping=False)."""
    batch, beam = state.scores.shape
    vocab = logits.shape[-1]
    totals = logits.float().log_softmax(-1).view(batch, beam, vocab) + state.scores[..., None]
    top, where = totals.flatten(1).topk(2 * beam)  # [B, 2 beam]: enough for `beam` that go on
    source, token = where // vocab, where % vocab
    paths = state.tokens.gather(1, source[..., None].expand(-1, -1, options.max_tokens))  # [B, 2 beam, steps]
    paths.index_copy_(2, state.position, token[..., None])
    ended = token == model.end
    length = (state.position + 1).float()
    counted = ended & (torch.arange(2 * beam, device=top.device) < beam) & ~state.finished[:, None]
    _merge_done(state, paths, torch.where(counted, top / length, _NEVER))
    scores, kept = torch.where(ended, _NEVER, top).topk(beam)  # [B, beam]
    running = ~state.finished[:, None]
    rows = torch.where(running, source.gather(1, kept), torch.arange(beam, device=top.device))
    state.tokens.copy_(paths.gather(1, kept[..., None].expand(-1, -1, options.max_tokens)))
    state.scores.copy_(scores)
    state.last.copy_(torch.where(running, token.gather(1, kept), model.pad).flatten())
    flat = (rows + beam * torch.arange(batch, device=rows.device)[:, None]).flatten()
    for pair in state.self_kv:
        for cache in pair:
            cache.copy_(cache.index_select(0, flat))
    worst = state.done_scores.min(1).values
    state.finished.logical_or_((worst > _NEVER / 2) & (worst >= scores[:, 0] / length))


def _merge_done(state: _State, paths: Tensor, scores: Tensor) -> None:
    """Keep the best finished hypotheses among those known and `paths` [B, n, steps]."""
    beam = state.done_scores.shape[1]
    best, index = torch.cat((state.done_scores, scores), 1).topk(beam)
    every = torch.cat((state.done_tokens, paths), 1)
    state.done_tokens.copy_(every.gather(1, index[..., None].expand(-1, -1, every.shape[2])))
    state.done_scores.copy_(best)


def _keep_unfinished(state: _State) -> None:
    """At the limit of tokens, hypotheses that have not ended count as they are."""
    scores = state.scores / state.position.float()
    _merge_done(state, state.tokens, scores.masked_fill(state.finished[:, None], _NEVER))
