"""The attacks again where the operator has opened every door at once: nothing else gets out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import uv

from kernel_mcp.config.settings import Limits
from kernel_mcp.launch.network import PORT
from kernel_mcp.units import MIB
from tests.escape.attacks.table import Target
from tests.escape.host import FOLDER, prepared
from tests.escape.inside import ATTACKS
from tests.escape.test_mounted_folders import (
    CONTAINER,
    UNSPACED,
    WAYS,
    Notebook,
    Project,
    opened,
)
from tests.integration import containers
from tests.integration.processes import descendants
from tests.integration.unprivileged import REPOSITORY, USER
from tests.sampled import sampled

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes a device file, as root alone may"),
]

LIMITS = ("--memory", "256M", "--pids", "40", "--disk", "64M")
BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
STATED = {"list_the_home_folder mounted", "list_another_sessions_workspace mounted"}
"""Under Landlock names in covered folders can be listed."""
RUN = """
import json, os, subprocess, sys
task = open("task.json").read()
os.unlink("task.json")  # it holds the secret that attacks look for
program = [sys.executable, "-I", "-S", "-B", {program!r}]
with open("told.json", "w") as told:
    subprocess.run(program, input=task, text=True, stdout=told, check=True)
print(json.dumps("done"))
"""


@dataclass(frozen=True)
class House:
    """A project with every kind of door: `root` is read-only, `out` in it can be changed."""

    target: Target
    root: Path
    out: Path
    device: Path

    def flags(self, way: str) -> tuple[str, ...]:
        """All doors that the sandbox has."""
        unspaced = way in UNSPACED
        mounted = [str(self.root)]
        if way != "root landlock":  # kernels of their own users cannot write there
            mounted.append(f"{self.out}:rw")
        network = ("--network", "example.com,db.invalid:5432")
        return (
            *(word for each in mounted for word in ("--mount", each)),
            *("--env", "GREETING=hello-to-all", "--device", str(self.device)),
            *("--python", str(self.root / ".venv"), *LIMITS),
            *("--tool-servers", str(self.root.parent / "mcp.json"), "--allow-tool", "*"),
            *(() if unspaced else (*network, "--secret", "API_TOKEN@api.example.com")),
        )


@pytest.fixture
def house() -> Iterator[House]:
    with ExitStack() as stack:
        target = stack.enter_context(prepared())
        folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="doors-"))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o755)
        (folder / "project").mkdir()
        project = Project(folder / "project")
        for name in (".env", ".netrc", ".ssh/id", "deep/er/.aws/credentials", "real"):
            project.write(name, target.marker)
        server = {"command": sys.executable, "args": ["-m", "tests.crm"], "cwd": str(REPOSITORY)}
        servers = {"mcpServers": {"crm": {**server, "env": {"KEY": target.marker}}}}
        (folder / "mcp.json").write_text(json.dumps(servers))
        python = ["--python", sys.executable, str(project.root / ".venv")]
        make = [uv.find_uv_bin(), "venv", "--quiet", "--offline", *python]
        subprocess.run(make, check=True)
        for path in (FOLDER / "inside.py", *(FOLDER / "attacks").glob("*.py")):
            project.write(f"corpus/tests/escape/{path.relative_to(FOLDER)}", path.read_text())
        out = project.root / "results"
        out.mkdir()
        project.own()
        listening = stack.enter_context(project.listener("socket"))
        listening.listen()
        yield House(target, project.root, out, stack.enter_context(device()))


@contextmanager
def device() -> Iterator[Path]:
    """A node of its own for what /dev/zero is, of the ordinary user.

    By its name it is a GPU's, for which tasks may write to files of their own in /proc.
    """
    path = Path(f"/dev/nvidia-kmtest-{os.getpid()}")
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    os.chown(path, USER, USER)
    try:
        yield path
    finally:
        path.unlink()


async def outcomes(notebook: Notebook, house: House, names: list[str]) -> dict[str, str]:
    """Return the outcomes of the attacks in a session: on the host at large, then on mounts."""
    limits = {**house.target.limits, "tmp_bytes": Limits().tmp_bytes}
    at_large = replace(house.target, limits=limits, opened=[str(house.out), str(house.device)])
    mounted = replace(
        at_large,
        secret_home=str(house.root / ".ssh/id"),
        secret_tmp=str(house.root / ".env"),
        secret_shm=str(house.root / "hard"),
        other_workspace=str(house.root / "deep/er/.aws"),
        unix=str(house.root / "socket"),
    )
    found: dict[str, str] = {}
    for about, target in (("", at_large), (" mounted", mounted)):
        task = {"target": asdict(target), "names": names, "workspace": "."}
        call, session = notebook.agent.call, notebook.session
        await call("write_file", path="task.json", content=json.dumps(task), session=session)
        program = str(house.root / "corpus/tests/escape/inside.py")
        await notebook.run(RUN.format(program=program))
        told = await call("read_file", path="told.json", limit=MIB, session=session)
        found |= {f"{name}{about}": outcome for name, outcome in json.loads(told.text).items()}
    return found


@pytest.mark.parametrize(
    "way",
    [
        WAYS[1],
        *(pytest.param(way, marks=pytest.mark.full) for way in (*WAYS[:1], *WAYS[2:])),
        *(pytest.param(way, marks=pytest.mark.full) for way in (*UNSPACED, CONTAINER)),
    ],
)
async def test_what_is_held_without_doors_is_held_with_all_of_them(way: str, house: House) -> None:
    if way == CONTAINER:
        containers.detect("podman")
    names = [attack.name for attack in ATTACKS]
    env = {"API_TOKEN": house.target.marker}
    async with opened(way, *house.flags(way), env=env) as notebook:
        told = (await notebook.agent.call("info", session=notebook.session)).data
        assert (bool(told["mounts"]), bool(told["devices"])) == (True, True)
        assert told["tools"].startswith("reaches: crm")
        found = await outcomes(notebook, house, names)
    assert len(found) == 2 * len(names)
    out = {name for name, told in found.items() if not told.startswith("held")}
    if way in UNSPACED:  # which lacks much of what these attack: no more than without doors
        async with opened(way, "--mount", str(house.root / "corpus"), *LIMITS) as notebook:
            without = await outcomes(notebook, house, names)
        out -= {name for name, told in without.items() if not told.startswith("held")} | STATED
    assert {name: found[name] for name in out} == {}


PLANT = """
import json, os
done = []
def attempt(name, work):
    try:
        work()
        done.append(name)
    except OSError:
        pass
def write(path):
    with open(path, "a") as file:
        file.write("# changed")
for path in ("kernel_mcp/network/proxy.py", "kernel_specs/selftest.py", "my.toml", "trust.pem"):
    attempt(path, lambda: write(f"{ROOT}/{path}"))
attempt("new", lambda: write(f"{ROOT}/kernel_mcp/linux/new.py"))
for name in ("kernel_mcp", "kernel_specs", "my.toml", "trust.pem"):
    attempt(f"rename {name}", lambda: os.rename(f"{ROOT}/{name}", f"{ROOT}/moved"))
for name in ("json", "socket", "sitecustomize", "usercustomize", "bcrypt", "socksio"):
    with open(f"{ROOT}/{name}.py", "w") as file:
        file.write(f"open({ROOT!r} + '/sprung', 'a').write({name!r})")
print(json.dumps(done))
"""


@pytest.mark.parametrize("way", sampled(WAYS[:2], WAYS[1]))
async def test_a_writable_mount_with_the_server_in_it_changes_nothing_that_runs(way: str) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="checkout-") as folder:
        root = Path(folder)
        for name in ("kernel_mcp", "kernel_specs"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, root / name, ignore=ignored)
        (root / "my.toml").write_text('memory = "400M"\n')
        bundle = next(path for path in map(Path, BUNDLES) if path.exists())
        shutil.copy(bundle, root / "trust.pem")
        subprocess.run(["chown", "-R", f"{USER}:{USER}", folder], check=True)
        root.chmod(0o755)
        flags = ("--mount", f"{root}:rw", "--config", str(root / "my.toml"))
        env = {"PYTHONPATH": folder, "API_TOKEN": "a-token-of-the-host"}
        env["SSL_CERT_FILE"] = str(root / "trust.pem")
        doors = ("--network", "example.com", "--secret", "API_TOKEN@api.example.com")
        async with opened(way, *flags, *doors, env=env, cwd="/") as notebook:
            assert await notebook.run(f"ROOT = {folder!r}\n{PLANT}") == []
            for name in ("kernel_mcp/new.py", "kernel_specs/selftest.py", "my.toml", "trust.pem"):
                given = {"path": str(root / name), "content": "changed"}
                told = await notebook.agent.refused("write_file", **given)
                assert "read-only" in told, told
            for session in ("next", "another"):
                await notebook.agent.call("create_session", name=session)
                assert (await notebook.agent.run("1", session=session)).status == "ok"
            kill_the_proxy()
            while "HTTP" not in (await notebook.agent.run(ASK, session="next")).text:
                pass
        assert (root / "json.py").exists()
        assert not (root / "sprung").exists()


ASK = f"""
import socket
with socket.create_connection(("127.0.0.1", {PORT}), 30) as proxy:
    proxy.sendall(b"CONNECT elsewhere.invalid:443 HTTP/1.1\\r\\n\\r\\n")
    print(proxy.recv(100))
"""


def kill_the_proxy() -> None:
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in descendants(os.getpid())}
    (proxy,) = [pid for pid, name in names.items() if name == "kernel-network\n"]
    os.kill(proxy, signal.SIGKILL)


async def test_what_replaces_a_link_to_what_the_host_executes_is_set_aside() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="links-") as folder:
        root = Path(folder)
        for name in ("conf", "dots"):
            (root / name).mkdir()
        (root / "conf/checks").write_text("{}")
        (root / ".pre-commit-config.yaml").symlink_to("conf/checks")
        (root / ".claude").symlink_to("dots")
        subprocess.run(["chown", "-Rh", f"{USER}:{USER}", folder], check=True)
        root.chmod(0o755)
        async with opened(WAYS[1], "--mount", f"{root}:rw") as notebook:
            assert await notebook.run(f"ROOT = {folder!r}\n{RELINK}") == ["replace", "move"]
            # a number may be used up by what has moved on meanwhile
            names = {path.name.rstrip("0123456789") for path in root.iterdir()}
        aside = {".pre-commit-config.yaml.set-aside-", ".claude.set-aside-"}
        assert names == {"conf", "dots", "old", *aside}
        assert (root / "conf/checks").read_text() == "{}"
        assert not any((root / "dots").iterdir())


RELINK = """
import json, os
done = []
def attempt(name, work):
    try:
        work()
        done.append(name)
    except OSError:
        pass
def replace():
    os.unlink(f"{ROOT}/.pre-commit-config.yaml")
    os.mknod(f"{ROOT}/.pre-commit-config.yaml")
def move():
    os.rename(f"{ROOT}/.claude", f"{ROOT}/old")
    os.mkdir(f"{ROOT}/.claude")
attempt("replace", replace)
while os.path.lexists(f"{ROOT}/.pre-commit-config.yaml"):
    pass
attempt("move", move)
while os.path.lexists(f"{ROOT}/.claude"):
    pass
print(json.dumps(done))
"""
