"""From messages to a prompt: by the model's own chat template, or as a plain transcript."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specter_lab.serve.errors import ApiError
from specter_lab.serve.protocol import Message

# For models without a template, which were trained on text alone: the next line is the assistant's.
TRANSCRIPT = """\
{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}

{% else %}{{ message.role | capitalize }}: {{ message.content }}
{% endif %}{% endfor %}Assistant:"""
TRANSCRIPT_STOP = "\nUser:"


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to where the assistant goes on.

    Raises:
        ApiError: the template refuses the messages.
    """
    plain = [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in messages]
    template = None if tokenizer.chat_template else TRANSCRIPT
    try:
        text = tokenizer.apply_chat_template(plain, chat_template=template, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ApiError(400, f"the model's chat template refuses these messages: {error}", param="messages") from error
    return tokenizer(text, add_special_tokens=template is not None)["input_ids"]


def chat_stops(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Stop strings of every conversation: a transcript ends where the user would speak."""
    return () if tokenizer.chat_template else (TRANSCRIPT_STOP,)
