"""The one-layer-ahead predictor against a loop over requests, tokens and layers."""

import torch

from specter_lab.measure.lookahead import lookahead_overlap
from specter_lab.measure.prompts import select, tokenize
from specter_lab.models.load import load
from specter_lab.models.routing import observe_routing


def test_equals_a_plain_loop():
    source = load("phi-nano")
    tokens = tokenize(select(2, sets=["prose", "dialogue"]), source.tokenizer, max_tokens=24)
    layers = source.adapter.moe_layers(source.model)
    expected = []
    for ids in tokens.ids:
        seen = []
        with torch.inference_mode(), observe_routing(source.model, seen.append):
            source.model.model(input_ids=ids[None], use_cache=False)
            predicted = [layer.router(seen[i].hidden)[2] for i, layer in enumerate(layers[1:])]
        for t in range(len(ids)):
            row = [
                len({*predicted[i][t].tolist()} & {*seen[i + 1].indices[t].tolist()}) / 2 for i in range(len(predicted))
            ]
            expected.append(row)
    got = torch.from_numpy(lookahead_overlap(source.model, tokens))
    assert got.shape == (tokens.num_tokens, len(layers) - 1)
    assert (got == torch.tensor(expected)).float().mean() > 0.999  # a near tie may fall the other way in a larger batch
    assert 0.3 < got.mean() < 1
