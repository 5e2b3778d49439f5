"""What 00-start-here shows: the heat map, the rounds, the change of routing, the course."""

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from specter_lab.errors import UserError
from specter_lab.experiments import runner
from specter_lab.experiments.lab import course, heat_map, round_by_round, routing_change
from specter_lab.experiments.lab.player import player
from specter_lab.experiments.registry import EXPERIMENTS, LABS
from specter_lab.experiments.specter import routing
from specter_lab.measure.speculate import plain_decode
from specter_lab.models.experts import with_experts

TEXT = "The ship left the harbour at dawn and"


@pytest.fixture(scope="module")
def question():
    return routing.ask("qwen-nano", 1, 0)


@pytest.fixture(scope="module")
def draft(question, tmp_path_factory):
    experts = routing.quantized(question, "rtn-int4", tmp_path_factory.mktemp("cache"))
    return with_experts(question.source.model, experts.banks)


@pytest.fixture
def shell():
    """A place to display in, as a kernel has one."""
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_the_player_shows_what_its_slider_says(shell):
    with capture_output() as shown:
        slider = player(lambda step: [f"step {step}", step * step], last=5, label="step", start=2)
        slider.value = 4
    said = [output.data["text/plain"] for output in shown.outputs]
    assert said[1:] == ["'step 2'", "4", "'step 4'", "16"] and "IntSlider" in said[0]
    assert (slider.min, slider.max, slider.description) == (0, 5, "step")


def test_the_heat_map_counts_every_choice(question, shell):
    with capture_output() as shown:
        decoded = heat_map.watch(question.source, TEXT, new_tokens=20, seed=1)
    assert decoded.experts.shape == (20, 4, 4) and len(decoded.words) == 20
    for tokens in (1, 20):
        assert decoded.uses(tokens).shape == (4, 60) and (decoded.uses(tokens).sum(axis=1) == 4 * tokens).all()
    used = set(zip(*decoded.uses(20).nonzero()))
    assert used == {
        (layer, e) for pass_ in decoded.experts for layer, chosen in enumerate(pass_) for e in chosen.tolist()
    }
    assert sum("Figure" in output.data["text/plain"] for output in shown.outputs) >= 3, (
        "drawn while it decodes, and at the end"
    )
    image = heat_map.draw(decoded, 20).axes[0].images[0].get_array()
    assert np.asarray(image).sum() == pytest.approx(4 * 60), "an even share is 1"


def test_there_must_be_something_to_write(question):
    with pytest.raises(UserError, match="0 new tokens leave nothing to decode"):
        heat_map.watch(question.source, TEXT, new_tokens=0)


def test_the_rounds_write_the_targets_own_text(question, draft, shell):
    source = question.source
    watched = round_by_round.decode(source, draft, TEXT, new_tokens=24, depth=4)
    ids = source.tokenizer(TEXT, return_tensors="pt").input_ids
    plain = plain_decode(source.model, ids, new_tokens=24).tokens[0]
    written = watched.text_before(len(watched.rounds))
    assert written.startswith(TEXT + "".join(source.tokenizer.decode(token) for token in plain))
    assert sum(r.accepted + 1 for r in watched.rounds) >= 24 and all(len(r.drafted) == 4 for r in watched.rounds)
    with capture_output() as shown:
        slider = round_by_round.show(watched)
        slider.value = 1
    texts = [output.data["text/html"] for output in shown.outputs if "text/html" in output.data]
    assert "round 1 of" in texts[0] and "round 2 of" in texts[-1]
    now = watched.rounds[1]
    assert texts[-1].count(round_by_round.KEPT) == now.accepted + 1, "each accepted token, and the key"
    assert texts[-1].count(round_by_round.DROPPED) == 4 - now.accepted + 1


def test_foreseen_and_needed_are_told_apart(question, draft):
    watched = round_by_round.decode(question.source, draft, TEXT, new_tokens=8, depth=4)
    kinds = np.asarray(round_by_round.draw(watched, 0).axes[0].collections[0].get_array()).reshape(4, 60)
    now = watched.rounds[0]
    assert ((kinds == 3).sum(), (kinds >= 2).sum()) == ((now.needed & now.foreseen).sum(), now.needed.sum())


def test_changed_choices_are_marked(question, draft):
    moved = routing_change.compared(question, draft)
    same = routing_change.compared(question, question.source.model)
    assert 0.9 < moved.overlap < 1 == same.overlap and moved.choices == question.tokens.num_tokens * 4
    assert "<b" in moved.first_tokens(40).to_html() and "<b" not in same.first_tokens(40).to_html()
    first_layer, *_ = moved.by_layer().axes[0].lines[0].get_ydata()
    assert first_layer == 1, "nothing quantised lies before the first router"


def test_the_course_links_every_other_notebook():
    text = course.contents().data
    for name in {*EXPERIMENTS, *LABS} - {"00-start-here"}:
        assert f"[{name}]({name}.ipynb)" in text
    assert "reproduced" in text


def test_the_notebook_runs_headless(out):
    executed = runner.run_lab("00-start-here", {"new_tokens": "16"})
    assert executed == out / "results" / "00-start-here" / "16.ipynb"
    assert "image/png" in executed.read_text() and "tokens per round" in executed.read_text()
