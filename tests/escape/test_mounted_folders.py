"""Code that reaches for what a mounted folder does not show, and through it for the host."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from kernel_mcp.host_folders.covers import MOST_COVERS
from tests.integration import containers
from tests.integration.agent import Agent, command
from tests.integration.processes import descendants
from tests.integration.unprivileged import USER, as_ordinary_user
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

SECRET = "the-secret-of-the-host"
GIT_CONFIG = f'[remote "origin"]\n\turl = https://me:{SECRET}@host/x\n'
PATIENCE_S = 60.0


class Project:
    """A folder of an ordinary user with data, secrets and doors."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("data.csv", "a,b\n1,2\n", mode=0o600)
        for name in (".env", "sub/.env.local", ".ssh/id", "deep/er/.aws/credentials", ".netrc"):
            self.write(name, SECRET)
        self.write(".git/config", GIT_CONFIG)
        self.write(".git/HEAD", "ref: refs/heads/main\n")
        self.write(".git/hooks/post-commit", "#!/bin/sh\n")
        self.write("plain/.git/config", "[core]\n\tbare = false\n")
        self.write("real", SECRET)
        self.write(os.fsdecode(b"odd\xff\nname") + "/.env", SECRET)
        (root / ".env.link").symlink_to("real")
        (root / "hard").hardlink_to(root / ".env")
        (root / "key").hardlink_to(root / ".ssh" / "id")
        self.write("cluster/of-one", SECRET)
        (root / ".kube").symlink_to("cluster")
        (root / "out").symlink_to("/etc")
        os.mkfifo(root / "pipe")
        self.own()

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        """Make or replace a file as an editor does, by a rename."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}~fresh")
        fresh.write_text(text)
        fresh.chmod(mode)
        if os.geteuid() == 0:
            os.chown(fresh, USER, USER)
        fresh.rename(path)
        return path

    def own(self) -> None:
        """Give all of it to the ordinary user, but what a server sets aside meanwhile."""
        if os.geteuid() == 0:
            os.chown(self.root, USER, USER)
            for top, folders, files in os.walk(self.root):
                for name in (*folders, *files):
                    with suppress(FileNotFoundError):
                        os.chown(Path(top) / name, USER, USER, follow_symlinks=False)

    def listener(self, name: str) -> socket.socket:
        """A server of the host behind a socket that everyone may write to."""
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self.root / name))
        listening.listen(1)
        (self.root / name).chmod(0o777)
        listening.setblocking(False)
        return listening


@pytest.fixture
def project() -> Iterator[Project]:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="mounted-"))
    folder.chmod(0o755)
    (folder / "home").mkdir()
    try:
        yield Project(folder / "home")
    finally:
        shutil.rmtree(folder)


Session = Callable[..., Any]
WAYS = ("root cold", "root forked", "ordinary cold", "ordinary forked")
UNSPACED = ("root landlock", "ordinary landlock")
"""Without a file namespace."""
CONTAINER = "root container"
ALWAYS = ("ordinary forked",)
"""As most people run the server."""
EACH = ("root cold", "ordinary forked")
"""Each user, and each way to start a kernel, once."""


def in_these(*ways: str, always: Sequence[str] = ALWAYS) -> pytest.MarkDecorator:
    """Run a test in these ways, with most changes in those of `always` alone."""
    return pytest.mark.parametrize("way", sampled(ways, *always), indirect=True)


in_every_sandbox = in_these(*WAYS, *UNSPACED, CONTAINER, always=EACH)
where_owners_write = in_these(*WAYS, "ordinary landlock", CONTAINER)
with_mounts = in_these(*WAYS, CONTAINER)
by_file_tools = in_these(*WAYS, *UNSPACED, CONTAINER)
"""The server reads and writes, however its kernels have been started."""


@pytest.fixture(params=sampled(WAYS, *ALWAYS))
def way(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("root") and os.geteuid() != 0:
        pytest.skip("takes root")
    if request.param == CONTAINER:
        containers.detect("podman")
    return str(request.param)


class Notebook:
    """A session whose cells print JSON."""

    def __init__(self, agent: Agent, session: str) -> None:
        self.agent = agent
        self.session = session

    async def run(self, code: str) -> Any:
        """Return the last line that a cell prints, without the notices around it."""
        answer = await self.agent.run(code, session=self.session)
        assert answer.status == "ok", answer.text
        for line in reversed(answer.text.splitlines()):
            with suppress(json.JSONDecodeError):
                return json.loads(line)
        raise AssertionError(answer.text)


@asynccontextmanager
async def opened(
    way: str, *flags: str, env: Mapping[str, str] | None = None, cwd: str = ""
) -> AsyncIterator[Notebook]:
    """A session of a server of that kind of user, started in that way."""
    start = ("--allow", "*", *flags, "--warm", "0")
    if way.endswith("cold"):
        start += ("--no-template",)
    if way in UNSPACED:
        start += ("--sandbox", "landlock")
    if way == CONTAINER:
        options = containers.options("podman")
        start += ("--sandbox", "container", "--container-engine", options.engine)
        start += ("--container-image", options.image)
        start += ("--container-runtime", options.runtime) if options.runtime else ()
    wanted = command(*start, env=dict(env or {}))
    wanted.cwd = cwd or wanted.cwd
    if way.startswith("ordinary"):
        given = [f"{name}={value}" for name, value in (env or {}).items()]
        words = as_ordinary_user(["env", *given, sys.executable, "-m", "kernel_mcp", *start])
        wanted = StdioServerParameters(command=words[0], args=words[1:], env={}, cwd="/")
    async with Client(wanted) as client:
        agent = Agent(client)
        with anyio.fail_after(PATIENCE_S):
            while True:
                session = (await agent.call("create_session")).data["session"]
                await agent.run("1", session=session)
                found = (await agent.call("info", session=session)).data["sandbox_found"]
                if not way.endswith("forked") or found[0].startswith("forked"):
                    break
                await agent.call("close_session", session=session)
        yield Notebook(agent, session)


READ_ALL = """
import json, os
found = {}
for folder, _, names in os.walk(ROOT):
    for name in names:
        path = os.path.join(folder, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            found[os.path.relpath(path, ROOT)] = os.read(fd, 4096).decode("latin-1")
            os.close(fd)
        except OSError as error:
            found[os.path.relpath(path, ROOT)] = error.strerror
print(json.dumps(found))
"""


def reading(project: Project) -> str:
    return f"ROOT = {str(project.root)!r}\n{READ_ALL}"


CONNECT = """
import ctypes, json, os, socket, struct
done = {}
def attempt(name, work):
    try:
        done[name] = str(work())
    except OSError as error:
        done[name] = error.strerror or str(error)
def plain(kind):
    with socket.socket(socket.AF_UNIX, kind) as one:
        one.connect(PATH)
        return "connected"
def pair(kind):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    with one, other:
        one.connect(PATH)
        return "connected"
def later():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    other.close()
    one.shutdown(socket.SHUT_RDWR)
    with one:
        one.connect(PATH)
        return "connected"
def sent():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        one.sendto(b"x", PATH)
        return "sent"
def inherited():
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
            one.connect(PATH)
            return "connected"
        except OSError:
            pass
    return "none"
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
    attempt(f"socket {kind}", lambda: plain(kind))
    attempt(f"pair {kind}", lambda: pair(kind))
attempt("later", later)
attempt("sent", sent)
attempt("inherited", inherited)
print(json.dumps(done))
"""


def connecting(path: Path) -> str:
    return f"PATH = {str(path)!r}\n{CONNECT}"


def accepted(listening: socket.socket) -> bool:
    try:
        listening.accept()
    except BlockingIOError:
        return False
    return True


@in_every_sandbox
async def test_a_folder_shows_its_data_and_none_of_its_secrets(way: str, project: Project) -> None:
    mode = project.root.stat().st_mode & 0o777
    async with opened(way, "--mount", str(project.root)) as notebook:
        found = await notebook.run(reading(project))
        assert found["data.csv"] == "a,b\n1,2\n"
        assert way in UNSPACED or found["plain/.git/config"].startswith("[core]")
        assert found[".git/HEAD"].startswith("ref:")
        assert SECRET not in json.dumps(found)
        covered = [name for name in found if name.startswith((".ssh/", "deep/er/.aws/"))]
        assert bool(covered) == (way in UNSPACED)  # Landlock hides no name
        # by other ways to the same place
        hidden = await notebook.run(
            f"import json, os\nR = {str(project.root)!r}\nfound = {{}}\n"
            "for path in (R + '/sub/../.env', R + '/.ssh/id', '/proc/self/root' + R + '/.env',\n"
            "             '/proc/self/root' + R + '/real', R + '/hard', R + '/out/shadow'):\n"
            "    try: found[path] = open(path).read()\n"
            "    except OSError as error: found[path] = error.strerror\n"
            "os.chdir(R)\n"
            "for name, work in (('cwd', lambda: open('.env').read()),\n"
            "                   ('above', lambda: os.listdir('..')),\n"
            "                   ('table',\n"
            "                    lambda: open('/proc/mounts', errors='replace').read())):\n"
            "    try: found[name] = work()\n"
            "    except OSError as error: found[name] = error.strerror\n"
            "print(json.dumps(found))"
        )
        shown = ("Permission denied",) if way in UNSPACED else ([project.root.name],)
        assert hidden.pop("above") in shown
        assert SECRET not in json.dumps(hidden)
        assert "root:" not in json.dumps(hidden)
        # and nothing can be changed
        changed = await notebook.run(
            f"import json, os\nR = {str(project.root)!r}\ndone = []\n"
            "for work in (lambda: open(R + '/new', 'w'), lambda: open(R + '/data.csv', 'a'),\n"
            "             lambda: os.unlink(R + '/data.csv'), lambda: os.mkdir(R + '/x'),\n"
            "             lambda: os.rename(R + '/real', R + '/y'), lambda: os.chmod(R, 0o777),\n"
            "             lambda: os.utime(R + '/real'), lambda: os.link(R + '/real', R + '/z'),\n"
            "             lambda: os.unlink(R + '/.env'), lambda: os.truncate(R + '/real', 0)):\n"
            "    try: work(); done.append('done')\n"
            "    except OSError as error: done.append(error.errno)\n"
            "print(json.dumps(done))"
        )
        # where kernels have the user of the server, modes and times are only said to be changed
        pretended = {5, 6} if way == "ordinary landlock" else set()
        assert {number for number, how in enumerate(changed) if how == "done"} <= pretended
        assert (project.root / "data.csv").read_text() == "a,b\n1,2\n"
        assert (project.root.stat().st_mode & 0o777) == mode


@with_mounts
async def test_what_the_host_replaces_or_adds_is_covered_again(way: str, project: Project) -> None:
    project.write("edited/.git/config", "[core]\n")
    project.own()
    async with opened(way, "--mount", str(project.root)) as notebook:
        project.write(".env", SECRET)
        project.write(".git/config", GIT_CONFIG)
        project.write("sub/.env.production", SECRET)
        project.write("real", SECRET)
        shutil.rmtree(project.root / "deep")
        project.write("deep/er/.aws/credentials", SECRET)
        (project.root / ".ssh").rename(project.root / "keys")
        (project.root / "again").hardlink_to(project.root / ".env")
        (project.root / "keys" / "id").rename(project.root / "taken")
        project.write("sub/.env.brief", SECRET).rename(project.root / "brief")
        project.write("fresh/.aws/credentials", SECRET)
        project.write("plain/.git/config", GIT_CONFIG)
        with (project.root / "edited/.git/config").open("a") as file:  # in place
            file.write(GIT_CONFIG)
        project.own()
        with anyio.fail_after(PATIENCE_S):
            while SECRET in json.dumps(found := await notebook.run(reading(project))):
                pass
        assert found["data.csv"] == "a,b\n1,2\n"
        # a session that begins now, and one that was there
        again = await notebook.agent.call("create_session")
        other = Notebook(notebook.agent, again.data["session"])
        assert SECRET not in json.dumps(await other.run(reading(project)))


@contextmanager
def mounted(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """A file system of the host's, in memory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", str(folder)], check=True)
    try:
        if shared:
            subprocess.run(["mount", "--make-shared", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@in_these(*WAYS, always=EACH[:1])
async def test_what_the_host_mounts_in_a_folder_is_not_shown(way: str, project: Project) -> None:
    if os.geteuid() != 0:
        pytest.skip("takes root")
    top = project.root / "top"
    for name in ("deep/er", "before"):
        (top / name).mkdir(parents=True)
    with mounted(top, shared=True):
        for name in ("deep/er", "before", "moved"):
            (top / name).mkdir(parents=True)
        project.write("top/data.csv", "a,b")
        project.own()
        with mounted(top / "before"):
            project.write("top/before/data", SECRET)
            async with opened(way, "--mount", str(top)) as notebook:
                with mounted(top / "deep/er"), mounted(top / "moved"):
                    project.write("top/deep/er/data", SECRET)
                    project.write("top/moved/data", SECRET)
                    project.own()
                    code = f"ROOT = {str(top)!r}\n{READ_ALL}"
                    assert await notebook.run(code) == {"data.csv": "a,b"}
                    made = await notebook.agent.call("create_session")
                    other = Notebook(notebook.agent, made.data["session"])
                    assert await other.run(code) == {"data.csv": "a,b"}
                # a kernel that was begun while there were some
                assert await other.run(code) == {"data.csv": "a,b"}


READ_ON = """
import json, os, threading, time
HERE = os.getcwd()
os.chdir(ROOT)
seen, tries, stop = set(), [0], threading.Event()
def look():
    while not stop.is_set():
        for name in NAMES:
            try:
                with open(name) as file:
                    text = file.read()
                if SECRET in text:
                    seen.add(name)
            except OSError:
                pass
        tries[0] += 1
watching = threading.Thread(target=look)
watching.start()
print(json.dumps("watching"))
"""


@where_owners_write
async def test_strict_folders_never_show_what_replaces_a_secret(way: str, project: Project) -> None:
    root = project.root
    (root / "out").unlink()
    (root / "out").mkdir()
    project.write("out/.env", SECRET)
    project.own()
    flags = ("--mount", f"{root}:strict", "--mount", f"{root}/out:rw:strict")
    async with opened(way, *flags) as notebook:
        found = await notebook.run(reading(project))
        assert found["data.csv"] == "a,b\n1,2\n"
        assert found[".git/HEAD"].startswith("ref:")
        assert SECRET not in json.dumps(found)
        names = [".env", "again", "keys/id", "new/.env", ".git/config", "sub/x", "out/.env"]
        begin = f"ROOT, NAMES, SECRET = {str(root)!r}, {names!r}, {SECRET!r}\n{READ_ON}"
        assert await notebook.run(begin) == "watching"
        for _ in range(20):
            for name in (".env", ".git/config", "new/.env", "sub/.env", "out/.env"):
                project.write(name, GIT_CONFIG)
            (root / ".env").rename(root / "again")
            (root / "sub" / ".env").rename(root / "sub" / "x")
            project.write(".env", SECRET)
            (root / "sub" / "x").unlink()
            (root / "sub" / "x").hardlink_to(root / ".env")
        (root / ".ssh").rename(root / "keys")
        (root / "again").unlink()
        (root / "again").hardlink_to(root / ".env")
        project.write("data2.csv", "new")
        project.own()
        # a process of its own, and other ways to the same files
        done = await notebook.run(
            "import shutil, subprocess\n"
            "before = tries[0]\nwhile tries[0] < before + 20: time.sleep(0.001)\n"
            "stop.set(); watching.join()\nfound = {}\n"
            "for name in NAMES + ['data2.csv', '/proc/self/root' + ROOT + '/again']:\n"
            "    found[name] = subprocess.run(['cat', name], capture_output=True).stdout.decode()\n"
            "def attempt(name, work):\n"
            "    try: found[name] = str(work())\n"
            "    except OSError as error: found[name] = error.strerror\n"
            "attempt('link', lambda: (os.link('again', HERE + '/a'), open(HERE + '/a').read()))\n"
            "attempt('move', lambda: (os.rename('out/.env', HERE + '/b'), open(HERE + '/b')))\n"
            "attempt('make', lambda: os.makedirs('out/sub', exist_ok=True))\n"
            "attempt('down', lambda: (os.rename('out/.env', 'out/sub/b'), open('out/sub/b')))\n"
            "attempt('result', lambda: open('out/result', 'w').write('made'))\n"
            "os.chdir(HERE); os.makedirs('q/r'); open('q/s', 'w').write('1')\n"
            "os.rename('q/s', 'q/r/s'); os.mkdir(os.environ['TMPDIR'] + '/t')\n"
            "found['moved'] = open('q/r/s').read()\n"
            "print(json.dumps([found, sorted(seen), tries[0]]))"
        )
        assert done[1] == [], done
        assert SECRET not in json.dumps(done[0])
        assert done[0]["moved"] == "1"
        assert done[0]["data2.csv"] == ""
        # Landlock alone lets nothing be made beside a secret
        made_result = way not in UNSPACED
        assert (root / "out" / "result").exists() == made_result
        # a kernel that begins now, in a new session and in this one
        made = await notebook.agent.call("create_session")
        other = Notebook(notebook.agent, made.data["session"])
        await notebook.agent.call("reset", session=notebook.session)
        assert (await notebook.run(reading(project)))["data2.csv"] == "new"
        found = await other.run(reading(project))
        assert found["data2.csv"] == "new"
        assert found.get("out/result") == ("made" if made_result else None)
        assert SECRET not in json.dumps(found)
        told = (await notebook.agent.call("info")).data["mounts"]
        assert "later sessions only" in told[0]


WATCH = """
import json, os
shown = reads = 0
while not os.path.exists(ROOT + "/ended"):
    try:
        with open(ROOT + "/.env") as file:
            shown += bool(file.read())
    except OSError:
        pass
    reads += 1
print(json.dumps([shown, reads]))
"""
SAVES = 200


async def test_of_rapid_saves_little_is_seen_and_none_stays_uncovered(
    way: str, project: Project
) -> None:
    names = [".env", *(f"sub/.env.{number}" for number in range(20))]
    async with opened(way, "--mount", str(project.root)) as notebook:

        def save() -> None:
            for count in range(SAVES):
                project.write(names[count % len(names)], SECRET)
                if count % len(names) == 0:
                    project.write("data.csv", str(count))  # in what was the inode of a secret
                # as fast as people and their programs are, by this machine's speed
                subprocess.run(["/bin/true"], check=True)
            project.own()
            project.write("ended", "")

        code = f"ROOT = {str(project.root)!r}\n{WATCH}"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, save)
            shown, reads = await notebook.run(code)
        assert shown < reads / 2, (shown, reads)
        with anyio.fail_after(PATIENCE_S):
            while SECRET in json.dumps(found := await notebook.run(reading(project))):
                pass
        assert found["data.csv"].isdigit()
        read = await notebook.agent.call("read_file", path=f"{project.root}/data.csv")
        assert not read.failed


@in_every_sandbox
async def test_sockets_below_a_mount_cannot_be_connected_to(way: str, project: Project) -> None:
    with closing(project.listener("before")) as before:
        async with opened(way, "--mount", str(project.root)) as notebook:
            with closing(project.listener("after")) as after:
                for listening, name in ((before, "before"), (after, "after")):
                    found = await notebook.run(connecting(project.root / name))
                    assert "connected" not in found.values(), found
                    assert "sent" not in found.values(), found
                    assert not accepted(listening)
                if way in UNSPACED:
                    return
                # what code needs of sockets still works
                works = await notebook.run(
                    "import multiprocessing, socket\n"
                    "a, b = socket.socketpair(); a.send(b'x')\n"
                    "with socket.create_server(('127.0.0.1', 0)) as s:\n"
                    "    socket.create_connection(s.getsockname()).close()\n"
                    "with multiprocessing.Manager() as manager:\n"
                    "    shared = manager.list([1])\n"
                    "    with multiprocessing.Pool(2) as pool: pool.map(shared.append, [2])\n"
                    "    print(list(shared))"
                )
                assert works == [1, 2]


@in_every_sandbox
async def test_one_file_is_shown_when_it_is_mounted_by_name(way: str, project: Project) -> None:
    flags = ("--mount", str(project.root), "--mount", str(project.root / ".env"))
    async with opened(way, *flags) as notebook:
        found = await notebook.run(reading(project))
        assert found[".env"] == SECRET
        del found[".env"]
        assert SECRET not in json.dumps({**found, "hard": ""})


@by_file_tools
async def test_file_tools_see_the_same_covers(way: str, project: Project) -> None:
    with closing(project.listener("before")):
        async with opened(way, "--mount", str(project.root)) as notebook:
            agent, root = notebook.agent, str(project.root)
            read = await agent.call("read_file", path=f"{root}/data.csv")
            assert "1,2" in read.text
            listed = await agent.call("list_files", path=root)
            assert f"{root}/data.csv" in json.dumps(listed.data)
            assert "read-only" in await agent.refused(
                "write_file", path=f"{root}/new.txt", content="x"
            )
            for name in (
                *(".env", "hard", "real", "sub/.env.local", ".ssh/id", ".ssh", ".git/config"),
                *("before", "pipe", "sub/../.env", "out/shadow", "out/passwd"),
            ):
                assert SECRET not in await agent.refused("read_file", path=f"{root}/{name}")
            assert "outside the workspace" in await agent.refused(
                "read_file", path=f"{root}/../../etc/passwd"
            )
            project.write("sub/.env.new", SECRET)
            assert "covered" in await agent.refused("read_file", path=f"{root}/sub/.env.new")


@pytest.mark.parametrize(
    ("mount", "reason"),
    [
        ("/", "no folder of one project"),
        ("/etc", "belongs to the system"),
        ("/usr/share", "belongs to the system"),
        ("/proc", "belongs to the system"),
        ("/root", "no folder of one project" if os.geteuid() == 0 else "may not read it"),
        (str(Path.home()), "no folder of one project|holds, the home folder"),
        ("/no/such/folder", "no such folder"),
        ("/srv:/proc/x", "place of the sandbox"),
        ("/srv:/workspace/x", "place of the sandbox"),
        ("/srv:relative", "absolute path"),
    ],
)
async def test_places_that_belong_to_others_are_refused(mount: str, reason: str) -> None:
    wanted = command("--mount", mount, env={"HOME": str(Path.home())})
    done = await anyio.run_process(
        [wanted.command, *wanted.args], env=wanted.env, cwd=wanted.cwd, check=False, input=b""
    )
    said = done.stderr.decode()
    assert done.returncode != 0
    assert re.search(reason, said), said
    assert "Traceback" not in said


FORKED = "forked from a template that was tried"


@pytest.mark.parametrize("name", sampled(["data", "deep/er"], "data"))
async def test_what_is_mounted_of_the_home_folder_is_no_breach(project: Project, name: str) -> None:
    """The template is tried with files of the home folder, which must not be seen."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    project.write("data/rows.csv", "1,2")
    mount = project.root / name
    env = {"HOME": str(project.root), "XDG_CACHE_HOME": cache}
    async with Client(command("--mount", str(mount), "--warm", "0", env=env)) as client:
        notebook = Agent(client)
        with anyio.fail_after(PATIENCE_S):
            for _ in iter(int, 1):
                handle = (await notebook.call("create_session")).data["session"]
                code = f"import os; os.listdir({str(project.root)!r})"
                seen = (await notebook.run(code, session=handle)).text
                assert seen.splitlines()[0] == f"['{name.partition('/')[0]}']"
                found = str((await notebook.call("info", session=handle)).data["sandbox_found"])
                if FORKED in found:
                    break
                await notebook.call("close_session", session=handle)


PLANTED = (".git/hooks/post-commit", ".git/config", ".mcp.json", ".venv/bin/python", ".envrc")
WRITES = """
import json, os, stat
os.chdir(ROOT)
done = {}
def attempt(name, work):
    try:
        work()
        done[name] = "done"
    except OSError as error:
        done[name] = error.strerror
def write(path):
    with open(path, "w") as file:
        file.write("planted")
def beside(path):
    write("prepared")
    os.rename("prepared", path)
def swapped(path):
    import ctypes
    write("prepared")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, b"prepared", -100, path.encode(), 2):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def linked(path):
    os.link(path, "linked")
    write("linked")
for path in PLANTED:
    attempt(f"write {path}", lambda: write(path))
    attempt(f"rename to {path}", lambda: beside(path))
    attempt(f"swap {path}", lambda: swapped(path))
    attempt(f"unlink {path}", lambda: os.unlink(path))
    attempt(f"link {path}", lambda: linked(path))
    attempt(f"through root {path}", lambda: write(f"/proc/self/root{ROOT}/{path}"))
for path in (
    *(".git", ".git/hooks", ".venv", ".venv/bin"),
    *("nested", "nested/repo", "nested/repo/.git"),
):
    attempt(f"move {path}", lambda: os.rename(path, "moved"))
attempt("new hook", lambda: write(".git/hooks/pre-commit"))
attempt("new hook below", lambda: write("nested/repo/.git/hooks/pre-commit"))
attempt("other name", lambda: write("hook"))
attempt("other name of a file", lambda: write("deep/servers"))
attempt("mode", lambda: os.chmod(".git/hooks/post-commit", 0o777))
attempt("set-id", lambda: (write("tool"), os.chmod("tool", 0o4755)))
attempt("set-gid", lambda: os.chmod("tool", 0o2755))
attempt("born set-id", lambda: os.close(os.open("born", os.O_CREAT | os.O_WRONLY, 0o4755)))
attempt("device", lambda: os.mknod("device", 0o600 | stat.S_IFCHR, os.makedev(1, 3)))
attempt("chown", lambda: os.chown("tool", 0, 0))
print(json.dumps(done))
"""


PLANTS = """
import json, os
os.chdir(ROOT)
done = {}
def attempt(name, work):
    for _ in range(3):
        try:
            work()
        except OSError:
            pass  # it has been set aside meanwhile
    done[name] = "tried"
def write(path, text="planted"):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
attempt("ordinary", lambda: write("fresh/plain.txt", "ordinary"))
attempt("repository", lambda: (write("repo/.git/config"), write("repo/.git/hooks/post-checkout")))
attempt("claude", lambda: write(".claude/settings.json"))
attempt("tasks", lambda: write(".vscode/tasks.json"))
attempt("envrc", lambda: write(".envrc"))
attempt("renamed", lambda: (write("sh/prepared"), os.rename("sh/prepared", "sh/.bashrc")))
attempt("link", lambda: (os.makedirs("link", exist_ok=True), os.symlink("../fresh", "link/.git")))
print(json.dumps(done))
"""


@where_owners_write
async def test_a_writable_mount_takes_files_and_plants_nothing(way: str, project: Project) -> None:
    for name in (".mcp.json", "nested/repo/.git/HEAD", ".venv/bin/python", ".venv/pyvenv.cfg"):
        project.write(name, "original")
    project.write("room/old", "")
    project.write(".git/config", "[core]\n")
    (project.root / "hook").hardlink_to(project.root / ".git/hooks/post-commit")
    (project.root / "deep" / "servers").hardlink_to(project.root / ".mcp.json")
    project.own()
    before = {name: (project.root / name).read_text() for name in PLANTED if name != ".envrc"}
    async with opened(way, "--mount", f"{project.root}:rw") as notebook:
        code = f"ROOT, PLANTED = {str(project.root)!r}, {tuple(before)!r}\n{WRITES}"
        found = await notebook.run(code)
        pretended = {"mode", "set-gid"} if way in UNSPACED else set()
        assert {name for name, how in found.items() if how == "done"} <= pretended, found
        assert before == {name: (project.root / name).read_text() for name in before}
        assert not (project.root / ".git/hooks/pre-commit").exists()
        # what is fixed and comes to hold credentials, by both of its names
        with (project.root / ".mcp.json").open("a") as file:
            file.write(f"token = {SECRET}")
        names = [str(project.root / name) for name in (".mcp.json", "deep/servers")]
        reads = f"import json; print(json.dumps([open(name).read() for name in {names}]))"
        with anyio.fail_after(PATIENCE_S):
            while way not in UNSPACED and SECRET in json.dumps(await notebook.run(reads)):
                pass
        # what it is for
        wrote = await notebook.run(
            f"import json, os\nos.chdir({str(project.root)!r})\nos.makedirs('room/result/deep')\n"
            "open('room/new.csv', 'w').write('1')\nopen('data.csv', 'a').write('3,4')\n"
            "os.rename('room/new.csv', 'room/result/deep/new.csv')\n"
            "try: os.rename('sub', 'other')\nexcept OSError: pass\n"
            "print(json.dumps(sorted(os.listdir('room/result'))))"
        )
        assert (project.root / "other").exists() == (way not in UNSPACED)
        assert wrote == ["deep"]
        assert (project.root / "data.csv").read_text().endswith("3,4")
        made = (project.root / "room" / "result" / "deep" / "new.csv").stat()
        owner = project.root.stat()
        assert (made.st_uid, made.st_gid) == (owner.st_uid, owner.st_gid)
        for name in ("tool", "born"):
            path = project.root / name
            assert not path.exists() or path.stat().st_mode & 0o6000 == 0
        # secrets are covered here, too, also when a folder above them was moved by code
        assert SECRET not in json.dumps(await notebook.run(reading(project)))
        # nor where there was nothing before
        done = await notebook.run(f"ROOT = {str(project.root)!r}\n{PLANTS}")
        assert set(done.values()) == {"tried"}, done
        absent = ("repo/.git", "link/.git", ".claude", ".vscode", ".envrc", "sh/.bashrc")
        with anyio.fail_after(PATIENCE_S):
            while found := [name for name in absent if os.path.lexists(project.root / name)]:
                told = (await notebook.agent.call("info")).data["mounts"][0]
                assert "appeared" in told, found
        if way not in UNSPACED:  # where nothing can be made beside what is covered
            assert (project.root / "fresh" / "plain.txt").read_text() == "ordinary"
            told = (await notebook.agent.call("info")).data["mounts"][0]
            assert re.search(r"repo/\.git \(now repo/\.git\.set-aside-\d+\)", told)
        # what the host makes while no code runs stays as it is, and is kept from code
        with anyio.fail_after(PATIENCE_S):
            while (await notebook.agent.call("list_sessions")).data["sessions"][-1]["idle_s"] < 1:
                pass
        project.write("later/.git/hooks/post-commit", "original")
        project.own()
        with anyio.fail_after(PATIENCE_S):
            told = ""
            while "later/.git" not in told:
                told = (await notebook.agent.call("info")).data["mounts"][0]
        plant = f"open({str(project.root / 'later/.git/hooks/post-commit')!r}, 'w').write('x')"
        answer = await notebook.agent.run(plant, session=notebook.session)
        assert re.search("Read-only|Permission denied", answer.text)
        assert (project.root / "later/.git/hooks/post-commit").read_text() == "original"


PLANT_ON = """
import os, subprocess, threading, time
os.chdir(ROOT)
def plant(): # by processes that are gone at once, and by this one
    subprocess.run(["sh", "-c", "mkdir -p by-shell; echo x > by-shell/.envrc"])
    try:
        os.makedirs("planted/.git/hooks")
        with open("planted/.git/hooks/post-commit", "w") as file:
            file.write("planted")
    except OSError:
        pass  # it has been set aside or fixed meanwhile
    with open("prepared", "w") as file:
        file.write("planted")
    os.rename("prepared", ".mcp.json")
    os.mkdir("planted-env") # what is in it makes it an environment, whatever its name
    for folder in ("planted-env", "src"):
        with open(f"{folder}/pyvenv.cfg", "w") as file:
            file.write("planted")
plant()
while not os.path.exists("ended"):
    time.sleep(0.001)
"""
"""Ends when the host has made a file."""
MINE = ("mine/.git", ".git", "removed/.git", "mine/env", ".envrc", ".vscode")


@with_mounts
async def test_what_code_plants_is_set_aside_and_what_the_host_makes_is_not_lost(
    way: str, project: Project
) -> None:
    shutil.rmtree(project.root / ".git")
    shutil.rmtree(project.root / "plain")
    room = project.root / "room"
    (room / "removed/.git").mkdir(parents=True)
    project.write("room/src/code.py", "")
    environments = ("planted-env/pyvenv.cfg", "src/pyvenv.cfg")
    planted = ("planted/.git", ".mcp.json", "by-shell/.envrc", *environments)
    project.own()
    knows = way.startswith("root")
    async with opened(way, "--mount", f"{room}:rw") as notebook:
        answers: list[str] = []

        async def plants() -> None:
            answer = await notebook.agent.run(
                f"ROOT = {str(room)!r}\n{PLANT_ON}", session=notebook.session
            )
            answers.append(answer.text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(plants)
            with anyio.fail_after(PATIENCE_S):
                told = ""
                while not all(name in told for name in planted):
                    told = (await notebook.agent.call("info")).data["mounts"][0]
                    told = told.partition("appeared")[2]
            if knows:
                shutil.rmtree(room / "removed/.git")
                for words in (
                    ["git", "init", "-q", str(room / "mine")],
                    ["git", "init", "-q", str(room)],
                    ["git", "init", "-q", str(room / "removed")],
                    ["python3", "-m", "venv", "--without-pip", str(room / "mine/env")],
                ):
                    done = await anyio.run_process(words, check=False)
                    assert done.returncode == 0, done.stderr
                project.write("room/.vscode/tasks.json", "mine")
                project.own()
            project.write("room/mine.txt", "mine")
            (room / "mine.txt").rename(room / ".envrc")
            project.write("room/ended", "")
        assert [os.path.lexists(room / name) for name in planted] == [False] * 5
        assert (room / "src/code.py").exists()
        moved = list(room.rglob("*.set-aside-*"))
        assert not [path for path in moved if path.name.count(".set-aside-") > 1], moved
        if knows:
            assert len(moved) == 5, moved
            assert all(os.path.lexists(room / name) for name in MINE)
        kept = [room / ".envrc", *room.glob(".envrc.set-aside-*")]
        assert [path.read_text() for path in kept if path.exists()] == ["mine"]
        told = (await notebook.agent.call("info")).data["mounts"][0].partition("appeared")[2]
        for name in planted:
            assert name in answers[0], answers
        for name in MINE if knows else ():
            own = rf"(?:^|[ ,]){re.escape(name)}\b"
            assert not re.search(own, answers[0]), answers
            assert not re.search(own, told), told


HOLD = """
import json, os
os.chdir(ROOT + "/held/one")
NAMES = ("held", "held/one", "held/one/two")
HELD = {name: os.open(f"{ROOT}/{name}", os.O_RDONLY) for name in NAMES}
print(json.dumps("held"))
"""
TRY_HELD = """
done, read = {}, {}
def attempt(name, work):
    try:
        work()
        done[name] = "done"
    except OSError as error:
        done[name] = error.errno
def look(name, folder, path):
    try:
        read[name] = os.read(os.open(path, os.O_RDONLY, dir_fd=folder), 99).decode()
    except OSError as error:
        read[name] = error.strerror
def change(folder, path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, dir_fd=folder))
ways = {f"fd {name}": (fd, name, "") for name, fd in HELD.items()}
ways |= {f"path {name}": (None, name, f"{ROOT}/{name}/") for name in HELD}
ways["cwd"] = (None, "held/one", "")
for way, (fd, name, top) in ways.items():
    for below in [other for other in HELD if other.startswith(name)]:
        inner = below[len(name):].lstrip("/")
        inner = f"{top}{inner}/" if inner else top
        for path in (".git/config", ".git/new", ".mcp.json"):
            attempt(f"{way} {below} {path}", lambda: change(fd, inner + path))
        look(f"{way} {below}", fd, inner + ".netrc")
attempt("move", lambda: os.rename("two", "other"))
top = HELD["held"]
attempt("move by fd", lambda: os.rename("one", "1", src_dir_fd=top, dst_dir_fd=top))
attempt("move by path", lambda: os.rename(ROOT + "/held", ROOT + "/other"))
attempt("other copies", lambda: os.listdir("/run/blank/pins"))
for name in os.listdir("/run/blank"):
    attempt("open " + name, lambda: os.chmod(f"/run/blank/{name}", 0o777))
os.mkdir("two/plain")
os.rename("two/plain", ROOT + "/moved")
os.rmdir(ROOT + "/moved")
print(json.dumps([done, read]))
"""


@with_mounts
async def test_folders_that_code_holds_open_show_and_change_no_more_than_by_their_names(
    way: str, project: Project
) -> None:
    """Repositories and secrets of the host appear in them, and in folders around and below."""
    (project.root / "held/one/two").mkdir(parents=True)
    project.own()
    async with opened(way, "--mount", f"{project.root}:rw") as notebook:
        top = f"ROOT = {str(project.root)!r}\n"
        assert await notebook.run(top + HOLD) == "held"
        with anyio.fail_after(PATIENCE_S):
            while (await notebook.agent.call("list_sessions")).data["sessions"][-1]["idle_s"] < 1:
                pass
        for name in ("held/one", "held/one/two", "held"):
            project.write(f"{name}/.git/config", "[core]\n")
            project.write(f"{name}/.mcp.json", "{}")
            project.write(f"{name}/.netrc", SECRET)
            project.own()
            with anyio.fail_after(PATIENCE_S):
                told = ""
                while f"{name}/.git" not in told or f"{name}/.mcp.json" not in told:
                    told = (await notebook.agent.call("info")).data["mounts"][0]
        done, read = await notebook.run(TRY_HELD)
        assert len(read) == 14
        assert [name for name, how in done.items() if how == "done"] == [], done
        assert set(read.values()) == {""}, read
        for name in ("held/one", "held/one/two", "held"):
            assert (project.root / name / ".git/config").read_text() == "[core]\n"
        # what has got covers of its own meanwhile keeps its promise, also once the host moves it
        (project.root / "held").rename(project.root / "later")
        if way.endswith("forked"):
            assert not (await notebook.agent.call("branch", session=notebook.session)).failed


KEEP_OPEN = """
import json, mmap, os, subprocess, sys
os.chdir(ROOT + "/room")
for name in ("agent", "cloud", "plain"):
    os.mkdir(name)
for name in ("note", "mapped", "hidden", "other"):
    open(name, "w").write("{}")
os.link("note", "twin")
SLEEP = "import time; time.sleep(600)"
WITHOUT_ITS_FIRST_THREAD = (
    "import ctypes, threading, time\\n"
    "threading.Thread(target=time.sleep, args=[600]).start()\\n"
    "ctypes.CDLL(None).pthread_exit(None)"
)
MAPS = f"import mmap, os; fd = os.open('mapped', os.O_RDWR); m = mmap.mmap(fd, 2); os.close(fd)\\n"
def start(code, fd=-1, cwd="."):
    words = [sys.executable, "-c", code]
    one = subprocess.Popen(words, pass_fds=[fd] if fd >= 0 else [], cwd=cwd)
    if fd >= 0:
        os.close(fd)
    return one
keeps = {
    "file": start(SLEEP, os.open("note", os.O_RDWR)),
    "hidden file": start(SLEEP, os.open("hidden", os.O_WRONLY)),
    "file of a thread": start(WITHOUT_ITS_FIRST_THREAD, os.open("note", os.O_RDWR)),
    "mapping of a thread": start(MAPS + "print(1)\\n" + WITHOUT_ITS_FIRST_THREAD),
    "mapping": start(MAPS + "print(1)\\n" + SLEEP),
    "folder": start(SLEEP, os.open("agent", os.O_RDONLY)),
    "working folder": start(SLEEP, cwd="cloud"),
    "none of these": start(SLEEP, os.open("other", os.O_RDWR), "plain"),
}
print(json.dumps("kept"))
"""
ENDED = """
found = {name: one.poll() for name, one in keeps.items()}
for name in ("twin", ".mcp.json"):
    try:
        open(name, "r+").close()
        found[name] = "opened"
    except OSError as error:
        found[name] = error.strerror
print(json.dumps(found))
"""


@with_mounts
async def test_who_holds_open_what_is_covered_later_is_ended_and_links_to_it_are_fixed(
    way: str, project: Project
) -> None:
    """A descriptor, a mapping, a working folder and a hard link, from before the host moved it."""
    room = project.root / "room"
    room.mkdir()
    project.own()
    async with opened(way, "--mount", f"{project.root}:rw") as notebook:
        assert await notebook.run(f"ROOT = {str(project.root)!r}\n{KEEP_OPEN}") == "kept"
        with anyio.fail_after(PATIENCE_S):
            while (await notebook.agent.call("list_sessions")).data["sessions"][-1]["idle_s"] < 1:
                pass
        for name, new in {
            "note": ".mcp.json",
            "mapped": "lefthook.yml",
            "hidden": ".envrc",
            "agent": ".claude",
            "cloud": ".aws",
        }.items():
            (room / name).rename(room / new)
        with anyio.fail_after(PATIENCE_S):
            told = ""
            while not all(f"room/{name}" in told for name in ("lefthook.yml", ".claude", "twin")):
                told = (await notebook.agent.call("info")).data["mounts"][0]
        answers: list[str] = []
        killed = {"file", "hidden file", "mapping", "folder", "working folder"}
        killed |= {"file of a thread", "mapping of a thread"}
        with anyio.fail_after(PATIENCE_S):
            while True:
                answer = await notebook.agent.run(ENDED, session=notebook.session)
                answers.append(answer.text)
                found = json.loads(answer.text.splitlines()[0])
                if {name for name, code in found.items() if code == -signal.SIGKILL} >= killed:
                    break
        said = "".join(answers)
        assert found["none of these"] is None
        assert "twin has appeared" not in said
        assert found["twin"] == found[".mcp.json"] == "Read-only file system"
        for name in (".mcp.json", ".envrc", "lefthook.yml", ".claude", ".aws"):
            assert f"room/{name}: a process of a session held that open" in said, said


@in_these(*WAYS)
async def test_file_tools_write_into_writable_mounts_alone(way: str, project: Project) -> None:
    async with opened(way, "--mount", f"{project.root}:rw") as notebook:
        agent, root = notebook.agent, str(project.root)
        await agent.call("write_file", path=f"{root}/new/file.txt", content="text")
        made, owner = (project.root / "new" / "file.txt").stat(), project.root.stat()
        assert (made.st_uid, made.st_gid) == (owner.st_uid, owner.st_gid)
        for name in (".git/hooks/x", ".mcp.json", "a/.vscode/tasks.json", ".env", "out/x"):
            refused = await agent.refused("write_file", path=f"{root}/{name}", content="x")
            assert "Traceback" not in refused
        assert not (project.root / ".mcp.json").exists()


@in_these(*WAYS)
async def test_a_folder_made_anew_is_what_later_sessions_see(way: str, project: Project) -> None:
    async with opened(way, "--mount", str(project.root)) as notebook:
        project.root.rename(project.root.with_name("old"))
        project.root.mkdir()
        project.write("data.csv", "new")
        project.write(".env", SECRET)
        project.own()
        made = await notebook.agent.call("create_session")
        other = Notebook(notebook.agent, made.data["session"])
        found = await other.run(reading(project))
        assert found["data.csv"] == "new"
        assert SECRET not in json.dumps(found)
        project.write("sub/.env", SECRET)
        project.own()
        with anyio.fail_after(PATIENCE_S):
            while SECRET in json.dumps(found := await other.run(reading(project))):
                pass
        assert "sub/.env" in found


async def test_a_link_that_code_put_in_the_place_of_a_mount_is_not_followed(
    way: str, project: Project
) -> None:
    victim = project.root.parent / "victim"
    (victim / "b").mkdir(parents=True)
    (victim / "b" / "loot").write_text(SECRET)
    for name in ("a/b/data", "s/data"):
        project.write(name, "shown")
    project.own()
    root = str(project.root)
    # seen at two places, one of them writable, and below a folder that can be moved away
    flags = ("--mount", f"{root}:/all:rw", "--mount", f"{root}/s:/s", "--mount", f"{root}/a/b:/b")
    async with opened(way, *flags) as notebook:
        agent = notebook.agent
        await notebook.run(
            "import os\nos.chdir('/all')\nos.rename('s', 'was')\nos.symlink('../victim/b', 's')\n"
            "os.rename('a', 'old')\nos.symlink('../victim', 'a')\nprint(1)"
        )
        made = (await agent.call("create_session")).data["session"]
        for place in ("/s/loot", "/b/loot"):
            assert SECRET not in (await agent.call("read_file", path=place)).text
            answer = await agent.run(f"open({place!r}).read()", session=made)
            assert SECRET not in answer.text
            assert "cannot be shown any more" in answer.text
        (project.root / "s").unlink()
        (project.root / "was").rename(project.root / "s")
        (project.root / "a").unlink()
        (project.root / "old").rename(project.root / "a")
        other = Notebook(agent, (await agent.call("create_session")).data["session"])
        assert await other.run("import json; print(json.dumps(open('/s/data').read()))") == "shown"


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("ordinary cold", "SIGKILL"),
        pytest.param("ordinary cold", "SIGSTOP", marks=pytest.mark.full),
        pytest.param("root forked", "SIGKILL", marks=pytest.mark.ways),
        pytest.param("root forked", "SIGSTOP", marks=pytest.mark.ways),
    ],
    indirect=["way"],
)
async def test_a_dead_or_silent_keeper_is_replaced_and_what_appeared_meanwhile_is_covered(
    way: str, name: str, project: Project
) -> None:
    show = f"print(json.dumps(open({str(project.root / 'new' / '.env')!r}).read()))"
    async with opened(way, "--mount", str(project.root)) as notebook:
        keeper, *_ = [  # an ordinary user's has processes in sandboxes
            pid
            for pid in descendants(os.getpid())
            if Path(f"/proc/{pid}/comm").read_text().strip() == "kernel-keeper"
        ]
        os.kill(keeper, signal.Signals[name])
        project.write("new/.env", SECRET)
        said = []
        with anyio.fail_after(PATIENCE_S):
            while True:
                answer = await notebook.agent.run(f"import json\n{show}", session=notebook.session)
                said.append(answer.text)
                if answer.status == "ok" and SECRET not in answer.text:
                    break
        assert "covers secrets below the mounted folders is replaced" in "".join(said)
        made = await notebook.agent.call("create_session")
        other = Notebook(notebook.agent, made.data["session"])
        assert await other.run(f"import json\n{show}") == ""
        told = (await notebook.agent.call("info", session=notebook.session)).data["mounts"]
        assert "replaced" not in told[0]


@pytest.mark.ways
async def test_more_secrets_than_can_be_covered_are_told(project: Project) -> None:
    log = project.root.parent / "log"
    flags = ("--mount", str(project.root), "--no-template", "--warm", "0")
    words = [sys.executable, "-m", "kernel_mcp", *flags]
    shell = ["-c", 'exec "$@" 2>"$0"', str(log), *words]
    server = command()
    async with Client(
        StdioServerParameters(command="/bin/sh", args=shell, env=server.env, cwd=server.cwd)
    ) as client:
        await Agent(client).run("1")
        for number in range(MOST_COVERS + 1):
            (project.root / f".env.{number}").touch()
        with anyio.fail_after(PATIENCE_S):
            while "would have to be covered" not in log.read_text():
                await Agent(client).run("1")
