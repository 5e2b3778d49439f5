"""Every routed expert beside its INT4 codes, one record each, in host memory: what residual transport moves.

    record   low [N] | starts [R] int32 | before [R + 1] int32 | places [X] int32 | patterns [X] int16 | stream [S]

R = 2I + H rows: of gate, up and down. `compress.residual` says what the parts mean; starts and places count over the whole expert,
and `before` counts the exceptions before each row, after the last one all X.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psutil
import torch
from torch import Tensor
from tqdm.auto import tqdm

from specter_lab.compress.grid import Codes
from specter_lab.compress.int4 import INT4_BITS, Int4Bank, unpack
from specter_lab.compress.residual import REACHES, Residual, decode, encode
from specter_lab.engine.arena import host_slab
from specter_lab.errors import UserError


@dataclass(frozen=True)
class Records:
    """Of all experts."""

    hidden: int
    width: int  # I of an expert
    banks: tuple[Int4Bank, ...]  # the codes, on the device
    slabs: tuple[Tensor, ...]  # per layer [B] uint8 on the host; pinned where a GPU reads it
    first: np.ndarray  # [L, E] byte of its layer's slab where a record begins
    length: np.ndarray  # [L, E] bytes
    exceptions: np.ndarray  # [L, E] X
    reach: float  # of the codes, see `compress.residual`
    codes: Tensor  # [L, E, 6] int64 on the device: addresses of an expert's packed codes and scales: gate, up, down

    @property
    def numel(self) -> int:
        """Weights of an expert, N."""
        return 3 * self.hidden * self.width

    @property
    def rows(self) -> int:
        return 2 * self.width + self.hidden

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def bits(self) -> float:
        """Over the link, per weight."""
        return 8 * float(self.length.mean()) / self.numel

    def of(self, layer: int, expert: int) -> Tensor:
        """One record [B] uint8."""
        first = self.first[layer, expert]
        return self.slabs[layer][first : first + self.length[layer, expert]]


def new_records(host: Tensor, banks: tuple[Int4Bank, ...]) -> Records:
    """Encode the experts of the slab [L, E, N], whose values are BF16's, beside the codes of `banks`.

    Raises:
        UserError: the host's memory does not suffice, or cannot be pinned.
    """
    device, slabs, layers = banks[0].gate.packed.device, [], []
    tried = {reach: _record(host[0, 0].to(device), banks[0], 0, reach)[0] for reach in REACHES}
    reach, one = min(tried.items(), key=lambda each: len(each[1]))
    needed, free = len(one) * host.shape[0] * host.shape[1], psutil.virtual_memory().available
    if needed > free:
        raise UserError(f"experts beside their codes need about {needed / 2**30:.0f} GiB of host memory more, and {free / 2**30:.0f} are "
                        f"free: use transport='whole', or a machine with more")  # fmt: skip
    for layer, bank in enumerate(tqdm(banks, desc="experts beside their codes", unit="layer", delay=2.0)):
        of_layer = [_record(host[layer, expert].to(device), bank, expert, reach) for expert in range(len(host[layer]))]
        lengths = np.array([len(record) for record, _ in of_layer])
        slab = host_slab(int(lengths.sum()), pinned=device.type == "cuda")
        torch.cat([record for record, _ in of_layer], out=slab)
        slabs.append(slab)
        layers.append((np.cumsum(lengths) - lengths, lengths, [exceptions for _, exceptions in of_layer]))
    hidden, width = banks[0].down.packed.shape[1], banks[0].gate.packed.shape[1]
    numbers = (np.array(part) for part in zip(*layers))
    return Records(hidden, width, banks, tuple(slabs), *numbers, reach, _addresses(banks).to(device))


def restored(records: Records, layer: int, expert: int) -> Tensor:
    """The weights [N] bfloat16 of one expert: the reference of `engine.kernels.residual.restore_experts`."""
    low, starts, places, patterns, stream = _cut(records, layer, expert)
    found, first, row = [], 0, 0
    for codes in _codes(records.banks[layer], expert):
        rows, width = codes.codes.shape
        mine = (places >= first) & (places < first + rows * width)
        part = Residual(low[first : first + rows * width].view(rows, width), stream, starts[row : row + rows],
                        places[mine].long() - first, patterns[mine], records.reach)  # fmt: skip
        found.append(decode(part, codes).flatten())
        first, row = first + rows * width, row + rows
    return torch.cat(found)


def _record(block: Tensor, bank: Int4Bank, expert: int, reach: float) -> tuple[Tensor, int]:
    """Bytes on the host, and how many exceptions are among them."""
    parts, size = _codes(bank, expert), len(block) // 3
    found = [
        encode(weights.bfloat16().view(codes.codes.shape), codes, reach)
        for weights, codes in zip(block.split(size), parts)
    ]
    streams = np.cumsum([0, *(len(part.stream) for part in found)])
    places = torch.cat([part.places + i * size for i, part in enumerate(found)])
    rows = torch.cat(
        [
            torch.arange(len(part.low), device=block.device) * part.low.shape[1] + i * size
            for i, part in enumerate(found)
        ]
    )
    ends = torch.cat([rows, rows.new_tensor([3 * size])])  # [R + 1] where rows begin, and the end
    joined = (
        torch.cat([part.low.flatten() for part in found]),
        torch.cat([part.starts + int(begin) for part, begin in zip(found, streams)]),
        torch.searchsorted(places, ends, out_int32=True),
        places.int(),
        torch.cat([part.patterns for part in found]),
        torch.cat([part.stream for part in found]),
    )
    return torch.cat([part.view(torch.uint8) for part in joined]).cpu(), len(places)


def _cut(records: Records, layer: int, expert: int) -> tuple[Tensor, ...]:
    """Low, starts, places, patterns and stream of a record."""
    record, exceptions = records.of(layer, expert), int(records.exceptions[layer, expert])
    sizes = (records.numel, 4 * records.rows, 4 * (records.rows + 1), 4 * exceptions, 2 * exceptions)
    low, starts, _, places, patterns, stream = record.split((*sizes, len(record) - sum(sizes)))
    starts, places = (part.clone().view(torch.int32) for part in (starts, places))
    return low, starts, places, patterns.clone().view(torch.int16), stream


def _codes(bank: Int4Bank, expert: int) -> list[Codes]:
    """Of one expert's gate, up and down."""
    parts = (bank.gate, bank.up, bank.down)
    return [Codes(unpack(part.packed[expert]), part.scales[expert], INT4_BITS) for part in parts]


def _addresses(banks: tuple[Int4Bank, ...]) -> Tensor:
    """[L, E, 6] int64."""

    def of_all(tensor: Tensor) -> Tensor:
        return tensor.data_ptr() + torch.arange(len(tensor)) * tensor[0].nbytes

    layers = (
        [tensor for part in (bank.gate, bank.up, bank.down) for tensor in (part.packed, part.scales)] for bank in banks
    )
    return torch.stack([torch.stack([of_all(tensor) for tensor in tensors], dim=1) for tensors in layers])
