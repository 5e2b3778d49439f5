"""What quantising does to routing, to look at: the first tokens of a text, and every layer."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler
from transformers import PreTrainedModel

from specter_lab.experiments.specter.routing import Question
from specter_lab.measure import fidelity
from specter_lab.measure.capture import capture
from specter_lab.measure.trace import Trace

CHANGED = "<b style='color:#c22'>{}</b>"


@dataclass(frozen=True)
class Compared:
    """The same texts, read by a model and its draft."""

    words: tuple[str, ...]  # of the first text
    model: Trace
    draft: Trace

    @property
    def overlap(self) -> float:
        """Share of the model's experts that the draft chooses too, mean over tokens and layers."""
        return float(fidelity.compare(self.model, self.draft).overlap.mean())

    @property
    def choices(self) -> int:
        """Tokens times layers."""
        return self.model.indices.shape[0] * self.model.indices.shape[1]

    def first_tokens(self, count: int, layer: int = -1) -> Styler:
        """What both chose in one layer, best score first; the draft's experts that the model did not choose in red."""
        mine, theirs = (fidelity.by_score(trace)[0][:count, layer] for trace in (self.model, self.draft))  # [n, k]
        columns = {
            "token": [repr(word) for word in self.words[:count]],
            "model": [" ".join(map(str, row)) for row in mine],
            "draft": [
                " ".join(str(e) if e in kept else CHANGED.format(e) for e in row) for row, kept in zip(theirs, mine)
            ],
        }
        return pd.DataFrame(columns).style.hide(axis="index")

    def by_layer(self) -> Figure:
        """Overlap of the two sets of experts, layer by layer."""
        match = fidelity.compare(self.model, self.draft)
        figure, axis = plt.subplots(figsize=(5, 2.4), constrained_layout=True)
        axis.plot(np.arange(len(match.layers)) + 1, fidelity.per_layer(match.overlap), marker="o")
        axis.set(xlabel="MoE layer", ylabel="overlap with the model", xticks=np.arange(len(match.layers)) + 1)
        axis.grid(alpha=0.25)
        plt.close(figure)
        return figure


def compared(question: Question, draft: PreTrainedModel) -> Compared:
    """Let the model and its draft read the texts of a question."""
    source, tokens = question.source, question.tokens
    model = capture(source.model, tokens, question.origin())
    words = tuple(source.tokenizer.decode(token) for token in tokens.ids[0])
    return Compared(words, model, capture(draft, tokens, question.origin("draft")))
