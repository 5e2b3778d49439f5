"""Translating a batch: the encoder once, then cached decoder steps, greedy or by beam search, with batch pruning.

Batch pruning (Elephants): a finished sentence stays in its row, but its tokens get an expert id past the last: they sort
to the end, no expert computes them, and experts that only they would use are not read. Rows do not see each other, so
translations are the same with and without, as far as a product's rows do not depend on how many there are: the kernels'
do not, a BLAS may differ in the last bit. The same holds where a batch narrows (`Options.narrow`): finished sentences leave
altogether, which changes the shape of every product, so it is for those who want translations, not for what counts pruning.

All state lies in buffers of fixed size and a step reads nothing on the host, so on a GPU a step is one CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specter_lab.engine.graphs import captured
from specter_lab.engine.switch_model import (
    SwitchModel,
    encode,
    feed_forward_,
    heads_of,
    position_bias,
)
from specter_lab.engine.switch_ops import cross_attend, likeliest, rms_norm, self_attend

_NEVER = -1e9  # score of what must not be chosen


@dataclass(frozen=True)
class Options:
    """How to translate."""

    beam: int = 1
    max_tokens: int = 64  # of a translation, with its </s>
    prune: bool = True
    graph: bool = True  # capture the step on a GPU; experts that ask the host (`LoopExperts`) cannot be captured
    narrow: bool = False  # on a CPU: once half of the sentences are finished, the others go on in a batch of their own

    def __post_init__(self) -> None:
        if self.narrow and not self.prune:
            raise ValueError("a batch that narrows prunes: leave out prune=False")


@dataclass(frozen=True)
class Translation:
    """What a batch became."""

    tokens: Tensor  # [B, max_tokens] ids after the start token, padded after </s>
    scores: Tensor  # [B] log probability over length (beam search), or its sum (greedy)
    steps: int
    experts: Tensor  # [steps, sparse decoder layers, B beam] expert used; num_experts: none


class Session:
    """Translates batches of one shape: B sentences of S source tokens. Buffers and graphs are made once.

    Args:
        forced: for random weights, which never end by themselves and say the same in every row, so that one expert
            would serve all: rows read `given` tokens whatever they choose, sentences end at the lengths given.
    """

    def __init__(
        self, model: SwitchModel, batch: int, source_tokens: int, options: Options = Options(), *, forced: bool = False
    ) -> None:
        self.model, self.options, self.forced = model, options, forced
        with torch.inference_mode():
            self._allocate(batch, source_tokens)
        self._on_gpu = model.device.type == "cuda"
        # The answer to whether all are finished, once the event behind the question has come.
        self._answer = torch.zeros((), dtype=torch.bool, pin_memory=self._on_gpu)
        self._asked = torch.cuda.Event() if self._on_gpu else None
        self._begin: Callable[[], object] = self.begin
        self._step: Callable[[], object] = self.step
        if self._on_gpu and options.graph:
            with torch.inference_mode():
                self._begin, self._step = captured(self.begin, ()), captured(self.step, ())

    def _allocate(self, batch: int, source_tokens: int) -> None:
        model, beam, steps = self.model, self.options.beam, self.options.max_tokens
        device, dtype, rows = model.device, model.embedding.dtype, batch * beam
        dim = model.decoder[0].attention.o.shape[1] // model.heads

        def cache(*shape: int) -> list[Tensor]:
            return [torch.zeros((2, *shape), dtype=dtype, device=device) for _ in model.decoder]  # keys, values

        self.sources = torch.full((batch, source_tokens), model.pad, device=device)
        self.lengths = torch.full((batch,), steps, device=device)  # tokens after which a sentence is finished
        self.self_kv = cache(batch, model.heads, beam, steps, dim)
        self.cross_kv = cache(batch, model.heads, source_tokens, dim)
        self.owner = torch.zeros(batch, beam, steps, dtype=torch.long, device=device)  # whose cache holds a beam's past
        self.cross_mask = torch.zeros(batch, 1, 1, source_tokens, dtype=dtype, device=device)
        later = torch.ones(steps, steps, dtype=torch.bool, device=device).triu(1)
        bias = position_bias(model, model.decoder_bias, steps, steps, causal=True)
        self.bias = bias.masked_fill(later, torch.finfo(dtype).min).contiguous()  # [heads, steps, steps]
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.last = torch.full((rows,), model.pad, device=device)  # the token each row reads next
        self.tokens = torch.full((batch, beam, steps), model.pad, device=device)
        draw = torch.Generator(device).manual_seed(0)
        self.given = torch.randint(model.end + 1, len(model.embedding), (rows, steps), device=device, generator=draw)
        self.scores = torch.zeros(batch, beam, device=device)
        self.done_tokens, self.done_scores = self.tokens.clone(), self.scores.clone()
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.experts = torch.full((steps, model.sparse_decoder_layers, rows), model.num_experts, device=device)

    def begin(self) -> None:
        """Encode `sources` and forget the batch before."""
        states, mask = encode(self.model, self.sources)
        self.cross_mask.copy_(mask)
        for layer, cache in zip(self.model.decoder, self.cross_kv):
            cache.copy_(heads_of(F.linear(states, layer.cross.kv), 2, self.model.heads))
        for buffer, value in (
            (self.position, 0), (self.last, self.model.pad), (self.tokens, self.model.pad), (self.scores, 0.0),
            (self.done_tokens, self.model.pad), (self.done_scores, _NEVER), (self.finished, False),
            (self.experts, self.model.num_experts), (self.owner, 0),
        ):  # fmt: skip
            buffer.fill_(value)
        self.scores[:, 1:].fill_(_NEVER)  # all beams start alike: one of them counts

    def step(self) -> None:
        """One token of every row."""
        logits = _decoder_step(self)
        if self.options.beam == 1:
            _greedy(self, logits)
        else:
            _beam(self, logits)
        if self.forced:
            self.last.copy_(self.given.index_select(1, self.position)[:, 0])
            self.finished.logical_or_(self.position + 1 >= self.lengths)
        self.position.add_(1)

    def _all_finished(self) -> bool:
        """Whether all sentences are; on a GPU, whether they were before the step that is under way, so none waits for it."""
        if not self._on_gpu:
            return bool(self.finished.all())
        self._asked.synchronize()
        before = bool(self._answer)
        self._answer.copy_(self.finished.all(), non_blocking=True)
        self._asked.record()
        return before

    def _finish(self, steps: int) -> int:
        """Go on after `steps` steps until all sentences are finished, or there are as many as may be; returns how many there were."""
        finished = False
        while steps < self.options.max_tokens and not finished:
            self._step()
            steps += 1
            finished = self._all_finished()
            if self.options.narrow and not self._on_gpu and not finished:
                others = (~self.finished).nonzero().flatten()
                if 2 * len(others) <= len(self.finished):
                    return self._finish_only(others, steps)
        return steps - (self._on_gpu and finished)  # the last one began before the answer was there

    def _finish_only(self, sentences: Tensor, steps: int) -> int:
        """`_finish` for some sentences [n]; the others, which are finished, stay as they are."""
        beam, apart = self.options.beam, copy.copy(self)
        rows = (sentences[:, None] * beam + torch.arange(beam)).flatten()
        by_sentence = ("tokens", "scores", "done_tokens", "done_scores", "finished")  # what comes back
        for name in (*by_sentence, "lengths", "owner", "cross_mask"):
            setattr(apart, name, getattr(self, name).index_select(0, sentences))
        for name in ("last", "given"):
            setattr(apart, name, getattr(self, name).index_select(0, rows))
        for name in ("self_kv", "cross_kv"):
            setattr(apart, name, [cache.index_select(1, sentences) for cache in getattr(self, name)])
        apart.experts = self.experts.index_select(2, rows)
        apart._step = apart.step
        steps = apart._finish(steps)
        for name in by_sentence:
            getattr(self, name).index_copy_(0, sentences, getattr(apart, name))
        self.experts.index_copy_(2, rows, apart.experts)
        return steps

    @torch.inference_mode()
    def __call__(self, sources: Tensor, lengths: Tensor | None = None) -> Translation:
        """Translate sources [B, S], padded on the right; `lengths` [B] where they are forced."""
        self.sources.copy_(sources)
        if lengths is not None:
            self.lengths.copy_(lengths)
        self._begin()
        if self._on_gpu:
            self._asked.synchronize()
            self._answer.fill_(False)
        steps = self._finish(0)
        tokens, scores = self.tokens, self.scores
        if self.options.beam > 1:
            _keep_unfinished(self)
            tokens, scores = self.done_tokens, self.done_scores
        return Translation(tokens[:, 0].clone(), scores[:, 0].clone(), steps, self.experts[:steps].clone())


def translate(model: SwitchModel, sources: Tensor, options: Options = Options()) -> Translation:
    """Translate one batch of sources [B, S], padded on the right."""
    return Session(model, *sources.shape, options)(sources)


def _decoder_step(state: Session) -> Tensor:
    """Logits [B beam, V] after each row's last token."""
    model, beam = state.model, state.options.beam
    x = F.embedding(state.last, model.embedding)  # [R, H]
    finished = state.finished.repeat_interleave(beam) if state.options.prune else None
    if beam > 1:  # each beam writes into its own cache
        slots = torch.arange(beam, device=x.device).expand(len(state.owner), -1)[..., None]
        state.owner.index_copy_(2, state.position, slots)
    used = []
    for layer, self_kv, cross_kv in zip(model.decoder, state.self_kv, state.cross_kv):
        part = layer.attention
        qkv = F.linear(rms_norm(x, part.norm, model.eps), part.qkv)
        x.addmm_(self_attend(qkv, self_kv, state.owner, state.bias, state.position), part.o.t())
        part = layer.cross
        q = F.linear(rms_norm(x, part.norm, model.eps), part.q)
        x.addmm_(cross_attend(q, cross_kv, state.cross_mask), part.o.t())
        experts = feed_forward_(model, layer.feed_forward, x, finished)
        used += [] if experts is None else [experts]
    state.experts.index_copy_(0, state.position, torch.stack(used)[None])
    hidden = rms_norm(x, model.decoder_norm, model.eps) * x.shape[-1] ** -0.5
    return F.linear(hidden, model.embedding)


def _greedy(state: Session, logits: Tensor) -> None:
    model = state.model
    token, top, log_sum = likeliest(logits)  # [B]
    token = token.masked_fill(state.finished, model.pad)
    state.scores[:, 0] += (top - log_sum).masked_fill(state.finished, 0.0)
    state.tokens[:, 0].index_copy_(1, state.position, token[:, None])
    state.last.copy_(token)
    if not state.forced:
        state.finished.logical_or_(token == model.end)


def _beam(state: Session, logits: Tensor) -> None:
    """One step of beam search with length-normalised scores; ends as transformers' does (early_stopping=False)."""
    model, (batch, beam), steps = state.model, state.scores.shape, state.options.max_tokens
    *_, log_sum = likeliest(logits)
    top, token = logits.topk(2 * beam)  # [R, 2 beam]: enough for `beam` that go on, should all be of one source
    totals = (top - log_sum[:, None]).view(batch, beam, -1) + state.scores[..., None]
    top, where = totals.flatten(1).topk(2 * beam)  # [B, 2 beam]
    source, token = where // (2 * beam), token.view(batch, -1).gather(1, where)
    paths = state.tokens.gather(1, source[..., None].expand(-1, -1, steps))  # [B, 2 beam, steps]
    paths.index_copy_(2, state.position, token[..., None])
    ended = token == model.end
    length = (state.position + 1).float()
    counted = ended & (torch.arange(2 * beam, device=top.device) < beam) & ~state.finished[:, None]
    _merge_done(state, paths, torch.where(counted, top / length, _NEVER))
    scores, kept = torch.where(ended, _NEVER, top).topk(beam)  # [B, beam]
    running = ~state.finished[:, None]
    rows = torch.where(running, source.gather(1, kept), torch.arange(beam, device=top.device))
    state.tokens.copy_(paths.gather(1, kept[..., None].expand(-1, -1, steps)))
    state.scores.copy_(scores)
    state.last.copy_(torch.where(running, token.gather(1, kept), model.pad).flatten())
    state.owner.copy_(state.owner.gather(1, rows[..., None].expand(-1, -1, steps)))
    worst = state.done_scores.min(1).values
    state.finished.logical_or_((worst > _NEVER / 2) & (worst >= scores[:, 0] / length))


def _merge_done(state: Session, paths: Tensor, scores: Tensor) -> None:
    """Keep the best finished hypotheses among those known and `paths` [B, n, steps]."""
    beam = state.done_scores.shape[1]
    best, index = torch.cat((state.done_scores, scores), 1).topk(beam)
    every = torch.cat((state.done_tokens, paths), 1)
    state.done_tokens.copy_(every.gather(1, index[..., None].expand(-1, -1, every.shape[2])))
    state.done_scores.copy_(best)


def _keep_unfinished(state: Session) -> None:
    """At the limit of tokens, hypotheses that have not ended count as they are."""
    scores = state.scores / state.position.float()
    _merge_done(state, state.tokens, scores.masked_fill(state.finished[:, None], _NEVER))
