"""Code that reaches for more of the network than its session has: other doors, other sessions."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kernel_mcp.launch.network import PORT
from tests.escape.test_mounted_folders import ALWAYS, WAYS, opened
from tests.integration.agent import Agent
from tests.sampled import sampled

pytestmark = pytest.mark.anyio

PRELUDE = """
import array, ctypes, errno, glob, json, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def tried(make):
    try:
        return repr(make())
    except OSError as error:
        return errno.errorcode[error.errno]
def bound(family, address, *options):
    def make():
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            for level, name in options:
                sock.setsockopt(level, name, 1)
            sock.bind(address)
            sock.listen()
    return tried(make)
def done(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), 'x')
def opened(*kind):
    return tried(lambda: socket.socket(*kind).close())
"""
SOCKETS = """
found = dict(
    packet=opened(17, socket.SOCK_RAW, 768),
    raw=opened(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP),
    icmp=opened(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
    netlink=opened(16, socket.SOCK_RAW, 0),
    diagnosis=opened(16, socket.SOCK_DGRAM, 4),
    vsock=opened(40, socket.SOCK_STREAM, 0),
    multipath=opened(socket.AF_INET, socket.SOCK_STREAM, 262),
    sctp=opened(socket.AF_INET, socket.SOCK_STREAM, 132),
    xdp=opened(44, socket.SOCK_RAW, 0),
    ring=tried(lambda: done(libc.syscall(*map(ctypes.c_long, (425, 8, 0))))),
    namespace=tried(lambda: done(libc.setns(os.open('/proc/self/ns/net', 0), 0))),
    fresh=tried(lambda: done(libc.unshare(0x40000000))),
    users=tried(lambda: done(libc.unshare(0x50000000))),
)
"""
PORTS = f"""
reuse = [(socket.SOL_SOCKET, socket.SO_REUSEADDR), (socket.SOL_SOCKET, socket.SO_REUSEPORT)]
found = dict(
    same=bound(socket.AF_INET, ('127.0.0.1', {PORT}), *reuse),
    any=bound(socket.AF_INET, ('0.0.0.0', {PORT}), *reuse),
    mapped=bound(socket.AF_INET6, ('::ffff:127.0.0.1', {PORT}), *reuse),
    dual=bound(socket.AF_INET6, ('::', {PORT}), *reuse),
    named=bound(socket.AF_INET, ('127.0.0.2', 5432), *reuse),
)
"""
DESCRIPTORS = """
def listening(fd):
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            return sock.family == socket.AF_INET and bool(
                sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
inodes = {line.split()[9] for line in open('/proc/net/tcp').read().splitlines()[1:]
          if line.split()[3] == '0A'}
shown = [path for path in glob.glob('/proc/[0-9]*/fd/*') + glob.glob('/proc/[0-9]*/task/*/fd/*')
         if any(f'socket:[{inode}]' == tried(lambda: os.readlink(path)).strip(chr(39))
                for inode in inodes)]
own = [fd for fd in range(256) if listening(fd)]
abstract = [line for line in open('/proc/net/unix').read().splitlines() if '@' in line]
found = dict(listening=len(inodes), shown=shown, own=own, abstract=abstract)
"""


@pytest.fixture
def abstract() -> Iterator[str]:
    """A server of the host with an abstract name."""
    name = f"kernel-mcp-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen(1)
        yield name


async def told(agent: Agent, session: str, code: str) -> dict[str, Any]:
    answer = await agent.run(f"{PRELUDE}{code}\nprint(json.dumps(found))", session=session)
    assert answer.status == "ok", answer.text
    found: dict[str, Any] = json.loads(answer.text.splitlines()[0])
    return found


@pytest.mark.parametrize("way", sampled(WAYS, *ALWAYS))
async def test_code_has_no_socket_but_its_own_and_no_way_round_the_proxy(
    way: str, abstract: str
) -> None:
    if way.startswith("root") and os.geteuid() != 0:
        pytest.skip("takes root")
    async with opened(way, "--network", "example.com,db.invalid:5432") as notebook:
        agent, session = notebook.agent, notebook.session
        made = await told(agent, session, SOCKETS)
        refused = {"EPERM", "EACCES", "ENOTSUP", "EPROTONOSUPPORT", "EINVAL"}
        assert {name: made[name] for name in made if made[name] not in refused} == {}

        taken = await told(agent, session, PORTS)
        assert set(taken.values()) == {"EADDRINUSE"}

        descriptors = await told(agent, session, DESCRIPTORS)
        assert descriptors["listening"] == 2
        assert descriptors["shown"] == descriptors["own"] == descriptors["abstract"] == []
        host = await told(
            agent,
            session,
            f"found = dict(host=tried(lambda: "
            f"socket.socket(socket.AF_UNIX).connect(chr(0) + {abstract!r})))",
        )
        assert host["host"] == "ECONNREFUSED"


ASK = f"""
def asked(target):
    with socket.create_connection(('127.0.0.1', {PORT}), 30) as proxy:
        proxy.sendall(b'CONNECT ' + target + b' HTTP/1.1\\r\\n\\r\\n')
        return proxy.recv(500).partition(b'\\r')[0].decode()
"""


async def test_a_session_speaks_for_itself_alone() -> None:
    """Neither the listener of another nor what it was permitted is within reach."""
    served: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                served.append(connection.recv(100))

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        async with opened(WAYS[-1], "--network", target) as notebook:
            agent = notebook.agent
            await agent.call("create_session", name="less", network=[])
            ask = f"{ASK}found = dict(said=asked(b'{target}'))"
            assert (await told(agent, notebook.session, ask))["said"].startswith("HTTP/1.1 200")
            assert (await told(agent, "less", ask))["said"].startswith("HTTP/1.1 403")
            # what the first left behind does not outlive its kernel
            left = f"{ASK}proxy = socket.create_connection(('127.0.0.1', {PORT}), 30)\nfound = {{}}"
            await told(agent, "less", left)
            await agent.call("reset", session="less")
            assert (await told(agent, "less", ask))["said"].startswith("HTTP/1.1 403")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
