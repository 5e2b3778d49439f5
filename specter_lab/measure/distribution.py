"""Does sampled speculative output follow the target's distribution? An exact check (Specter, losslessness).

The models keep their weights, but their vocabulary is cut to a few tokens, so that the probability of every possible
continuation of n tokens can be computed by reading all V^n of them. Continuations sampled by the speculative decoder
are counted and compared with that law. Two accept rules that are wrong on purpose show what the test can see.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor, nn
from transformers import PreTrainedModel

from specter_lab.measure.sampling import AcceptRule, accept, at, sample

FEWEST_EXPECTED = 5.0  # cells with a smaller expected count are merged into one (Pearson's rule of thumb)


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square test of counts against a law, over the cells that are left after merging."""

    n: int
    cells: int
    chi_square: float
    p_value: float
    total_variation: float  # between counts and law: also a perfect sampler shows about sqrt(cells / (2 pi n))
    total_variation_at_most: float  # of what was sampled from and the law over these cells, upper confidence bound


def with_vocabulary(model: PreTrainedModel, token_ids: Tensor) -> PreTrainedModel:
    """The same model with a vocabulary of only `token_ids` [V]; every other tensor is shared."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    small = copy.deepcopy(model, memo=dict(shared))
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(model.get_output_embeddings().weight[token_ids], requires_grad=False)
    small.set_input_embeddings(nn.Embedding.from_pretrained(model.get_input_embeddings().weight[token_ids]))
    small.set_output_embeddings(head)
    small.config.vocab_size = len(token_ids)
    return small


def continuation_law(model: PreTrainedModel, prompt: Tensor, length: int, temperature: float) -> np.ndarray:
    """Probability of every continuation of `length` tokens of a prompt [P]: [V^n] float64, by `continuation_index`.

    One forward pass over all V^n texts: for small vocabularies only.
    """
    prompt = prompt.to(model.device)
    vocabulary = torch.arange(model.config.vocab_size, device=prompt.device)
    texts = torch.cartesian_prod(*[vocabulary] * length).view(-1, length)  # [V^n, n]
    inputs = torch.cat([prompt.expand(len(texts), -1), texts[:, :-1]], dim=1)
    with torch.inference_mode():
        logits = model(input_ids=inputs).logits[:, -length:].double()  # [V^n, n, V]
    log_p = torch.log_softmax(logits / temperature, dim=-1).gather(2, texts[..., None])
    return log_p.sum(dim=(1, 2)).exp().cpu().numpy()


def continuation_index(tokens: Tensor, vocabulary: int) -> np.ndarray:
    """Number of each continuation [N, n] in the law: its tokens as digits to the base V, first token first."""
    powers = vocabulary ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return (tokens * powers).sum(dim=1).numpy()


def goodness_of_fit(counts: np.ndarray, law: np.ndarray, confidence: float = 0.95) -> Fit:
    """Test counts [C] against probabilities [C].

    The bound on total variation follows from the chi-square statistic: under another law it is non-central with
    parameter n x sum (p' - p)^2 / p, the largest one not excluded bounds that sum, and by Cauchy-Schwarz half its root
    bounds the total variation. A parameter is excluded by the CLs criterion (A. L. Read, J. Phys. G 28, 2002): a
    statistic that is this small must be unlikely under it *compared with* the law itself. So counts that fit better
    than chance would have it claim no more than the sample can show: the bound never falls below
    sqrt(-2 ln(1 - confidence) / n) / 2.

    Raises:
        ValueError: fewer than two cells are left after merging.
    """
    n = int(counts.sum())
    observed, expected = _merge_rare(counts, law * n)
    if len(expected) < 2:
        raise ValueError(f"{n} samples leave fewer than two cells to compare: draw more")
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    return Fit(
        n=n,
        cells=len(expected),
        chi_square=chi_square,
        p_value=1 - _chi_square_below(chi_square, freedom),
        total_variation=float(np.abs(observed - expected).sum() / (2 * n)),
        total_variation_at_most=float(np.sqrt(_largest_noncentrality(chi_square, freedom, confidence) / n) / 2),
    )


def _merge_rare(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rarest cells first, with those below FEWEST_EXPECTED in one, which takes in more until it is large enough."""
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    rare = int((expected < FEWEST_EXPECTED).sum())
    if rare:
        rare = max(rare, int(np.searchsorted(expected.cumsum(), FEWEST_EXPECTED)) + 1)
        observed, expected = (np.append(x[:rare].sum(), x[rare:]) for x in (observed, expected))
    return observed, expected


def _chi_square_below(x: float, freedom: int, noncentrality: float = 0.0) -> float:
    """P(chi-square <= x); non-central as a Poisson mixture of central ones."""
    half = torch.tensor(noncentrality / 2, dtype=torch.float64)
    terms = torch.arange(int(half + 12 * half.sqrt() + 20), dtype=torch.float64)
    log_weight = torch.special.xlogy(terms, half) - half - torch.lgamma(terms + 1)
    below = torch.special.gammainc(freedom / 2 + terms, torch.tensor(x / 2, dtype=torch.float64))
    return float((log_weight.exp() * below).sum())


def _largest_noncentrality(x: float, freedom: int, confidence: float) -> float:
    """The non-centrality with which a chi-square of at most x is 1 - confidence times as likely as without; bisection."""
    x = max(x, freedom / 10)  # a fit that good has a chance which underflows; the bound hardly depends on it there
    excluded_below = (1 - confidence) * _chi_square_below(x, freedom)
    low, high = 0.0, 4 * x + 100
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _chi_square_below(x, freedom, middle) > excluded_below else (low, middle)
    return low


def always_accept(drafted: Tensor, q: Tensor, p: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Wrong on purpose: every drafted token is kept."""
    accepted = torch.full((len(drafted),), drafted.shape[1], device=drafted.device)
    return accepted, sample(p[:, -1], generator)


def no_residual(drafted: Tensor, q: Tensor, p: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Wrong on purpose: after a rejection the next token is drawn from p, not from what q left over."""
    accepted, _ = accept(drafted, q, p, generator)
    return accepted, sample(at(p, accepted), generator)


STANDARD = "standard"
RULES: dict[str, AcceptRule] = {STANDARD: accept, "always accept": always_accept, "no residual": no_residual}
