"""Many clients, clients that hang up, keys, and servers that are told to stop."""

import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from specter_lab.cli import main
from specter_lab.errors import UserError
from specter_lab.serve import server
from tests.serve.conftest import client_of, running

PROMPT = "The old man walked along the river and"
LONG = {"model": "qwen-nano", "prompt": PROMPT, "max_tokens": 1900, "temperature": 0}  # repeats itself and never ends
SHORT = {**LONG, "max_tokens": 8}


def health(url, key="none"):
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(url.removesuffix("/v1") + "/health", headers=headers, trust_env=False, timeout=60).json()


def requests_inside(url, key="none"):
    return health(url, key)["requests"]


def wait_for(url, requests, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while requests_inside(url) != requests:
        assert time.monotonic() < deadline, f"never {requests} requests"
        time.sleep(0.05)


def test_a_client_that_hangs_up_frees_the_engine(client, url):
    """In the middle of a stream, while it waits for its turn, and while it waits for a whole text."""
    expected = client.completions.create(**SHORT).choices[0].text
    stream = client.completions.create(**LONG, stream=True)
    assert next(iter(stream)).choices[0].text
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(**SHORT)  # it waits behind the stream
    stream.close()
    wait_for(url, 0, timeout_s=20)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).completions.create(**LONG)
    wait_for(url, 0, timeout_s=20)
    assert client.completions.create(**SHORT).choices[0].text == expected


def test_health_tells_what_the_engine_counted(client, url):
    client.completions.create(**SHORT)
    told = health(url)
    assert told["status"] == "ok" and told["model"] == "qwen-nano"
    found = told["since_start"]
    assert found["tokens_per_s"] > 0 and 0 < found["hit_rate"] < 1 and found["expert_bytes_per_token"] > 0
    assert (found["slots_per_layer"], found["experts_per_layer"]) == (8, 60)


def test_the_line_is_bounded_and_in_order(client, url):
    stream = client.completions.create(**LONG, stream=True)
    next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.completions.create, **SHORT)
        wait_for(url, 2)
        with pytest.raises(openai.RateLimitError, match="as many requests wait as may") as caught:
            client.completions.create(**SHORT)
        assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "queue_full"
        assert not waiting.done()
        stream.close()
        assert waiting.result(timeout=60).choices[0].text
    wait_for(url, 0)


def test_many_impatient_clients(client, url):
    """Sixteen at a time, some of whom hang up: whoever gets an answer gets the right one, and nothing is left behind."""
    prompts = [f"{PROMPT} {word}" for word in ("the", "his", "a", "one")]
    expected = {prompt: client.completions.create(**{**SHORT, "prompt": prompt}).choices[0].text for prompt in prompts}
    draw = random.Random(0)
    patience_s = [draw.choice((0.003, 0.05, 1, 30)) for _ in range(64)]

    def ask(number):
        prompt, hasty = prompts[number % 4], client.with_options(timeout=patience_s[number])
        try:
            return hasty.completions.create(**{**SHORT, "prompt": prompt}).choices[0].text == expected[prompt]
        except (openai.RateLimitError, openai.APITimeoutError) as error:
            return type(error)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(64)))
    wait_for(url, 0)
    assert {True, openai.APITimeoutError} <= set(found) <= {True, openai.RateLimitError, openai.APITimeoutError}
    assert client.completions.create(**SHORT).choices[0].text


def test_sigterm_in_the_middle_of_a_stream_with_a_key():
    with running("--max-tokens", "1900", SPECTER_LAB_API_KEY="sesame") as (process, url):
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            client_of(url, "simsim").models.list()
        assert health(url)["error"]["code"] == "invalid_api_key"
        client = client_of(url, "sesame")
        stream = client.completions.create(**LONG, stream=True)
        next(iter(stream))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.completions.create, **SHORT)
            deadline = time.monotonic() + 30
            while requests_inside(url, "sesame") != 2:
                assert time.monotonic() < deadline
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                waiting.result(timeout=30)
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in process.stderr.read()


def test_ctrl_c_in_the_middle_of_a_stream():
    with running("--draft", "none") as (process, url):
        stream = client_of(url).completions.create(**{**LONG, "max_tokens": 1000}, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert process.wait(timeout=30) == 130
        said = process.stderr.read()
        assert "specter-lab: stopped by Ctrl-C\n" in said and "Traceback" not in said


def test_other_machines_need_a_key(capsys):
    assert server.is_loopback("127.0.0.7") and server.is_loopback("::1") and server.is_loopback("localhost")
    for host in ("0.0.0.0", "::", "192.168.1.5", "some.name"):
        with pytest.raises(UserError, match="can be reached from other machines: give --api-key"):
            server.check_access(host, None)
        server.check_access(host, "sesame")
    assert main(["serve", "qwen-nano", "--host", "0.0.0.0"]) == 2
    assert "give --api-key" in capsys.readouterr().err


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "qwen-nano", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in said and "loading" not in said and said.count("\n") == 1
    for host in ("no.such.host.invalid", "a" * 80):
        with pytest.raises(UserError, match="cannot listen on"):
            server.open_socket(host, 0)
    with pytest.raises(UserError, match="there is no port 99999"):
        server.open_socket("127.0.0.1", 99_999)
