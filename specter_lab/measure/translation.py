"""BLEU and chrF by sacrebleu, with bootstrap intervals over sentences, alone and as paired differences.

BLEU of a corpus is a function of sums over its sentences, so a resample is a resample of those sums; two systems are
compared on the same resamples (paired bootstrap, Koehn 2004).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from specter_lab.measure.bootstrap import Interval, resample_counts

RESAMPLES = 1000
CONFIDENCE = 0.95
_ORDER = 4


def bleu_statistics(translations: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Per sentence [N, 10]: matching n-grams (1 to 4), n-grams (1 to 4), length, reference length.

    Raises:
        ValueError: not as many references as translations.
    """
    metric = BLEU(effective_order=True)  # of single sentences; the sums do not depend on it
    scores = [
        metric.sentence_score(ours, [reference]) for ours, reference in zip(translations, references, strict=True)
    ]
    return np.array(
        [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores], dtype=np.float64
    )


def bleu_of(sums: np.ndarray) -> np.ndarray:
    """BLEU of summed statistics [..., 10]."""
    flat = sums.reshape(-1, 2 * _ORDER + 2).round().astype(int)
    found = [
        BLEU.compute_bleu(
            list(row[:_ORDER]), list(row[_ORDER:-2]), int(row[-2]), int(row[-1]), smooth_method="exp"
        ).score
        for row in flat
    ]
    return np.array(found).reshape(sums.shape[:-1])


def bleu(statistics: np.ndarray, seed: int = 0) -> Interval:
    """Corpus BLEU with its bootstrap interval.

    Raises:
        UserError: fewer than two sentences.
    """
    drawn = resample_counts(len(statistics), RESAMPLES, seed) @ statistics  # [B, 10]
    return _interval(bleu_of(statistics.sum(0)), bleu_of(drawn), len(statistics))


def bleu_change(before: np.ndarray, after: np.ndarray, seed: int = 0) -> Interval:
    """BLEU after minus before, on the same sentences and the same resamples.

    Raises:
        UserError: fewer than two sentences.
    """
    counts = resample_counts(len(before), RESAMPLES, seed)
    drawn = bleu_of(counts @ after) - bleu_of(counts @ before)
    return _interval(bleu_of(after.sum(0)) - bleu_of(before.sum(0)), drawn, len(before))


def _interval(estimate: np.ndarray, drawn: np.ndarray, n: int) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return Interval(estimate, low, high, n, CONFIDENCE)


def chrf(translations: Sequence[str], references: Sequence[str], seed: int = 0) -> Interval:
    """Corpus chrF2 with its bootstrap interval.

    Raises:
        UserError: fewer than two sentences.
    """
    metric = CHRF()  # sacrebleu has no public way to its per-sentence sums; the pin and a test hold this one
    sums = np.array(metric._extract_corpus_statistics(list(translations), [list(references)]), dtype=np.float64)
    drawn = resample_counts(len(sums), RESAMPLES, seed) @ sums  # [B, 18]
    scores = np.array([metric._compute_score_from_stats(row.tolist()).score for row in drawn])
    return _interval(np.array(metric._compute_score_from_stats(sums.sum(0).tolist()).score), scores, len(sums))


def signature() -> str:
    """How sacrebleu describes the BLEU that is computed here."""
    metric = BLEU()
    metric.corpus_score(["a"], [["a"]])
    return str(metric.get_signature())
