"""The expert heat-map of a model that is decoding: which experts its tokens use, drawn while they are written.

    decoded = watch(source, "The old man walked along the river and", new_tokens=64)

The picture is drawn anew every few tokens; afterwards a slider goes back to any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import HTML, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Generator
from tqdm.auto import tqdm

from specter_lab.experiments.lab.player import player
from specter_lab.measure.entropy import normalized_entropy
from specter_lab.measure.prefix import prefill, write
from specter_lab.measure.speculate import check_length, check_new_tokens
from specter_lab.models.load import LoadedModel

REDRAW_EVERY = 8  # tokens: a redraw takes as long as several tokens of a small model
MOST = 4.0  # times its fair share: the end of the colour scale


@dataclass(frozen=True)
class Decoded:
    """N tokens that a model wrote, and the experts that each pass used."""

    model: str
    num_experts: int
    words: tuple[str, ...]  # [N] what was written
    experts: np.ndarray  # [N, L, k]

    def uses(self, tokens: int) -> np.ndarray:
        """How often the first `tokens` passes used every expert: [L, E]."""
        used = np.zeros((self.experts.shape[1], self.num_experts), np.int64)
        for layer, chosen in enumerate(self.experts[:tokens].swapaxes(0, 1)):
            used[layer] = np.bincount(chosen.ravel(), minlength=self.num_experts)
        return used


def watch(source: LoadedModel, text: str, *, new_tokens: int = 64, temperature: float = 0.8, seed: int = 0) -> Decoded:
    """Continue `text` and draw the heat map meanwhile; then leave a slider over the tokens.

    Args:
        temperature: 0 is greedy; a small model repeats itself greedily, and then uses few experts.

    Raises:
        UserError: there is nothing to write, or too much for the model's context.
    """
    ids = source.tokenizer(text, return_tensors="pt").input_ids  # [1, P]
    check_new_tokens(new_tokens)
    check_length(source.model, ids, new_tokens)
    words, experts, place = [], [], None
    with torch.inference_mode():
        prefix = prefill(source.model, ids[:, :-1])
        steps = write(source.model, prefix, ids[:, -1:], new_tokens, temperature, Generator().manual_seed(seed))
        for token, _, routing in tqdm(steps, total=new_tokens, desc="decoding", unit="token", mininterval=0.2):
            words.append(source.tokenizer.decode(token[0]))
            experts.append(routing.indices[0].numpy())
            if len(words) % REDRAW_EVERY == 0 and len(words) < new_tokens:
                so_far = draw(Decoded(source.name, source.num_experts, tuple(words), np.stack(experts)), len(words))
                if place is None:
                    place = display(so_far, display_id=True)
                else:
                    place.update(so_far)
    decoded = Decoded(source.name, source.num_experts, tuple(words), np.stack(experts))
    if place is not None:
        place.update(HTML(""))  # the player shows the same picture
    player(lambda token: [draw(decoded, token + 1)], last=new_tokens - 1, label="token", start=new_tokens - 1)
    return decoded


def draw(decoded: Decoded, tokens: int) -> Figure:
    """Uses of every expert after so many tokens, over an even share of them; dots mark what the last token uses."""
    used = decoded.uses(tokens)  # [L, E]
    fair = tokens * decoded.experts.shape[2] / decoded.num_experts
    figure, axis = plt.subplots(figsize=(9.5, 0.34 * len(used) + 1.7), constrained_layout=True)
    image = axis.imshow(used / fair, aspect="auto", cmap="viridis", vmin=0, vmax=MOST, interpolation="nearest")
    figure.colorbar(image, ax=axis, label="uses over\nan even share", extend="max", pad=0.01)
    for layer, chosen in enumerate(decoded.experts[tokens - 1]):
        axis.plot(chosen, np.full(len(chosen), layer), "o", color="white", markersize=4, markeredgecolor="black")
    _label(axis, decoded, tokens, used)
    plt.close(figure)
    return figure


def _label(axis: Axes, decoded: Decoded, tokens: int, used: np.ndarray) -> None:
    entropy, touched = normalized_entropy(used).mean(), (used > 0).mean()
    said = (
        f"{decoded.model} after {tokens} of its tokens: {touched:.0%} of the experts used, entropy {entropy:.2f} of 1"
    )
    axis.set_title(said, loc="left", fontsize=9)
    tail = "".join(decoded.words[:tokens])[-90:].replace("\n", " ").replace("$", r"\$")
    axis.set_xlabel(f"expert\n... {tail}", fontsize=8)
    axis.set_ylabel("MoE layer")
    axis.set_yticks(range(len(used)), range(1, len(used) + 1))
