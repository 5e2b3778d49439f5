"""GPTQ for all experts of a layer at once.

GPTQ (arXiv 2210.17323) rounds the inputs of a linear layer one after the other and lets the inputs not yet rounded make
up for the errors so far, as the Hessian X^T X of the calibration inputs says. An MoE layer has E small, independent
problems of one shape, so here they are one batched problem: one Cholesky over [E, in, in], one loop over the inputs for
all experts, and gate and up as one stack of rows, since they read the same inputs. The Hessian is factored and never
inverted: GPTQ is Babai's nearest plane algorithm (arXiv 2507.18553), which needs the factor only.

Differences from the paper's code, each on purpose:
- A dead input (zero on the Hessian's diagonal) keeps its weight, rounded to nearest; the paper's code sets it to zero,
  which is wrong for the tokens that calibration did not contain. So an expert without a single token comes out
  rounded to nearest, by the same code.
- Damping is a share of the mean diagonal of the Hessian itself, dead inputs counted as zero.
- The block of inputs between two updates of the remaining ones is the quantisation group, so every group's scale is
  found after all earlier errors have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from specter_lab.compress.experts_only import experts_only
from specter_lab.compress.grid import GROUP, CodedBank, Codes, dequantize, group_of, round_to_codes, scale_for
from specter_lab.models.experts import ExpertBank

DAMP = 0.01  # share of the mean diagonal of the Hessian
_DAMP_STEPS = (1, 10, 100)  # a Hessian that rounding made indefinite is damped more


@dataclass(frozen=True)
class LayerInputs:
    """What one MoE layer sees of the calibration text."""

    hidden: Tensor  # [T, H] inputs of the experts
    indices: Tensor  # [T, k] experts used by each token
    activation: Callable[[Tensor], Tensor]  # between gate and down


def expert_tokens(indices: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """For each expert the positions, in 0 .. T-1, of the tokens it got; `indices` is [T, k]."""
    counts = torch.bincount(indices.flatten(), minlength=num_experts).tolist()
    order = indices.flatten().argsort(stable=True)
    return (order // indices.shape[1]).split(counts)


def hessians(inputs: Iterable[Tensor]) -> Tensor:
    """[E, n, n] sums of x x^T over the rows of each expert's inputs [T_e, n]."""
    return torch.stack([x.float().t() @ x.float() for x in inputs])


def upper_factors(hessian: Tensor, damp: float = DAMP) -> Tensor:
    """Upper triangular R [E, n, n] with R R^T the damped Hessian [E, n, n].

    Raises:
        ArithmeticError: a Hessian is not positive definite even with 100 times the damping (not finite inputs).
    """
    flipped = hessian.flip(-1, -2)  # the lower factor of the reversed matrix is the reversed upper factor
    diagonal = flipped.diagonal(dim1=-2, dim2=-1)  # [E, n], a view
    undamped = diagonal.clone()
    step = damp * undamped.mean(dim=-1, keepdim=True)  # [E, 1]
    for times in _DAMP_STEPS:
        diagonal.copy_(torch.where(undamped == 0, 1.0, undamped) + times * step)
        lower, failed = torch.linalg.cholesky_ex(flipped)
        if not failed.any():
            return lower.flip(-1, -2)
    raise ArithmeticError(f"Hessians of experts {failed.nonzero().flatten().tolist()} are not positive definite")


def solve(weights: Tensor, hessian: Tensor, bits: int, group: int = GROUP, damp: float = DAMP) -> Codes:
    """GPTQ on E layers of one shape.

    The error to keep small is ||(W - Q) R||, R upper triangular. Input j is rounded after the errors of the inputs
    before it are known, to what makes column j of that product smallest: w_j + sum_{i<j} (w_i - q_i) R_ij / R_jj.

    Args:
        weights: [E, out, in].
        hessian: [E, in, in] sums of x x^T; all zero for an expert without tokens.
        bits: 2, 3, 4 or 8.
        group: inputs that share a scale.
        damp: share of the mean diagonal added to the diagonal.
    """
    factors = upper_factors(hessian, damp)  # [E, in, in]
    original = weights.float().transpose(1, 2).contiguous()  # [E, in, out]: an input is a row
    inputs, size = original.shape[1], group_of(original.shape[1], group)
    codes = torch.empty_like(original, dtype=torch.int8)
    errors = torch.empty_like(original)  # [E, in, out], weight - quantised
    scales = []
    for start in range(0, inputs, size):
        stop = start + size
        square = factors[:, start:stop, start:stop].transpose(1, 2)  # [E, size, size], lower
        best = original[:, start:stop]  # [E, size, out], best real values of this group given the errors before it
        if start:
            pull = factors[:, :start, start:stop].transpose(1, 2) @ errors[:, :start]  # [E, size, out]
            best = best + torch.linalg.solve_triangular(square, pull, upper=False)
        scale = scale_for(best.abs().amax(dim=1, keepdim=True), bits)  # [E, 1, out]
        spread = square / square.diagonal(dim1=1, dim2=2).unsqueeze(2)  # row j: R_ij / R_jj
        missed = torch.empty_like(best)  # [E, size, out], best - quantised
        for j in range(size):
            target = torch.baddbmm(best[:, j : j + 1], spread[:, j : j + 1, :j], missed[:, :j])  # [E, 1, out]
            code = round_to_codes(target, scale, bits)
            missed[:, j : j + 1] = best[:, j : j + 1] - code * scale
            codes[:, start + j : start + j + 1] = code
        errors[:, start:stop] = original[:, start:stop] - best + missed
        scales.append(scale)
    return Codes(codes.transpose(1, 2).contiguous(), torch.cat(scales, dim=1).transpose(1, 2).contiguous(), bits)


def quantize_bank(
    bank: ExpertBank, inputs: LayerInputs, bits: int, group: int = GROUP, damp: float = DAMP
) -> CodedBank:
    """GPTQ on the experts of one layer; down is fitted to what the quantised gate and up put out.

    Runs on the device of the weights. Experts without tokens come out rounded to nearest.

    Raises:
        TypeError: `bank` is not an `ExpertBank`.
        UserError: a row is not a whole number of groups.
    """
    bank = experts_only(bank)
    rows = [inputs.hidden[tokens] for tokens in expert_tokens(inputs.indices, bank.num_experts)]  # E x [T_e, H]
    stacked = solve(torch.cat((bank.gate, bank.up), dim=1), hessians(rows), bits, group, damp)  # [E, 2I, H]
    gate_codes, up_codes = stacked.codes.chunk(2, dim=1)
    gate_scales, up_scales = stacked.scales.chunk(2, dim=1)
    gate, up = Codes(gate_codes, gate_scales, bits), Codes(up_codes, up_scales, bits)
    middle = (  # E x [T_e, I]
        inputs.activation(x.float() @ g.t()) * (x.float() @ u.t())
        for x, g, u in zip(rows, dequantize(gate), dequantize(up))
    )
    return CodedBank(bank.layer, gate, up, solve(bank.down, hessians(middle), bits, group, damp))
