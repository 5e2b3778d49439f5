"""gptqmodel and autoawq for real, in their own processes, on small models; AWQ's scales and packed format."""

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specter_lab.compress import external
from specter_lab.compress.awq import dequantize_awq, folded_scales, undo_folding
from specter_lab.compress.external import not_run_reason, run_job
from specter_lab.compress.int4 import dequantize_bank
from specter_lab.compress.int4_stored import RoutedExperts, open_int4, read_int4
from specter_lab.compress.job import appearing, read_calibration, read_report
from specter_lab.compress.packed import open_packed
from specter_lab.compress.stored import assemble
from specter_lab.errors import UserError
from specter_lab.models.adapters import adapter_for
from specter_lab.models.experts import read_banks, with_experts
from specter_lab.models.load import load
from specter_lab.models.routing import observe_routing
from specter_lab.models.zoo.shapes import SHAPES
from specter_lab.paths import ROOT, ZOO

needs_gptqmodel = pytest.mark.skipif(
    not_run_reason("gptqmodel-gptq", "qwen2_moe") is not None, reason="gptqmodel is not installed"
)
EXPERTS = {"qwen2_moe": "num_experts", "phimoe": "num_local_experts", "deepseek_v2": "n_routed_experts"}
STARVED = (1, 0)  # layer, expert of qwen-nano that calibration does not reach
WEIGHTS = "model.safetensors"
JOBS = {
    "qwen-gptq": ("qwen-nano", "gptqmodel-gptq"),
    "qwen-gptq-again": ("qwen-nano", "gptqmodel-gptq"),
    "qwen-awq": ("qwen-nano", "gptqmodel-awq"),
    "phi-awq": ("phi-nano", "gptqmodel-awq"),
    "deepseek-awq": ("deepseek-nano", "gptqmodel-awq"),
    "deepseek-autoawq": ("deepseek-nano", "autoawq"),
}


class Finished(NamedTuple):
    folder: Path
    progress: list[str]


# gptqmodel's own reading of AWQ layers: what its CPU kernel multiplies with. Runs in a process of its own.
ORACLE = """
import os, sys
os.environ["GPTQMODEL_CPU_WORKERS"] = "2"
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file
tensors, weights = load_file(sys.argv[1]), {}
for layer in sys.argv[3:]:
    qweight, qzeros, scales = (tensors[layer + name] for name in (".qweight", ".qzeros", ".scales"))
    group = qweight.shape[0] // scales.shape[0]
    weights[layer] = dequantize_gemm(qweight, qzeros, scales, 4, group).t().contiguous()
save_file(weights, sys.argv[2])
"""


def save_two_layers(name, folder):
    """A zoo shape with two layers of eight experts, in BF16; saved, and loaded the way real ones are."""
    original = SHAPES[name].config
    changes = {"num_hidden_layers": 2, "layer_types": None, EXPERTS[original.model_type]: 8, "num_experts_per_tok": 2}
    config = type(original)(**(original.to_dict() | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    for layer in adapter_for(config).moe_layers(model):
        layer.router.weight.normal_()
    if name == "qwen-nano":
        starve(model)
    if name == "deepseek-nano":  # inputs of uneven weight, as in trained models: AWQ's scales depend on them
        for layer in adapter_for(config).moe_layers(model):
            layer.experts.gate_up_proj.mul_((torch.randn(config.hidden_size) / 2).exp())
            layer.experts.down_proj.mul_((torch.randn(config.moe_intermediate_size) / 2).exp())
    if name == "phi-nano":  # its norms have a bias, which AWQ scales as well
        for layer in model.model.layers:
            layer.post_attention_layernorm.bias.normal_(std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in (ZOO / "tokenizer").glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return load(str(folder))


def starve(model):
    """Expert 0 of layer 1 is never among the two best: its score is 0, the others' are pairs x, -x and one more."""
    router = model.model.layers[1].mlp.gate.weight  # [8, H]
    router[0], router[2::2] = 0, -router[1:-1:2]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-layers")
    return {name: save_two_layers(name, folder / name) for name in ("qwen-nano", "phi-nano", "deepseek-nano")}


@pytest.fixture(scope="module")
def jobs(models, ids, tmp_path_factory):
    """Job of JOBS -> what it made; two processes at a time, as in use."""
    if not_run_reason("gptqmodel-gptq", "qwen2_moe"):
        pytest.skip("gptqmodel is not installed")
    root = tmp_path_factory.mktemp("jobs")

    def run(job):
        (name, quantizer), progress = JOBS[job], []
        folder, source = root / job, models[name].path
        run_job(quantizer, source, folder, bits=4, calibration=ids, on_progress=progress.append)
        return Finished(folder, progress)

    wanted = [job for job, (_, quantizer) in JOBS.items() if quantizer != "autoawq" or external.AUTOAWQ_PYTHON.exists()]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(wanted, pool.map(run, wanted)))


def banks_in(folder, source):
    """Dequantised experts as they stand in a packed checkpoint."""
    return assemble(open_packed(folder, source), source, str(folder))[0]


def output_error(source, banks, ids):
    with torch.no_grad():
        wanted, got = source.model(ids).logits, with_experts(source.model, banks)(ids).logits
    return ((got - wanted).norm() / wanted.norm()).item()


def test_gptq_leaves_everything_but_routed_experts_alone(models, jobs):
    before = load_file(models["qwen-nano"].path / WEIGHTS)
    after = load_file(jobs["qwen-gptq"].folder / WEIGHTS)
    others = {name for name in before if ".experts." not in name}
    assert others == {name for name in after if ".experts." not in name}
    for name in others:
        assert torch.equal(before[name].float(), after[name].float()), name
    packed = {name.rpartition(".")[0] for name in after if name.endswith(".qweight")}
    assert packed == {name.removesuffix(".weight") for name in before if ".experts." in name}


def test_gptq_experts_approximate_the_source(models, jobs, ids):
    source, folder = models["qwen-nano"], jobs["qwen-gptq"].folder
    for bank, original in zip(banks_in(folder, source), read_banks(source.model)):
        for name in ("gate", "up", "down"):
            wanted, got = getattr(original, name), getattr(bank, name)
            assert 0.02 < (got - wanted).norm() / wanted.norm() < 0.2
    assert output_error(source, banks_in(folder, source), ids) < 0.05


def test_gptq_codes_fit_the_int4_layout_and_awq_codes_do_not(models, jobs):
    folder, experts = jobs["qwen-gptq"].folder, RoutedExperts("qwen-nano", (0, 1), 8, 256, 32)
    for bank, expected in zip(read_int4(folder, experts), banks_in(folder, models["qwen-nano"]), strict=True):
        found = dequantize_bank(bank)
        assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in ("gate", "up", "down"))
    with pytest.raises(UserError, match="quantised by awq, whose zero points"):
        open_int4(jobs["qwen-awq"].folder)


@pytest.mark.parametrize("job", ["qwen-gptq", "qwen-awq"])
def test_report_counts_every_token_and_names_the_starved_expert(jobs, ids, job):
    report = read_report(jobs[job].folder)
    assert report.quantizer == JOBS[job][1] and report.bits == 4
    assert report.group_sizes == {"gate": 128, "up": 128, "down": 32}
    assert report.calibration_tokens == ids.numel()
    assert list(report.tokens_per_expert) == [0, 1]
    assert all(sum(counts) == 2 * ids.numel() for counts in report.tokens_per_expert.values())  # top-2
    assert report.starved == [STARVED]
    assert {name.rpartition(".")[0] for name in report.fallback} == {"layers.1.mlp.experts.0"}


def test_same_arguments_give_the_same_bytes(jobs):
    first, again = jobs["qwen-gptq"], jobs["qwen-gptq-again"]
    assert (first.folder / WEIGHTS).read_bytes() == (again.folder / WEIGHTS).read_bytes()
    assert first.progress == again.progress == ["layer 1 of 2", "layer 2 of 2"]


def test_dequantised_awq_is_what_gptqmodel_computes_with(jobs, tmp_path):
    file = jobs["deepseek-awq"].folder / WEIGHTS
    layers = [f"model.layers.1.mlp.experts.3.{projection}_proj" for projection in ("gate", "up", "down")]
    subprocess.run([sys.executable, "-c", ORACLE, file, tmp_path / "w", *layers], check=True, capture_output=True)
    wanted, tensors = load_file(tmp_path / "w"), load_file(file)
    for layer in layers:
        got = dequantize_awq(*(tensors[f"{layer}.{name}"] for name in ("qweight", "qzeros", "scales")))
        assert torch.equal(got.to(wanted[layer].dtype), wanted[layer])


@pytest.mark.parametrize("job", ["qwen-awq", "phi-awq", "deepseek-awq"])
def test_awq_scales_move_out_of_the_norm_without_changing_the_model(models, jobs, ids, job):
    """Original norm + effective experts = scaled norm + experts as stored + everything else compensated."""
    source, folder = models[JOBS[job][0]], jobs[job].folder
    scales, stored = folded_scales(source.path, folder), banks_in(folder, source)
    moe_layers = source.adapter.moe_layers(source.model)
    assert all((scales[layer.index] - 1).abs().max() > 0.01 for layer in moe_layers)  # AWQ did scale, in every layer
    effective = with_experts(source.model, undo_folding(stored, scales))
    compensated = compensate(load(str(source.path)), scales, stored)
    with torch.no_grad():
        routing, logits = run_routed(effective, ids)
        wanted_routing, wanted_logits = run_routed(compensated, ids)
    assert all(torch.equal(a, b) for a, b in zip(routing, wanted_routing))
    assert (logits - wanted_logits).norm() < 1e-4 * wanted_logits.norm()
    naive = with_experts(source.model, stored)(ids).logits  # stored experts behind the original norm are another model
    assert (naive - wanted_logits).norm() > 1e-3 * wanted_logits.norm()
    assert output_error(source, undo_folding(stored, scales), ids) < 0.1


def compensate(source, scales, banks):
    """The model as AWQ means it: norm divided by the scales, all that reads it multiplied, experts as stored."""
    model = with_experts(source.model, banks)
    for index, scale in scales.items():
        layer = model.model.layers[index]
        for parameter in layer.post_attention_layernorm.parameters():
            parameter.div_(scale)
        for name, module in layer.mlp.named_modules():
            if name in ("gate", "router", "shared_expert_gate") or name.endswith(("gate_proj", "up_proj")):
                module.weight.mul_(scale)
    return model


def run_routed(model, ids):
    """Expert indices [T, k] of every MoE layer, and logits."""
    indices = []
    with observe_routing(model, lambda routing: indices.append(routing.indices.sort(dim=-1).values)):
        logits = model(ids).logits
    return indices, logits


@pytest.mark.skipif(not external.AUTOAWQ_PYTHON.exists(), reason="no .venv-autoawq: `make setup-autoawq`")
def test_autoawq_and_gptqmodel_agree_on_a_model_both_know(models, jobs, ids):
    source, errors, reports = models["deepseek-nano"], [], []
    for job in ("deepseek-autoawq", "deepseek-awq"):
        folder = jobs[job].folder
        effective = undo_folding(banks_in(folder, source), folded_scales(source.path, folder))
        errors.append(output_error(source, effective, ids))
        reports.append(read_report(folder))
        assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"
    assert 0.8 < errors[0] / errors[1] < 1.25
    assert reports[0].group_sizes == reports[1].group_sizes
    for report in reports:
        (counts,) = report.tokens_per_expert.values()  # one MoE layer
        assert sum(counts) == 2 * ids.numel()  # top-2


def test_autoawq_says_why_it_does_not_run(monkeypatch, tmp_path):
    assert "does not know qwen2_moe" in not_run_reason("autoawq", "qwen2_moe")
    monkeypatch.setattr(external, "AUTOAWQ_PYTHON", tmp_path / "python")
    assert "make setup-autoawq" in not_run_reason("autoawq", "deepseek_v2")


@needs_gptqmodel
def test_failed_job_names_its_last_line_and_leaves_only_the_log(models, ids, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(models["phi-nano"].path, broken)
    (broken / WEIGHTS).write_bytes((broken / WEIGHTS).read_bytes()[:100_000])
    with pytest.raises(UserError, match="gptqmodel-gptq with 4 bits on broken stopped: .*Error: .*log: "):
        run_job("gptqmodel-gptq", broken, tmp_path / "made", bits=4, calibration=ids)
    assert {file.name for file in tmp_path.iterdir()} == {"broken", "made.log"}


@pytest.mark.parametrize(
    "ids, problem",
    [([1, 2, 3], "no integers"), ([[0.5]], "no integers"), ([[1, 2048]], "token 2048"), ([[-1]], "token -1")],
)
def test_calibration_that_does_not_fit_is_refused(tmp_path, ids, problem):
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(UserError, match=problem):
        read_calibration(tmp_path / "ids.npy", vocab_size=2048)


def test_destination_appears_whole_or_not_at_all(tmp_path):
    destination = tmp_path / "made"
    (tmp_path / "made.partial").mkdir()
    (tmp_path / "made.partial" / "left by a killed job").touch()
    with pytest.raises(OSError), appearing(destination) as folder:
        (folder / WEIGHTS).touch()
        raise OSError("disk full")
    assert not list(tmp_path.iterdir())
    with appearing(destination) as folder:
        (folder / WEIGHTS).touch()
        assert not destination.exists()
    assert [file.name for file in destination.iterdir()] == [WEIGHTS]
    with pytest.raises(UserError, match="is there already"), appearing(destination):
        pass


def test_damaged_awq_tensors_are_refused():
    qweight, qzeros = torch.zeros(64, 4, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    assert dequantize_awq(qweight, qzeros, torch.ones(2, 32).half()).shape == (32, 64)
    with pytest.raises(UserError, match="do not make one layer"):
        dequantize_awq(qweight, qzeros, torch.ones(2, 24).half())
    with pytest.raises(UserError, match="4 bits, this one says 3"):
        dequantize_awq(qweight, qzeros, torch.ones(2, 32).half(), bits=3)


def test_norms_of_another_model_are_refused(models, tmp_path):
    source = models["phi-nano"]
    with pytest.raises(UserError, match="same layers"):
        folded_scales(source.path, tmp_path)
    tensors = load_file(source.path / WEIGHTS)
    tensors["model.layers.0.post_attention_layernorm.bias"] += 1
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match="layer 0: the norm in"):
        folded_scales(source.path, tmp_path)


def test_a_job_does_not_outlive_its_parent(tmp_path):
    """Kill -9 of the process that started it: nobody could use what it makes."""
    job = "import time; from specter_lab.compress.job import exit_after; exit_after(lambda: time.sleep(600))"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {job!r}]); print(p.pid, flush=True); p.wait()"
    run = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(run.stdout.readline()))
    time.sleep(2)  # the job reads its parent's number when it starts
    run.kill()
    run.communicate()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
