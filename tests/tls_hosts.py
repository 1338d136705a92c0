"""HTTPS hosts on loopback, with an authority of their own, that tell what they were told."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kernel_mcp.network.authority import Authority
from kernel_mcp.network.secrets import authorities


class Services(BaseHTTPRequestHandler):
    """Answers by the first part of the path."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(OSError):
            super().handle_one_request()

    def _given(self) -> str:
        return self.headers.get("Authorization", "")

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _chunks(self, *pieces: bytes, trailer: str = "", **headers: str) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        end = f"X-Trailer: {trailer}\r\n" if trailer else ""
        self.wfile.write(f"0\r\n{end}\r\n".encode())

    def do_GET(self) -> None:
        body = self._body()
        self.server.seen.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        given = self._given()
        plain = given.partition(" ")[2].encode()
        match self.path.partition("?")[0].split("/")[1]:
            case "length":
                digest = hashlib.sha256(given.encode()).hexdigest()
                said = {"digest": digest, "body": hashlib.sha256(body).hexdigest()}
                self._answer(json.dumps({**said, "length": len(body)}).encode())
            case "echo":
                self._answer(json.dumps(dict(self.headers)).encode())
            case "large":
                self._answer(b"x" * 200_000 + plain + b"y" * 10)
            case "gzip":
                self._answer(gzip.compress(given.encode()), Content_Encoding="gzip")
            case "twice":
                self.send_response(200)
                for coding in ("gzip", "identity"):
                    self.send_header("Content-Encoding", coding)
                packed = gzip.compress(given.encode())
                self.send_header("Content-Length", str(len(packed)))
                self.end_headers()
                self.wfile.write(packed)
            case "malformed":
                texts = {
                    "header": f"X Given: {given}\r\nContent-Length: 0\r\n\r\n",
                    "value": f"X-Given: \0{given}\r\nContent-Length: 0\r\n\r\n",
                    "chunk": f"Transfer-Encoding: chunked\r\n\r\n{given}\r\n0\r\n\r\n",
                }
                place = self.path.partition("?")[2]
                start = f"HTTP/1.1 2x {given}\r\n" if place == "status" else "HTTP/1.1 200 OK\r\n"
                self.wfile.write((start + texts.get(place, "\r\n")).encode())
            case "base64":
                self._answer(base64.b64encode(b"some text before " + plain + b" and after"))
            case "split":
                self._chunks(b"x" * 100_000, *(bytes([each]) for each in plain), b"y")
            case "header":
                self._answer(b"", X_Given=given)
            case "trailer":
                self._chunks(b"x" * 200_000, trailer=given)
            case "events":
                events = [f"data: {number}\n\n".encode() for number in range(5)]
                self._chunks(*events, Content_Type="text/event-stream")
            case "closing":
                self._answer(b"closing", Connection="close")
            case "redirect":
                self._answer(b"", 302, Location=self.path.partition("?")[2])
            case _:
                self._answer(b"no such service", 404)

    do_POST = do_PUT = do_HEAD = do_GET  # noqa: N815  # as the base class calls them


@dataclass
class Host:
    """One that runs at `port`; `seen` are path, headers and body of its requests."""

    name: str
    port: int
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


@contextlib.contextmanager
def serving(name: str, authority: Authority) -> Iterator[Host]:
    """A host of that name with a certificate of `authority`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Services)
    server.daemon_threads = True
    context = authority.context(name)
    context.sni_callback = lambda *_: None
    server.socket = context.wrap_socket(server.socket, server_side=True)
    host = Host(name, server.server_address[1])
    server.seen = host.seen  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield host
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def trusting(authority: Authority, folder: Path) -> Path:
    """A file with its certificate and this machine's, for `SSL_CERT_FILE`."""
    file = folder / "authority.pem"
    file.write_text(authorities({}) + authority.certificate)
    return file


def trust_of(authority: Authority) -> ssl.SSLContext:
    """Return a context that verifies its hosts."""
    return ssl.create_default_context(cadata=authority.certificate)
