"""elephants-dequant: integers to floating point by bit tricks, proven over all codes; sizes and rounding errors.

Exhaustive where that is possible: every int8 code at every byte of a word, and for int4 every value of one half of a
word beside every nibble in the other (masks and shifts act on bits alone, so nothing else can matter). What the
divisor that the paper doesn't state does to the error is measured on Gaussian channels of the paper's 1024 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure
from torch import Tensor

from specter_lab.compress import i2f, per_channel
from specter_lab.experiments.context import Context, Measured
from specter_lab.models.switch import ELEPHANTS

EXACT, LAYOUT, SIZE, ERROR = "exact share", "layout share", "size GB", "relative error"
CHANNELS = 4096  # Gaussian output channels per bits and divisor
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def inputs(context: Context) -> dict[str, str]:
    """Nothing: all codes, and weights that are drawn."""
    return {}


def run(context: Context) -> pd.DataFrame:
    """Rows: what was checked or measured, its value, an interval where it is a sample, and on how many."""
    return pd.DataFrame([*_exactness(), *_sizes(), *_errors(context.seed)])


def _row(
    metric: str, name: str, value: float, n: int, low: float | None = None, high: float | None = None, divisor: str = ""
) -> dict:
    return {"metric": metric, "name": name, "divisor": divisor, "value": value, "low": low, "high": high, "n": n}


def int8_words() -> Tensor:
    """Codes [W, 4] in which every code stands at every byte beside -128, -1 and 127."""
    words = []
    for place in range(4):
        for other in (-128, -1, 127):
            word = torch.full((256, 4), other, dtype=torch.int8)
            word[:, place] = torch.arange(-128, 128, dtype=torch.int8)
            words.append(word)
    return torch.cat(words)


def int4_words() -> Tensor:
    """Words [W] int32 whose one half takes every value while the other holds one nibble throughout."""
    half, fill = torch.arange(2**16), 0x1111 * torch.arange(16)[:, None]
    words = torch.cat((half | fill << 16, half << 16 | fill)).flatten()
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _exactness() -> Iterator[dict]:
    codes = int8_words()
    packed = i2f.pack_int8(codes)
    for name, convert in (("fp16", i2f.int8_to_fp16), ("bf16", i2f.int8_to_bf16)):
        yield _row(
            EXACT, f"int8-{name}", float((convert(packed).double() == codes.double()).double().mean()), codes.numel()
        )
    words = int4_words()[:, None]
    codes = i2f.unpack_int4(words)  # by plain shifts, the independent way
    for name, dtype in TYPES.items():
        same = i2f.int4_to_half(words, dtype).double() == codes.double()
        yield _row(EXACT, f"int4-{name}", float(same.double().mean()), codes.numel())
    yield _row(LAYOUT, "int4", float((i2f.pack_int4(codes) == words).double().mean()), len(words))


def _sizes() -> Iterator[dict]:
    for name, bits in (("fp16", 16), ("int8", 8), ("int4", 4)):
        yield _row(SIZE, name, ELEPHANTS.stored_bytes(bits) / 1e9, 1)


def channel_errors(bits: int, divisor: str, seed: int) -> np.ndarray:
    """Relative error ||w - w'|| / ||w|| of Gaussian channels of 1024 weights, [CHANNELS]."""
    weights = 0.02 * torch.randn(1, ELEPHANTS.hidden, CHANNELS, generator=torch.Generator().manual_seed(seed))
    error = per_channel.dequantize(per_channel.quantize(weights, bits, divisor)) - weights
    return (error.norm(dim=1) / weights.norm(dim=1)).flatten().numpy()


def _errors(seed: int) -> Iterator[dict]:
    for bits in per_channel.BITS:
        for divisor in per_channel.DIVISORS:
            errors = channel_errors(bits, divisor, seed)
            half = 1.96 * errors.std(ddof=1) / len(errors) ** 0.5  # of the mean, 95 %
            mean = float(errors.mean())
            yield _row(ERROR, f"int{bits}", mean, len(errors), mean - half, mean + half, divisor)


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean relative error: bits by divisor."""
    return rows[rows["metric"] == ERROR].pivot(index="name", columns="divisor", values="value")[
        list(per_channel.DIVISORS)
    ]


def plot(rows: pd.DataFrame) -> Figure:
    """a: rounding of one int4 channel under both divisors; b: size of the model."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True, width_ratios=(1.6, 1))
    colors = sns.color_palette("colorblind", 3)
    at = torch.linspace(-1, 1, 2001)[None, :, None]  # a channel [1, M, 1] whose absmax is 1
    for divisor, color in zip(per_channel.DIVISORS, colors):
        coded = per_channel.quantize(at, 4, divisor)
        mean = rows[(rows["metric"] == ERROR) & (rows["name"] == "int4") & (rows["divisor"] == divisor)]["value"].iloc[
            0
        ]
        left.plot(at.flatten(), (per_channel.dequantize(coded) - at).flatten(), color=color, lw=1.2,
                  label=f"{divisor}: mean error of Gaussian channels {mean:.1%}")  # fmt: skip
    left.set(xlabel="weight / absmax of its channel", ylabel="error / absmax", ylim=(-0.15, 0.12))
    left.set_title("a  int4: what the divisor does", loc="left", fontsize=10)
    left.legend(fontsize=8, loc="upper center")
    left.grid(alpha=0.25)
    sizes = rows[rows["metric"] == SIZE].set_index("name")["value"]
    rest = ELEPHANTS.other_parameters * 2 / 1e9
    right.bar(sizes.index, [rest] * len(sizes), color="0.75", label="everything else, 16 bit")
    right.bar(sizes.index, sizes - rest, bottom=rest, color=colors[0], label="experts and their scales")
    for name, size in sizes.items():
        right.annotate(f"{size:.2f}", (name, size), ha="center", va="bottom", fontsize=8)
    right.set(ylabel="GB (10^9 bytes)", ylim=(0, sizes.max() * 1.12))
    right.set_title("b  The 5.3B model", loc="left", fontsize=10)
    right.legend(fontsize=8)
    plt.close(figure)
    return figure


def claims(rows: pd.DataFrame) -> list[Measured]:
    """Exactness over all codes, the layout, and the three sizes."""
    found = []
    for row in rows.itertuples():
        if row.metric == EXACT:
            found.append(
                Measured(
                    f"elephants-dequant/exact@{row.name}", row.value, n=int(row.n), note="every code at every place"
                )
            )
        elif row.metric == LAYOUT:
            found.append(Measured("elephants-dequant/int4-layout", row.value, n=int(row.n)))
        elif row.metric == SIZE:
            found.append(
                Measured(f"elephants-dequant/model-size@{row.name}", row.value, n=1, note="counted from the geometry")
            )
    return found
