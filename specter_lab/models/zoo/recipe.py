"""The training recipe of the zoo: one file of numbers, one loop.

The loop trains in the precision the model is shipped in: parameters are BF16 and every forward pass uses them as
such, while AdamW keeps float32 masters. On a GPU the whole step is one CUDA graph, because models this small spend
their time launching kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specter_lab.models.adapters import adapter_for
from specter_lab.models.routing import Routing, observe_routing


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, besides the corpus and the shape."""

    tokens: int = 250_000_000
    batch: int = 128  # sequences per step
    seq_len: int = 512  # tokens per sequence
    lr: float = 3e-3  # peak, cosine to a tenth
    warmup_steps: int = 100
    weight_decay: float = 0.1  # matrices only
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    balance: float = 0.01  # weight of the load-balancing loss, per layer
    seed: int = 0

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.batch * self.seq_len))

    def lr_at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Progress:
    """One line of the loss curve."""

    step: int
    tokens: int
    loss: float  # nats per token, this step
    balance: float  # mean over layers; 1.0 = perfectly even
    seconds: float


def build(config: PretrainedConfig, *, seed: int, device: str) -> PreTrainedModel:
    """A freshly initialised model: BF16 parameters on a GPU, float32 on a CPU (toy size)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="grouped_mm")
    model.to(device).train()
    if device.startswith("cuda"):
        for parameter in model.parameters():  # parameters only: rotary frequencies must stay float32
            parameter.data = parameter.data.bfloat16()
    return model


def balance_loss(routing: Routing) -> Tensor:
    """Switch-Transformer load-balancing loss of one layer: E * sum_e f_e P_e (Fedus et al. 2021, eq. 4); 1.0 if even."""
    num_experts = routing.logits.shape[-1]
    probability = routing.logits.float().softmax(-1).mean(0)  # [E]
    load = torch.zeros_like(probability).scatter_add_(
        0, routing.indices.reshape(-1), torch.ones_like(routing.indices.reshape(-1), dtype=probability.dtype)
    )
    return num_experts * (load / routing.indices.numel() * probability).sum()


@dataclass(frozen=True)
class Mixture:
    """Token streams of several domains on one device, and how often each is drawn."""

    stream: Tensor  # [N] token ids, domain after domain
    starts: Tensor  # [D] first token of each domain
    sizes: Tensor  # [D] tokens of each domain
    shares: Tensor  # [D] probability of each domain, sums to one

    @staticmethod
    def of(streams: dict[str, Tensor], shares: dict[str, float], device: str) -> Mixture:
        sizes = torch.tensor([len(s) for s in streams.values()])
        return Mixture(torch.cat(list(streams.values())).to(device), sizes.cumsum(0) - sizes, sizes,
                       torch.tensor([shares[domain] for domain in streams]))  # fmt: skip


def windows(mixture: Mixture, recipe: Recipe) -> Iterator[Tensor]:
    """Endless batches [batch, seq_len + 1] of random windows, each within one domain, deterministic in the seed."""
    generator = torch.Generator().manual_seed(recipe.seed)
    span = torch.arange(recipe.seq_len + 1, device=mixture.stream.device)
    while True:
        domain = torch.multinomial(mixture.shares, recipe.batch, replacement=True, generator=generator)
        room = mixture.sizes[domain] - recipe.seq_len - 1
        first = (
            mixture.starts[domain] + (torch.rand(recipe.batch, generator=generator, dtype=torch.float64) * room).long()
        )
        yield mixture.stream[first.to(span.device)[:, None] + span].long()


def train(
    model: PreTrainedModel, mixture: Mixture, recipe: Recipe, *, log_every: int, on_log: Callable[[Progress], None]
) -> None:
    """Train `model` in place on `mixture` (which lies on the model's device).

    Raises:
        FloatingPointError: the loss is no longer finite.
    """
    device = mixture.stream.device
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone().requires_grad_() for p in params]
    for master in masters:
        master.grad = torch.zeros_like(master)
    lr = torch.tensor(recipe.lr, device=device)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in masters if m.ndim >= 2], "weight_decay": recipe.weight_decay},
            {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr, betas=recipe.betas, fused=on_gpu, capturable=on_gpu,
    )  # fmt: skip
    adapter = adapter_for(model.config)
    num_layers = len(adapter.moe_layers(model))
    batch = torch.zeros(recipe.batch, recipe.seq_len + 1, dtype=torch.long, device=device)  # the graph reads here
    last = torch.zeros(2, device=device)  # loss, balance of the step just done

    def step() -> None:
        balances: list[Tensor] = []
        # `device`: Phimoe recomputes its rotary frequencies on the default device, and a graph cannot copy from the CPU
        with device, observe_routing(model, lambda routing: balances.append(balance_loss(routing))):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # [B, T, V]
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        balance = torch.stack(balances).sum()
        grads = torch.autograd.grad(loss + recipe.balance * balance, params)
        torch._foreach_copy_([m.grad for m in masters], grads)
        torch.nn.utils.clip_grad_norm_(masters, recipe.clip_norm, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
            last.copy_(torch.stack((loss.detach(), balance.detach() / num_layers)))

    run = step
    batches = windows(mixture, recipe)
    if on_gpu and adapter.num_experts(model.config) > 1:  # a count over one expert (torch.histc) cannot be captured
        # three warm-up steps at learning rate 0, then record one step
        lr.zero_()
        batch.copy_(next(batches))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay

    began = time.perf_counter()
    for i in range(recipe.steps):
        lr.fill_(recipe.lr_at(i))
        batch.copy_(next(batches))
        run()
        if i % log_every == 0 or i == recipe.steps - 1:
            loss, balance = last.tolist()
            if not math.isfinite(loss):
                raise FloatingPointError(f"training diverged at step {i}: loss {loss}")
            tokens = (i + 1) * recipe.batch * recipe.seq_len
            on_log(Progress(i, tokens, loss, balance, time.perf_counter() - began))
