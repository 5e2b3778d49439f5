"""The official client against a real server: what it writes is what the engine writes."""

import httpx
import openai
import pytest

from specter_lab.engine import api

PROMPT = "The old man walked along the river and"
HI = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Do you like music?"}]},
]


@pytest.fixture(scope="module")
def engine():
    return api.load("qwen-nano", expert_budget=8, in_slots=True, device="cpu")


def complete(client, prompt=PROMPT, **how):
    return client.completions.create(model="qwen-nano", prompt=prompt, **how)


def streamed(chunks):
    """Text, reason and usage of a stream."""
    text, reason, usage = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            reason = choice.finish_reason or reason
    return text, reason, usage


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("qwen-nano", 2048) and client.models.retrieve(
        "qwen-nano"
    ).id == "qwen-nano"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here: ask for 'qwen-nano'"):
        client.models.retrieve("gpt-4")


def test_greedy_completion_is_the_engines_text(client, engine):
    found = complete(client, temperature=0, max_tokens=40)
    ids = engine.tokenizer(PROMPT)["input_ids"]
    assert found.choices[0].text == engine.generate(PROMPT, 40)
    assert found.choices[0].finish_reason == "length" and found.object == "text_completion"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), 40)
    assert complete(client, ids, temperature=0, max_tokens=40).choices == found.choices
    assert complete(client, [PROMPT], temperature=0).choices[0].text == engine.generate(
        PROMPT, 16
    )  # the protocol's default


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}])
def test_a_stream_is_the_whole_text(client, sampling):
    whole = complete(client, max_tokens=40, **sampling)
    text, reason, usage = streamed(
        complete(client, max_tokens=40, stream=True, stream_options={"include_usage": True}, **sampling)
    )
    assert (text, reason, usage) == (whole.choices[0].text, whole.choices[0].finish_reason, whole.usage)
    assert streamed(complete(client, max_tokens=40, stream=True, **sampling))[2] is None


def test_samples_repeat_with_their_seed_only(client):
    texts = [complete(client, max_tokens=24, seed=seed).choices[0].text for seed in (7, 7, 8, None, None)]
    assert texts[0] == texts[1] and len(set(texts)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text(client, engine, stream):
    text = engine.generate(PROMPT, 40)
    stop = text[20:24]
    found = complete(client, temperature=0, max_tokens=40, stop=["never in it", stop], stream=stream)
    found = streamed(found) if stream else (found.choices[0].text, found.choices[0].finish_reason)
    assert found[:2] == (text[: text.index(stop)], "stop")


def test_chat_whole_and_streamed(client):
    how = {"model": "qwen-nano", "messages": HI, "seed": 1, "max_tokens": 30}
    whole = client.chat.completions.create(**how)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.content and whole.usage.completion_tokens <= 30
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    assert streamed(chunks) == (message.content, whole.choices[0].finish_reason, whole.usage)
    told = client.chat.completions.create(
        model="qwen-nano", messages=HI, seed=1, max_completion_tokens=5, top_p=1, user="me", n=1
    )
    assert told.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("given", "param", "sentence"),
    [
        ({"top_p": 0.5}, "top_p", "'top_p' is not served here: leave it out"),
        ({"n": 2}, "n", "'n' is not served here"),
        ({"extra_body": {"tpo_p": 1}}, "tpo_p", "'tpo_p' is no parameter"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1901}, "max_tokens", "writes up to 1900"),
        ({"stop": list("abcde")}, "stop", "at most 4 items"),
        ({"stop": ""}, "stop.0", "at least 1 character"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"prompt": ""}, None, "fewer than 2 tokens"),
        ({"prompt": [5, 9_999]}, None, "token 9999 is not in the vocabulary"),
        ({"prompt": ["a b", "c d"]}, "prompt", "send one request for each"),
        ({"prompt": [5] * 2000, "max_tokens": 100}, None, "more than the 2048 that fit"),
        ({"prompt": None}, "prompt", "valid"),
    ],
)
def test_what_cannot_be_done_is_said(client, given, param, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence) as caught:
        client.completions.create(**{"model": "qwen-nano", "prompt": PROMPT, **given})
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "at least 1 item"),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content.0.type: Input should be 'text'",
        ),
        ([{"role": "user", "content": "word " * 3000}], "more than the 2048 that fit"),
    ],
)
def test_messages_that_cannot_be_read(client, messages, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.chat.completions.create(model="qwen-nano", messages=messages)
    with pytest.raises(openai.BadRequestError, match="'tools' is not served here"):
        client.chat.completions.create(
            model="qwen-nano", messages=HI, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_requests_that_are_none(url):
    def error(response, status):
        assert response.status_code == status
        return response.json()["error"]["message"]

    with httpx.Client(base_url=url, trust_env=False) as raw:
        assert "the body is no JSON" in error(
            raw.post("/completions", content="{", headers={"Content-Type": "application/json"}), 400
        )
        assert "application/json" in error(
            raw.post("/completions", content='{"model": "qwen-nano", "prompt": "a b"}'), 400
        )
        assert "no GET /v1/nothing" in error(raw.get("/nothing"), 404)
        assert "takes no GET" in error(raw.get("/completions"), 405)
        assert "not called 'page.example'" in error(raw.get("/models", headers={"Host": "page.example"}), 403)
        assert "send less text" in error(raw.post("/completions", json={"prompt": "x" * 3_000_000}), 413)
