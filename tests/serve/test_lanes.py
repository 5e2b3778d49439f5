"""Requests that are written together get the texts they would get alone."""

import asyncio

import pytest

from specter_lab.engine import api
from specter_lab.errors import UserError
from specter_lab.serve.line import Closing, Full, Line
from specter_lab.serve.model import served
from specter_lab.serve.write import Ask, write

ASKS = (
    Ask((5, 6, 7), 9),
    Ask((9, 10, 11, 12), 3),
    Ask((20, 21), 12, 1.0, 7),
    Ask((30, 31, 32), 1),
    Ask((40, 41), 7, 0.7, 3),
)


@pytest.fixture(scope="module")
def model():
    return served(
        api.load("qwen-nano", expert_budget=8, in_slots=True, device="cpu", mode="paper"), "qwen-nano", depth=3
    )


@pytest.fixture(scope="module")
def alone(model):
    return ["".join(piece.text for piece in write(model, ask)) for ask in ASKS]


def run(model, lanes, what, max_waiting=8):
    async def whole():
        line = Line(model, max_waiting, lanes)
        try:
            return await what(line)
        finally:
            await asyncio.to_thread(line.join)

    return asyncio.run(whole())


async def text_of(job):
    return "".join([piece.text async for piece in job.pieces()])


@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_each_gets_its_own_text(model, alone, lanes):
    async def what(line):
        found = await asyncio.gather(*(text_of(line.enter(ask)) for ask in ASKS))
        assert line.inside == 0
        return found

    assert run(model, lanes, what) == alone


def test_a_longer_request_gets_longer_lanes(model, alone):
    async def what(line):
        long = Ask((5, 6, 7), 300, stops=("\n",))
        jobs = [line.enter(ask) for ask in (ASKS[0], long, ASKS[1])]
        return await asyncio.gather(*map(text_of, jobs))

    first, _, last = run(model, 2, what)
    assert [first, last] == alone[:2]


def test_who_hangs_up_frees_the_lane_for_who_waits(model, alone):
    async def what(line):
        gone = line.enter(Ask((5, 6, 7), 200))
        stays = line.enter(ASKS[0])
        await anext(gone.pieces())
        gone.cancel()
        return await asyncio.gather(text_of(gone), text_of(stays))

    assert run(model, 1, what)[1] == alone[0]


def test_what_fails_is_told_to_whom_it_concerns(model, alone, monkeypatch):
    def refuse(*_):
        raise UserError("no room")

    async def what(line):
        monkeypatch.setattr(model.engine, "session_for", refuse)
        with pytest.raises(UserError, match="no room"):
            await text_of(line.enter(ASKS[0]))
        monkeypatch.undo()
        return await text_of(line.enter(ASKS[0]))

    assert run(model, 1, what) == alone[0]


def test_the_line_is_bounded_and_closes(model):
    async def what(line):
        jobs = [line.enter(Ask((5, 6, 7), 200)) for _ in range(3)]
        with pytest.raises(Full):
            line.enter(ASKS[0])
        await anext(jobs[0].pieces())
        line.close()
        with pytest.raises(Closing):
            line.enter(ASKS[0])
        for job in jobs:
            with pytest.raises(Closing):
                await text_of(job)

    run(model, 2, what, max_waiting=1)


def test_more_lanes_than_fast_mode_serves():
    fast = served(api.load("qwen-nano", expert_budget=8, in_slots=True, device="cpu"), "qwen-nano", depth=7)
    with pytest.raises(UserError, match="9 windows of 8 are more"):
        Line(fast, 8, 9)
