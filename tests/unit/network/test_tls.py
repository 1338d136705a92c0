"""The first message of TLS clients, which can be read in one way only."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.network.tls import HELLO_BYTES, BadHello, Hello


def hello(name: str | None = "example.com") -> bytes:
    """Return the first message of OpenSSL."""
    context = ssl.create_default_context()
    context.check_hostname = False
    out = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return out.read()


def records(message: bytes, size: int) -> bytes:
    """A handshake message in records of `size` bytes."""
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(each).to_bytes(2, "big") + each for each in pieces)


def with_extension(data: bytes, kind: int, content: bytes) -> bytes:
    """The hello of OpenSSL with one more extension."""
    more = kind.to_bytes(2, "big") + len(content).to_bytes(2, "big") + content
    body = bytearray(data[9:])
    place = 2 + 32
    place += 1 + body[place]
    place += 2 + int.from_bytes(body[place : place + 2], "big")
    place += 1 + body[place]
    size = int.from_bytes(body[place : place + 2], "big") + len(more)
    body[place : place + 2] = size.to_bytes(2, "big")
    body += more
    return records(b"\x01" + len(body).to_bytes(3, "big") + bytes(body), 1 << 14)


@pytest.mark.parametrize("size", [1, 5, 100, 1 << 14])
@pytest.mark.parametrize("step", [1, 7, 1 << 14])
def test_the_server_name_is_found_in_whatever_records_and_pieces_it_comes(
    size: int, step: int
) -> None:
    data = records(hello("Example.com")[5:], size)
    found = Hello()
    names = [found.feed(data[at : at + step]) for at in range(0, len(data), step)]
    assert names[-1] == "example.com"
    assert set(names[:-1]) <= {None}
    assert found.raw == data


SNI = b"\0\x0e\0\0\x0bexample.com"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (with_extension(hello(), 0xFE0D, b"\0" * 20), "hides"),
        (with_extension(hello(), 0xFFCE, b"\0" * 20), "hides"),
        (with_extension(hello(), 0, SNI), "twice"),
        (with_extension(hello(None), 0, b"\0\x11" + SNI[2:] + b"\0\0\0"), "no way that is known"),
        (with_extension(hello(None), 0, b"\0\0"), "cut short"),
        (with_extension(hello(None), 0, b"\0\x03\0\0\0"), "no way that is known"),
        (with_extension(hello(None), 0, SNI.replace(b"example", b"ex\xe4mple")), "no way"),
        (records(b"\x02" + hello()[6:], 1 << 14), "ClientHello"),
        (records(b"\x01\xff\xff\xff" + b"x" * HELLO_BYTES * 2, 1 << 14), "too long"),
        (records(hello()[5:] + b"\x01\0\0\0", 1 << 14), "more follows"),
        (b"\x16\x03\x01\0\0" * 10, "speak TLS"),
        (b"\x16\x02\x01\0\x05hello", "speak TLS"),
        (b"\x80\x2e\x01\0\x02", "speak TLS"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "speak TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "speak TLS"),
    ],
)
def test_no_hello_without_one_server_name_in_the_open(data: bytes, says: str) -> None:
    with pytest.raises(BadHello, match=says):
        Hello().feed(data)


def test_a_hello_may_name_no_server() -> None:
    assert Hello().feed(hello(None)) == ""


@given(st.binary(max_size=300), st.integers(0, 600), st.booleans())
def test_a_hello_in_any_state_is_read_or_refused(noise: bytes, place: int, put_in: bool) -> None:
    data = bytearray(BASE)
    data[place : place + (0 if put_in else len(noise))] = noise
    try:
        name = Hello().feed(bytes(data))
    except BadHello:
        return
    assert name is None or name.isascii()


BASE = hello()
