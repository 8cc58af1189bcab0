"""Whose log lines are, and what they are about."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from overstory.workers.log_context import label_process, name_request


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    before = logging.getLogRecordFactory()
    caplog.set_level(logging.INFO)
    yield caplog
    logging.setLogRecordFactory(before)


def test_lines_of_any_logger_carry_the_label(lines: pytest.LogCaptureFixture) -> None:
    label_process("replica r1 rank 0")
    logging.getLogger("somebody.else").info("took %d of %s", 3, "7%")
    logging.getLogger().info("100% done")
    assert lines.messages == [
        "[replica r1 rank 0] took 3 of 7%",
        "[replica r1 rank 0] 100% done",
    ]


def test_a_request_is_named_in_its_own_task_alone(lines: pytest.LogCaptureFixture) -> None:
    label_process("a%d")

    async def serve(number: int) -> None:
        name_request(f"request {number}")
        await asyncio.sleep(0)
        logging.info("step %d", number)

    async def both() -> None:
        await asyncio.gather(serve(1), serve(2))
        logging.info("outside")

    asyncio.run(both())
    assert lines.messages == ["[a%d request 1] step 1", "[a%d request 2] step 2", "[a%d] outside"]


def test_a_new_label_takes_the_place_of_the_old(lines: pytest.LogCaptureFixture) -> None:
    label_process("first")
    label_process("second")
    logging.info("x")
    assert lines.messages == ["[second] x"]
