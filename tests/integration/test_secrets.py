"""Secrets that code uses and cannot read, through real servers, kernels and TLS."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from kernel_mcp.network.authority import Authority
from tests import tls_hosts
from tests.integration.agent import Agent
from tests.integration.unprivileged import as_ordinary_user

pytestmark = pytest.mark.anyio

NAME, OTHER = "api.example.com", "elsewhere.example.com"
VALUE = "tok-7f3a91c2e5b8/d4+secret=="
PLAIN = VALUE.encode()


@dataclass
class World:
    """A host with a secret, another one, and what the server has to trust to reach them."""

    host: tls_hosts.Host
    other: tls_hosts.Host
    trust: Path

    def command(self, *flags: str, ordinary: bool = False) -> StdioServerParameters:
        """A server with the secret in its environment."""
        ports = {NAME: self.host.port, OTHER: self.other.port}
        words = [sys.executable, "-m", "tests.integration.loopback_hosts", json.dumps(ports)]
        words += ["--secret", f"API_TOKEN@{NAME}", *flags]
        own = {"API_TOKEN": VALUE, "SSL_CERT_FILE": str(self.trust)}
        root = str(Path(__file__).parents[2])
        if ordinary:
            words = as_ordinary_user(words)
            place = words.index("-i") + 1
            words[place:place] = [f"{name}={value}" for name, value in own.items()]
            own = {}
        environ = {**os.environ, **own, "PYTHONPATH": root}
        return StdioServerParameters(command=words[0], args=words[1:], env=environ, cwd=root)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    real = Authority([NAME, OTHER])
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="secrets-"))
    folder.chmod(0o755)
    try:
        with tls_hosts.serving(NAME, real) as host, tls_hosts.serving(OTHER, real) as other:
            yield World(host, other, tls_hosts.trusting(real, folder))
    finally:
        shutil.rmtree(folder)


PRELUDE = f"""
import base64, hashlib, http.client, json, os, subprocess, sys, urllib.error, urllib.request
KEY = os.environ["API_TOKEN"]
def ask(path, headers=None, host={NAME!r}, data=None):
    headers = {{"Authorization": "Bearer " + KEY}} if headers is None else headers
    request = urllib.request.Request(f"https://{{host}}{{path}}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return [reply.status, str(reply.headers) + reply.read().decode("latin-1")]
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode("latin-1")]
    except (OSError, http.client.HTTPException) as error:
        return [0, repr(error)]
"""


async def told(agent: Agent, code: str, session: str = "") -> Any:
    """What code prints as JSON."""
    answer = await agent.run(f"{PRELUDE}\nprint(json.dumps({code}))", session=session)
    assert answer.status == "ok", answer.text
    return json.loads(answer.text.splitlines()[0])


def digest_of(header: str) -> str:
    return hashlib.sha256(header.encode()).hexdigest()


@pytest.mark.parametrize("way", ["root", "root cold", "ordinary", "ordinary cold"])
async def test_code_uses_a_secret_and_finds_it_nowhere(world: World, way: str) -> None:
    if way.startswith("root") and os.geteuid() != 0:
        pytest.skip("takes root")
    flags = ("--no-template", "--warm", "0") if way.endswith("cold") else ("--warm", "1")
    command = world.command(*flags, "--network", OTHER, ordinary=way.startswith("ordinary"))
    async with Client(command) as client:
        agent = Agent(client)
        assert (await told(agent, "[KEY.startswith('kmcp_'), len(KEY)]")) == [True, len(VALUE)]
        found = await told(agent, "ask('/length')")
        assert found[0] == 200, found
        assert digest_of(f"Bearer {VALUE}") in found[1]
        other = await told(agent, f"ask('/length', host={OTHER!r})")
        assert other[0] == 200, other
        assert digest_of(f"Bearer {VALUE}") not in other[1]
