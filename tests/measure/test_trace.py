import dataclasses
import json
import resource
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from specter_lab.errors import UserError
from specter_lab.measure.trace import HEADER_KEY, Origin, Trace, content_hash, index_dtype, read_trace, write_trace


def random_trace(tokens=40, layers=3, experts=16, top_k=2, logits=False) -> Trace:
    rng = np.random.default_rng(0)
    slots = (tokens, layers, top_k)
    return Trace(
        Origin("qwen-nano", "aa11", "gguf-q4_k", seed=7), "teacher-forced", experts,
        tuple(range(1, layers + 1)), ("m-1", "p-2"),
        np.sort(rng.integers(0, 2, tokens)).astype(np.int32), np.arange(tokens, dtype=np.int32),
        rng.integers(0, 2, tokens).astype(np.uint8), rng.integers(0, 2048, tokens).astype(np.int32),
        rng.integers(0, experts, slots).astype(index_dtype(experts)), rng.random(slots, dtype=np.float32),
        rng.standard_normal(slots).astype(np.float32),
        rng.standard_normal((tokens, layers, experts)).astype(np.float32) if logits else None,
    )  # fmt: skip


def assert_same(a: Trace, b: Trace) -> None:
    for field in dataclasses.fields(Trace):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype
        else:
            assert x == y


@pytest.mark.parametrize("logits", (False, True))
@pytest.mark.parametrize("experts", (16, 300))
def test_round_trip(tmp_path, logits, experts):
    trace = random_trace(experts=experts, logits=logits)
    write_trace(trace, tmp_path / "new folder" / "t.parquet")
    assert_same(trace, read_trace(tmp_path / "new folder" / "t.parquet", model_digest="aa11"))


def test_the_file_is_as_documented(tmp_path):
    trace = random_trace()
    write_trace(trace, tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table["experts"][5].as_py() == trace.indices[5].ravel().tolist()
    assert table["token_id"].to_pylist() == trace.token_id.tolist()
    header = json.loads(table.schema.metadata[HEADER_KEY])
    assert header["layers"] == [1, 2, 3] and header["top_k"] == 2 and header["content_sha256"] == content_hash(trace)


@pytest.mark.parametrize("version", [99, "1"])
def test_other_schema_version(tmp_path, version):
    write_trace(random_trace(), tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    header = json.loads(table.schema.metadata[HEADER_KEY]) | {"schema_version": version}
    pq.write_table(table.replace_schema_metadata({HEADER_KEY: json.dumps(header)}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=f"schema version {version!r}, this program reads 1"):
        read_trace(tmp_path / "t.parquet")


def test_other_model(tmp_path):
    write_trace(random_trace(), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="from qwen-nano with weights aa11, not from bb22"):
        read_trace(tmp_path / "t.parquet", model_digest="bb22")


def test_altered_header_or_value(tmp_path):
    write_trace(random_trace(), tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    header = json.loads(table.schema.metadata[HEADER_KEY])
    renamed = table.replace_schema_metadata({HEADER_KEY: json.dumps(header | {"quantizer": "none"})})
    shorter = table.slice(1)
    swapped = table.set_column(3, "token_id", table["position"])
    for altered in (renamed, shorter, swapped, table.drop_columns("weights"), table.replace_schema_metadata(None)):
        pq.write_table(altered, tmp_path / "t.parquet")
        with pytest.raises(UserError, match="damaged or not a trace"):
            read_trace(tmp_path / "t.parquet")


def test_damaged_bytes_never_pass(tmp_path):
    trace, path = random_trace(), tmp_path / "t.parquet"
    write_trace(trace, path)
    whole = path.read_bytes()
    for length in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged or not a trace"):
            read_trace(path)
    refused = 0
    for at in range(0, len(whole), 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            assert_same(trace, read_trace(path))  # a flip where nothing of ours lies may pass, a changed trace may not
        except UserError:
            refused += 1
    assert refused > len(whole) / 37 / 4
    with pytest.raises(UserError, match="no trace file"):
        read_trace(tmp_path / "absent.parquet")


def test_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "t.parquet"
    write_trace(random_trace(tokens=10), path)
    old = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # writing past 8 KiB now fails, as on a full disk
    try:
        with pytest.raises(UserError, match="cannot write the trace"):
            write_trace(random_trace(tokens=5000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_reads_a_million_accesses_per_second(tmp_path):
    trace = random_trace(tokens=50_000, layers=5, experts=60, top_k=4)  # 1 M accesses
    write_trace(trace, tmp_path / "t.parquet")
    best_s = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        read_trace(tmp_path / "t.parquet")
        best_s = min(best_s, time.perf_counter() - start)
    assert best_s < 1
