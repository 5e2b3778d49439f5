"""Every window a request could draft: the record from which rounds of any depth can be replayed.

A request's text x_0 .. x_N (x_0: the last prompt token) is written once by the target. Window n starts there at x_n:

    input          x_n   d_1   d_2   ...  d_K      d_1 ... d_K: drafted from a throw-away copy of the prefix
    draft routes    *     *     *    ...           K inputs: what can be prefetched
    target routes   *     *     *    ...   *       K + 1 inputs: what verification needs
    accepted_n     drafted tokens the target agrees with, 0..K

A round of depth k <= K at position n is the first k steps of window n; it accepts a = min(accepted_n, k) tokens, and the
next round starts at n + a + 1. Plain decoding needs what the target routes for the first input of every window. With a
greedy text this replays greedy speculative decoding exactly (tested). With a sampled text, which does not repeat
itself as small models do greedily, every window is still drafted and verified greedily.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Generator, Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from specter_lab.errors import UserError
from specter_lab.files import whole_file
from specter_lab.measure.capture import ForwardRouting
from specter_lab.measure.kv_memory import empty_cache
from specter_lab.measure.prefix import Prefix, read, write
from specter_lab.measure.sampling import GREEDY, accepted_length
from specter_lab.measure.speculate import check_start, propose
from specter_lab.measure.trace import index_dtype
from specter_lab.models.adapters import adapter_for

SCHEMA_VERSION = 1
ROWS = 128  # windows drafted side by side


@dataclass(frozen=True)
class Windows:
    """All windows of R requests: N positions each, K drafted tokens deep, L MoE layers, k experts per token and layer."""

    num_experts: int
    prompt: np.ndarray  # [R, P - 1, L, k] experts the target used for the prompt but its last token
    draft: np.ndarray  # [R, N, K, L, k] experts the draft used
    draft_weights: np.ndarray  # [R, N, K, L, k] float16, its routing weights
    target: np.ndarray  # [R, N, K + 1, L, k] experts the target used
    target_weights: np.ndarray  # [R, N, K + 1, L, k] float16
    accepted: np.ndarray  # [R, N] 0..K
    prompt_set: tuple[str, ...]  # [R] where each request comes from

    @property
    def requests(self) -> int:
        return self.draft.shape[0]

    @property
    def positions(self) -> int:
        return self.draft.shape[1]

    @property
    def depth(self) -> int:
        return self.draft.shape[2]

    @property
    def layers(self) -> int:
        return self.draft.shape[3]

    @property
    def top_k(self) -> int:
        return self.draft.shape[4]

    def of(self, chosen: np.ndarray) -> Windows:
        """Some requests, given by row."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        sets = tuple(self.prompt_set[i] for i in chosen)
        kept = {name: value[chosen] for name, value in arrays.items() if isinstance(value, np.ndarray)}
        return Windows(num_experts=self.num_experts, prompt_set=sets, **kept)


def record_windows(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Tensor,
    prompt_sets: Sequence[str],
    *,
    new_tokens: int,
    max_depth: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> Windows:
    """Record the windows of `new_tokens` positions per request.

    Args:
        target: the full-precision model.
        draft: the same model with quantised experts, or one with the same KV layout.
        prompts: [R, P] token ids, P at least 2.
        prompt_sets: [R] where each prompt comes from.
        new_tokens: N, positions per request.
        max_depth: K, drafted tokens per window.
        temperature: of the text the target writes; windows are drafted and verified greedily. 0: greedy text.
        seed: of the text; what a request draws depends on the requests beside it.

    Raises:
        UserError: vocabularies differ, prompt and windows exceed the context, or a model produced NaN.
    """
    check_start(target, draft, prompts, new_tokens=new_tokens, depth=max_depth)
    num_experts = adapter_for(target.config).num_experts(target.config)
    generator = Generator(target.device).manual_seed(seed)
    prompts = prompts.to(target.device)
    with torch.inference_mode():
        prefix = Prefix(empty_cache(target), torch.zeros(len(prompts), dtype=torch.long, device=prompts.device))
        _, prompt_routing = read(target, prefix, prompts[:, :-1])
        steps = list(write(target, prefix, prompts[:, -1:], new_tokens, temperature, generator))
        text = torch.cat([prompts[:, -1:], *(token for token, _, _ in steps[:-1])], dim=1)  # [R, N]
        at_once = torch.arange(new_tokens, device=prompts.device).split(max(1, ROWS // len(prompts)))
        parts = [
            _windows_at(target, draft, prefix, text, positions, max_depth)
            for positions in tqdm(at_once, desc="windows", delay=2.0)
        ]
    drafts, targets, accepted = zip(*parts)
    dtype = index_dtype(num_experts)

    def by_request(rows: Sequence[Tensor]) -> np.ndarray:
        """[P * R, ...] of every group of positions -> [R, N, ...]."""
        return torch.cat([part.unflatten(0, (-1, len(prompts))) for part in rows]).transpose(0, 1).cpu().numpy()

    def experts(routing: Sequence[ForwardRouting]) -> np.ndarray:
        return by_request([r.indices.unflatten(0, (len(a), -1)) for r, a in zip(routing, accepted)]).astype(dtype)

    def weights(routing: Sequence[ForwardRouting]) -> np.ndarray:
        return by_request([r.weights.unflatten(0, (len(a), -1)) for r, a in zip(routing, accepted)]).astype(np.float16)

    return Windows(
        num_experts=num_experts,
        prompt=prompt_routing.indices.unflatten(0, (len(prompts), -1)).cpu().numpy().astype(dtype),
        draft=experts(drafts),
        draft_weights=weights(drafts),
        target=experts(targets),
        target_weights=weights(targets),
        accepted=by_request(accepted),
        prompt_set=tuple(prompt_sets),
    )


def _windows_at(
    target: PreTrainedModel, draft: PreTrainedModel, prefix: Prefix, text: Tensor, positions: Tensor, depth: int
) -> tuple[ForwardRouting, ForwardRouting, Tensor]:
    """Windows of all requests at some positions [P] of text [R, N], side by side: routing of draft and target, accepted [P * R].

    Rows of about the same length: their keys and values are what a pass spends its time on.
    """
    requests, (count, new_tokens) = len(text), (len(positions), text.shape[1])
    verified = prefix.rows(torch.arange(requests, device=text.device).repeat(count))
    verified.forget(new_tokens - positions.repeat_interleave(requests))  # ends before the window's first input
    last = text[:, positions].T.reshape(-1, 1)  # [P * R, 1]
    window, _, draft_routing = propose(draft, copy.deepcopy(verified), last, depth, GREEDY, Generator())
    logits, target_routing = read(target, verified, window)  # [P * R, K + 1, V]
    return draft_routing, target_routing, accepted_length(window[:, 1:] == logits[:, :-1].argmax(dim=-1))


def write_windows(windows: Windows, path: Path, *, model_digest: str) -> None:
    """Store windows in one safetensors file, whole or not at all; `model_digest` says whose they are."""
    fields_of = {f.name: getattr(windows, f.name) for f in fields(windows)}
    arrays = {name: np.ascontiguousarray(a) for name, a in fields_of.items() if isinstance(a, np.ndarray)}
    header = {
        "schema_version": str(SCHEMA_VERSION), "model_digest": model_digest, "num_experts": str(windows.num_experts),
        "prompt_set": json.dumps(windows.prompt_set), "content": _content_digest(arrays),
    }  # fmt: skip
    with whole_file(path) as half:
        save_file(arrays, half, header)


def read_windows(path: Path, *, model_digest: str | None = None) -> Windows:
    """Windows from `write_windows`.

    Raises:
        UserError: not such a file, another schema version, altered, or of another model than `model_digest` names.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            header, arrays = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is not a readable windows file ({error}): delete it and record it again") from error
    if header.get("schema_version") != str(SCHEMA_VERSION):
        raise UserError(f"{path} has windows schema version {header.get('schema_version')}, this program reads "
                        f"{SCHEMA_VERSION}: record it again")  # fmt: skip
    if header.get("content") != _content_digest(arrays):
        raise UserError(f"{path} has been altered since it was written: delete it and record it again")
    if model_digest not in (None, header["model_digest"]):
        raise UserError(f"{path} holds windows of another model ({header['model_digest'][:12]}, not "
                        f"{model_digest[:12]}): record them for this one")  # fmt: skip
    return Windows(int(header["num_experts"]), **arrays, prompt_set=tuple(json.loads(header["prompt_set"])))


def _content_digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
