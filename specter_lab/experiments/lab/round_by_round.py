"""Speculative rounds to look at one by one: what the draft wrote, what the target kept, and which experts both used.

    watched = decode(source, draft, "The old man walked along the river and", new_tokens=48, depth=6)
    watched.rounds[0].accepted        # of watched.rounds[0].drafted
    show(watched)                     # with a slider over the rounds

The decoding is `measure.speculate`'s own; the rule that accepts is listened to, not replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from specter_lab.experiments.lab.player import player
from specter_lab.measure.sampling import accept
from specter_lab.measure.speculate import speculative_decode
from specter_lab.models.load import LoadedModel

FORESEEN = {"neither": "white", "foreseen, not needed": "0.82", "needed, not foreseen": "#d55e00", "needed and foreseen": "#029e73"}  # fmt: skip
KEPT, DROPPED, OWN = "background:#c8ecdd", "background:#f8d3bd;text-decoration:line-through", "background:#cfe3f5"


@dataclass(frozen=True)
class Round:
    """One round of one text."""

    drafted: tuple[str, ...]  # [K]
    accepted: int
    own: str  # the target's token after those it accepted
    needed: np.ndarray  # [L, E] bool, experts the target used
    foreseen: np.ndarray  # [L, E] bool, experts the draft used


@dataclass(frozen=True)
class Watched:
    """A text, and the rounds that wrote it."""

    model: str
    prompt: str
    rounds: tuple[Round, ...]

    def text_before(self, number: int) -> str:
        """Prompt and everything committed before a round."""
        done = ("".join(r.drafted[: r.accepted]) + r.own for r in self.rounds[:number])
        return self.prompt + "".join(done)


def decode(
    source: LoadedModel, draft: PreTrainedModel, prompt: str, *, new_tokens: int, depth: int, seed: int = 0
) -> Watched:
    """Decode greedily and keep what every round drafted.

    Raises:
        UserError: as `measure.speculate.speculative_decode`.
    """
    heard: list[tuple[list[int], int, int]] = []

    def listening(drafted: Tensor, q: Tensor, p: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        accepted, own = accept(drafted, q, p, generator)
        heard.append((drafted[0].tolist(), int(accepted[0]), int(own[0, 0])))
        return accepted, own

    ids = source.tokenizer(prompt, return_tensors="pt").input_ids  # [1, P]
    found = speculative_decode(
        source.model, draft, ids, new_tokens=new_tokens, depth=depth, seed=seed, rule=listening
    ).rounds
    say = source.tokenizer.decode
    rounds = [
        Round(tuple(say([token]) for token in drafted), accepted, say([own]), needed, foreseen)
        for (drafted, accepted, own), needed, foreseen in zip(heard, found.needed, found.predicted)
    ]
    return Watched(source.name, prompt, tuple(rounds))


def show(watched: Watched) -> widgets.IntSlider:
    """A slider over the rounds; returns it."""
    return player(
        lambda number: (as_text(watched, number), draw(watched, number)), last=len(watched.rounds) - 1, label="round"
    )


def as_text(watched: Watched, number: int) -> HTML:
    """The text so far, the drafted tokens (kept ones green, dropped ones struck out) and the target's own token (blue)."""
    now = watched.rounds[number]
    parts = [_word(word, KEPT if place < now.accepted else DROPPED) for place, word in enumerate(now.drafted)]
    said = f"round {number + 1} of {len(watched.rounds)}: {now.accepted} of {len(now.drafted)} drafted tokens accepted"
    text = escape(watched.text_before(number)).replace("\n", " ")
    return HTML(
        f"<p><b>{said}</b></p><p style='font-family:monospace;max-width:60em'>{text}{''.join(parts)} "
        f"{_word(now.own, OWN)}</p><p><span style='{KEPT}'>drafted, accepted</span> "
        f"<span style='{DROPPED}'>drafted, rejected</span> <span style='{OWN}'>the target's own</span></p>"
    )


def _word(word: str, style: str) -> str:
    return f"<span style='{style};margin-right:1px'>{escape(word).replace(chr(10), '&#9166;')}</span>"


def draw(watched: Watched, number: int) -> Figure:
    """Which experts the round needed, and which of them the draft's routing had named before."""
    now = watched.rounds[number]
    kinds = now.foreseen + 2 * now.needed  # [L, E]: 0 neither, 1 foreseen only, 2 needed only, 3 both
    figure, axis = plt.subplots(figsize=(9.5, 0.34 * len(kinds) + 1.5), constrained_layout=True)
    axis.pcolormesh(
        kinds, cmap=ListedColormap(list(FORESEEN.values())), vmin=-0.5, vmax=3.5, edgecolors="0.9", linewidth=0.4
    )
    axis.invert_yaxis()
    axis.set_yticks(np.arange(len(kinds)) + 0.5, range(1, len(kinds) + 1))
    axis.set(xlabel="expert", ylabel="MoE layer")
    share = (now.needed & now.foreseen).sum() / now.needed.sum()
    said = f"{now.needed.sum(axis=1).mean():.1f} experts per layer needed by {len(now.drafted) + 1} tokens, {share:.0%} of them foreseen"
    axis.set_title(f"{watched.model}, round {number + 1}: {said}", loc="left", fontsize=9)
    handles = [Patch(facecolor=color, edgecolor="0.8", label=name) for name, color in list(FORESEEN.items())[1:]]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    plt.close(figure)
    return figure
