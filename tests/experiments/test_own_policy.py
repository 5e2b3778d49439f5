"""lab-write-a-policy: a policy of one's own beside shipped ones, what it cannot exceed, and the film of a round."""

from dataclasses import replace

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from specter_lab.errors import UserError
from specter_lab.experiments import runner
from specter_lab.experiments.lab import own_policy, slots_view, what_if
from specter_lab.plan.hardware import PAPERS_GPU, profile_names
from specter_lab.plan.policies import POLICIES, find_policy
from specter_lab.plan.policy import NO_LOADS, Policy, Prefetcher
from specter_lab.plan.residency import ABSENT
from tests.experiments import made_up


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    made_up.use(monkeypatch)
    monkeypatch.setattr(what_if, "NEW_TOKENS", made_up.POSITIONS)
    what_if.traffic_of.cache_clear()
    yield
    what_if.traffic_of.cache_clear()


@pytest.fixture
def start():
    return replace(what_if.setting_of("deepseek-nano", PAPERS_GPU), slots=24, depth=4)


@pytest.fixture
def shell():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def answering(loads):
    """A policy whose prefetcher gives this answer when the first token is drafted."""

    class Answers(Prefetcher):
        def begin(self, slots, depth, clock):
            self.slots = slots
            return NO_LOADS

        def drafted(self, step, experts, weights, clock):
            return loads(self.slots) if step == 1 else NO_LOADS

    return Policy("mine", "mine", "test", prefetch=lambda scene: Answers())


def one_absent(slots):
    return tuple(part[:1] for part in np.nonzero(slots.slot_of == ABSENT))


@pytest.mark.parametrize("name", ["specter", "lru", "specter-fast", "moe-infinity"])
def test_looking_at_answers_changes_nothing(start, name):
    policy = find_policy(name)
    plain, looked_at = what_if.ask(start, policy), what_if.ask(start, own_policy.checked(policy))
    assert looked_at == plain


def test_a_policy_of_ones_own_stands_first_beside_the_shipped_ones(start):
    rows = own_policy.beside({"mine": answering(one_absent)}, start)
    assert rows["policy"].tolist() == ["mine", *(find_policy(name).title for name in own_policy.SHIPPED)]
    assert rows["yours"].tolist() == [True] + [False] * len(own_policy.SHIPPED)
    mine, shipped = rows.iloc[0], what_if.ask(replace(start, policy="lru"))
    assert mine["h2d_mb_per_token"] > 0
    assert rows.iloc[4]["simulated_ms_per_token"] == shipped.simulated_ms_per_token


def test_no_policy_passes_its_limits(start):
    """Every policy whose windows are recorded anyway, at few and at many slots."""
    names = [name for name in what_if.policy_choices().values() if not POLICIES[name].lossy]
    bound = 0
    for slots in (4, 24, 48):
        rows = own_policy.beside({}, replace(start, slots=slots), names)
        limited = rows.dropna(subset=["hit_ceiling"])
        bound += len(limited)
        assert (limited["hit_rate"] <= limited["hit_ceiling"] + 1e-9).all()
        assert (limited["h2d_mb_per_token"] >= limited["fewest_mb_per_token"] - 1e-9).all()
        assert (limited["simulated_ms_per_token"] >= limited["fewest_ms_per_token"] - 1e-9).all()
    assert bound > 30


def test_all_experts_in_slots_need_no_copies(start):
    limits = own_policy.limits(replace(start, slots=64), find_policy("specter"), computing_ms=1.0)
    few = own_policy.limits(replace(start, slots=8), find_policy("specter"), computing_ms=1.0)
    assert limits["hit_ceiling"] == 1 and limits["fewest_mb_per_token"] < few["fewest_mb_per_token"] / 4
    assert np.isnan(own_policy.limits(start, find_policy("fiddler"), 1.0)["fewest_mb_per_token"]), "computes on the CPU"


@pytest.mark.parametrize(
    "loads, sentence",
    [
        (lambda slots: None, "mine: drafted answered None: give two arrays"),
        (lambda slots: (np.array([0, 1]), np.array([0])), r"arrays of shapes \(2,\) and \(1,\)"),
        (lambda slots: (np.array([0.0]), np.array([0.0])), "give layers and experts as whole numbers"),
        (lambda slots: (np.array([0]), np.array([64])), "asked for expert 64: there are 0 to 63"),
        (lambda slots: (np.array([-1]), np.array([0])), "asked for layer -1: there are 0 to 25"),
        (lambda slots: tuple(p[:1] for p in np.nonzero(slots.slot_of != ABSENT)), "which has a slot already"),
        (lambda slots: tuple(np.repeat(p, 2) for p in one_absent(slots)), "asked for an expert twice"),
    ],
)
def test_an_answer_that_cannot_be_carried_out_is_one_sentence(start, loads, sentence):
    with pytest.raises(UserError, match=sentence):
        own_policy.beside({"mine": answering(loads)}, start, ())


def test_the_bars_show_the_rows_and_their_limits(start):
    rows = own_policy.beside({"mine": answering(one_absent)}, start)
    times, copies, hits = own_policy.bars(rows).axes
    for axis, column in ((times, "simulated_ms_per_token"), (copies, "h2d_mb_per_token"), (hits, "hit_rate")):
        assert [bar.get_width() for bar in axis.patches] == pytest.approx(rows[column].tolist())
    assert [line.get_xdata()[0] for line in copies.lines] == pytest.approx(rows["fewest_mb_per_token"].tolist())
    assert len({bar.get_facecolor() for bar in times.patches}) == 2, "yours has a colour of its own"


def test_sliders_draw_anew(start, shell):
    with capture_output() as shown:
        box = own_policy.panel({"mine": answering(one_absent)}, start, ("lru",))
        row, depth = box.children
        slots, said = row.children
        before = said.value
        slots.value, depth.value = 32, 2
    assert sum("Figure" in output.data["text/plain"] for output in shown.outputs) == 3
    assert said.value != before and said.value.endswith("GB of GPU memory for Specter, paper mode")


@pytest.mark.parametrize("name", ["specter", "lru", "specter-fast", "specter-read", "fiddler"])
def test_listening_to_a_round_changes_nothing(start, name):
    question = replace(start, policy=name)
    filmed, found = slots_view.film(question), what_if.simulated(question)
    assert (filmed.start_ms, filmed.end_ms) in set(zip(found.rounds.start_ms.tolist(), found.rounds.end_ms.tolist()))
    assert filmed.needed.shape == (26, 64) and filmed.needed.sum(axis=1).min() >= 6
    times = [moment.from_ms for moment in filmed.moments]
    assert times == sorted(times) and times[0] == filmed.start_ms
    for moment in (*filmed.moments, filmed.after):
        assert moment.expert_in.shape[0] == 26
        assert all(len(set(row[row != ABSENT])) == (row != ABSENT).sum() for row in moment.expert_in), (
            "an expert has one slot"
        )


def test_the_film_ends_as_the_round_does(start):
    filmed = slots_view.film(start)
    last = slots_view.states(filmed, filmed.end_ms - filmed.start_ms)
    expected = np.take_along_axis(filmed.needed, filmed.after.expert_in, axis=1)
    assert ((last == slots_view.NEEDED) == expected).all()
    first = slots_view.states(filmed, 0.0)
    assert first.shape == (26, 24) and not np.isin(first, slots_view.MISSED).any()
    on_their_way = [(slots_view.states(filmed, t) == slots_view.PREFETCHED).sum() for t in filmed.times_ms]
    assert max(on_their_way) > 0 == on_their_way[-1], "the barrier waits for every prefetched expert"
    misses = filmed.rows[filmed.rows["work"] == "miss"]
    middle = misses.iloc[len(misses) // 2]
    during = slots_view.states(filmed, (middle["simulated_start_ms"] + middle["simulated_end_ms"]) / 2)
    assert (during[int(middle["layer"])] == slots_view.MISSED).sum() >= 1


def test_the_film_has_a_slider(start, shell):
    with capture_output() as shown:
        slider = slots_view.show(slots_view.film(start, answering(one_absent)))
        slider.value = 30
    assert slider.max == slots_view.PICTURES - 1
    assert sum("Figure" in output.data["text/plain"] for output in shown.outputs) == 2


def test_the_notebook_takes_what_a_question_is_made_of():
    parameters = runner._parameters(runner.NOTEBOOKS / "lab-write-a-policy.ipynb")
    assert (
        set(parameters) == {"model", "profile", "slots", "depth", "seed"} and parameters["profile"] in profile_names()
    )


@pytest.mark.parametrize("control", what_if.CONTROLS)
def test_a_round_is_found_again_whoever_sets_the_depth(start, control):
    filmed = slots_view.film(replace(start, control=control))
    assert filmed.end_ms > filmed.start_ms and filmed.needed.any()
