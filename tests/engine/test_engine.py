"""The engine writes what transformers' model writes, wherever its experts lie and whatever is prefetched."""

import numba
import numpy as np
import pytest
import torch

from specter_lab.engine import api, expert_math, host_experts
from specter_lab.engine.arena import Budget, host_slab
from specter_lab.engine.decode import Meter, decode
from specter_lab.engine.decoder import forward, new_kv_cache
from specter_lab.engine.host_experts import new_host_experts
from specter_lab.engine.ops import TorchOps
from specter_lab.engine.shape import shape_of
from specter_lab.engine.weights import load_weights
from specter_lab.errors import UserError
from specter_lab.models.load import load as load_reference
from specter_lab.models.originals import ORIGINALS
from specter_lab.plan.depth_control import FixedDepth, OnlineDepth
from specter_lab.plan.policy import Prefetcher
from specter_lab.plan.residency import ABSENT
from specter_lab.plan.serve import sooner_by_cpu

MODELS = ("qwen-nano", "phi-nano", "deepseek-nano")
TEXT = "The old man walked along the river and then he said to his son"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def engine_of(model: str, slots: int, device: str = "cpu", **options) -> api.Engine:
    engine = api.load(model, expert_budget=slots, in_slots=True, device=device, **options)
    spoil(engine)
    return engine


def spoil(engine: api.Engine) -> None:
    """A slot that is read before it was filled spoils everything."""
    engine.memory.device.fill_(float("nan"))
    if engine.device.type == "cuda":
        torch.cuda.synchronize()  # copies run on a stream of their own


def ids_of(engine: api.Engine) -> torch.Tensor:
    return torch.tensor(engine.tokenizer(TEXT)["input_ids"])


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_transformers(model):
    source, engine = load_reference(model), engine_of(model, 2)
    ids = torch.randint(3, 2048, (24,), generator=torch.Generator().manual_seed(0))
    kv = new_kv_cache(engine.memory.shape, 32, engine.weights.decoder.embedding)
    with torch.inference_mode():
        expected = source.model(ids[None]).logits[0]
        first = forward(engine.weights.decoder, ids[:10], torch.tensor([0]), kv, engine.target, TorchOps())
        second = forward(engine.weights.decoder, ids[10:], torch.tensor([10]), kv, engine.target, TorchOps(by_row=True))
    found = torch.cat([first.logits, second.logits])
    assert (found - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("depth", [0, 1, 5, None])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_text_is_transformers_generate(model, depth):
    source, engine = load_reference(model), engine_of(model, 3)
    ids = ids_of(engine)
    expected = source.model.generate(ids[None], max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert torch.equal(engine.generate(ids, 40, depth=depth, ignore_eos=True), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_offloaded_speculative_equals_resident_plain(model, device):
    """Bitwise the same tokens on a GPU too, where passes of different widths use different grids."""
    resident = engine_of(model, 64, device)
    resident.fill_slots()
    ids = ids_of(resident)
    expected = resident.generate(ids, 64, depth=0)
    for slots, depth in ((1, 8), (4, 3), (8, 16)):
        assert torch.equal(engine_of(model, slots, device).generate(ids, 64, depth=depth), expected)


PAPER = ("specter", "specmoeoff", "sp-e", "sp-l", "lru", "lru-s", "fifo", "lfu", "sp-moe", "promoe", "specter-fast")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("model", "policies"), [("qwen-nano", PAPER), ("phi-nano", PAPER[:1]), ("deepseek-nano", PAPER[:1])]
)
def test_paper_mode_writes_the_same_under_every_policy(model, policies, device):
    """Also with a single slot, where a layer's misses come one after the other through it."""
    fast = engine_of(model, 4, device)
    ids = ids_of(fast)
    expected = fast.generate(ids, 12, depth=0)
    for number, policy in enumerate(policies):
        slots = (1, 6)[number % 2]
        engine = api.engine_for(fast.weights, expert_budget=slots, in_slots=True, mode="paper", policy=policy)
        spoil(engine)
        assert torch.equal(engine.generate(ids, 12), expected), policy
        assert engine.stats.read_through_bytes == 0 and not engine.memory.slots.pinned.any()


def test_paper_mode_counts_every_copy():
    engine = engine_of("qwen-nano", 3, mode="paper", policy="lru")
    engine.generate(ids_of(engine), 24)
    stats, slots = engine.stats, engine.memory.slots
    expert_bytes = engine.memory.host[0, 0].nbytes
    assert stats.tokens_per_round == 1 and stats.needed == 24 * 4 * len(slots.count)
    assert stats.h2d_bytes == (stats.needed - stats.hits) * expert_bytes > 0
    assert engine.memory.h2d_bytes == slots.generation.sum() * expert_bytes  # the prompt's as well


@pytest.mark.parametrize("policy", ["specter-shared", "lru-shared", "hybrimoe"])
def test_host_and_link_share_the_misses(policy, monkeypatch):
    """In float32 the host's sums are close enough for the same greedy text; every miss is somebody's."""
    resident = engine_of("qwen-nano", 60)
    ids = ids_of(resident)
    engine = engine_of("qwen-nano", 6, mode="shared", policy=policy)
    assert torch.equal(engine.generate(ids, 24), resident.generate(ids, 24))
    engine.stats = Meter()
    monkeypatch.setattr(host_experts, "NEW_SHARE", 0.0)
    about_a_copy_ms = 0.9 * engine.memory.transport.copy_ms  # so they take turns
    engine.target.host.means_ms = dict.fromkeys(range(1, 64), about_a_copy_ms)
    engine.generate(ids, 24)
    stats, copies = engine.stats, engine.stats.h2d_bytes // engine.memory.host[0, 0].nbytes
    assert stats.by_host > 0 and copies > 0 and not engine.memory.slots.pinned.any()
    assert stats.by_host + copies >= stats.needed - stats.hits


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_the_host_computes(device):
    """Beside those of the GPU: as close as BF16 rounding of what lies between gate, up and down allows."""
    engine = engine_of("qwen-nano", 60, device)
    engine.fill_slots()
    memory, generator = engine.memory, torch.Generator().manual_seed(0)
    dtype = engine.weights.decoder.embedding.dtype
    x = torch.randn(5, memory.shape.hidden, generator=generator).to(dtype)
    indices = torch.stack([torch.randperm(60, generator=generator)[:4] for _ in range(5)])
    weights = torch.rand(5, 4, generator=generator)
    on_device = [part.to(device) for part in (x, indices, weights)]
    expected = expert_math.new_parts(*on_device[:2])
    addresses = torch.from_numpy(memory.addresses_of(1)).to(device)
    expert_math.compute(memory, 1, *on_device, expected, addresses)
    found = torch.zeros_like(expected)
    host = new_host_experts(memory)
    mine, room = np.unique(indices)[::2], host.room(found)
    host.begin(1, mine, x, indices.numpy(), weights, room)
    host.end()
    room.hand_over(found)
    of_host = torch.from_numpy(np.isin(indices, mine)).to(device)
    assert (found[~of_host] == 0).all()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found - expected)[of_host].abs().max() < tolerance * expected.abs().max()


def test_the_cores_leave_one_to_whoever_launches():
    threads = torch.get_num_threads()
    new_host_experts(engine_of("qwen-nano", 6).memory)
    found = host_experts._cores().submit(numba.get_num_threads).result()
    assert found == max(1, numba.config.NUMBA_NUM_THREADS - 1) and torch.get_num_threads() == threads


def test_a_worker_that_failed_once_fails_once(monkeypatch):
    engine = engine_of("qwen-nano", 6, mode="shared")
    engine.target.host.means_ms = dict.fromkeys(range(1, 64), 0.0)  # the cores are never slower
    expected = engine.generate(ids_of(engine), 12, depth=4)
    monkeypatch.setattr(host_experts, "_compute", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(ids_of(engine), 12, depth=4)
    monkeypatch.undo()
    assert torch.equal(engine.generate(ids_of(engine), 12, depth=4), expected)


def test_a_plan_that_was_broken_off_loads_nobody_twice():
    """Half of a verification's experts were loaded as misses when it ended; they are still on the prefetcher's list."""
    memory = engine_of("qwen-nano", 6).memory
    wanted = np.zeros(4, np.int64), np.arange(4)
    assert memory.load(wanted) == 4
    before = memory.slots.slot_of.copy(), memory.h2d_bytes
    assert memory.load(wanted) == 0 and memory.load((np.zeros(3, np.int64), np.array([2, 4, 3]))) == 1
    assert (memory.slots.slot_of[0][:4] == before[0][0][:4]).all() and memory.slots.slot_of[0, 4] != ABSENT
    assert memory.h2d_bytes == before[1] + memory.host[0, 0].nbytes


def test_sharing_is_even():
    """With cores as fast as the link every second miss is theirs; a busy link leaves them more, a slow host none."""
    assert sooner_by_cpu(6, 0.0, 1.0, 0.99).sum() == 3
    assert sooner_by_cpu(6, 4.0, 1.0, 0.99).sum() == 5
    assert not sooner_by_cpu(3, 0.0, 1.0, 5.0).any() and len(sooner_by_cpu(0, 0.0, 1.0, 1.0)) == 0


def test_a_slow_pass_does_not_keep_the_cores_out_for_good():
    host = engine_of("qwen-nano", 6, mode="shared").target.host
    memory, missing, slow_ms = host.memory, np.arange(4), 1e3 * host.memory.transport.copy_ms
    host.alone_ms = host.means_ms[9] = slow_ms  # as if kernels had been compiled meanwhile, and something else before
    tried = [host.share(missing, 9).sum() for _ in range(host_experts.PATIENCE)]
    assert tried == [0] * (host_experts.PATIENCE - 1) + [1]
    x, used = torch.ones(9, memory.shape.hidden), np.zeros((9, memory.shape.top_k), np.int64)
    room = host.room(torch.zeros(9, memory.shape.top_k, memory.shape.hidden))
    host.begin(0, missing[:1], x, used, torch.ones(9, memory.shape.top_k), room)
    host.end()
    assert host.means_ms[9] < slow_ms  # what was measured, not a tenth of it


@pytest.mark.parametrize("how", [{"draft": "none"}, {"policy": "lru"}])
def test_without_a_draft_what_was_used_is_there_the_next_time(how):
    engine = engine_of("qwen-nano", 30, **how)
    found = engine.generate(ids_of(engine), 32)
    assert torch.equal(found, engine_of("qwen-nano", 60, draft="none").generate(ids_of(engine), 32))
    assert engine.stats.hits > 0.3 * engine.stats.needed


def test_speculation_in_paper_mode_hits_what_it_prefetched():
    hits = {}
    for policy in ("specter", "lru"):
        engine = engine_of("qwen-nano", 16, mode="paper", policy=policy)
        engine.generate(ids_of(engine), 48, depth=4 if policy == "specter" else None)
        hits[policy] = engine.stats.hits / engine.stats.needed
    assert hits["specter"] > 0.85 > hits["lru"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["fast", "paper"])
def test_a_prompt_of_many_passes(mode, device):
    """Passes follow each other without the host; each waits for its own copies."""
    resident = engine_of("qwen-nano", 60, device, draft="none")
    resident.fill_slots()
    ids = torch.randint(3, 2000, (200,), generator=torch.Generator().manual_seed(0))
    expected = resident.generate(ids, 16, ignore_eos=True)
    assert torch.equal(
        engine_of("qwen-nano", 4, device, mode=mode).generate(ids, 16, depth=3, ignore_eos=True), expected
    )


@pytest.mark.gpu
def test_passes_launched_one_behind_the_other():
    engine = engine_of("qwen-nano", 4, "cuda")
    session = engine.session_for(256, 4, 0.0)
    with torch.inference_mode():
        session.begin([ids_of(engine).cuda()])
        for _ in range(20):
            verified = session.verify(4)
        torch.cuda.synchronize()
    assert verified.waited.tolist()[1] == 0 and int(engine.memory.flags.sum()) == 0


class Wrong(Prefetcher):
    """Asks for experts nobody named, twice as many as there are slots."""

    def begin(self, slots, depth, clock):
        self._slots, self._draw = slots, np.random.default_rng(depth)
        return super().begin(slots, depth, clock)

    def drafted(self, step, experts, weights, clock):
        layers, found = np.nonzero(self._slots.slot_of == ABSENT)
        chosen = self._draw.permutation(len(layers))[: 2 * int(self._slots.count.sum())]
        fresh = np.unique(np.stack([layers[chosen], found[chosen]]), axis=1)
        return fresh[0], fresh[1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_prefetcher_changes_no_token(device):
    engine = engine_of("qwen-nano", 2, device)
    ids, expected = ids_of(engine), None
    for prefetcher in (Prefetcher(), Wrong()):
        session = engine.session_for(len(ids) + 48, 6, 0.0)
        with torch.inference_mode():
            rounds = decode(session, engine.memory, prefetcher, FixedDepth(6), ids.to(device), new_tokens=48,
                            generator=torch.Generator(device), meter=Meter())  # fmt: skip
            tokens = [token for piece in rounds for token in piece][:48]
        expected = expected or tokens
        assert tokens == expected


def test_prefetched_experts_are_hit():
    """Every round's plan is fetched, not only the first one's: pins do not outlive their round."""
    engine = engine_of("qwen-nano", 12)
    engine.generate(ids_of(engine), 48, depth=3)
    slots = engine.memory.slots
    assert engine.stats.hits > 0.65 * engine.stats.needed
    assert not slots.pinned.any()


def test_streamed_text_is_the_whole_text():
    engine = engine_of("qwen-nano", 4)
    pieces = list(engine.generate(TEXT, 32, stream=True))
    assert len(pieces) > 1
    assert "".join(pieces) == engine.generate(TEXT, 32)


def test_what_depths_are_worth_is_learnt_once():
    engine, depths = engine_of("qwen-nano", 6), []
    engine.on_round = lambda routed, spans: depths.append(len(routed.drafted))
    begins = []
    for _ in range(2):
        begins.append(len(depths))
        engine.generate(ids_of(engine), 40)
    first, second = depths[: begins[1]], depths[begins[1] :]
    assert tuple(first[:3]) == OnlineDepth.START != tuple(second[:3])


def test_samples_repeat_with_their_seed_only():
    engine = engine_of("qwen-nano", 4)
    texts = [engine.generate(TEXT, 32, temperature=1.0, depth=4, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_samples_do_not_depend_on_what_was_asked_before():
    engine, used = engine_of("qwen-nano", 4), engine_of("qwen-nano", 4)
    used.generate(TEXT, 8, temperature=1.0)  # leaves a session with deeper windows
    texts = [one.generate(TEXT, 32, temperature=1.0, depth=3, seed=5) for one in (engine, used)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("device", DEVICES)
def test_addresses_follow_the_slots(device):
    engine = engine_of("qwen-nano", 2, device)
    engine.generate(ids_of(engine), 24, depth=4)
    memory, slots = engine.memory, engine.memory.slots
    copied = 0
    for layer in range(len(slots.count)):
        addresses = memory.addresses_of(layer)
        for expert in range(memory.shape.num_experts):
            slot = slots.slot_of[layer, expert]
            place = memory.host[layer, expert] if slot == ABSENT else memory.device[memory.first_slot[layer] + slot]
            assert addresses[expert] == place.data_ptr()
            assert slot == ABSENT or torch.equal(place.cpu(), memory.host[layer, expert])
        copied += int(slots.generation[layer].sum())
    assert memory.h2d_bytes == copied * memory.host[0, 0].nbytes == engine.stats.h2d_bytes
    if device == "cuda":
        assert np.array_equal(memory.table.cpu().numpy(), memory.addresses_of(slice(None)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["fast", "paper"])
def test_a_copy_that_was_broken_off_changes_no_token(mode, device, monkeypatch):
    """Its slot stays taken, and the expert is read from the host until it is copied again."""
    engine = engine_of("qwen-nano", 6, device, mode=mode)
    expected = engine.generate(ids_of(engine), 24, depth=4)
    engine.memory.device.fill_(float("nan"))
    engine.memory.slots.ready_ms[:] = np.inf
    monkeypatch.setattr(engine.memory.transport, "bring", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(ids_of(engine), 24, depth=4)
    monkeypatch.undo()
    assert torch.equal(engine.generate(ids_of(engine), 24, depth=4), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["fast", "paper"])
@pytest.mark.parametrize("model", MODELS)
def test_residual_transport_changes_no_bit(model, mode, device):
    whole = engine_of(model, 3, device, mode=mode)
    ids = ids_of(whole)
    engine = api.engine_for(whole.weights, expert_budget=3, in_slots=True, mode=mode, transport="residual")
    spoil(engine)
    assert torch.equal(engine.generate(ids, 32), whole.generate(ids, 32))
    memory, records = engine.memory, engine.weights.records()
    for layer, expert in zip(*np.nonzero(memory.slots.slot_of != ABSENT)):
        place = memory.device[memory.first_slot[layer] + memory.slots.slot_of[layer, expert]]
        assert torch.equal(place.cpu(), memory.host[layer, expert])
    copies = memory.slots.generation.sum()
    assert records.length.min() * copies <= memory.h2d_bytes <= records.length.max() * copies
    if device == "cuda":
        assert engine.budget.taken["residuals on their way"] > 0


def test_residual_transport_needs_the_codes():
    engine = engine_of("qwen-nano", 3, mode="paper", policy="lru", draft="none", transport="residual")
    assert engine.budget.taken["draft's INT4 experts"] == engine.weights.draft().nbytes and not engine.draft.banks
    with pytest.raises(UserError, match="no transport 'zip': choose whole or residual"):
        api.engine_for(engine.weights, expert_budget=3, in_slots=True, transport="zip")


def test_budgets_are_enforced_with_numbers():
    with pytest.raises(UserError, match="holds? one expert in every layer|does not hold"):
        api.load("qwen-nano", expert_budget="1KiB", device="cpu")
    with pytest.raises(UserError, match="expert slots needs 0.02 GiB .* 0.00 are left|expert slots needs"):
        api.load("qwen-nano", expert_budget="1GiB", memory_budget="1MiB", device="cpu")
    budget = Budget(100)
    budget.take("weights", 60, "less")
    with pytest.raises(UserError, match="KV cache and distributions needs"):
        budget.take(api.SESSION, 41, "ask for fewer tokens")
    assert budget.left_bytes == 40
    assert host_slab(5000, pinned=False).nbytes == 5000
    assert [api.in_bytes(size) for size in (7, "7", "2KiB", "1.5 GB")] == [7, 7, 2048, 1_500_000_000]
    with pytest.raises(UserError, match="'many' is no size"):
        api.in_bytes("many")


def test_a_refused_request_leaves_the_budget_as_it_was():
    weights = load_weights("qwen-nano", device="cpu")
    engine = api.engine_for(weights, expert_budget=4, in_slots=True, draft="none", memory_budget="5MB")
    assert engine.generate(TEXT, 8)
    for _ in range(2):
        with pytest.raises(UserError, match="KV cache and distributions needs"):
            engine.generate(TEXT, 1900)
    assert engine.generate(TEXT, 8) and engine.budget.left_bytes >= 0


def test_a_depth_where_nothing_drafts():
    for how in ({"draft": "none"}, {"mode": "paper", "policy": "lru"}):
        with pytest.raises(UserError, match="nothing drafts here"):
            engine_of("qwen-nano", 4, **how).generate(TEXT, 8, depth=4)


def test_what_the_engine_has_no_code_for():
    with pytest.raises(UserError, match="the engine runs qwen2_moe, phimoe, deepseek_v2, not mixtral"):
        shape_of(ORIGINALS["Mixtral-8x7B"])
    with pytest.raises(UserError, match="changes the output"):
        lossy = next(p for p in api.find_policy.__globals__["POLICIES"].values() if p.lossy)
        api.load("qwen-nano", expert_budget="1MiB", policy=lossy.id, device="cpu")
    for policy, why in (("ss-moe", "fewer of the target's"), ("fiddler", "on the CPU"), ("moe-infinity", "scores"),
                        ("hybrimoe", "give mode='shared'")):  # fmt: skip
        with pytest.raises(UserError, match=why):
            engine_of("qwen-nano", 2, mode="paper", policy=policy)
    with pytest.raises(UserError, match="no mode 'slow'"):
        engine_of("qwen-nano", 2, mode="slow")
    with pytest.raises(UserError, match="at least 2 tokens"):
        engine_of("qwen-nano", 2).generate(torch.tensor([5]), 4)
