"""Requests that are refused before anything else sees them, and those that are passed on."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any, cast

import anyio
import pytest
from starlette.types import Receive, Scope, Send

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.errors import ServerFailure
from kernel_mcp.http.addresses import Addresses
from kernel_mcp.http.admission import Admission
from kernel_mcp.http.bodies import MOST_BODY, MOST_VALUES
from kernel_mcp.http.connections import ClientConnection
from kernel_mcp.http.gate import PRINCIPAL_BODY, REFUSED_S, Gate
from kernel_mcp.http.refusals import respond_json
from kernel_mcp.identity import INSTALL, METRICS, RUN, OneToken, Principal, Unauthenticated
from kernel_mcp.sessions.notifications import DeliveryTracker
from kernel_mcp.units import KIB, MIB
from tests.unit.fake_kernels import FakeClock
from tests.unit.http.asgi import PEER, Answer, ask

pytestmark = pytest.mark.anyio

ANNA = {"authorization": "Bearer anna"}
CALL_INSTALL = b'{"method": "tools/call", "params": {"name": "install"}}'


_SCOPES = {
    "anna": {RUN, INSTALL},
    "ben": {RUN},
    "eve": {INSTALL},
    "olga": {METRICS},
    "kmcp_ben": {RUN},
}


class Doorbell:
    """Knows some tokens, hears refusals."""

    def __init__(self) -> None:
        self.refusals: list[tuple[str, str, str]] = []
        self.bytes = (0, 0)

    async def verify(self, token: str) -> Principal:
        if token == "down":
            raise ServerFailure("the issuer does not answer")
        scopes = _SCOPES.get(token)
        if scopes is None:
            raise Unauthenticated("not valid")
        return Principal(token, frozenset(scopes), Quotas(), ())

    async def aclose(self) -> None:
        pass

    def refused(self, reason: str, peer: str, principal: str) -> None:
        self.refusals.append((reason, peer, principal))

    def moved(self, received: int, sent: int) -> None:
        self.bytes = (self.bytes[0] + received, self.bytes[1] + sent)


class Behind:
    """Answers with who called and what came."""

    def __init__(self) -> None:
        self.reached = 0
        self.hold: anyio.Event | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached += 1
        message = await receive()
        if self.hold is not None and scope["method"] == "POST":
            await self.hold.wait()
        who = scope["state"].get("principal")
        found = {"who": who.name if who else "", "length": len(message.get("body", b""))}
        await respond_json(send, 200, found)


def made(
    bell: Doorbell | None = None, *, admission: Admission | None = None, **changes: Any
) -> tuple[Gate, Behind]:
    behind = Behind()
    options: dict[str, Any] = {
        "addresses": Addresses.of("127.0.0.1", ""),
        "admission": admission or Admission(bell, None, ""),
        "quotas": Quotas(),
        "clock": FakeClock(),
        "deliveries_of": lambda _: None,
        "observer": bell,
        **changes,
    }
    return Gate(behind, **options), behind


async def test_a_call_with_a_token_reaches_what_is_behind_with_its_principal() -> None:
    bell = Doorbell()
    gate, _ = made(bell)
    answer = await ask(gate, headers=ANNA, body=[b"ab", b"cd"])
    assert answer.status == 200
    assert answer.json == {"who": "anna", "length": 4}
    assert bell.bytes == (4, len(answer.body))
    assert bell.refusals == []


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer ", "Basic anna", "anna", "bearer wrong", "Bearer annaanna", "Bearer é"],
)
async def test_a_wrong_token_gets_no_further(given: str) -> None:
    bell = Doorbell()
    gate, behind = made(bell)
    answer = await ask(gate, headers={"authorization": given} if given else {})
    assert answer.status == 401
    assert behind.reached == 0
    challenge = answer.headers["www-authenticate"]
    assert challenge.startswith("Bearer realm=")
    assert 'scope="kernel:run"' in challenge
    assert bell.refusals == [("unauthenticated", PEER, "")]


async def test_the_scheme_of_a_token_may_have_any_case() -> None:
    gate, _ = made(Doorbell())
    assert (await ask(gate, headers={"authorization": "bEARER anna"})).status == 200


@pytest.mark.parametrize(("given", "told"), [("", False), ("Bearer wrong", True)])
async def test_a_refused_token_has_the_body_of_rfc_6750(given: str, told: bool) -> None:
    gate, _ = made(Doorbell())
    answer = await ask(gate, headers={"authorization": given} if given else {})
    assert set(answer.json) == {"error", "error_description"}
    assert answer.json["error"] == "invalid_token"
    assert ('error="invalid_token"' in answer.headers["www-authenticate"]) is told


@pytest.mark.parametrize("issuer", [False, True])
@pytest.mark.parametrize("path", ["oauth-authorization-server", "openid-configuration/mcp", "x"])
async def test_addresses_where_clients_look_for_an_issuer_need_no_token(
    path: str, issuer: bool
) -> None:
    gate, behind = made(admission=Admission(Doorbell(), {} if issuer else None, ""))
    assert (await ask(gate, "GET", f"/.well-known/{path}")).status == 404
    assert behind.reached == 0


async def test_without_an_issuer_there_is_no_metadata() -> None:
    gate, _ = made(Doorbell())
    for suffix in ("", "/mcp"):
        answer = await ask(gate, "GET", f"/.well-known/oauth-protected-resource{suffix}")
        assert answer.status == 404


async def test_a_preflight_is_refused_and_no_answer_lets_a_page_read_it() -> None:
    gate, behind = made(Doorbell())
    page = {"origin": "http://localhost:6274", "access-control-request-method": "POST"}
    refused = await ask(gate, "OPTIONS", headers=page)
    assert refused.status == 405
    assert "CORS" in refused.json["error"]
    assert behind.reached == 0
    for answer in (refused, await ask(gate, headers={**ANNA, **page})):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("path", "served"), [("/mcp/", "/mcp"), ("/sse/", "/sse")])
async def test_a_slash_at_the_end_is_no_other_address(path: str, served: str) -> None:
    gate, _ = made(Doorbell())
    seen: list[str] = []

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])
        await respond_json(send, 200, {})

    gate._app = behind
    assert (await ask(gate, path=path)).status == 401
    assert (await ask(gate, path=path, headers=ANNA)).status == 200
    assert seen == [served]


async def test_a_token_without_the_scope_is_told_which_one_it_lacks() -> None:
    bell = Doorbell()
    gate, behind = made(bell)
    answer = await ask(gate, headers={"authorization": "Bearer eve"})
    assert answer.status == 403
    assert 'error="insufficient_scope", scope="kernel:run"' in answer.headers["www-authenticate"]
    assert answer.json["error"] == "insufficient_scope"
    assert RUN in answer.json["error_description"]
    assert behind.reached == 0
    assert bell.refusals == [("forbidden", PEER, "eve")]


@pytest.mark.parametrize(
    ("token", "path", "status"),
    [("anna", "/metrics", 403), ("olga", "/metrics", 200), ("olga", "/mcp", 403)],
)
async def test_metrics_take_a_scope_of_their_own(token: str, path: str, status: int) -> None:
    gate, _ = made(Doorbell())
    headers = {"authorization": f"Bearer {token}"}
    answer = await ask(gate, method="GET", path=path, headers=headers)
    assert answer.status == status
    needed = "kernel:metrics" if path == "/metrics" else "kernel:run"
    assert (f'scope="{needed}"' in answer.headers.get("www-authenticate", "")) is (status == 403)


async def test_the_token_that_the_server_has_made_reads_metrics() -> None:
    made_at_start = OneToken()
    gate, _ = made(admission=Admission(made_at_start, None, ""))
    headers = {"authorization": f"Bearer {made_at_start.token}"}
    assert (await ask(gate, method="GET", path="/metrics", headers=headers)).status == 200


async def test_tokens_that_cannot_be_checked_now_are_not_called_wrong() -> None:
    gate, _ = made(Doorbell())
    answer = await ask(gate, headers={"authorization": "Bearer down"})
    assert answer.status == 503
    assert "does not answer" in answer.json["error"]
    assert "www-authenticate" not in answer.headers


async def test_without_a_verifier_everyone_is_the_same_principal_without_doors() -> None:
    gate, _ = made(None)
    state: dict[str, Any] = {}
    assert (await ask(gate, state=state)).json["who"] == "local"
    assert state["principal"].grants == ()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("LocalHost", 200),
        ("[::1]:9", 200),
        ("localhost.", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.0.0.1:8000.evil.example", 421),
        ("", 421),
    ],
)
async def test_a_request_has_to_name_this_host(host: str, status: int) -> None:
    gate, _ = made(Doorbell())
    assert (await ask(gate, headers={**ANNA, "host": host})).status == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("http://evil.example", 403),
        ("https://localhost.evil.example", 403),
        ("null", 403),
    ],
)
async def test_pages_of_other_origins_may_not_call(origin: str, status: int) -> None:
    gate, _ = made(Doorbell())
    assert (await ask(gate, headers={**ANNA, "origin": origin})).status == status


@pytest.mark.parametrize(
    ("host", "status"),
    [("notebook.example", 200), ("NOTEBOOK.example", 200), ("127.0.0.1:8000", 421)],
)
async def test_the_public_url_names_the_host(host: str, status: int) -> None:
    addresses = Addresses.of("10.0.0.1", "https://notebook.example")
    gate, _ = made(Doorbell(), addresses=addresses)
    headers = {**ANNA, "host": host, "origin": "https://notebook.example"}
    assert (await ask(gate, headers=headers)).status == status


async def test_a_server_for_every_address_takes_every_host() -> None:
    gate, _ = made(Doorbell(), addresses=Addresses.of("0.0.0.0", ""))
    assert (await ask(gate, headers={**ANNA, "host": "box.lan:8000"})).status == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_need_no_token(path: str) -> None:
    gate, behind = made(Doorbell())
    assert (await ask(gate, "GET", path, headers={"host": "10.1.2.3"})).status == 200
    assert behind.reached == 1


@pytest.mark.parametrize("suffix", ["", "/mcp"])
async def test_the_metadata_is_at_both_addresses(suffix: str) -> None:
    document = {"resource": "https://notebook.example/mcp"}
    where = "https://notebook.example/.well-known/oauth-protected-resource/mcp"
    gate, _ = made(admission=Admission(Doorbell(), document, where))
    path = "/.well-known/oauth-protected-resource" + suffix
    assert (await ask(gate, "GET", path)).json == document
    challenge = (await ask(gate)).headers["www-authenticate"]
    assert f'resource_metadata="{where}"' in challenge
    assert 'scope="kernel:run kernel:install"' in challenge, "clients register for these alone"


@pytest.mark.parametrize("name", ["authorization", "host", "content-length"])
async def test_a_header_that_decides_may_not_come_twice(name: str) -> None:
    gate, behind = made(Doorbell())
    scope_headers = {**ANNA, name.upper(): "x"}
    given = {"host": "localhost", "content-length": "2", **ANNA}

    async def twice(scope: Scope, receive: Receive, send: Send) -> None:
        pairs = [(k.encode(), v.encode()) for k, v in given.items()]
        scope["headers"] = [*pairs, (name.encode(), b"Bearer ben")]
        await gate(scope, receive, send)

    assert (await ask(twice, headers=scope_headers)).status == 400
    assert behind.reached == 0


async def test_a_body_that_is_too_long_is_refused_with_the_way_that_takes_it() -> None:
    gate, behind = made(Doorbell())
    length = str(MOST_BODY + 1)
    declared = await ask(gate, headers={**ANNA, "content-length": length})
    streamed = await ask(gate, headers=ANNA, body=[b"x" * MIB] * 5)
    for answer in (declared, streamed):
        assert answer.status == 413
        assert "/sessions/HANDLE/files/PATH" in answer.json["error"]
        assert answer.headers["connection"] == "close"
    assert behind.reached == 0


async def test_a_body_without_end_is_refused_after_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernel_mcp.http.bodies.BODY_S", 0.01)
    monkeypatch.setattr("kernel_mcp.http.bodies.SKIP_S", 0.01)
    gate, behind = made(Doorbell())

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await gate(scope, anyio.sleep_forever, send)  # type: ignore[arg-type]

    answer = await ask(endless, headers=ANNA)
    assert answer.status == 408
    assert behind.reached == 0
    assert gate.calls == 0


async def test_a_client_that_goes_in_its_body_leaves_nothing_behind() -> None:
    gate, behind = made(Doorbell())
    assert (await ask(gate, headers=ANNA, body=[b"{"], stays=False)).status == 408
    assert behind.reached == 0
    assert gate.calls == 0


async def test_the_bytes_of_one_principal_are_bounded_and_those_of_another_are_not() -> None:
    gate, behind = made(Doorbell())
    behind.hold = anyio.Event()
    full = [b"x" * (MOST_BODY // 4)] * 4
    async with anyio.create_task_group() as tasks:
        for _ in range(PRINCIPAL_BODY // MOST_BODY):
            tasks.start_soon(lambda: ask(gate, headers=ANNA, body=full))
        with anyio.fail_after(30):
            while behind.reached < PRINCIPAL_BODY // MOST_BODY:
                await anyio.lowlevel.checkpoint()
        refused = await ask(gate, headers=ANNA, body=[b"x"])
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        behind.hold.set()
        other = await ask(gate, headers={"authorization": "Bearer ben"}, body=full)
        assert other.status == 200
    assert (await ask(gate, headers=ANNA, body=full)).status == 200


@pytest.mark.parametrize(
    "value",
    [[0] * MOST_VALUES, [[]] * MOST_VALUES, {str(n): {} for n in range(MOST_VALUES)}],
    ids=["numbers", "lists", "objects"],
)
async def test_a_message_of_so_many_values_that_others_would_wait_is_refused(value: object) -> None:
    gate, behind = made(Doorbell())
    answer = await ask(gate, headers=ANNA, body=[json.dumps({"params": value}).encode()])
    assert answer.status == 413
    assert b"10,000 values" in answer.body
    assert behind.reached == 0
    text = '"\\' + json.dumps(value) * 2  # as the text of a file, say
    answer = await ask(gate, headers=ANNA, body=[json.dumps({"params": [text, "a"]}).encode()])
    assert answer.status == 200


async def test_a_quota_of_bytes_bounds_one_body_too() -> None:
    gate, _ = made(Doorbell(), quotas=Quotas(body=2 * KIB))
    assert (await ask(gate, headers=ANNA, body=[b"x" * KIB])).status == 200
    assert (await ask(gate, headers=ANNA, body=[b"x" * 3 * KIB])).status == 413


async def test_more_calls_a_second_than_the_quota_wait_and_those_of_others_do_not() -> None:
    clock, bell = FakeClock(), Doorbell()
    gate, behind = made(bell, quotas=Quotas(rate=2), clock=clock)
    assert [(await ask(gate, headers=ANNA)).status for _ in range(3)] == [200, 200, 429]
    assert (await ask(gate, headers={"authorization": "Bearer ben"})).status == 200
    refused = await ask(gate, headers=ANNA)
    assert int(refused.headers["retry-after"]) >= 1
    assert bell.refusals[-1] == ("rate", PEER, "anna")
    clock.now += 0.5
    assert (await ask(gate, headers=ANNA)).status == 200
    assert (await ask(gate, headers=ANNA)).status == 429
    clock.now += 60
    assert [(await ask(gate, headers=ANNA)).status for _ in range(3)] == [200, 200, 429]
    assert behind.reached == 6


async def test_calls_that_another_server_answers_are_of_the_same_rate() -> None:
    clock = FakeClock()
    gate, _ = made(Doorbell(), quotas=Quotas(rate=2), clock=clock)
    gate.made_elsewhere("anna", 5)  # who has not called here has nothing here to take them from
    assert gate.calls_made() == {}
    assert (await ask(gate, headers=ANNA)).status == 200
    assert gate.calls_made() == {"anna": 1}
    gate.made_elsewhere("anna", 2)
    assert (await ask(gate, headers=ANNA)).status == 429
    clock.now += 0.9
    assert (await ask(gate, headers=ANNA)).status == 429
    clock.now += 0.2
    assert (await ask(gate, headers=ANNA)).status == 200
    clock.now += 100
    assert gate.calls_made() == {}


async def test_who_calls_again_at_once_hears_late_that_it_may_not() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    gate, _ = made(Doorbell(), quotas=Quotas(rate=1), sleep=sleep)
    assert (await ask(gate, headers=ANNA)).status == 200
    assert slept == []
    assert (await ask(gate, headers=ANNA)).status == 429
    assert slept == [REFUSED_S]


async def test_a_server_that_stops_takes_no_more_and_waits_for_what_runs() -> None:
    gate, behind = made(Doorbell())
    behind.hold = anyio.Event()
    answers = []

    async def call() -> None:
        answers.append(await ask(gate, headers=ANNA))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        while not behind.reached:
            await anyio.lowlevel.checkpoint()
        gate.draining = True
        refused = await ask(gate, headers=ANNA)
        assert refused.status == 503
        assert refused.headers["connection"] == "close"
        assert (await ask(gate, "GET", "/healthz")).status == 200
        assert gate.calls == 1
        behind.hold.set()
        await gate.drained()
    assert [each.status for each in answers] == [200]


@pytest.mark.parametrize("handshake", [False, True])
async def test_listeners_are_no_calls_to_wait_for(handshake: bool) -> None:
    gate, behind = made(Doorbell())
    behind.hold = anyio.Event()
    headers = {**ANNA, "mcp-method": "subscriptions/listen"}
    if handshake:  # has no such listeners: this may be any call
        headers["mcp-session-id"] = "f" * 32
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: ask(gate, headers=headers))
        while not behind.reached:
            await anyio.lowlevel.checkpoint()
        assert gate.calls == handshake
        if not handshake:
            await gate.drained()
        behind.hold.set()
    assert gate.calls == 0


async def test_an_upload_that_outlasts_the_server_is_told_so() -> None:
    gate, behind = made(Doorbell())
    begun = anyio.Event()

    async def store(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await anyio.sleep_forever()

    gate._app = store
    answers: list[Answer] = []

    async def upload() -> None:
        answers.append(await ask(gate, "PUT", "/sessions/s/files/a", headers=ANNA))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(upload)
        await begun.wait()
        gate.draining = True
        assert (gate.calls, gate.cancel_transfers()) == (1, 1)
        await gate.drained()
    assert answers[0].status == 503
    assert "the file is as it was" in answers[0].json["error"]
    assert behind.reached == gate.cancel_transfers() == 0


class Line:
    """A transport that is there until it is cut."""

    closing = False

    def abort(self) -> None:
        self.closing = True


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_stream_is_cut_when_its_token_is_good_no_more(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, behind = made(Doorbell())
    begun, hold = anyio.Event(), anyio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await hold.wait()
        await behind(scope, receive, send)

    gate._app = stream
    line = Line()
    state = {"connection": ClientConnection(cast(asyncio.Transport, line))}
    headers = {**ANNA, "mcp-method": "subscriptions/listen"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(ask, gate, method, headers=headers, state=state))
        await begun.wait()
        await gate.recheck()
        assert not line.closing
        monkeypatch.delitem(_SCOPES, "anna")
        await gate.recheck()
        assert line.closing
        hold.set()
    monkeypatch.undo()
    line.closing = False
    await gate.recheck()
    assert not line.closing, "it has ended"


async def test_a_stream_is_cut_though_the_answer_before_it_ended_after_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, behind = made(Doorbell())
    begun = [anyio.Event(), anyio.Event()]
    hold = [anyio.Event(), anyio.Event()]

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        number = sum(each.is_set() for each in begun)
        begun[number].set()
        await hold[number].wait()
        await behind(scope, receive, send)

    gate._app = stream
    line = Line()
    state = {"connection": ClientConnection(cast(asyncio.Transport, line))}
    asked = partial(ask, gate, "GET", headers=ANNA, state=state)

    async def first() -> None:
        await asked()
        first_ended.set()

    first_ended = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        await begun[0].wait()
        tasks.start_soon(asked)
        await begun[1].wait()
        hold[0].set()
        await first_ended.wait()
        monkeypatch.delitem(_SCOPES, "anna")
        await gate.recheck()
        assert line.closing
        hold[1].set()


async def test_an_answer_that_is_an_event_has_arrived_before_its_stream_ends() -> None:
    deliveries, told = DeliveryTracker(), list[str]()
    deliveries.expect(7).then(lambda: told.append("delivered"))
    seen: list[list[str]] = []

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        scope["state"]["delivery"].expect(7).then(lambda: told.append("delivered"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for data in (
            b'{"method":"notifications/progress","jsonrpc":"2.0"}',
            b'{"jsonrpc":"2.0","id":7,"result":{}}',
        ):
            body = b"event: message\r\ndata: " + data + b"\r\n\r\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
            seen.append(list(told))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    gate, _ = made(Doorbell(), deliveries_of=lambda _: deliveries)
    gate._app = stream
    line = ClientConnection(cast(asyncio.Transport, Line()))
    await ask(gate, headers=ANNA, state={"connection": line})
    assert seen == [[], ["delivered"]]
    assert told == ["delivered"]


@pytest.mark.parametrize(
    ("token", "body", "status"),
    [
        ("ben", CALL_INSTALL, 403),
        ("ben", CALL_INSTALL.replace(b'"install"', b'"execute"'), 200),
        ("ben", b'["install"]', 200),
        ("ben", b'{"method": "tools/call", "params": "install", "x": "install"}', 200),
        ("ben", b'"install"' + b"[" * 9_000, 200),
        ("anna", CALL_INSTALL, 200),
        ("kmcp_ben", CALL_INSTALL, 200),  # whom the tool tells, as nobody gives it another token
    ],
    ids=range(7),
)
async def test_an_issuers_token_is_to_be_another_for_an_install(
    token: str, body: bytes, status: int
) -> None:
    gate, _ = made(admission=Admission(Doorbell(), {}, "https://x.example/about"))
    answer = await ask(gate, headers={"authorization": f"Bearer {token}"}, body=[body])
    assert answer.status == status
    challenge = 'error="insufficient_scope", scope="kernel:run kernel:install"'
    assert (challenge in answer.headers.get("www-authenticate", "")) is (status == 403)


async def test_without_an_issuer_the_tool_says_what_is_lacking() -> None:
    gate, _ = made(Doorbell())
    ben = {"authorization": "Bearer ben"}
    assert (await ask(gate, headers=ben, body=[CALL_INSTALL])).status == 200
