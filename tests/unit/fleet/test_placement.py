"""On which node a session begins."""

from __future__ import annotations

from collections import Counter
from random import Random

from kernel_mcp.fleet.members import Load, Member
from kernel_mcp.fleet.placement import choose, environment_of

GIB = 2**30


def member(name: str, sessions: int = 0, *, environments: tuple[str, ...] = ()) -> Member:
    load = Load(16 * GIB, sessions, 0, 16, environments)
    return Member(name, name, load=load)


def chosen(*members: Member, environment: str = "") -> Counter[str]:
    """How often each is chosen."""
    draw = Random(7)
    found = (choose(members, environment, draw) for _ in range(1000))
    return Counter(each.name for each in found if each is not None)


def test_no_node_that_is_lost_drained_or_has_refused_is_chosen() -> None:
    lost = Member("lost", "", lost=True)
    drained = Member("drained", "", draining=True)
    assert set(chosen(lost, drained, member("free"))) == {"free"}
    assert choose([lost, drained], "", Random(1)) is None
    assert choose([member("one")], "", Random(1), but=("one",)) is None


def test_the_emptier_of_two_is_chosen_and_of_many_not_always_the_emptiest() -> None:
    assert set(chosen(member("full", 15), member("empty", 1))) == {"empty"}
    counts = chosen(*(member(f"n{number}", number) for number in range(10)))
    assert counts["n9"] == 0
    assert 100 < counts["n0"] < 300  # as it is drawn in two of ten
    assert counts["n1"] > counts["n8"]


def test_a_node_without_room_or_memory_takes_a_session_only_where_all_are_so() -> None:
    full = member("full", 16)
    assert set(chosen(full, member("free", 15))) == {"free"}
    assert set(chosen(full, member("fuller", 20))) == {"full"}
    poor = Member("poor", "", load=Load(GIB // 8, 0, 0, 16))
    assert set(chosen(poor, member("rich", 12))) == {"rich"}


def test_a_node_that_has_the_environment_ready_is_always_drawn() -> None:
    key = environment_of({"packages": ["numpy"]})
    ready = member("ready", 12, environments=(key,))
    others = [member(f"n{number}") for number in range(20)]
    assert set(chosen(ready, *others, environment=key)) == {"ready"}
    full = member("ready", 16, environments=(key,))
    assert "ready" not in chosen(full, *others, environment=key)


def test_sessions_that_were_just_sent_count() -> None:
    one, two = member("one"), member("two")
    found = choose([one, two], "", Random(1), ahead={"one": 5})
    assert found is not None
    assert found.name == "two"


def test_an_environment_is_known_by_what_is_asked_for() -> None:
    assert environment_of({}) == environment_of({"packages": [], "python": ""}) == ""
    one = environment_of({"packages": ["numpy", "Pandas "]})
    assert one == environment_of({"packages": "pandas,numpy"})
    assert one != environment_of({"packages": ["numpy", "pandas"], "python": "3.12"})
