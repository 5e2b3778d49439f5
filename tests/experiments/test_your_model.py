"""`specter-lab measure` and its notebook, end to end on small models of classes that the zoo does not have."""

import inspect
import json
import re

import numpy as np
import pytest
import torch

from specter_lab import paths
from specter_lab.cli import main
from specter_lab.compress.calibration import calibration_ids
from specter_lab.compress.quantizers import QUANTIZERS, quantize
from specter_lab.errors import UserError
from specter_lab.experiments import runner
from specter_lab.experiments.lab.asked import ask, comparable
from specter_lab.experiments.lab.figure import plot
from specter_lab.experiments.lab.prediction import predict, slots_that_fit
from specter_lab.experiments.lab.your_model import measure_model
from specter_lab.measure.prompts import PROMPT_SETS, Request, TokenizedRequests
from specter_lab.measure.speculate import Rounds
from specter_lab.measure.trace import DECODE, Origin, Trace
from specter_lab.models.anatomy import anatomy_of
from specter_lab.models.load import load
from specter_lab.plan.hardware import read_profile
from tests.models.foreign import CONFIGS, EXPERTS, MOE_LAYERS, save

SMALL = {"memory_gb": 0.003}  # so that the experts of the small models do not all fit


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    return {kind: save(kind, folder / kind) for kind in CONFIGS}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "mine.txt"
    words = "the quick brown fox jumps over a lazy dog while seven wizards box".split()
    file.write_text("\n".join(" ".join(words[n:] + words[:n]) for n in range(6)))
    return file


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_report_on_every_class(checkpoints, prompts, out, kind):
    report = measure_model(str(checkpoints[kind]), quantizer="rtn-int4", prompts=[str(prompts)], depth=4, **SMALL)
    about = report.subject
    assert (about.model, about.architecture, about.prompts, about.n_prompts) == (kind, kind, ("mine.txt",), 6)
    assert (about.num_experts, about.moe_layers) == (EXPERTS[kind], len(MOE_LAYERS[kind]))
    for found in (report.fidelity_teacher_forced, report.fidelity_free_running):
        assert 0 < found["ordered_match"].value <= found["set_match"].value <= found["overlap"].value < 1
        assert all(e.low <= e.value <= e.high and e.n == 6 for e in found.values())
    for column in ("prefill", "decode"):
        curve = [getattr(row, column).value for row in report.explosion if getattr(row, column)]
        assert curve[0] == about.top_k and curve == sorted(curve) and curve[-1] <= about.num_experts
    assert [row.depth for row in report.depths] == [0, 2, 4]
    for row in report.depths[1:]:
        assert row.accepted_per_proposed.value <= row.accepted_per_checked.value <= 1
        assert 1 <= row.tokens_per_round.value <= row.depth + 1
        assert row.resident_experts <= row.distinct_experts <= about.num_experts
        assert row.resident_experts <= report.simulated.slots_per_layer
    cheapest = min(report.depths, key=lambda row: row.simulated_ms_per_token.value)
    assert report.simulated.best_depth == cheapest.depth and report.simulated.priced_as == kind
    assert json.loads(report.to_json())["subject"]["architecture"] == kind
    text = report.to_text()
    assert f"PREDICTED K* = {cheapest.depth}" in text and text.count("SIMULATED") == 2
    assert len(plot(report).axes) == 3


def test_the_command_prints_json_or_a_table(checkpoints, prompts, out, capsys):
    command = ["measure", str(checkpoints["olmoe"]), "--quantizer", "rtn-int4", "--prompts", str(prompts), "code"]
    command += ["--requests", "2", "--depth", "2"]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["subject"]["n_prompts"] == 4 and report["subject"]["prompts"] == ["mine.txt", "code"]
    assert "quantising: rtn-int4 ..." in printed.err
    assert main(command) == 0
    table = capsys.readouterr().out
    assert f"overlap                {report['fidelity_teacher_forced']['overlap']['value']:.2%}" in table


def test_a_quantised_checkpoint_serves_as_well_as_its_quantiser(checkpoints, prompts, out):
    source = load(str(checkpoints["mixtral"]))
    made = quantize(source, "gptq-int4-batched", calibration_ids(source.tokenizer), paths.CACHE / "quantized")
    asked = {"prompts": [str(prompts)], "depth": 2}
    by_name, by_path = (measure_model(str(source.path), quantizer=q, **asked) for q in ("gptq-int4-batched", str(made)))
    assert by_path == by_name and by_path.subject.starved_experts == 0


@pytest.mark.parametrize(
    "text, options, sentence",
    [
        ("", [], "holds no prompts"),
        ("only one", [], "one prompt has no interval: give at least 2"),
        ("long enough\n" + "word " * 600, [], "prompt 'mine.txt:2' needs [0-9]+ positions, the model has 512"),
        (
            "long enough\n" + "word " * 600,
            [],
            r"cut prompts to 512 tokens or less \(--max-tokens, in Python max_tokens\)",
        ),
        ("a b\nc d", ["--max-tokens", "1"], "prompts cut to 1 tokens cannot be continued: keep 2 or more"),
        ("a b\nc d", ["--max-tokens", "0"], "prompts cut to 0 tokens cannot be continued"),
        ("a b\nc d", ["--max-tokens", "-5"], "prompts cut to -5 tokens cannot be continued"),
        ("a\nb\nc d e f", [], "prompt 'mine.txt:1' is a single token, as are most"),
        ("one two three\none two three", [], "all prompts of [0-9]+ tokens or more begin alike"),
        ("a b\nc d", ["--device", "gpu"], "no device 'gpu' on this machine: give 'cpu'"),
        ("a b\nc d", ["--device", "cuda:99"], "no device 'cuda:99' on this machine: give 'cpu'"),
        (
            "a b\nc d",
            ["--memory-gb", "0"],
            "needs 0.00[0-9]+ GB for its INT4 draft, .* and there are 0: name more memory",
        ),
        ("a b\nc d", ["--memory-gb", "-1"], "and there are -1: name more memory"),
        ("a b\nc d", ["--memory-gb", "nan"], "a memory of nan GB is no size"),
        ("a b\nc d", ["--quantizer", "./nowhere/q"], "no quantised checkpoint ./nowhere/q: give its path"),
        ("a b\nc d", ["--quantizer", "gtpq"], "no quantiser 'gtpq': choose one of gptq-int8, .* or give the path"),
        ("a b\nc d", ["--quantizer", "./gone.gguf"], "no GGUF file ./gone.gguf: give its path"),
        ("a b\nc d", ["--depth", "0"], "a depth of 0 is not measured here: give 1 to 32"),
        ("a b\nc d", ["--depth", "33"], "a depth of 33 is not measured here"),
        ("a b\nc d", ["--profile", "abacus"], "no hardware profile 'abacus': choose from"),
        ("a b\nc d", ["--memory-gb", "0.001"], "needs 0.00[0-9]+ GB for its INT4 draft"),
    ],
)
def test_bad_input_is_one_sentence(checkpoints, out, tmp_path, capsys, text, options, sentence):
    file = tmp_path / "mine.txt"
    file.write_text(text)
    rest = ["--quantizer", "rtn-int4", "--depth", "2"]
    assert main(["measure", str(checkpoints["olmoe"]), "--prompts", str(file), *rest, *options]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("specter-lab: ")
    assert re.search(sentence, said[-1]), said[-1]
    assert not any("quantising" in line for line in said)  # nothing that takes long was begun


def test_a_model_that_cannot_be_measured_is_refused_before_it_is_loaded(
    checkpoints, out, tmp_path, capsys, monkeypatch
):
    def never(*_, **__):
        raise AssertionError("the weights were read")

    monkeypatch.setattr("specter_lab.experiments.lab.asked.load", never)
    short = tmp_path / "short.txt"
    short.write_text("a")
    for rest in (["--prompts", str(short)], ["--prompts", "gone.txt"], ["--quantizer", "./gone"]):
        assert main(["measure", str(checkpoints["olmoe"]), *rest]) == 2
        assert str(checkpoints["olmoe"]) not in capsys.readouterr().err


def test_short_and_repeated_prompts_are_left_out_and_named(checkpoints, tmp_path, out):
    file = tmp_path / "mine.txt"
    words = "the quick brown fox jumps over a lazy dog while seven wizards box".split()
    lines = [" ".join(words[n:] + words[:n]) for n in range(5)]
    file.write_text("\n".join([lines[0], "too short", *lines[1:], lines[2] + " and more"]))
    report = measure_model(str(checkpoints["olmoe"]), quantizer="rtn-int4", prompts=[str(file)], depth=2, **SMALL)
    short, again = report.subject.left_out
    assert re.match(r"mine.txt:2 \([0-9]+ tokens, [0-9]+ are needed\)", short)
    assert re.match(r"mine.txt:7 \(begins with the same [0-9]+ tokens as mine.txt:4\)", again)
    assert report.subject.n_prompts == 5 and report.subject.prefix_tokens > 5
    assert f"left out: {short}" in report.to_text()


@pytest.mark.parametrize(
    "lengths, prefix, kept",
    [((40, 50, 60), 32, 3), ((40, 3, 60), 32, 2), ((5, 40), 5, 2), ((9, 8, 2, 7), 7, 3), ((2, 2), 2, 2)],
)
def test_a_few_short_prompts_do_not_shorten_the_prefix(lengths, prefix, kept):
    requests = tuple(Request(str(n), "s", "s", "l", "t") for n in range(len(lengths)))
    ids = tuple(torch.arange(length) + 100 * n for n, length in enumerate(lengths))
    found = comparable(TokenizedRequests(requests, ids))
    assert (found.prefix_tokens, len(found.tokens.ids), len(found.left_out)) == (prefix, kept, len(lengths) - kept)


def test_when_everything_fits_nothing_is_copied(checkpoints, prompts, out):
    report = measure_model(str(checkpoints["olmoe"]), quantizer="rtn-int4", prompts=[str(prompts)], depth=2)
    assert report.simulated.slots_per_layer == EXPERTS["olmoe"]
    for row in report.depths:
        assert row.resident_experts == row.distinct_experts and row.simulated_h2d_mb_per_round == 0
    said = re.search(r"everything fits: nothing to offload.* with --memory-gb ([0-9.e-]+) half", report.to_text())
    smaller = measure_model(
        str(checkpoints["olmoe"]), quantizer="rtn-int4", prompts=[str(prompts)], depth=2, memory_gb=float(said[1])
    )
    assert EXPERTS["olmoe"] // 2 - 1 <= smaller.simulated.slots_per_layer <= EXPERTS["olmoe"] // 2
    assert "everything fits" not in smaller.to_text()


def test_help_lists_every_name(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["measure", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in (*QUANTIZERS, *PROMPT_SETS, "rtx4090"))


@pytest.fixture(scope="module")
def qwen():
    return anatomy_of("Qwen1.5-MoE-A2.7B")


def test_a_seed_is_a_number_that_every_generator_takes():
    for seed in (-1, 2**32, 0.5):
        with pytest.raises(UserError, match="give a whole number from 0 to 4294967295"):
            ask("phi-nano", ["mathematics"], requests=1, seed=seed)


def test_slots_are_what_memory_leaves(qwen):
    """20 GB less 3.7 GB of other weights, 6.4 GB of INT4 experts and 0.2 GB of KV, in slots of 24 x 17.3 MB."""
    assert slots_that_fit(qwen, 20, 1000) == 23
    assert slots_that_fit(qwen, 1000, 1000) == 60
    with pytest.raises(UserError, match="Qwen1.5-MoE-A2.7B needs 10[.0-9]* GB for its INT4 draft"):
        slots_that_fit(qwen, 8, 1000)


def made_up_rounds(depth, accepted, experts):
    """20 rounds of 4 requests; every window uses `experts` of 60 in 2 layers, others than the last, and is foreseen."""
    count = np.arange(20)
    needed = np.zeros((20, 2, 60), dtype=bool)
    needed[count[:, None], :, (count[:, None] // 4 * experts + np.arange(experts)) % 60] = True
    return Rounds(depth, count % 4, count // 4 * (accepted + 1), np.full(20, accepted), needed, needed)


def made_up_trace():
    """4 requests of 8 tokens that move through the experts, so that a small cache never holds the next ones."""
    indices = (np.arange(32)[:, None, None] * 4 + np.arange(4) + np.zeros((1, 2, 1), int)) % 60
    used = np.full(indices.shape, 0.25, np.float32)
    tokens = np.tile(np.arange(8, dtype=np.int32), 4)
    return Trace(
        Origin("made up", "0"), "greedy-decode", 60, (0, 1), tuple("abcd"), np.repeat(np.arange(4, dtype=np.int32), 8),
        tokens, np.full(32, DECODE, np.uint8), tokens, indices.astype(np.uint8), used, used,
    )  # fmt: skip


@pytest.mark.parametrize("share, best", [(1.0, 16), (0.0, 0)])
def test_the_best_depth_follows_acceptance(qwen, share, best):
    """Windows of all depths need 8 new experts: if all is accepted the deepest wins, if nothing is, plain decoding."""
    rounds = {k: made_up_rounds(k, int(share * k), experts=8) for k in (2, 4, 8, 16)}
    rows, prediction = predict(rounds, made_up_trace(), qwen, read_profile(), memory_gb=16, new_tokens=64, seed=0)
    assert (prediction.best_depth, prediction.best_depth_low, prediction.best_depth_high) == (best, best, best)
    assert rows[0].distinct_experts == 4 and rows[0].tokens_per_round is None
    assert rows[1].tokens_per_round.value == int(share * 2) + 1


def test_the_notebook_takes_the_parameters_of_the_function():
    names = set(runner._parameters(runner.NOTEBOOKS / "lab-your-model.ipynb"))
    assert names <= set(inspect.signature(measure_model).parameters)


def test_the_notebook_runs_on_a_model_of_ones_own(checkpoints, prompts, out, capsys):
    given = [
        f"MODEL={checkpoints['qwen3_moe']}",
        "QUANTIZER=rtn-int4",
        f"PROMPTS={prompts} code",
        "requests=4",
        "depth=2",
    ]
    assert main(["lab", "lab-your-model", *given]) == 0
    kept = paths.RESULTS / "lab-your-model" / "qwen3_moe-rtn-int4-mine.txt-code-4-2.ipynb"
    assert str(kept) in capsys.readouterr().out
    outputs = kept.read_text()
    assert "PREDICTED K*" in outputs and "qwen3_moe: qwen3_moe, 2 MoE layers, top-2 of 16 experts" in outputs


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["lab-your-modl"], "no lab notebook 'lab-your-modl': there are 00-start-here, lab-your-model"),
        (["lab-your-model", "colour=red"], "has no parameter 'colour': it has model, quantizer"),
        (["lab-your-model", "depth=deep"], "depth=deep is not a number"),
        (["lab-your-model", "depth"], "'depth' is no parameter: write NAME=VALUE"),
    ],
)
def test_a_lab_notebook_with_bad_input(out, capsys, arguments, sentence):
    assert main(["lab", *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not list((paths.RESULTS).glob("lab-your-model/*"))
