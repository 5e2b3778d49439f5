"""Every command explains itself, answers in JSON, and tells a user's mistake in one sentence."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from specter_lab import paths
from specter_lab.cli import main, memory_problem
from specter_lab.cli.parser import COMMANDS, GROUPS
from specter_lab.experiments.lab import what_if
from tests.experiments import made_up

NANO = ("generate", "qwen-nano")
MISTAKES = [
    ((), "which command? `specter-lab --help` lists them"),
    (("generat",), "no command 'generat': did you mean generate?"),
    (("xyzzy",), "no command 'xyzzy': `specter-lab --help` lists them all"),
    (("list", "--jsn"), "specter-lab list has no option '--jsn': did you mean --json?"),
    (("list", "all"), "'all' is too much: `specter-lab list --help` shows"),
    (("reproduce",), "missing: ID (`specter-lab reproduce --help` shows how)"),
    (("reproduce", "tabel1"), "did you mean table1"),
    (("reproduce", "table1", "--tier", "gpuu"), "no tier 'gpuu': give one of cpu, gpu, paper"),
    (("reproduce", "table1", "--seed", "x"), "--seed: 'x' is no whole number"),
    (("compare", "table1", "--verdict", "good"), "no verdict 'good': give one of reproduced"),
    (("compare", "kernel"), "specter-kernel has no 'cpu' tier"),
    (("measure", "no-model"), "no model 'no-model': give one of qwen-nano"),
    (("measure", "qwen-nano", "--memory-gb", "much"), "--memory-gb: 'much' is no number"),
    (("simulate", "mixtral"), "'mixtral' has no recorded routing: give one of qwen-nano"),
    (("simulate", "qwen-nano", "--policy", "lruu"), "no policy 'lruu'"),
    (("simulate", "qwen-nano", "--policy", "ss-moe"), "policy 'ss-moe' drafts with other windows"),
    (("simulate", "qwen-nano", "--profile", "abacus"), "no hardware profile 'abacus'"),
    (("simulate", "qwen-nano", "--slots", "3", "--memory-gb", "4"), "give one of them"),
    (("simulate", "qwen-nano", "--memory-gb", "nan"), "--memory-gb: 'nan' is no amount above zero"),
    ((*NANO, "The end", "--temperature", "nan"), "a temperature of nan"),
    (("quantize", "qwen-nano", "--quantizer", "int4"), "no quantiser 'int4': choose one of gptq-int8"),
    (("quantize", "qwen-nano", "--out", "."), ". is there already"),
    (("quantize", "qwen-nano", "--sequences", "0"), "--sequences: '0' is not above zero"),
    (("lab", "lab-what"), "no lab notebook 'lab-what'"),
    (("completion", "fish"), "no completion for 'fish': there is bash, zsh, tcsh"),
    ((*NANO, ""), "the prompt is empty"),
    ((*NANO, "The", "end"), "'end' is too much"),
    ((*NANO, "The end", "--prompt-file", "x"), "a prompt and --prompt-file: give one of them"),
    ((*NANO, "--prompt-file", "no-such-file"), "cannot read no-such-file"),
    ((*NANO, "The end", "--slots", "3", "--expert-budget", "1MiB"), "give one of them"),
    ((*NANO, "The end", "--slots", "0"), "0 slots per layer hold no expert"),
    ((*NANO, "The end", "--expert-budget", "many"), "'many' is no size"),
    ((*NANO, "The end", "--depth", "99"), "give 0 to 16"),
    ((*NANO, "The end", "--mode", "slow"), "no mode 'slow': choose fast, paper, shared"),
    ((*NANO, "The end", "--draft", "int5"), "no draft 'int5': choose one of int4, none, gptq-int4"),
    ((*NANO, "The end", "--draft", "gptq-int8"), "symmetric 4-bit codes in groups of 128, gptq-int8 makes others"),
    ((*NANO, "The end", "--draft", "data/zoo/qwen-nano"), "is not a quantised checkpoint"),
    ((*NANO, "The end", "--draft", "none", "--depth", "4"), "nothing drafts here"),
    ((*NANO, "The end", "--device", "tpu"), "no device 'tpu'"),
    ((*NANO, "The end", "--temperature", "-1"), "a temperature of -1"),
    ((*NANO, "The end", "--temperature", "hot"), "--temperature: 'hot' is no number"),
    ((*NANO, "The end", "--stop", ""), "an empty stop text"),
    ((*NANO, "The end", "--seed", str(2**70)), "a seed of"),
    (("generate", ".", "The end"), "no config.json in ."),
    (("serve", "qwen-nano", "--host", "0.0.0.0"), "give --api-key"),
    (("serve", "qwen-nano", "--port", "99999"), "there is no port 99999"),
    (("serve", "qwen-nano", "--max-waiting", "-1"), "-1 requests cannot wait"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_a_mistake_is_one_sentence(words, sentence, capsys, out, monkeypatch):
    monkeypatch.delenv("SPECTER_LAB_API_KEY", raising=False)
    assert main(words) == 2
    said = capsys.readouterr()
    *progress, last = said.err.splitlines()
    assert last.startswith("specter-lab: ") and sentence in last
    assert all(line.endswith("...") for line in progress) and said.out == ""


def test_a_bug_keeps_its_trace(monkeypatch):
    monkeypatch.setitem(COMMANDS, "list", replace(COMMANDS["list"], run=lambda options: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        main(["list"])


def test_serving_without_its_packages_names_them(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "qwen-nano"]) == 2
    assert "serving needs uvicorn: `pip install 'specter-lab[serve]'`, or `make setup`" in capsys.readouterr().err


def test_ctrl_c_while_a_text_is_written():
    command = [
        sys.executable,
        "-u",
        "-m",
        "specter_lab.cli",
        *NANO,
        "The old man walked along the river and",
        "--max-tokens",
        "1900",
    ]
    run = subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    assert run.stdout.read(1)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 130 and said.endswith("specter-lab: stopped by Ctrl-C\n") and "Traceback" not in said


def test_help_names_every_command_and_status(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for command in COMMANDS.values():
        assert f"  {command.name:<12}{command.help}" in text
    assert {"0", "1", "2", "130"} <= set(text.split("exit status")[1].split())
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and f"specter-lab {name}" in text.split("examples")[1]
    assert "--json" in text or name == "completion"


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_understood(name):
    """Every example parses: its words are the command's."""
    from shlex import split

    from specter_lab.cli.parser import parse

    lines = [line for line in COMMANDS[name].examples.splitlines() if "specter-lab " in line]
    assert lines
    for line in lines:
        words = split(
            line.removeprefix('eval "$(').split(")")[0].split(" |")[0].split(" >")[0].split(" <")[0], comments=True
        )
        parse(words[words.index("specter-lab") + 1 :])


def test_help_and_lists_need_no_torch():
    code = ("import sys; from specter_lab.cli import main\n"
            "for words in (['list'], ['--help']):\n try: main(words)\n except SystemExit: pass\n"
            "assert not {'torch', 'numpy', 'fastapi'} & set(sys.modules)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def answer(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_compare_and_table_as_json(capsys):
    experiments = answer(capsys, "list")["experiments"]
    assert {"specter-table1", "specter-kernel"} <= {row["id"] for row in experiments}
    claims = answer(capsys, "compare", "table1")
    assert {claim["experiment"] for claim in claims} == {"specter-table1"} and all(
        claim["recorded"] for claim in claims
    )
    failed = answer(capsys, "compare", "--verdict", "not reproduced")
    assert failed and {claim["verdict"] for claim in failed} == {"not reproduced"}
    assert {"claim", "paper", "ours", "verdict"} <= set(answer(capsys, "table")[0])


def test_compare_says_what_the_results_say(capsys):
    assert main(["compare", "table1"]) == 0
    text = capsys.readouterr().out
    assert "paper 99.38 % / recorded 99.83 %" in text
    claims = answer(capsys, "compare", "table1")
    assert f"{len(claims)} claims: " in text and text.count("specter-table1: ") == len(claims)


def test_quantize_keeps_a_copy_that_measures(capsys, out, tmp_path):
    from specter_lab.compress.checkpoint import load_quantized
    from specter_lab.models.load import load

    made = answer(
        capsys, "quantize", "qwen-nano", "--quantizer", "rtn-int4", "--out", str(tmp_path / "q"), "--sequences", "4"
    )
    experts = load_quantized(made["folder"], load("qwen-nano"))
    assert made["folder"] == str(tmp_path / "q") and experts.quantizer == made["quantizer"] == "rtn-int4"
    assert made["bits_per_weight"] == pytest.approx(experts.bits_per_weight) and 4 < made["bits_per_weight"] < 5
    assert main(["quantize", "qwen-nano", "--quantizer", "rtn-int4", "--sequences", "4"]) == 0
    assert "4.16 bits per expert weight" in capsys.readouterr().out or made["bits_per_weight"] != pytest.approx(
        4.16, abs=0.005
    )


def test_generate_streams_text_and_tells_numbers(capsys, monkeypatch):
    prompt = "The old man walked along the river and"
    whole = answer(capsys, "generate", "qwen-nano", prompt, "--max-tokens", "24", "--slots", "8", "--device", "cpu")
    monkeypatch.setattr("sys.stdin", io.StringIO(prompt))
    assert (
        main(["generate", "qwen-nano", "--max-tokens", "24", "--slots", "60", "--draft", "none", "--device", "cpu"])
        == 0
    )
    said = capsys.readouterr()
    assert said.out == whole["text"] + "\n"  # plain decoding, everything resident: the same text
    for words in ("24 tokens (length)", "tokens/s on cpu", "acceptance -, 1.00 tokens per round", "60 of 60 experts"):
        assert words in said.err
    assert (whole["new_tokens"], whole["slots_per_layer"]) == (24, 8) and 0 < whole["hit_rate"] < 1
    assert whole["expert_bytes_per_token"] > 0 and whole["tokens_per_s"] > 0 and 0 < whole["acceptance"] <= 1
    stopped = answer(capsys, "generate", "qwen-nano", prompt, "--stop", whole["text"][10:14], "--device", "cpu")
    assert stopped["text"] == whole["text"][:10] and stopped["finish_reason"] == "stop"


def test_simulate_is_what_the_sliders_say(capsys, monkeypatch):
    made_up.use(monkeypatch)
    monkeypatch.setattr(what_if, "NEW_TOKENS", made_up.POSITIONS)
    what_if.traffic_of.cache_clear()
    try:
        found = answer(
            capsys, "simulate", "deepseek-nano", "--policy", "specter", "lru", "--slots", "9", "--depth", "3"
        )
        for row, policy in zip(found, ("specter", "lru")):
            asked = what_if.Question("deepseek-nano", policy, "a100-40gb-pcie4", 9, 3)
            assert row["simulated_ms_per_token"] == what_if.ask(asked).simulated_ms_per_token
        assert main(["simulate", "deepseek-nano", "--memory-gb", "16"]) == 0
        assert "SIMULATED: deepseek-nano with its original's bytes" in capsys.readouterr().out
        assert main(["simulate", "deepseek-nano", "--slots", "900"]) == 2
        assert "900 slots per layer: give 1 to 64" in capsys.readouterr().err
    finally:
        what_if.traffic_of.cache_clear()


def test_memory_that_is_refused_is_one_sentence():
    import torch

    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory_problem(refused.value).startswith("not enough memory (")
    assert memory_problem(ValueError("x")) is None


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_tab_completes_commands_ids_options_and_models(tmp_path):
    """In a real bash, with the script that the command prints."""
    script = tmp_path / "complete.sh"
    done = subprocess.run([sys.executable, "-m", "specter_lab.cli", "completion", "bash"], cwd=paths.ROOT, text=True,
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    script.write_text(done.stdout)

    def completed(*words):
        line = (f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; COMP_TYPE=9; "
                "_shtab_specter_lab; printf '%s\\n' \"${COMPREPLY[@]}\"")  # fmt: skip
        return subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, check=True, env=os.environ
        ).stdout.split()

    assert completed("specter-lab", "gen") == ["generate"]
    assert {"table1", "specter-table1"} & set(completed("specter-lab", "reproduce", "table")) == {"table1"}
    assert completed("specter-lab", "generate", "qwen") == ["qwen-nano"]
    assert completed("specter-lab", "generate", "--max") == ["--max-tokens"]
    assert completed("specter-lab", "simulate", "qwen-nano", "--profile", "rtx40") == ["rtx4090"]
