"""What a session has to tell is kept until it was told."""

from __future__ import annotations

from kernel_mcp.sessions.losses import MOST_NAMES, MOST_PENDING, Ledger, Loss


def test_a_notice_is_pending_until_it_was_told() -> None:
    ledger = Ledger()
    first, second = ledger.add("one"), ledger.add("two")
    ledger.told([first])
    assert ledger.pending == (second,)


def test_what_nobody_has_read_is_pending_again_in_its_place() -> None:
    ledger = Ledger()
    first, second = ledger.add("one"), ledger.add("two")
    ledger.told([first])
    ledger.untold([first])
    assert ledger.pending == (first, second)


def test_a_loss_that_was_told_can_be_told_once_more() -> None:
    ledger = Ledger()
    ledger.told([ledger.add("a remark")])
    assert ledger.again is None
    loss = ledger.add("gone", Loss("death", ("x",)))
    ledger.told([loss])
    assert ledger.again is loss
    ledger.told([loss])
    assert ledger.again is None


def test_cells_run_after_what_was_lost_while_they_waited_and_before() -> None:
    ledger = Ledger()
    first = ledger.add("one", Loss("death"))
    assert ledger.place(ledger.number) == [first]
    assert ledger.place(ledger.number) == []
    waiting = ledger.number
    second = ledger.add("two", Loss("death"))
    assert ledger.place(waiting) == [second]
    assert ledger.place(waiting) == [second]
    assert ledger.place(ledger.number) == []


def test_what_its_own_cell_has_told_is_repeated_by_those_that_waited_only() -> None:
    ledger = Ledger()
    waiting = ledger.number
    killed = ledger.add("cell 1 was killed", Loss("death"))
    ledger.told_by_its_cell(killed)
    assert ledger.place(ledger.number) == []
    assert ledger.place(waiting) == [killed]


def test_after_a_reset_no_cell_runs_after_a_loss() -> None:
    ledger = Ledger()
    ledger.add("one", Loss("death"))
    ledger.forgive()
    assert ledger.place(ledger.number) == []
    assert len(ledger.pending) == 1


def test_notices_that_nobody_fetches_are_counted() -> None:
    ledger = Ledger()
    for number in range(MOST_PENDING + 3):
        ledger.add(str(number))
    told = ledger.pending
    assert told[0].text.startswith("3 earlier notices")
    ledger.told(told)
    assert ledger.pending == ()


def test_names_of_a_loss_are_bounded_and_the_rest_is_counted() -> None:
    loss = Loss.of("death", (f"n{i}" for i in range(MOST_NAMES + 7)), more=5)
    assert (len(loss.names), loss.more) == (MOST_NAMES, 12)
