"""Files for operators' own programs, tried with them: logrotate, Prometheus, promtool."""

from __future__ import annotations

import getpass
import grp
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.conftest import lacking
from tests.integration.httpclient import http_agent, until
from tests.integration.httpserver import ROOT
from tests.integration.principals import add
from tests.integration.test_http_operations import Operated, operating

pytestmark = [pytest.mark.anyio, pytest.mark.full]

MONITORING = ROOT / "packaging/monitoring"


def program(name: str) -> str:
    """The path of an operator's program."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    return found or lacking("containers", f"needs {name}")


def rotate(operated: Operated, folder: Path) -> None:
    """Rotate the audit trail as the file for logrotate says, with the names of this machine."""
    text = (MONITORING / "logrotate").read_text()
    trail = "/var/lib/kernel-mcp/audit.jsonl"
    assert trail in text
    own = f"su {getpass.getuser()} {grp.getgrgid(os.getgid()).gr_name}"
    text = text.replace(trail, str(operated.folder / "audit"))
    text = text.replace("su kernel-mcp kernel-mcp", own)
    (folder / "rotation").write_text(text)
    (folder / "rotation").chmod(0o644)
    words = [program("logrotate"), "--force", "--state", str(folder / "state"), "rotation"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def test_a_rotation_needs_no_signal_and_a_signal_ends_nothing(tmp_path: Path) -> None:
    with operating() as operated:
        await operated.ready()
        async with http_agent(operated.server) as notebook:
            await notebook.run("1")
            rotate(operated, tmp_path)
            operated.server.signal(signal.SIGHUP)
            assert (await notebook.run("2")).text == "2"
        former = (operated.folder / "audit.1").read_text()
        assert (former.count('"event": "cell"'), former.count("server_start")) == (1, 1)
        assert [line["event"] for line in operated.trail].count("cell") == 1
        rotate(operated, tmp_path)
        assert (operated.folder / "audit.2.gz").exists()


def test_the_alerts_fire_when_they_should_and_only_then() -> None:
    words = [program("promtool"), "test", "rules", "alerts.test.yml"]
    done = subprocess.run(words, cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(server: str, token: str, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes a server each second as the example does; yields its address."""
    text = (MONITORING / "prometheus.yml").read_text()
    for word, other in (
        ("/etc/prometheus/kernel-mcp.token", str(folder / "token")),
        ("127.0.0.1:8000", server.removeprefix("http://")),
        ("15s", "1s"),
    ):
        assert word in text
        text = text.replace(word, other)
    (folder / "token").write_text(token)
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(MONITORING / "alerts.yml", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [program("prometheus"), *flags, f"--web.listen-address={address}"],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://{address}"
    finally:
        running.terminate()
        running.wait()


def values(address: str, query: str) -> list[dict[str, object]]:
    """The series that Prometheus finds for a query; none before it has started."""
    try:
        found = httpx2.get(f"{address}/api/v1/query", params={"query": query}).json()
    except httpx2.TransportError:
        return []
    assert found["status"] == "success", found
    series: list[dict[str, object]] = found["data"]["result"]
    return series


async def test_every_query_of_the_dashboard_finds_what_a_server_tells_prometheus(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens"
    ada = add(tokens, "ada")
    reader = add(tokens, "prometheus", "--scope", "kernel:metrics")
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    queries = [each["expr"] for panel in panels for each in panel["targets"]]
    with operating("--tokens", str(tokens), token=ada) as operated:
        await operated.ready()
        async with http_agent(operated.server) as notebook:
            await notebook.run("1")
            await notebook.run("import subprocess")
            with prometheus(operated.server.url, reader, tmp_path) as address:
                await until(lambda: bool(values(address, 'up{job="kernel-mcp"} == 1')))
                await until(lambda: all(values(address, query) for query in queries))
                (free,) = values(address, "kernel_mcp_disk_free_bytes{folder='state'}")
                assert free
                version = values(address, "kernel_mcp_build_info")[0]
                assert "version" in str(version)
        lines = subprocess.run(
            [program("promtool"), "check", "metrics"],
            input=operated.get("/metrics", reader).text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (lines.returncode, lines.stdout, lines.stderr) == (0, "", "")
