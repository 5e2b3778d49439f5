"""BLEU of sums is sacrebleu's, intervals hold it, and paired differences are narrower than unpaired ones."""

import numpy as np
import pytest
import sacrebleu

from specter_lab.errors import UserError
from specter_lab.measure import translation

REFERENCES = [
    f"The device number {n} is not {'ready' if n % 3 else 'connected'} yet , please wait {n % 7} seconds"
    for n in range(80)
]
OURS = [
    r.replace("please", "kindly") if n % 4 == 0 else r.replace("seconds", "minutes") if n % 5 == 0 else r
    for n, r in enumerate(REFERENCES)
]
WORSE = [o.replace("The", "A") if n % 9 == 0 else o for n, o in enumerate(OURS)]


def test_bleu_is_sacrebleus():
    found = translation.bleu(translation.bleu_statistics(OURS, REFERENCES))
    assert float(found.estimate) == pytest.approx(sacrebleu.corpus_bleu(OURS, [REFERENCES]).score, abs=1e-9)
    assert found.low < found.estimate < found.high and found.n_requests == 80


def test_no_match_is_near_zero_and_a_copy_is_100():
    nothing = translation.bleu_statistics(["völlig anders"] * 3, ["not the same at all"] * 3)
    assert float(translation.bleu_of(nothing.sum(0))) == pytest.approx(
        sacrebleu.corpus_bleu(["völlig anders"] * 3, [["not the same at all"] * 3]).score
    )
    assert float(translation.bleu(translation.bleu_statistics(REFERENCES, REFERENCES)).low) == pytest.approx(100)
    assert float(translation.chrf(REFERENCES, REFERENCES).estimate) == pytest.approx(100)
    found = translation.chrf(OURS, REFERENCES)
    assert float(found.estimate) == pytest.approx(sacrebleu.corpus_chrf(OURS, [REFERENCES]).score)
    assert found.low < found.estimate < found.high


def test_a_paired_difference_is_narrow():
    before, after = (translation.bleu_statistics(texts, REFERENCES) for texts in (OURS, WORSE))
    change = translation.bleu_change(before, after)
    apart = translation.bleu(before)
    assert change.high < 0 and (change.high - change.low) < 0.8 * (apart.high - apart.low)
    same = translation.bleu_change(before, before)
    assert (same.estimate, same.low, same.high) == (0, 0, 0)


def test_sentences_must_pair_up():
    with pytest.raises(ValueError):
        translation.bleu_statistics(OURS[:3], REFERENCES)
    with pytest.raises(UserError):
        translation.bleu(np.ones((1, 10)))


def test_signature_names_the_tokenizer():
    assert "tok:13a" in translation.signature()
