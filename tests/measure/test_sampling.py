import numpy as np
import torch

from specter_lab.measure.sampling import accept, accepted_length, distribution, sample

N = 40_000


def generator():
    return torch.Generator().manual_seed(0)


def shares(tokens, size):
    return np.bincount(tokens.flatten().numpy(), minlength=size) / tokens.numel()


def test_accepted_length():
    agreed = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]]).bool()
    assert accepted_length(agreed).tolist() == [3, 0, 1, 2]


def test_distribution():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert distribution(logits, 0.0).tolist() == [[0, 1, 0]]
    torch.testing.assert_close(distribution(logits, 0.5), torch.softmax(2 * logits, -1))


def test_sample_follows_weights_and_never_takes_a_zero():
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 5.0, 0.0])
    found = shares(sample(weights.expand(N, -1), generator()), 6)
    np.testing.assert_allclose(found, weights / 8, atol=0.01)
    assert (found[weights == 0] == 0).all()


def test_accepted_and_replaced_tokens_together_follow_the_target():
    """Position by position, over the three ways a token gets there: accepted, drawn from the residual, bonus."""
    q = torch.softmax(torch.randn(2, 5, generator=generator()), -1)
    p = torch.softmax(torch.randn(3, 5, generator=generator()) + 1.5 * torch.eye(3, 5), -1)
    g = generator()
    drafted = torch.cat([sample(q[i].expand(N, -1), g) for i in range(2)], dim=1)  # [N, 2]
    accepted, following = accept(drafted, q.expand(N, -1, -1), p.expand(N, -1, -1), g)
    tokens = torch.cat([drafted, torch.zeros(N, 1, dtype=torch.long)], dim=1)
    tokens[torch.arange(N), accepted] = following[:, 0]
    for position in range(3):
        there = tokens[accepted >= position, position]
        np.testing.assert_allclose(shares(there, 5), p[position], atol=0.02)
    expected = torch.minimum(p[0], q[0]).sum()  # 1 - total variation
    np.testing.assert_allclose((accepted > 0).float().mean(), expected, atol=0.01)


def test_greedy_is_temperature_zero():
    drafted = torch.tensor([[1, 2], [1, 2], [1, 2]])
    wanted = torch.tensor([[1, 2, 3], [1, 4, 0], [0, 2, 3]])
    accepted, following = accept(drafted, *(torch.eye(5)[x] for x in (drafted, wanted)), generator())
    assert accepted.tolist() == [2, 1, 0]
    assert following.flatten().tolist() == [3, 4, 0]


def test_equal_distributions_are_always_accepted():
    p = torch.softmax(torch.randn(1, 3, 7, generator=generator()), -1).expand(N, -1, -1)
    g = generator()
    drafted = torch.cat([sample(p[:, i], g) for i in range(2)], dim=1)
    accepted, _ = accept(drafted, p[:, :2], p, g)
    assert (accepted == 2).all()
