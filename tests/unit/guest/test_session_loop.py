"""The event loop of a session: it outlives cells, interrupts and what code does to it."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kernel_specs.restricted.session_loop import SessionLoop, run_to_end

NUMBER = contextvars.ContextVar("NUMBER", default=0)


class Pipe:
    """A channel that is readable once something was written."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.attended = 0

    def fileno(self) -> int:
        return self.read

    def attend(self) -> None:
        os.read(self.read, 1)
        self.attended += 1


@pytest.fixture
def session() -> Iterator[SessionLoop]:
    create, choose = asyncio.create_task, asyncio.set_event_loop
    made = SessionLoop()
    yield made
    made.close()
    asyncio.create_task = asyncio.tasks.create_task = create
    asyncio.set_event_loop = asyncio.events.set_event_loop = choose
    asyncio.set_event_loop(None)


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe]]:
    made = Pipe(), Pipe()
    yield made
    for fd in (each for pipe in made for each in (pipe.read, pipe.write)):
        os.close(fd)


async def value(result: object = 5) -> object:
    await asyncio.sleep(0)
    return result


def ignore(_: Callable[[], None]) -> None:
    """Start a cell that no signal ends."""


SCHEDULED: dict[str, Callable[[], object]] = {
    "ensure_future": lambda: asyncio.ensure_future(value()),
    "gather": lambda: asyncio.gather(value(), value()),
    "create_task": lambda: asyncio.create_task(value()),
    "the loop's create_task": lambda: asyncio.get_event_loop().create_task(value()),
    "run_in_executor": lambda: asyncio.get_event_loop().run_in_executor(None, int),
}


@pytest.mark.filterwarnings("ignore:There is no current event loop:DeprecationWarning")
@pytest.mark.parametrize("schedule", SCHEDULED.values(), ids=SCHEDULED)
def test_what_a_cell_schedules_runs_while_the_kernel_waits(
    session: SessionLoop, pipes: tuple[Pipe, Pipe], schedule: Callable[[], asyncio.Future[object]]
) -> None:
    session.begin_cell()
    future = schedule()
    future.add_done_callback(lambda _: os.write(pipes[0].write, b"x"))
    session.wait(pipes[0])
    assert future.done()


def test_loops_of_the_cell_itself_run_and_its_own_is_still_there(session: SessionLoop) -> None:
    session.begin_cell()
    loop = asyncio.get_event_loop()
    assert not loop.is_running()
    assert loop.run_until_complete(value(6)) == 6
    assert asyncio.run(value(7)) == 7
    session.begin_cell()
    assert asyncio.get_event_loop() is loop
    assert session.run(value(8), ignore) == 8


def test_other_channels_are_read_meanwhile(session: SessionLoop, pipes: tuple[Pipe, Pipe]) -> None:
    first, other = pipes
    os.write(other.write, b"x")
    threading.Timer(0.01, os.write, (first.write, b"x")).start()
    while not other.attended:
        session.wait(first, other)
    assert os.read(first.read, 1) == b"x"


def test_after_another_loop_the_session_has_its_own_again(session: SessionLoop) -> None:
    session.begin_cell()
    own = asyncio.get_event_loop()
    asyncio.run(value())
    assert asyncio.get_event_loop() is own
    own.close()
    asyncio.run(value())
    assert not asyncio.get_event_loop().is_closed()
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(value())))
    thread.start()
    thread.join()
    assert found == [5]
    if (child := os.fork()) == 0:
        asyncio.set_event_loop(None)
        try:
            os._exit(asyncio.get_event_loop() is session.asyncio_loop)
        except RuntimeError:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_loop_that_code_has_closed_is_replaced(session: SessionLoop) -> None:
    session.begin_cell()
    asyncio.get_event_loop().close()
    session.add_callback(int)
    session.turn()
    assert session.run(value(), ignore) == 5


def test_a_loop_that_code_runs_in_a_thread_is_replaced(session: SessionLoop) -> None:
    loop = session.enter()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        assert asyncio.run_coroutine_threadsafe(value(3), loop).result() == 3
        assert session.run(value(), ignore) == 5
        assert session.asyncio_loop is not loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_loop_that_code_stops_goes_on(session: SessionLoop) -> None:
    async def stops() -> int:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return 4

    assert session.run(stops(), ignore) == 4


def test_context_variables_of_a_cell_stay(session: SessionLoop) -> None:
    async def sets() -> None:
        await asyncio.sleep(0)
        NUMBER.set(7)

    context = contextvars.copy_context()
    context.run(session.run, sets(), ignore)
    assert context[NUMBER] == 7


def test_exit_in_a_task_ends_the_task_alone(session: SessionLoop) -> None:
    async def leaves() -> None:
        raise SystemExit(3)

    escapes: list[None] = []
    session.escaped = lambda: escapes.append(None)
    session.begin_cell()
    task = asyncio.create_task(leaves())
    session.turn()
    assert escapes == [None]
    with pytest.raises(SystemExit):
        task.result()
    assert session.run(value(), ignore) == 5


def test_an_interrupt_cancels_the_tasks_of_the_cell_and_no_others(session: SessionLoop) -> None:
    ran: list[int] = []

    async def blocks(number: int) -> None:
        ran.append(number)
        if number == 2:
            raise KeyboardInterrupt
        time.sleep(0.001)

    async def cell() -> None:
        await asyncio.gather(*(blocks(number) for number in range(10)))

    session.begin_cell()
    earlier = asyncio.create_task(asyncio.sleep(3600))
    session.begin_cell()
    said: list[None] = []
    session.interrupted = lambda: said.append(None)
    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
        session.run(cell(), ignore)
    assert (ran, said) == ([0, 1, 2], [None])
    assert asyncio.all_tasks(session.asyncio_loop) == {earlier}
    earlier.cancel()
    session.turn()


def test_a_signal_handler_wakes_a_loop_that_sleeps(session: SessionLoop) -> None:
    cancels: list[Callable[[], None]] = []
    before = signal.signal(signal.SIGALRM, lambda *_: cancels[0]())
    try:
        session.begin_cell()
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(asyncio.CancelledError):
            session.run(asyncio.sleep(3600), cancels.append)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_cell_that_awaits_cannot_run_another(session: SessionLoop) -> None:
    async def cell() -> None:
        session.run(value(), ignore)

    with pytest.raises(RuntimeError, match="a cell of its own"):
        session.run(cell(), ignore)
    assert session.run(value(), ignore) == 5


def test_a_request_is_run_to_its_end() -> None:
    async def answers() -> int:
        return 3

    assert run_to_end(answers()) == 3
    with pytest.raises(RuntimeError, match="has waited"):
        run_to_end(asyncio.sleep(0))
