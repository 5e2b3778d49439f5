"""Batched GPTQ against gptqmodel's own class, against rounding to nearest, and on starved experts."""

import json
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import silu

from specter_lab.compress import gptq, grid, rtn
from specter_lab.compress.gptq import LayerInputs
from specter_lab.compress.sequential import quantize_in_order
from specter_lab.models.experts import ExpertBank, read_banks, with_experts
from specter_lab.models.routing import observe_routing


def correlated(tokens, features, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator) / features**0.5
    return torch.randn(tokens, features, generator=generator) @ (mixing + torch.eye(features))


def random_weights(*shape, seed=1):
    return 0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def output_error(inputs, weights, coded, expert=0):
    return (inputs @ (weights[expert] - grid.dequantize(coded)[expert]).t()).square().sum()


def textbook_gptq(weights, hessian, bits, group):
    """The paper's loop for one layer in float64: inverse Hessian, its upper Cholesky factor, one input at a time."""
    w, size = weights.double().clone(), hessian.shape[0]
    damped = hessian.double() + gptq.DAMP * hessian.double().diagonal().mean() * torch.eye(size)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    codes = torch.empty_like(w)
    for i in range(size):
        if i % group == 0:
            scale = grid.scale_for(w[:, i : i + group].abs().amax(dim=1), bits)
        codes[:, i] = grid.round_to_codes(w[:, i], scale, bits)
        error = (w[:, i] - codes[:, i] * scale.double()) / factor[i, i]
        w[:, i:] -= error[:, None] * factor[i, i:][None, :]
    return codes


@pytest.mark.parametrize(("bits", "features"), [(2, 256), (3, 256), (4, 256), (8, 256), (4, 32)])
def test_codes_are_the_papers(bits, features):
    weights = random_weights(3, 16, features)
    hessian = gptq.hessians([correlated(400, features, seed) for seed in range(3)])
    coded = gptq.solve(weights, hessian, bits)
    for expert in range(3):
        expected = textbook_gptq(weights[expert], hessian[expert], bits, min(128, features))
        assert (coded.codes[expert] == expected).float().mean() > 0.995  # float32 against float64: ties fall apart
    assert coded.scales.shape == (3, 16, max(1, features // 128))


def test_no_worse_than_gptqmodel_on_the_same_inputs():
    command = "specter_lab.compress.bench_gptq --experts 6 --tokens 2048".split()
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout[done.stdout.rindex("{") :])
    assert found["gate_up_error_ratio"] < 1.01 and found["down_error_ratio"] < 1.01
    assert found["equal_codes"] > 0.95


def test_it_beats_rounding_to_nearest_where_it_counts():
    inputs, weights = correlated(400, 256), random_weights(1, 64, 256)
    fitted = gptq.solve(weights, gptq.hessians([inputs]), 4)
    nearest = grid.round_to_nearest(weights, 4)
    assert output_error(inputs, weights, fitted) < 0.7 * output_error(inputs, weights, nearest)


def test_experts_of_one_batch_do_not_see_each_other():
    weights, inputs = random_weights(2, 8, 64), [correlated(100, 64, seed) for seed in (0, 1)]
    both = gptq.solve(weights, gptq.hessians(inputs), 4)
    for expert in range(2):
        alone = gptq.solve(weights[expert : expert + 1], gptq.hessians([inputs[expert]]), 4)
        assert torch.equal(both.codes[expert], alone.codes[0])


def test_dead_inputs_are_rounded_to_nearest_and_disturb_nothing():
    inputs, weights = correlated(400, 64), random_weights(1, 8, 64)
    dead = [3, 40]
    inputs[:, dead] = 0
    coded = gptq.solve(weights, gptq.hessians([inputs]), 4)
    nearest = grid.round_to_codes(weights[0], coded.scales[0], 4)
    assert torch.equal(coded.codes[0][:, dead].float(), nearest[:, dead])
    assert output_error(inputs, weights, coded) < output_error(inputs, weights, grid.round_to_nearest(weights, 4))


@pytest.fixture
def bank():
    return ExpertBank(0, random_weights(4, 32, 256), random_weights(4, 32, 256, seed=2), random_weights(4, 256, 32))


def test_experts_with_no_token_and_with_one(bank):
    """Expert 3 gets nothing and comes out rounded to nearest; expert 2 gets one token and serves it better."""
    hidden = correlated(201, 256)
    indices = torch.tensor([[0, 1]] * 200 + [[0, 2]])
    coded = gptq.quantize_bank(bank, LayerInputs(hidden, indices, silu), 4)
    nearest = rtn.quantize_bank(bank, 4)
    for projection in ("gate", "up", "down"):
        fitted, plain = getattr(coded, projection), getattr(nearest, projection)
        assert torch.equal(fitted.codes[3], plain.codes[3]) and torch.equal(fitted.scales[3], plain.scales[3])
        assert not torch.equal(fitted.codes[0], plain.codes[0])
        assert grid.dequantize(fitted).isfinite().all()
    assert output_error(hidden[-1:], bank.gate, coded.gate, 2) < output_error(hidden[-1:], bank.gate, nearest.gate, 2)


def test_layers_are_fitted_to_quantised_layers_below(source, ids):
    """Tokens that reach the experts of each layer are those of a model whose lower layers are quantised already."""
    results = list(quantize_in_order(source, ids, lambda bank, _inputs: rtn.quantize_bank(bank, 2)))
    assert [coded.layer for coded, _ in results] == [bank.layer for bank in read_banks(source.model)]
    banks = [
        ExpertBank(coded.layer, *(grid.dequantize(getattr(coded, name)) for name in ("gate", "up", "down")))
        for coded, _ in results
    ]
    counts = {}

    def count(routing):
        counts[routing.layer] = torch.bincount(routing.indices.flatten(), minlength=source.num_experts)

    draft = with_experts(source.model, banks)
    with torch.no_grad(), observe_routing(draft, count):
        draft(ids)
    for coded, tokens in results:
        assert torch.equal(tokens, counts[coded.layer])
        assert tokens.sum() == ids.numel() * source.top_k


def test_the_source_model_is_left_alone(qwen, ids):
    before = {name: tensor.clone() for name, tensor in qwen.model.state_dict().items()}
    list(quantize_in_order(qwen, ids, lambda bank, inputs: gptq.quantize_bank(bank, inputs, 4)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in qwen.model.state_dict().items())


def test_the_same_twice(qwen, ids):
    def run():
        return [coded for coded, _ in quantize_in_order(qwen, ids, lambda b, i: gptq.quantize_bank(b, i, 4))]

    for first, second in zip(run(), run()):
        assert torch.equal(first.gate.codes, second.gate.codes) and torch.equal(first.down.scales, second.down.scales)


@pytest.mark.gpu
def test_on_a_gpu_codes_are_mostly_the_same(bank):
    hidden, indices = correlated(400, 256), torch.arange(400)[:, None] % 4
    here = gptq.quantize_bank(bank, LayerInputs(hidden, indices, silu), 4)
    moved = ExpertBank(0, bank.gate.cuda(), bank.up.cuda(), bank.down.cuda())
    there = gptq.quantize_bank(moved, LayerInputs(hidden.cuda(), indices.cuda(), silu), 4)
    assert there.gate.codes.is_cuda and (there.gate.codes.cpu() == here.gate.codes).float().mean() > 0.98
