"""The runtime on real zoo models: bit-identical logits under every setting, budgets kept, threads that end, damage that speaks."""

import json
import os
import random
import threading
import time
from dataclasses import replace

import pytest
import torch

from specter_lab.engine.store.layout import EXPERTS, read_index
from specter_lab.engine.store.pack import pack
from specter_lab.engine.store.reader import BUFFERED, DIRECT, drop_pages, warm_pages
from specter_lab.engine.zipmoe.baselines import in_memory, open_accelerate, open_mapped
from specter_lab.engine.zipmoe.memory import PARTS, staging_bytes
from specter_lab.engine.zipmoe.model import generate, open_store
from specter_lab.engine.zipmoe.settings import BASELINES, ZIPMOE
from specter_lab.errors import UserError
from specter_lab.models.load import resolve
from specter_lab.plan.zipmoe.cache import RULES
from specter_lab.plan.zipmoe.pools import Pools

MODELS = ("qwen-nano", "phi-nano", "deepseek-nano", "switch-nano")  # the last an encoder-decoder
PLAIN = replace(ZIPMOE, in_place=False)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    for model in MODELS:
        pack(model, folder / model, raw=True)
    return folder


def prompt(seed=0, batch=1, length=9):
    return torch.randint(3, 2048, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model, ids, new_tokens=6):
    seen = []
    done = generate(model, ids, new_tokens, on_logits=seen.append)
    return done.tokens, torch.stack(seen)


@pytest.fixture(scope="module")
def reference():
    """Logits of the model in memory, with the loop over experts."""
    found = {}
    for name in MODELS:
        model = in_memory(resolve(name)).model
        for batch in (1, 3):
            found[name, batch] = logits_of(model, prompt(batch=batch))
    return found


def same(found, expected):
    return torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def budget_of(store, share):
    index = read_index(store)
    return int(share * index.total_bytes) + staging_bytes(index, replace(ZIPMOE, prefetch=2))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("settings", [*BASELINES.values(), PLAIN, ZIPMOE], ids=lambda s: f"{s.name}-{s.in_place}")
def test_logits_are_the_models_own(stores, reference, model, batch, settings):
    with open_store(stores / model, budget_of(stores / model, 0.25), settings=settings) as served:
        for _ in range(2):  # from empty and from filled pools
            assert same(logits_of(served.model, prompt(batch=batch)), reference[model, batch])


VARIANTS = {
    "buffered": dict(read_mode=BUFFERED), "direct": dict(read_mode=DIRECT), "one worker": dict(workers=1),
    "four workers": dict(workers=4), "one in flight": dict(in_flight=1), "read-ahead": dict(prefetch=2),
    "router's order": dict(scheduled=False), "nothing kept": dict(caching=False),
    "codec off": dict(form="raw"), **{rule: dict(rule=rule, pools=Pools(2, 3, 2, 2)) for rule in RULES},
    "halves only": dict(pools=Pools(0, 0, 10, 10)), "everything": dict(pools=Pools(60)),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_no_setting_changes_a_bit(stores, reference, name):
    store = stores / "qwen-nano"
    share = 1.1 if name == "everything" else 0.4
    with open_store(store, budget_of(store, share), settings=replace(PLAIN, **VARIANTS[name]), check=False) as served:
        for _ in range(2):
            assert same(logits_of(served.model, prompt()), reference["qwen-nano", 1])


def test_everything_fits_into_the_budget_and_every_buffer_is_somewhere(stores):
    store = stores / "qwen-nano"
    budget = budget_of(store, 0.25)
    settings = replace(PLAIN, prefetch=2)
    with open_store(store, budget, settings=settings) as served:
        runtime = served.runtime
        assert runtime.memory.num_bytes <= budget
        before = {part: len(buffers) for part, buffers in runtime.memory.free.items()}
        logits_of(served.model, prompt(), 20)
        for layer in runtime.index.layers:
            runtime._collect_ahead(layer, [])
        time.sleep(0.1)
        assert not missing_buffers(runtime, before)
        assert sum(runtime.report.uses.values()) == sum(needed for _, needed in runtime.report.hits_by_call)


def test_in_place_only_where_the_page_cache_has_the_expert(stores):
    store = stores / "qwen-nano"
    warm_pages(store / "raw.bin")
    with open_store(store, budget_of(store, 0.25)) as served:
        served.runtime.reset()
        logits_of(served.model, prompt())
        assert served.runtime.report.uses["in place"] > 0 == served.runtime.reader.read_bytes


def test_too_small_a_budget_is_refused_in_bytes(stores):
    with pytest.raises(UserError, match="in flight take"):
        open_store(stores / "qwen-nano", 1000, check=False)


def test_damage_is_found_before_the_first_token(stores, tmp_path):
    for file in (stores / "phi-nano").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    record = read_index(tmp_path).experts[2, 5]
    with (tmp_path / EXPERTS).open("r+b") as file:
        file.seek(record.shards[0].offset + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(UserError, match="layer 2, expert 5"):
        open_store(tmp_path, 10**8)


def test_a_failing_read_names_the_expert_and_ends_the_threads(stores):
    store = stores / "qwen-nano"
    served = open_store(store, budget_of(store, 0.25), settings=replace(PLAIN, caching=False), check=False)
    reader = served.runtime.reader
    os.close(reader._file)
    reader._file = os.open(os.devnull, os.O_RDONLY)  # every read ends at once
    with pytest.raises(RuntimeError, match="layer 0, expert .* could not be put together"):
        logits_of(served.model, prompt())
    served.runtime.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("zipmoe")]


def test_a_time_out_dumps_what_is_missing(stores, monkeypatch):
    store = stores / "qwen-nano"
    with open_store(store, budget_of(store, 0.25), settings=replace(PLAIN, timeout_s=0.2), check=False) as served:
        monkeypatch.setattr(served.runtime._fetcher, "_read_sign_mantissa", lambda fetch: None)
        with pytest.raises(RuntimeError, match="no expert arrived(.|\n)*shards left(.|\n)*zipmoe-worker-0: alive"):
            logits_of(served.model, prompt())


def test_closing_ends_every_thread(stores):
    with open_store(stores / "qwen-nano", 10**7, check=False) as served:
        logits_of(served.model, prompt(), 2)
        assert any(t.name.startswith("zipmoe") for t in threading.enumerate())
    assert not [t for t in threading.enumerate() if t.name.startswith("zipmoe")]


@pytest.mark.parametrize("model", ["qwen-nano", "switch-nano"])
def test_baselines_compute_the_model(stores, reference, tmp_path, model):
    mapped = open_mapped(resolve(model), stores / model)
    assert torch.equal(logits_of(mapped.model, prompt())[0], reference[model, 1][0])
    mapped.unmap()
    assert torch.equal(logits_of(mapped.model, prompt())[0], reference[model, 1][0])
    accelerated = logits_of(open_accelerate(resolve(model), tmp_path).model, prompt())
    assert same(accelerated, reference[model, 1])


def test_a_translator_writes_what_transformers_writes(stores, reference):
    model = in_memory(resolve("switch-nano")).model
    options = dict(do_sample=False, num_beams=1, min_new_tokens=6, max_new_tokens=6)
    written = model.generate(prompt(batch=3), attention_mask=torch.ones(3, 9, dtype=torch.long), **options)
    assert torch.equal(written[:, 1:], reference["switch-nano", 3][0])


@pytest.mark.parametrize("settings", [PLAIN, replace(PLAIN, prefetch=2), BASELINES["lru"]], ids=["", "ahead", "lru"])
def test_tokens_beyond_a_routers_capacity_are_computed_by_nobody(stores, tmp_path, settings):
    store, source = tmp_path / "store", tmp_path / "source"
    for copied, original in ((store, stores / "switch-nano"), (source, resolve("switch-nano"))):
        copied.mkdir()
        for file in original.iterdir():
            if file.name != "MANIFEST.json":
                (copied / file.name).write_bytes(file.read_bytes())
        config = json.loads((copied / "config.json").read_text()) | {"expert_capacity": 1}
        (copied / "config.json").write_text(json.dumps(config))
    ids = prompt(batch=3, length=30)  # tokens that share an expert: only the first of a row is computed
    expected = logits_of(in_memory(source).model, ids)
    assert not torch.equal(expected[1], logits_of(in_memory(resolve("switch-nano")).model, ids)[1])
    with open_store(store, budget_of(store, 0.25), settings=settings, check=False) as served:
        assert same(logits_of(served.model, ids), expected)
    assert same(logits_of(open_mapped(source, store).model, ids), expected)


def test_an_encoders_last_layer_reads_nothing_ahead(stores):
    store = stores / "switch-nano"
    with open_store(store, budget_of(store, 0.25), settings=replace(PLAIN, prefetch=2), check=False) as served:
        assert served.runtime.index.layers == (1, 3, 5) and list(served.runtime._routers) == [3]


def test_pools_beyond_the_budget_are_refused(stores):
    with pytest.raises(UserError, match="the budget leaves"):
        open_store(stores / "qwen-nano", 10**6, settings=replace(PLAIN, pools=Pools(60)), check=False)


@pytest.mark.parametrize("seed", range(6))
def test_random_settings_with_a_slow_disk_lose_no_buffer(stores, reference, seed):
    rng = random.Random(seed)
    settings = replace(
        PLAIN, rule=rng.choice(RULES), workers=rng.choice((1, 2, 3)), in_flight=rng.choice((1, 2, 3, 5)), prefetch=rng.choice((0, 1, 2, 4)),
        scheduled=rng.random() < 0.5, in_place=rng.random() < 0.5, pools=Pools(*(rng.choice((0, 1, 3, 6)) for _ in range(4))),
    )  # fmt: skip
    drop_pages(stores / "qwen-nano" / "raw.bin")
    with (stores / "qwen-nano" / "raw.bin").open("rb") as file:
        file.read(4 * 2**20)  # some experts are resident
    with open_store(stores / "qwen-nano", 10**8, settings=settings, check=False) as served:
        runtime = served.runtime
        original = runtime.reader.read_into
        runtime.reader.read_into = lambda *where: (time.sleep(2e-3 * rng.random()), original(*where))
        before = {part: len(buffers) for part, buffers in runtime.memory.free.items()}
        for batch in (1, 3):
            assert same(logits_of(served.model, prompt(batch=batch)), reference["qwen-nano", batch])
        for layer in runtime.index.layers:
            runtime._collect_ahead(layer, [])
        end = time.monotonic() + 5  # a dropped read gives its buffers when it ends
        while time.monotonic() < end and missing_buffers(runtime, before):
            time.sleep(0.01)
        assert not missing_buffers(runtime, before)


def missing_buffers(runtime, before):
    """Parts of which some buffer is neither free nor held by an expert."""
    held = [h for layer in runtime._held.values() for h in layer.values()]
    return [p for p in PARTS if len(runtime.memory.free[p]) + sum(getattr(h, p) is not None for h in held) != before[p]]
