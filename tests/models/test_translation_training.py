"""Grouped experts equal the class's; batches cover every example once; a toy training run makes a complete folder."""

import dataclasses
import json
import lzma

import pytest
import torch
from transformers import AutoTokenizer, SwitchTransformersForConditionalGeneration

from specter_lab.models.load import checkpoint_digest
from specter_lab.models.zoo import train_translation
from specter_lab.models.zoo.grouped_switch import group_experts, ungroup_experts
from specter_lab.models.zoo.pairs import read_pairs
from specter_lab.models.zoo.train_translation import run
from specter_lab.models.zoo.translation import IGNORED, PAD, SHAPES, Examples, config, epoch, pair_tokenizer
from specter_lab.models.zoo.translation_recipe import TOY, loss_of

TINY = config(d_model=32, d_ff=48, heads=2, head_dim=16, encoder_layers=4, decoder_layers=2, dropout=0.0, experts=6)


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    model = SwitchTransformersForConditionalGeneration(TINY)
    for block in (*model.encoder.block, *model.decoder.block):
        if block.is_sparse:
            torch.nn.init.normal_(block.layer[-1].mlp.router.classifier.weight, std=1.0)
    return model


def inputs():
    sources = torch.randint(3, 200, (5, 12), generator=torch.Generator().manual_seed(1))
    targets = torch.randint(3, 200, (5, 12), generator=torch.Generator().manual_seed(2))
    sources[1, 7:], targets[3, 4:] = PAD, IGNORED
    return sources, targets


def test_grouped_experts_compute_what_the_class_computes(tiny):
    sources, targets = inputs()
    arguments = dict(input_ids=sources, attention_mask=(sources != PAD).long(), labels=targets)
    expected = tiny(**arguments)
    expected.loss.backward()
    experts = tiny.encoder.block[1].layer[-1].mlp.experts
    expected_grads = torch.stack([e.wi.weight.grad for e in experts.values() if e.wi.weight.grad is not None])
    grouped = group_experts(tiny)
    assert [len(layers) for layers in grouped.values()] == [2, 1]
    got = tiny(**arguments)
    torch.testing.assert_close(got.logits, expected.logits, atol=2e-5, rtol=2e-5)
    got.loss.backward()
    grads = grouped["encoder"][0].wi.grad
    torch.testing.assert_close(grads[grads.abs().sum((1, 2)) > 0], expected_grads, atol=2e-5, rtol=2e-4)
    assert int((grouped["encoder"][0].load > 0).sum()) >= 4  # several experts were really used


def test_ungrouping_brings_trained_weights_back(tiny):
    sources, targets = inputs()
    names = set(tiny.state_dict())
    grouped = group_experts(tiny)
    with torch.no_grad():
        for layer in grouped["encoder"] + grouped["decoder"]:
            layer.wi.add_(0.01)
            layer.wo.mul_(1.1)
            layer.router.mul_(0.9)
    arguments = dict(input_ids=sources, attention_mask=(sources != PAD).long(), labels=targets)
    trained = tiny(**arguments).logits
    ungroup_experts(tiny)
    assert set(tiny.state_dict()) == names
    torch.testing.assert_close(tiny(**arguments).logits, trained, atol=2e-5, rtol=2e-5)


def test_loss_is_the_classs_and_padding_is_not_counted(tiny):
    sources, targets = inputs()
    expected = tiny(input_ids=sources, attention_mask=(sources != PAD).long(), labels=targets).loss
    grouped = group_experts(tiny)
    torch.testing.assert_close(loss_of(tiny, grouped, sources, targets), expected)
    before = grouped["encoder"][0].load
    wider = torch.nn.functional.pad(sources, (0, 9), value=PAD), torch.nn.functional.pad(targets, (0, 9), value=IGNORED)
    torch.testing.assert_close(loss_of(tiny, grouped, *wider), expected)
    torch.testing.assert_close(grouped["encoder"][0].load, before)


def test_an_epoch_is_every_example_once_in_narrow_batches():
    rows = read_pairs("test")[:300]
    examples = Examples.of(rows, pair_tokenizer(rows), 64, "cpu")
    batches = list(epoch(examples, 512, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat(batches).tolist()) == list(range(len(examples.widths)))
    for batch in batches:
        sources, targets = examples.batch(batch)
        assert sources.shape == targets.shape and sources.numel() <= 512 and len(examples.widths[batch].unique()) == 1
        lengths = torch.maximum((sources != PAD).sum(1), (targets != IGNORED).sum(1))
        assert (lengths > sources.shape[1] - 8).all()


def test_toy_training_writes_a_folder_that_loads(tmp_path, monkeypatch):
    rows = read_pairs("validation")[:400]
    lines = "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
    (tmp_path / "train.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    monkeypatch.setitem(SHAPES, "switch-nano", TINY)
    monkeypatch.setattr(train_translation, "SAMPLES", 8)
    recipe = dataclasses.replace(TOY, steps=24)
    record = run("switch-nano", recipe, tmp_path, tmp_path / "zoo", toy=True)
    assert record["steps"] == 24 and record["loss_curve"][-1]["validation"] < record["loss_curve"][0]["validation"]
    folder = tmp_path / "zoo" / "switch-nano"
    checkpoint_digest(folder)  # every file is the manifest's
    model, report = SwitchTransformersForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<to-de>") == 3
    assert "software interface" in (folder / "README.md").read_text()
