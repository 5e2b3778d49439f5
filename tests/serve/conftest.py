"""Real servers: `specter-lab serve` on the CPU, on loopback."""

import json
import os
import select
import subprocess
import sys
from contextlib import contextmanager

import openai
import pytest

from specter_lab import paths

START_S = 240  # a machine at work reads a model in a minute


@contextmanager
def running(*options, model="qwen-nano", **environment):
    """A server in a process of its own; yields the process and its address."""
    command = [sys.executable, "-m", "specter_lab.cli", "serve", model, "--port", "0", "--json", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(command, cwd=paths.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True)  # fmt: skip
    try:
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        assert ready, f"no address in {START_S} s"
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)["url"]
    finally:
        process.kill()
        process.communicate()


def client_of(url, key="none", **how):
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120, **how)


@pytest.fixture(scope="session")
def url():
    """Of a server with room for one request that waits."""
    with running("--max-waiting", "1", "--max-tokens", "1900", "--slots", "8") as (_, url):
        yield url


@pytest.fixture(scope="session")
def client(url):
    return client_of(url)
