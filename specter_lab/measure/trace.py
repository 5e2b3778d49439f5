"""Routing traces: what every MoE layer did with every token, in memory and on disk.

A trace file is Parquet, one row per token, rows ordered by request and then by position:

    request_index  int32                          which request, counted from 0; its id is in the header
    position       int32                          position of the token in its request, counted from 0
    phase          uint8                          0 prefill, 1 decode
    token_id       int32
    experts        fixed_size_list<uint8>[L*k]    experts used, layer-major: slot s of layer l at l*k + s
                   (uint16 with more than 256 experts)
    weights        fixed_size_list<float>[L*k]    factors the experts' outputs were multiplied with (after softmax)
    scores         fixed_size_list<float>[L*k]    router logits of the same experts (before softmax)
    logits         fixed_size_list<float>[L*E]    all router logits; this column may be absent

Slots stand in the order the layer used them, which is not always the order of the scores (DeepSeek's router does not
sort). Columns hold no nulls. The schema metadata has one entry, `specter_lab.trace`, a JSON header: schema_version,
model, model_digest (sha256 of the weight files), quantizer, seed, protocol, num_experts, top_k, layers (decoder layer
numbers), request_ids, num_tokens, and content_sha256 over the header and every value. Reading checks that hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specter_lab.errors import UserError
from specter_lab.files import whole_file

SCHEMA_VERSION = 1
HEADER_KEY = b"specter_lab.trace"
PREFILL, DECODE = 0, 1  # phase


@dataclass(frozen=True)
class Origin:
    """Which model a trace was taken from, and from which selection of requests."""

    model: str
    model_digest: str  # sha256 of the full-precision weights
    quantizer: str = "none"  # "none": experts as in the checkpoint
    seed: int = 0  # of the request selection


@dataclass(frozen=True)
class Trace:
    """Routing of T tokens in L MoE layers with E experts, k of them used per token and layer."""

    origin: Origin
    protocol: str  # "teacher-forced", "free-running-draft", "verification"
    num_experts: int
    layers: tuple[int, ...]  # [L] decoder layer numbers
    request_ids: tuple[str, ...]  # [R]
    request_index: np.ndarray  # [T] int32, into request_ids
    position: np.ndarray  # [T] int32
    phase: np.ndarray  # [T] uint8
    token_id: np.ndarray  # [T] int32
    indices: np.ndarray  # [T, L, k] uint8 or uint16, experts used
    weights: np.ndarray  # [T, L, k] float32, factors as used (after softmax)
    scores: np.ndarray  # [T, L, k] float32, router logits of the experts used (before softmax)
    logits: np.ndarray | None = None  # [T, L, E] float32, all router logits

    @property
    def num_tokens(self) -> int:
        return len(self.token_id)

    @property
    def top_k(self) -> int:
        return self.indices.shape[2]


def index_dtype(num_experts: int) -> np.dtype:
    """The smallest unsigned integer that numbers the experts of a layer."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def content_hash(trace: Trace) -> str:
    """sha256 over the header and every array, hexadecimal."""
    digest = hashlib.sha256(json.dumps(_header(trace), sort_keys=True).encode())
    for values in _columns(trace).values():
        digest.update(np.ascontiguousarray(values))
    return digest.hexdigest()


def write_trace(trace: Trace, path: Path) -> None:
    """Write `trace` to `path`, whole or not at all.

    Raises:
        UserError: the file cannot be written (disk full, no permission).
    """
    columns = {name: _to_arrow(values) for name, values in _columns(trace).items()}
    header = _header(trace) | {"content_sha256": content_hash(trace)}
    table = pa.table(columns).replace_schema_metadata({HEADER_KEY: json.dumps(header)})
    try:
        with whole_file(path) as half:
            pq.write_table(table, half, compression="zstd", use_dictionary=["experts.list.element"])
    except OSError as error:
        raise UserError(f"cannot write the trace {path} ({error}): free some space or set SPECTER_LAB_OUT") from error


def read_trace(path: Path, *, model_digest: str | None = None) -> Trace:
    """Read a trace file and check its content hash.

    Args:
        path: a file written by `write_trace`.
        model_digest: when given, the trace must have been taken from these weights.

    Raises:
        UserError: no such file, damaged or not a trace, another schema version, or another model.
    """
    if not path.exists():
        raise UserError(f"no trace file {path}: run the experiment that captures it")
    damaged = UserError(f"{path} is damaged or not a trace: delete it, and the next run captures it again")
    try:
        table = pq.read_table(path)
        header = json.loads((table.schema.metadata or {})[HEADER_KEY])
        version = header["schema_version"]
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise damaged from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has trace schema version {version!r}, this program reads {SCHEMA_VERSION!r}: "
                        f"delete it and capture it again, or use the program version that wrote it")  # fmt: skip
    try:
        trace = _from_table(table, header)
        intact = content_hash(trace) == header["content_sha256"]
    except (pa.ArrowException, KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged from error
    if not intact:
        raise damaged
    if model_digest not in (None, trace.origin.model_digest):
        raise UserError(f"{path} was taken from {trace.origin.model} with weights {trace.origin.model_digest[:12]}, "
                        f"not from {model_digest[:12]}: delete it and capture it again")  # fmt: skip
    return trace


def _header(trace: Trace) -> dict:
    return {
        "schema_version": SCHEMA_VERSION,
        "model": trace.origin.model,
        "model_digest": trace.origin.model_digest,
        "quantizer": trace.origin.quantizer,
        "seed": trace.origin.seed,
        "protocol": trace.protocol,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "layers": list(trace.layers),
        "request_ids": list(trace.request_ids),
        "num_tokens": trace.num_tokens,
    }


def _columns(trace: Trace) -> dict[str, np.ndarray]:
    columns = {
        "request_index": trace.request_index,
        "position": trace.position,
        "phase": trace.phase,
        "token_id": trace.token_id,
        "experts": trace.indices,
        "weights": trace.weights,
        "scores": trace.scores,
    }
    return columns if trace.logits is None else columns | {"logits": trace.logits}


def _to_arrow(values: np.ndarray) -> pa.Array:
    flat = pa.array(values.reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values[0].size)


def _from_table(table: pa.Table, header: dict) -> Trace:
    def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
        column = table[name].combine_chunks()
        return (column.flatten() if len(shape) > 1 else column).to_numpy().reshape(shape)

    tokens, layers, top_k, experts = (
        header["num_tokens"], tuple(header["layers"]), header["top_k"], header["num_experts"],
    )  # fmt: skip
    slots = (tokens, len(layers), top_k)
    return Trace(
        origin=Origin(header["model"], header["model_digest"], header["quantizer"], header["seed"]),
        protocol=header["protocol"],
        num_experts=experts,
        layers=layers,
        request_ids=tuple(header["request_ids"]),
        request_index=numbers("request_index", (tokens,)),
        position=numbers("position", (tokens,)),
        phase=numbers("phase", (tokens,)),
        token_id=numbers("token_id", (tokens,)),
        indices=numbers("experts", slots),
        weights=numbers("weights", slots),
        scores=numbers("scores", slots),
        logits=numbers("logits", (tokens, len(layers), experts)) if "logits" in table.column_names else None,
    )
