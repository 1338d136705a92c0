"""Packages that are hostile, brought in every way there is."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from kernel_mcp.environments.folder import tree_size
from kernel_mcp.linux.safe_tree import remove_tree
from tests.integration.agent import Agent, command
from tests.integration.executions import executions, traced
from tests.sampled import sampled
from tests.unit.packages import hostile

pytestmark = pytest.mark.anyio

MIB = 1 << 20
OPERATORS = f"{hostile.RUNS},{hostile.STRAYS},{hostile.SHADOWS}"
BLOCK = "# /// script\n# dependencies = [{}]\n# ///\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A service of this machine that installers may reach and code of packages may not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """A file that only what runs on the host can write."""
    mark = Path(f"/var/tmp/.kmtest-{os.getpid()}")
    yield mark
    mark.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all tests, each of which has environments of its own built in it."""
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    remove_tree(folder)


@pytest.fixture
def links(tmp_path: Path, mark: Path, listener: socket.socket) -> Path:
    folder = tmp_path / "links"
    hostile.hostile_wheels(folder, mark, listener.getsockname()[1])
    return folder


@asynccontextmanager
async def server(
    cache: Path, links: Path, *flags: str, log: Path | None = None
) -> AsyncIterator[Agent]:
    """A server that takes any package; only one that is traced forks kernels ahead."""
    ahead = ("--warm", "0", "--no-template") if log is None else ("--warm", "1")
    found = command(
        *("--cache-dir", str(cache), "--find-links", str(links), "--allow-install", "*"),
        *("--wait", "10m", *ahead, *flags),
    )
    if log is not None:
        argv = traced(log, [found.command, *found.args])
        found = StdioServerParameters(command=argv[0], args=argv[1:], env=found.env, cwd=found.cwd)
    async with Client(found, mode="auto") as client:
        yield Agent(client)


def built(cache: Path) -> set[Path]:
    """The environments in a cache."""
    return {settings.parent for settings in (cache / "envs").glob("*/pyvenv.cfg")}


def untouched(mark: Path, listener: socket.socket) -> None:
    assert not mark.exists(), mark.read_text()
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("python", sampled(["same", "other"], "same"))
async def test_no_package_runs_outside_a_sandbox_whichever_way_it_comes(
    python: str, tmp_path: Path, cache: Path, links: Path, mark: Path, listener: socket.socket
) -> None:
    log = tmp_path / "log"
    ran = "import sys\nprint(getattr(sys, 'kmtest_ran', False))"
    other = "" if python == "same" else "3.12" if sys.version_info[:2] != (3, 12) else "3.11"
    operators = ("--allow", OPERATORS)
    async with server(cache, links, *operators, log=log) as notebook:
        assert (await notebook.run(ran)).text == "True"  # it does run, in the kernel
        added = [hostile.POSES]
        await notebook.call("install", packages=added)
        answer = await notebook.call("create_session", python=other, packages=added)
        if "there is no Python" in answer.text:
            other = ""
            answer = await notebook.call("create_session", packages=added)
        session = answer.data["session"]
        assert (await notebook.run(ran, session=session)).text == "True"
        answer = await notebook.call("run_script", script=ran, dependencies=added, python=other)
        assert answer.text.startswith("True"), answer.text
        script = BLOCK.format(f'"{hostile.POSES}"') + ran
        answer = await notebook.call("run_script", script=script, python=other)
        assert answer.text.startswith("True"), answer.text
    untouched(mark, listener)
    own = str(cache / "envs")
    seen = executions(log)
    assert [each for each in seen if not each.confined and each.program.startswith(own)] == []
    uv = [each for each in seen if each.program.endswith("/uv") and '"pip"' in each.arguments]
    pythons = [each for each in seen if Path(each.program).name.startswith("python")]
    compiling = [each for each in pythons if "compile_file" in each.arguments]
    assert len(uv) >= 4  # two environments; a layer is resolved and installed
    assert len(compiling) >= 3
    assert all(each.confined for each in (*uv, *compiling))
    assert not any(f'"--python", "{own}' in each.arguments for each in uv)
    assert all('"-I", "-S"' in each.arguments for each in compiling)
    assert any(each.program.startswith(own) for each in seen)  # the kernels, in their sandboxes
    for environment in built(cache):
        assert not (environment / "bin/pyvenv.cfg").exists()
        assert "/nowhere" not in (environment / "pyvenv.cfg").read_text()
        links_in_it = {path.name for path in environment.rglob("*") if path.is_symlink()}
        minor = ".".join(environment.name.split("-")[1].split(".")[:2])
        assert links_in_it == {"python", "python3", f"python{minor}", "lib64"}
    assert not list(tmp_path.rglob("strayed"))


@pytest.mark.full
@pytest.mark.parametrize("sandbox", ["landlock", "none"])
async def test_other_sandboxes_build_as_confined(
    cache: Path, links: Path, mark: Path, listener: socket.socket, sandbox: str
) -> None:
    packages = [hostile.RUNS, *([hostile.POSES] if sandbox == "none" else [])]
    before = built(cache)
    async with server(cache, links, "--sandbox", sandbox) as notebook:
        answer = await notebook.call("create_session", packages=packages)
        assert not answer.failed, answer.text
        # its kernel is started by the first cell only: until then nothing has run
    assert built(cache) - before
    if sandbox == "landlock":
        untouched(mark, listener)


async def test_modules_and_versions_of_packages_are_what_they_may_be(
    cache: Path, links: Path
) -> None:
    flags = ("--profile", "guarded", "--allow", OPERATORS)
    async with server(cache, links, *flags) as notebook:
        for module in ("subprocess", "ctypes"):
            assert "not allowed" in (await notebook.run(f"import {module}")).text
        listed = await notebook.call("list_packages")
        assert hostile.SHADOWS in listed.text
        assert "Ignore" not in listed.text


@pytest.mark.ways
async def test_words_of_packages_are_cleaned(cache: Path, links: Path) -> None:
    async with server(cache, links) as notebook:
        text = await notebook.refused("install", packages=[hostile.SPEAKS])
        assert "ImportError: red " in text
        for hidden in ("\x1b", "\u202e", "\u2066", "\U000e0041"):
            assert hidden not in text
        assert "\\u202e" in text


@pytest.mark.ways
async def test_no_way_in_takes_more_of_the_disk_than_it_may(tmp_path: Path, cache: Path) -> None:
    links = tmp_path / "links"
    hostile.filling_wheel(links)
    async with server(cache, links, "--install-size", "32M") as notebook:
        await notebook.run("1")
        before = tree_size(cache)
        for tool, arguments in (
            ("create_session", {"packages": [hostile.FILLS]}),
            ("run_script", {"script": "1", "dependencies": [hostile.FILLS]}),
            ("run_script", {"script": BLOCK.format(f'"{hostile.FILLS}"')}),
            ("install", {"packages": [hostile.FILLS]}),
        ):
            assert "--install-size" in await notebook.refused(tool, **arguments), tool
            assert tree_size(cache) < before + 32 * MIB, tool
