"""Leases of nodes, and who may count on their end."""

from __future__ import annotations

import dataclasses

from kernel_mcp.fleet.members import LEASE_S, MARGIN_S, RENEW_S, Load, Member, Members
from kernel_mcp.sessions.principals import Use
from tests.unit.fake_kernels import FakeClock

WHOLE_S = LEASE_S + MARGIN_S


def joined(*names: str) -> tuple[Members, FakeClock]:
    clock = FakeClock()
    members = Members(clock)
    for name in names:
        assert members.join(Member(name, f"life of {name}")) == ""
    return members, clock


def test_a_lease_goes_on_as_long_as_it_is_renewed() -> None:
    members, clock = joined("one")
    for _ in range(20):
        clock.now += LEASE_S - 1
        assert members.renew("one", "life of one", Load(sessions=3))
        assert not members.is_over("one", "life of one")
    assert members.rows()[0]["load"]["sessions"] == 3


def test_a_node_that_is_silent_is_over_later_than_it_knows_itself_and_never_comes_back() -> None:
    members, clock = joined("one")
    clock.now += LEASE_S + MARGIN_S / 2
    assert not members.is_over("one", "life of one")
    clock.now += MARGIN_S
    assert members.is_over("one", "life of one")
    assert not members.renew("one", "life of one", Load())
    assert members.rows()[0]["lost"] is True


def test_a_lease_is_longer_than_several_renewals_take() -> None:
    assert LEASE_S >= 4 * RENEW_S
    assert WHOLE_S < 15  # what an answer may take after a node has fallen silent


def test_a_node_that_has_ended_is_over_at_once() -> None:
    members, _ = joined("one", "two")
    before = members.version
    members.end("one", "life of one")
    assert members.is_over("one", "life of one")
    assert not members.is_over("two", "life of two")
    assert members.version > before


def test_a_name_is_one_nodes_until_its_lease_is_over() -> None:
    members, clock = joined("one")
    assert "'one' is there already" in members.join(Member("one", "another life"))
    clock.now += WHOLE_S + 1
    assert members.join(Member("one", "another life")) == ""
    assert not members.renew("one", "life of one", Load())
    assert members.renew("one", "another life", Load())


def test_a_list_that_began_again_counts_on_no_lease_that_may_still_last() -> None:
    members, clock = joined()
    assert not members.is_over("one", "life of one")
    members.join(Member("one", "another life"))
    assert not members.is_over("one", "life of one")
    clock.now += WHOLE_S + 1
    assert members.is_over("one", "life of one")


def test_the_next_end_is_told_and_noted_when_it_comes() -> None:
    members, clock = joined("one")
    clock.now += 1
    members.join(Member("two", "life of two"))
    assert members.expire() == WHOLE_S - 1
    version = members.version
    clock.now += WHOLE_S - 0.5
    assert members.expire() == 0.5
    assert members.version == version + 1
    clock.now += 1
    assert members.expire() is None


def test_rows_are_plain_values_that_say_all() -> None:
    members, _ = joined("one")
    assert members.drain("one")
    assert not members.drain("two")
    (row,) = members.rows()
    member = Member.of(row)
    assert member.draining
    assert member.row() == row


def test_a_node_that_has_left_is_there_until_it_has_ended() -> None:
    members, _ = joined("one")
    members.leave("one", "another life")
    assert members.rows()[0]["left"] is False
    members.leave("one", "life of one")
    (row,) = members.rows()
    assert (row["left"], row["draining"], row["lost"]) == (True, True, False)
    assert not members.is_over("one", "life of one")
    members.end("one", "life of one")
    assert members.is_over("one", "life of one")


def test_a_lease_outlives_the_list_while_nobody_can_have_been_told_that_it_was_over() -> None:
    members, clock = joined()
    clock.now += WHOLE_S - 1
    assert not members.is_over("one", "life of one")
    assert members.resume(Member("one", "life of one", draining=True))
    assert members.rows()[0]["draining"] is True
    assert members.renew("one", "life of one", Load())
    clock.now += 2
    assert members.is_over("two", "life of two")
    assert not members.resume(Member("two", "life of two"))


def test_a_lease_of_an_earlier_list_does_not_go_on_under_a_name_that_another_node_has() -> None:
    members, _ = joined("one")
    assert not members.resume(Member("one", "another life"))
    assert members.renew("one", "life of one", Load())


HOLDS = {"ada": dataclasses.asdict(Use(sessions=2, memory=100, largest=80))}


def test_what_a_principal_may_have_is_counted_over_all_nodes() -> None:
    members, _ = joined("one", "two", "three")
    members.use("one", HOLDS)
    assert members.claim("two", "ada", "sessions", 1, most=3)
    assert not members.claim("three", "ada", "sessions", 1, most=3)
    assert not members.claim("two", "ada", "sessions", 2, most=3)
    assert members.claim("three", "ben", "sessions", 3, most=3)
    members.use("two", {})
    assert members.claim("three", "ada", "sessions", 1, most=3)


def test_a_node_hears_of_what_others_have_of_its_principals_alone() -> None:
    members, _ = joined("one", "two", "three")
    members.use("one", HOLDS)
    members.use("two", HOLDS | {"ben": dataclasses.asdict(Use(sessions=1))})
    members.use("three", HOLDS)
    assert members.holders("three", "ada") == ["one", "two"]
    assert members.others("three") == {
        "ada": dataclasses.asdict(Use(sessions=4, memory=200, largest=80))
    }


def test_what_a_lost_node_had_counts_no_more() -> None:
    members, clock = joined("one", "two")
    members.use("one", HOLDS)
    clock.now += WHOLE_S / 2
    assert members.renew("two", "life of two", Load())
    clock.now += WHOLE_S / 2 + 0.1
    members.expire()
    assert members.claim("two", "ada", "sessions", 3, most=3)
    members.use("one", HOLDS)
    assert members.claim("two", "ada", "sessions", 3, most=3)
    assert not members.claim("one", "ada", "memory", 1, most=0)
    assert not members.claim("none", "ben", "sessions", 1, most=3)


def test_a_lost_node_that_claims_late_counts_for_nobody() -> None:
    members, clock = joined("one")
    clock.now += WHOLE_S + 1
    assert members.join(Member("two", "life of two")) == ""
    assert not members.claim("one", "ada", "sessions", 1, most=3)
    assert not members.gives_way("one", "ada", {"memory": 9, "largest": 9}, most=3)
    assert members.holders("two", "ada") == []
    assert members.claim("two", "ada", "sessions", 3, most=3)
