"""Stop strings, whole characters, end tokens and the transcript of a conversation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specter_lab.engine import api
from specter_lab.errors import UserError
from specter_lab.serve.chat import chat_stops, prompt_ids
from specter_lab.serve.errors import ApiError
from specter_lab.serve.model import served
from specter_lab.serve.protocol import Message
from specter_lab.serve.stops import StopText
from specter_lab.serve.text import TokenText
from specter_lab.serve.write import Ask, check_ask, write

LETTERS = st.text("ab", max_size=20)


@pytest.fixture(scope="module")
def nano():
    return served(api.load("qwen-nano", expert_budget=8, in_slots=True, device="cpu"), "qwen-nano")


def cut(pieces, stops):
    stop = StopText(stops)
    text = "".join(map(stop.feed, pieces))
    return text + ("" if stop.found else stop.rest())


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stops_do_not_depend_on_the_pieces(pieces, stops):
    text = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    begun = [text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends)]
    assert cut(pieces, stops) == cut(list(text), stops) == (text[: min(begun)] if ends else text)


@given(st.lists(LETTERS, max_size=8))
def test_nothing_is_held_back_that_need_not_be(pieces):
    stop, passed, text = StopText(("aab",)), "", ""
    for piece in pieces:
        passed, text = passed + stop.feed(piece), text + piece
        held = len(text) - len(passed)
        assert stop.found or text.endswith("aab"[:held]) and held < 3


def test_end_tokens_end_a_text_and_are_not_shown(nano):
    text = "".join(piece.text for piece in write(nano, Ask((5, 6), 64)))
    engine = nano.engine
    new = (
        engine.generate(engine.tokenizer.decode([5, 6]), 1)
        and engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    )
    ended = replace(nano, ends=frozenset({new[3]}))
    pieces = list(write(ended, Ask((5, 6), 64)))
    assert pieces[-1].finish == "stop" and pieces[-1].tokens == new.index(new[3]) + 1
    assert "".join(piece.text for piece in pieces) == engine.tokenizer.decode(new[: new.index(new[3])])
    assert nano.ends == {2}


@given(st.text(min_size=1, max_size=30), st.data())
def test_characters_are_whole_or_not_there(nano, text, data):
    """Cut anywhere, also inside a character: what follows is shown without the prompt, and without halves of characters."""
    ids = nano.tokenizer(text, add_special_tokens=False)["input_ids"]
    at = data.draw(st.integers(0, len(ids)))
    shown = TokenText(nano.tokenizer, ids[:at])
    rest = "".join(map(shown.feed, ids[at:]))
    decoded = [nano.tokenizer.decode(part) for part in (ids, ids[:at])]
    assert decoded[0].endswith(rest) and "\ufffd" not in rest.replace("\ufffd", "", text.count("\ufffd"))
    assert decoded[1].endswith("\ufffd") or len(ids[:at]) > 8 or rest == decoded[0][len(decoded[1]) :]


def test_a_space_at_the_seam_is_kept():
    """As tokenizers of the Llama kind write it: a text's first space is not shown, but every other is."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=metaspace())
    ids = tokenizer("the old man")["input_ids"]
    shown = TokenText(tokenizer, ids[:1])
    assert "".join(map(shown.feed, ids[1:])) == " old man" and tokenizer.decode(ids[1:]) == "old man"


def metaspace():
    tokenizer = Tokenizer(models.WordLevel({"\u2581the": 0, "\u2581old": 1, "\u2581man": 2}))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def test_a_text_that_is_left_early_spoils_nothing(nano):
    expected = [piece.text for piece in write(nano, Ask((5, 6, 7), 24))]
    for rounds in (1, 2, 5):
        begun = write(nano, Ask((9, 10, 11), 64))
        for _ in range(rounds):
            next(begun)
        begun.close()
        assert "".join(piece.text for piece in write(nano, Ask((5, 6, 7), 24))) == "".join(expected)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (Ask((5,), 4), "fewer than 2 tokens"), (Ask((5, -1), 4), "token -1"), (Ask((5, 6), 4000), "more than the 2048"),
        (Ask((5, 6), 4, -1.0), "temperature of -1"), (Ask((5, 6), 4, 1.0, 2**63), "seed of"), (Ask((5, 6), 4, stops=("",)), "empty"),
    ],
)  # fmt: skip
def test_asks_that_cannot_be(nano, ask, sentence):
    with pytest.raises(UserError, match=sentence):
        check_ask(nano, ask)


def test_conversations_by_template_or_as_a_transcript(nano):
    messages = [Message(role="developer", content="Be kind."), Message(role="user", content="Hello"),
                Message(role="assistant", content="Hi"), Message(role="user", content="Bye")]  # fmt: skip
    text = nano.tokenizer.decode(prompt_ids(nano.tokenizer, messages), skip_special_tokens=True)
    assert text == "Be kind.\n\nUser: Hello\nAssistant: Hi\nUser: Bye\nAssistant:" and chat_stops(nano.tokenizer) == (
        "\nUser:",
    )
    other = nano.tokenizer.__class__.from_pretrained(nano.tokenizer.name_or_path)
    other.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ raise_exception('no') if messages[4:] }}"
    )
    assert other.decode(prompt_ids(other, messages[:2])) == "[system] Be kind.[user] Hello" and chat_stops(other) == ()
    with pytest.raises(ApiError, match="template refuses these messages: no"):
        prompt_ids(other, [*messages, messages[0]])
