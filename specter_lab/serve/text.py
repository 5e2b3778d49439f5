"""Text from tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

BEFORE = 8  # tokens of the prompt that the first new ones are read with
UNFINISHED = "\ufffd"  # what a character with bytes missing is decoded to


class TokenText:
    """The text that each token adds after a prompt, held back until its characters are whole.

    Tokens are decoded together with some before them, because some tokenizers drop the space in front of what they think is the
    beginning. (`tokenizers.DecodeStream` does the same, but repeats the prompt when that ends within a character.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt[-BEFORE:])
        self._known, self._shown = 0, len(self._ids)  # read along; passed on

    def feed(self, token: int) -> str:
        """Add a token; returns what can be shown now. Special tokens show nothing."""
        self._ids.append(token)
        before, after = self._decoded(self._ids[self._known : self._shown]), self._decoded(self._ids[self._known :])
        if len(after) <= len(before) or after.endswith(UNFINISHED):
            return ""
        self._known, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
