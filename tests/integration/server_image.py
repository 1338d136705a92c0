"""The image of the server for tests, made of the repository on a Debian that is made here."""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx2
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.sandbox.container.engine import Engine
from tests.conftest import lacking
from tests.integration import containers
from tests.integration.agent import Agent
from tests.run_folder import own_folder

ROOT = Path(__file__).parents[2]
FILE = ROOT / "packaging/container/Containerfile"
PROFILE = ROOT / "packaging/container/seccomp.json"
BASE, IMAGE = "kernel-mcp-test-base", "kernel-mcp-test-server"
PACKAGES = "ca-certificates,python3,python3-venv"
VOLUME = "/var/lib/kernel-mcp"
TOKENS = f"{VOLUME}/tokens"
PATIENCE_S = 300.0
HOST = "notebook.example.com"
"""The host name in the examples of proxies."""
SAFE = (
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--security-opt", f"seccomp={PROFILE}", "--security-opt", "unmask=ALL"),
    *("--read-only", "--tmpfs", "/tmp"),
)
"""As docs/deploy.md has them."""
_CERTIFICATES = Path("/etc/ssl/certs")
_RLIMITS = (("nofile", resource.RLIMIT_NOFILE, 16_384), ("nproc", resource.RLIMIT_NPROC, 4096))
_PASSED = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL")


def surroundings() -> list[str]:
    """The words that have a container trust and reach what this machine does."""
    words: list[str] = []
    bundle = _CERTIFICATES / "ca-certificates.crt"
    if bundle.is_file():
        words += ["--volume", f"{_CERTIFICATES}:{_CERTIFICATES}:ro"]
        words += ["--env", f"SSL_CERT_FILE={bundle}", "--env", f"PIP_CERT={bundle}"]
    for name, value in os.environ.items():
        if name in _PASSED or (name.startswith("UV_") and "://" in value):
            words += ["--env", f"{name}={value}"]
    return words


@functools.cache
def image() -> Engine:
    """Podman once it has the image; skips the test where that cannot be."""
    if os.geteuid() != 0:
        lacking("containers", "needs root to make a root filesystem")
    try:
        engine = Engine.find(containers.options("podman"))
    except SandboxUnavailable:
        lacking("containers", "needs podman")
    if reason := containers.missing_image(engine, BASE, PACKAGES):
        lacking("containers", reason)
    build(engine, IMAGE, ROOT, FILE, "--build-arg", f"BASE=localhost/{BASE}")
    return engine


def build(engine: Engine, name: str, context: Path, file: Path, *words: str) -> None:
    """Build an image; raises CalledProcessError with what was said as a note."""
    given = ["--network", "host", "--format", "docker", *surroundings(), *words]
    run(engine, "build", *given, "--tag", name, "--file", str(file), str(context))


def derived(engine: Engine, name: str, text: str, files: Sequence[Path] = ()) -> None:
    """Build an image from the text of a Containerfile and files beside it."""
    with tempfile.TemporaryDirectory(dir=own_folder()) as folder:
        file = Path(folder, "Containerfile")
        file.write_text(text)
        for each in files:
            Path(folder, each.name).write_bytes(each.read_bytes())
        build(engine, name, Path(folder), file)


def run(engine: Engine, *words: str) -> str:
    """Standard output of a command of the engine that must succeed."""
    done = subprocess.run(engine.command(*words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr[-3000:]} {done.stdout[-1000:]}"
    return done.stdout.strip()


def ceilings() -> list[str]:
    """Rlimits that podman may set where tests themselves run without the right to raise any."""
    words = []
    for name, kind, enough in _RLIMITS:
        hard = resource.getrlimit(kind)[1]
        most = enough if hard < 0 else min(hard, enough)
        words.append(f"--ulimit={name}={most}:{most}")
    return words


def started(*options: str, name: str = IMAGE) -> list[str]:
    """The words of `podman run`, up to the image; its health check takes systemd here."""
    common = ["run", "--rm", "--no-healthcheck", *ceilings(), *surroundings()]
    return [*common, *options, name]


@contextmanager
def volume(engine: Engine) -> Iterator[str]:
    """A volume that goes with this block."""
    name = run(engine, "volume", "create")
    try:
        yield name
    finally:
        engine.ask("volume", "rm", "--force", name, patience_s=PATIENCE_S)


@contextmanager
def container(engine: Engine, *words: str) -> Iterator[str]:
    """The id of a container in the background that goes with this block."""
    at = words.index("--rm")
    number = run(engine, *words[:at], "--detach", *words[at + 1 :])
    try:
        yield number
    finally:
        engine.ask("rm", "--force", "--time", "0", number, patience_s=PATIENCE_S)


def published(engine: Engine, number: str, port: int) -> int:
    """The port of this machine's loopback that leads to one of a container."""
    return int(run(engine, "port", number, str(port)).rpartition(":")[2])


def exit_code(engine: Engine, number: str) -> int:
    """That of a container that has ended."""
    found = json.loads(run(engine, "inspect", number))
    return int(found[0]["State"]["ExitCode"])


@asynccontextmanager
async def on_stdio(engine: Engine, *words: str) -> AsyncIterator[Agent]:
    """A client of a server that `podman run -i` starts."""
    command, *args = engine.command(*words)
    args.insert(args.index("run") + 1, "--interactive")
    parameters = StdioServerParameters(command=command, args=args, env=dict(os.environ))
    async with Client(parameters) as client:
        yield Agent(client)


@asynccontextmanager
async def over_http(url: str, token: str, *, mode: str = "auto") -> AsyncIterator[Agent]:
    """A client with a token; any certificate will do, and TLS asks for the host of the examples."""

    async def for_host(request: httpx2.Request) -> None:
        if request.url.scheme == "https":
            request.headers["host"] = HOST
            request.extensions["sni_hostname"] = HOST

    async with (
        httpx2.AsyncClient(
            headers={"authorization": f"Bearer {token}"},
            verify=False,
            timeout=120,
            event_hooks={"request": [for_host]},
        ) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield Agent(client)
