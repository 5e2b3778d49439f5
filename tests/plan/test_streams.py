"""Streams in virtual time, and their trace."""

import json

import numpy as np
import pytest

from specter_lab.plan.policies import find_policy
from specter_lab.plan.simulate import simulate
from specter_lab.plan.streams import (
    COMPUTE,
    EXPERT,
    H2D,
    MISS,
    STREAM_NAMES,
    WORK_NAMES,
    chrome_trace,
    new_streams,
    run,
    spans,
    write_chrome_trace,
)
from tests.plan.made import scene_of, windows_of


def test_work_waits_for_its_stream_and_its_event():
    streams = new_streams(10)
    copied = run(streams, H2D, 5.0, 2.0, MISS, 0, 3)
    assert copied == 7 and run(streams, COMPUTE, 1.0, copied, EXPERT, 0, 3) == 8
    assert run(streams, COMPUTE, 1.0, 0.0, EXPERT, 0, 4) == 9
    assert streams.busy_ms[H2D] == 5 and streams.busy_ms[COMPUTE] == 2
    assert [(s.stream, s.start_ms, s.end_ms, s.work) for s in spans(streams)] == [
        ("H2D", 2, 7, "miss"), ("compute", 7, 8, "expert"), ("compute", 8, 9, "expert"),
    ]  # fmt: skip


def test_a_full_log_is_not_an_error():
    streams = new_streams(1)
    assert [run(streams, COMPUTE, 1.0, 0.0, EXPERT, 0, 0) for _ in range(3)] == [1, 2, 3]
    assert len(spans(streams)) == 1


@pytest.mark.parametrize("name", ["specter", "hybrimoe", "specter-read"])
def test_chrome_trace_is_valid(name, tmp_path):
    """One complete event per span with the fields that the trace viewer needs, and a name per thread."""
    workload, scene = scene_of(windows_of(), slots=3)
    work = simulate(workload, find_policy(name), scene, new_tokens=6, record=True).spans
    write_chrome_trace(work, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert trace == json.loads(json.dumps(chrome_trace(work)))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert list(names.values()) == list(STREAM_NAMES)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(work)
    for event in events:
        assert event["name"] in WORK_NAMES and event["dur"] >= 0 and event["tid"] in names and event["pid"] == 0
    for thread in names:
        starts, ends = (
            np.array([e["ts"] + d for e in events if e["tid"] == thread for d in [e["dur"] * k]]) for k in (0, 1)
        )
        assert (starts[1:] >= ends[:-1] - 1e-6).all()
