"""The image of the server under podman, with the flags of docs/deploy.md, and what is around it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
import yaml

from kernel_mcp.sandbox.container.engine import Engine
from tests.integration import server_image
from tests.integration.agent import Agent
from tests.integration.server_image import (
    HOST,
    IMAGE,
    ROOT,
    SAFE,
    TOKENS,
    VOLUME,
    container,
    derived,
    exit_code,
    on_stdio,
    over_http,
    published,
    run,
    started,
    volume,
)
from tests.run_folder import own_folder

pytestmark = [pytest.mark.anyio, pytest.mark.full, pytest.mark.timeout(900)]
VALIDATOR = "kubernetes-validate==1.37.0"
PROXIES, SYSTEMD = "kernel-mcp-test-proxies", "kernel-mcp-test-systemd"
WITH_PROXIES = f"""
FROM localhost/{server_image.BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends caddy nginx-light openssl \\
 && mkdir /etc/ssl/notebook && openssl req -x509 -newkey rsa:2048 -nodes -days 2 \\
        -subj /CN={HOST} -keyout /etc/ssl/notebook/privkey.pem \\
        -out /etc/ssl/notebook/fullchain.pem \\
 && rm -f /etc/nginx/sites-enabled/default
COPY nginx.conf /etc/nginx/conf.d/notebook.conf
COPY Caddyfile /etc/caddy/Caddyfile
# Debian's Caddy 2.6 has another name for it; certificates of its own, as no authority answers here
RUN sed -i 's/request_buffers 4MiB/buffer_requests/' /etc/caddy/Caddyfile \\
 && sed 's/^{HOST} {{/{{\\n local_certs\\n skip_install_trust\\n admin off\\n}}\\n&/' \\
        /etc/caddy/Caddyfile > /etc/caddy/here
"""
WITH_SYSTEMD = f"""
FROM localhost/{IMAGE} AS server
FROM localhost/{server_image.BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap dbus systemd \\
 && useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin kernel-mcp \\
 && install --directory --owner=kernel-mcp --mode=0700 /etc/kernel-mcp
COPY --from=server /opt/kernel-mcp /opt/kernel-mcp
COPY kernel-mcp.service /etc/systemd/system/kernel-mcp.service
RUN env | grep -E '^(SSL_CERT_FILE|UV_|HTTPS?_PROXY)' > /etc/kernel-mcp/environment; \\
    setpriv --reuid=kernel-mcp --regid=kernel-mcp --clear-groups --reset-env \\
        /opt/kernel-mcp/bin/kernel-mcp token add alice --tokens /etc/kernel-mcp/tokens > /token \\
 && systemctl enable kernel-mcp
CMD ["/lib/systemd/systemd"]
STOPSIGNAL SIGRTMIN+3
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return server_image.image()


@pytest.fixture(scope="module")
def kept(engine: Engine) -> Iterator[str]:
    """A volume whose environments are built once."""
    with volume(engine) as name:
        yield name


def token(engine: Engine, name: str, kept: str) -> str:
    options = (*SAFE, "--volume", f"{kept}:{VOLUME}")
    return run(engine, *started(*options), "token", "add", name, "--tokens", TOKENS)


def serving(kept: str, *options: str) -> list[str]:
    """The words of a server on HTTP."""
    published = ("--publish", "127.0.0.1::8000", "--stop-timeout", "40")
    words = started(*SAFE, "--volume", f"{kept}:{VOLUME}", *published, *options)
    return [*words, "--http", "0.0.0.0:8000", "--tokens", TOKENS]


def until(found: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition of an engine or a service, which announce nothing here."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.1)


def healthy(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx2.TransportError:
        return False


async def counts(notebook: Agent, first: int = 0) -> None:
    for number in range(first + 1, first + 4):
        answer = await notebook.run("x = globals().get('x', 0) + 1\nx")
        assert answer.text.splitlines()[0] == str(number), answer.text


def test_the_sandbox_holds_inside(engine: Engine, kept: str) -> None:
    words = started(*SAFE, "--volume", f"{kept}:{VOLUME}")
    found = json.loads(run(engine, *words, "doctor", "--json", "--sandbox", "bwrap"))
    assert (found["holds"], found["used"], found["problem"]) == (True, "bwrap", "")
    assert [each["state"] for each in found["backends"][0]["checks"] if each["state"] != "ok"] == []
    assert "in a container of podman" in " ".join(found["versions"].values())


def test_nobody_inside_is_root(engine: Engine) -> None:
    words = started(*SAFE, "--entrypoint", "/bin/sh")
    said = run(engine, *words, "-c", "id; grep -E 'Cap(Prm|Eff)|NoNewPrivs' /proc/self/status")
    assert said.startswith("uid=1000(kernel-mcp) gid=1000(kernel-mcp) groups=1000(kernel-mcp)\n")
    assert set(re.findall(r"Cap\w+:\s+(\w+)", said)) == {"0" * 16}
    assert re.search(r"NoNewPrivs:\s+1", said)
    special = run(engine, *words, "-c", "find / -xdev -perm /6000 -writable 2>/dev/null; echo end")
    assert special == "end"


@pytest.mark.parametrize(
    "options", [("--user", "0"), ("--user", "0", "--security-opt", "unmask=ALL"), ()]
)
def test_without_the_flags_the_error_has_the_reason_and_the_flags(
    engine: Engine, options: tuple[str, ...]
) -> None:
    done = subprocess.run(
        engine.command(*started("--workdir", "/", *options), "--allow", "numpy"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "bubblewrap cannot start a process here (it said: bwrap: " in done.stderr
    assert "Start the container with --user 1000 --security-opt seccomp=" in done.stderr
    assert "docs/deploy.md" in done.stderr
    assert "may not enter" not in done.stderr


async def test_a_client_on_stdio_has_a_notebook_that_outlives_the_container(
    engine: Engine, kept: str
) -> None:
    words = started(*SAFE, "--volume", f"{kept}:{VOLUME}")
    flags = ("--allow", "numpy", "--allow-install", "*")
    async with on_stdio(engine, *words, *flags) as notebook:
        await counts(notebook)
        assert (await notebook.run("import numpy\nint(numpy.arange(4).sum())")).text == "6"
        installed = await notebook.call("install", packages=["tabulate"])
        assert not installed.failed, installed.text
        assert (await notebook.run("import tabulate\nopen('kept', 'w').write('x')")).status == "ok"
        info = (await notebook.call("info")).data
        assert info["sandbox"] == "bwrap"
        refused = await notebook.run("open('/var/lib/kernel-mcp/tokens')")
        assert refused.status == "error"
    async with on_stdio(engine, *words, *flags) as notebook:
        assert "kept" in (await notebook.call("list_files")).text
        await counts(notebook, 3)


async def test_a_client_over_http_is_served_and_the_end_is_in_order(
    engine: Engine, kept: str
) -> None:
    secret = token(engine, "alice", kept)
    with container(engine, *serving(kept)) as number:
        port = published(engine, number, 8000)
        until(lambda: healthy(port))
        check = json.loads(run(engine, "image", "inspect", IMAGE))[0]["Healthcheck"]["Test"]
        assert check[0] == "CMD"
        run(engine, "exec", number, *check[1:])
        url = f"http://127.0.0.1:{port}/mcp"
        assert httpx2.post(url, json={}).status_code == 401
        async with over_http(url, secret) as notebook:
            await counts(notebook)
            for name in ("a", "b"):
                await notebook.call("create_session", name=name)
                answer = await notebook.run("import os\nos.system('sleep 0 &')", session=name)
                assert answer.status == "ok"
                await notebook.call("close_session", session=name)
        until(lambda: "Z" not in run(engine, "top", number, "state").split())
        run(engine, "stop", number)
        assert number not in run(engine, "ps", "--quiet", "--no-trunc")


async def test_a_server_that_is_stopped_ends_by_itself(engine: Engine, kept: str) -> None:
    words = [word for word in serving(kept) if word != "--rm"]
    number = run(engine, words[0], "--detach", *words[1:])
    try:
        port = published(engine, number, 8000)
        until(lambda: healthy(port))
        run(engine, "stop", number)
        assert exit_code(engine, number) == 0
    finally:
        engine.ask("rm", "--force", number)


def test_the_volume_of_a_pod_will_do(engine: Engine) -> None:
    """That of root, whose group (`fsGroup`) may write."""
    folder = own_folder() / "pod"
    folder.mkdir()
    os.chown(folder, 0, 1000)
    folder.chmod(0o2775)
    try:
        secret = token(engine, "alice", str(folder))
        assert secret.startswith("kmcp_")
        with container(engine, *serving(str(folder))) as number:
            port = published(engine, number, 8000)
            until(lambda: healthy(port))
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def proxies(engine: Engine) -> str:
    files = [ROOT / "packaging/proxy/nginx.conf", ROOT / "packaging/proxy/Caddyfile"]
    derived(engine, PROXIES, WITH_PROXIES, files)
    return PROXIES


@pytest.mark.parametrize(
    ("check", "serve"),
    [
        (["nginx", "-t"], ["nginx", "-g", "daemon off;"]),
        (
            ["caddy", "validate", "--config", "/etc/caddy/Caddyfile"],
            ["caddy", "run", "--config", "/etc/caddy/here", "--adapter", "caddyfile"],
        ),
    ],
    ids=["nginx", "caddy"],
)
async def test_a_proxy_before_it_speaks_tls_and_passes_on_what_comes(
    check: list[str], serve: list[str], engine: Engine, proxies: str, kept: str
) -> None:
    run(engine, *started(name=proxies), *check)
    secret = token(engine, "alice", kept)
    behind = ("--public-url", f"https://{HOST}", "--trusted-proxy", "127.0.0.1")
    with container(engine, *serving(kept, "--publish", "127.0.0.1::443"), *behind) as number:
        until(lambda: healthy(published(engine, number, 8000)))
        shared = started("--network", f"container:{number}", name=proxies)
        with container(engine, *shared, *serve):
            url = f"https://127.0.0.1:{published(engine, number, 443)}"
            until(lambda: status(f"{url}/metrics") == 404)
            assert status(f"{url}/mcp") == 401
            for mode in ("auto", "legacy"):
                async with over_http(f"{url}/mcp", secret, mode=mode) as notebook:
                    await tells_as_it_goes(notebook)


def status(url: str) -> int:
    """That of an answer to a GET; 0 as long as nothing listens."""
    try:
        with httpx2.Client(verify=False) as client:
            request = client.build_request("GET", url, headers={"host": HOST})
            request.extensions["sni_hostname"] = HOST
            return int(client.send(request).status_code)
    except httpx2.TransportError:
        return 0


async def tells_as_it_goes(notebook: Agent) -> None:
    """A line of a running cell arrives before the cell ends, which waits for a file."""
    told = anyio.Event()

    def hear(_progress: float, _total: float | None, message: str | None) -> None:
        if message and "first" in message:
            told.set()

    async def let_go() -> None:
        await told.wait()
        await notebook.call("write_file", path="go", content="")

    code = (
        "import os, time\nprint('first', flush=True)\n"
        "while not os.path.exists('go'):\n    time.sleep(0.05)\nos.remove('go')"
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(let_go)
        answer = await notebook.call("execute", on_progress=hear, code=code, timeout=60, wait=60)
        tasks.cancel_scope.cancel()
    assert answer.status == "ok", answer.text
    large = await notebook.call("write_file", path="large", content="x" * 3_000_000)
    assert not large.failed, large.text


def test_a_service_of_systemd_runs_sandboxes_and_ends_in_order(engine: Engine) -> None:
    derived(engine, SYSTEMD, WITH_SYSTEMD, [ROOT / "packaging/systemd/kernel-mcp.service"])
    with container(engine, *started("--privileged", "--systemd=always", name=SYSTEMD)) as number:

        def inside(*words: str) -> str:
            return run(engine, "exec", number, *words)

        def active() -> bool:
            shown = ("exec", number, "systemctl", "is-active", "kernel-mcp")
            return engine.ask(*shown).stdout.strip() == "active"

        until(active)
        assert inside("systemd-analyze", "verify", "kernel-mcp.service") == ""
        ask = (
            "import json, sys, urllib.request as r\n"
            "token = open('/token').read().strip()\n"
            "body = {'jsonrpc': '2.0', 'id': 1, 'method': 'tools/call', 'params': {"
            "'name': 'execute', 'arguments': {'code': '6 * 7', 'wait': 300}}}\n"
            "body['params']['_meta'] = {"
            "'io.modelcontextprotocol/protocolVersion': '2026-07-28',"
            "'io.modelcontextprotocol/clientInfo': {'name': 'test', 'version': '1'},"
            "'io.modelcontextprotocol/clientCapabilities': {}}\n"
            "head = {'Authorization': f'Bearer {token}', 'Content-Type': 'application/json',"
            "'Accept': 'application/json, text/event-stream', 'Mcp-Method': 'tools/call',"
            "'Mcp-Name': 'execute', 'MCP-Protocol-Version': '2026-07-28'}\n"
            "url = 'http://127.0.0.1:8000/mcp'\n"
            "print(r.urlopen(r.Request(url, json.dumps(body).encode(), head)).read().decode())"
        )
        until(lambda: "serving" in inside("journalctl", "--unit", "kernel-mcp", "--no-pager"))
        assert '"42"' in inside("/opt/kernel-mcp/bin/python", "-c", ask)
        inside("systemctl", "stop", "kernel-mcp")
        shown = inside("systemctl", "show", "kernel-mcp", "-p", "Result", "-p", "ExecMainStatus")
        assert set(shown.split()) == {"Result=success", "ExecMainStatus=0"}
        assert "bwrap" not in inside("sh", "-c", "cat /proc/[0-9]*/comm")


@pytest.mark.parametrize("name", ["kernel-mcp", "fleet"])
def test_the_manifests_fit_the_schemas_of_kubernetes(name: str, tmp_path: Path) -> None:
    uv = Path(sys.prefix, "bin/uv")
    words = ["tool", "run", "--quiet", "--from", VALIDATOR, "kubernetes-validate", "--strict"]
    text = (ROOT / f"packaging/kubernetes/{name}.yaml").read_text()
    manifest = tmp_path / "manifests.yaml"
    manifest.write_text(yaml.safe_dump_all(of_kubernetes(yaml.safe_load_all(text))))
    done = subprocess.run([uv, *words, str(manifest)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def of_kubernetes(manifests: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Manifests with the pods of a RayCluster in its place, whose schema is another's."""
    for each in manifests:
        if each["kind"] != "RayCluster":
            yield each
            continue
        for group in (each["spec"]["headGroupSpec"], *each["spec"]["workerGroupSpecs"]):
            name = {"name": group.get("groupName", "head")}
            metadata = {**group["template"].get("metadata", {}), **name}
            yield {"apiVersion": "v1", "kind": "Pod", **group["template"], "metadata": metadata}
