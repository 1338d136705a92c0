"""Packages added to a session that goes on living."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from mcp.client import Client

from tests.integration.agent import Agent, Answer, agent, command
from tests.integration.servers import Servers
from tests.sampled import sampled
from tests.unit.packages.wheels import sdist, wheel

pytestmark = [pytest.mark.anyio]


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheels that nobody else has; one server has it for most tests."""
    return with_wheels(tmp_path_factory.mktemp("links"))


def with_wheels(folder: Path) -> Path:
    """Fill a folder."""
    wheel(folder, "kmtest-good", "1.0")
    wheel(folder, "kmtest-good", "2.0")
    wheel(
        folder,
        "kmtest-tool",
        files={
            "kmtest_tool.py": "def main(): print('tool ' + 'ran')\n",
            "kmtest_tool-1.0.dist-info/entry_points.txt": (
                "[console_scripts]\nkmtest-tool = kmtest_tool:main\n"
            ),
        },
    )
    wheel(folder, "kmtest-needs-good", requires=["kmtest-good"])
    wheel(folder, "kmtest-needs-new", requires=["kmtest-good>=2"])
    wheel(folder, "kmtest-broken", files={"kmtest_broken.py": "import kmtest_missing_part"})
    wheel(
        folder,
        "kmtest-crash",
        files={"kmtest_crash.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"},
    )
    return folder


def local(links: Path, *flags: str) -> tuple[str, ...]:
    return ("--allow-install", "*", "--find-links", str(links), *flags)


async def installed(notebook: Agent) -> dict[str, str]:
    """The packages of the session that were added to it."""
    listed = (await notebook.call("list_packages")).data["packages"]
    return {each["name"]: each["version"] for each in listed if each["source"] == "installed"}


async def add(notebook: Agent, *packages: str) -> Answer:
    answer = await notebook.call("install", packages=list(packages))
    assert not answer.failed, answer.text
    return answer


@pytest.mark.ways
async def test_polars_is_installed_and_used_with_earlier_variables_intact(servers: Servers) -> None:
    async with servers.agent("--allow-install", "polars") as notebook:
        await notebook.run("rows = [1, 2, 3]")
        missing = (await notebook.run("import polars")).text
        assert 'install(packages=["polars"]) adds it to this session' in missing
        told: list[str | None] = []
        answer = await notebook.call(
            "install",
            packages=["polars"],
            on_progress=lambda _value, _total, text: told.append(text),
        )
        assert not answer.failed, answer.text
        assert "import polars works in this session" in answer.data["summary"]
        assert answer.data["allowed_imports"] == ["polars"]
        assert any("Resolved" in (text or "") for text in told)
        used = await notebook.run("import polars as pl\npl.DataFrame({'a': rows})['a'].sum()")
        assert used.text == "6"
        assert (await notebook.call("check_syntax", code="import polars")).data["valid"]


async def test_installed_packages_outlive_a_reset_unless_they_are_to_go(
    links: Path, servers: Servers
) -> None:
    async with servers.agent(*local(links)) as notebook:
        await add(notebook, "kmtest-good==1.0")
        await notebook.call("reset")
        assert (await notebook.run("import kmtest_good as k\nk.__version__")).text == "'1.0'"
        answer = await notebook.call("reset", packages=True)
        assert "packages" in answer.text
        assert await installed(notebook) == {}
        assert "No module named" in (await notebook.run("import kmtest_good")).text
        await add(notebook, "kmtest-good")
        assert (await notebook.run("import kmtest_good as k\nk.__version__")).text == "'2.0'"


async def test_a_package_that_cannot_be_imported_is_not_installed(
    links: Path, servers: Servers
) -> None:
    async with servers.agent(*local(links)) as notebook:
        await notebook.run("x = 41")
        text = await notebook.refused("install", packages=["kmtest-good", "kmtest-broken"])
        assert "import kmtest_broken: ModuleNotFoundError" in text
        assert "Nothing was installed, the session is as it was" in text
        assert await installed(notebook) == {}
        assert "No module named" in (await notebook.run("import kmtest_good")).text
        assert (await notebook.run("x + 1")).text == "42"


async def test_a_package_that_kills_its_process_costs_no_variables(
    links: Path, servers: Servers
) -> None:
    async with servers.agent(*local(links)) as notebook:
        await notebook.run("x = 41")
        assert "SIGSEGV" in await notebook.refused("install", packages=["kmtest-crash"])
        assert (await notebook.run("x + 1")).text == "42"


@pytest.mark.ways
async def test_an_older_version_in_use_is_told_and_a_reset_changes_over(
    links: Path, servers: Servers
) -> None:
    async with servers.agent(*local(links)) as notebook:
        await add(notebook, "kmtest-good==1.0")
        await notebook.run("import kmtest_good")
        answer = await add(notebook, "kmtest-good==2.0")
        assert answer.data["reset_needed"] is True
        assert "in place of 1.0" in answer.data["summary"]
        assert "reset" in answer.data["summary"]
        assert (await notebook.run("kmtest_good.__version__")).text == "'1.0'"
        await notebook.call("reset")
        assert (await notebook.run("import kmtest_good as k\nk.__version__")).text == "'2.0'"


@pytest.mark.ways
async def test_what_is_there_stays_unless_something_needs_another_version(
    tmp_path: Path, servers: Servers
) -> None:
    links = with_wheels(tmp_path / "links")
    newer = wheel(links, "kmtest-good", "2.0").rename(links.parent / "newer")
    async with servers.agent(*local(links)) as notebook:
        await add(notebook, "kmtest-needs-good")
        newer.rename(links / "kmtest_good-2.0-py3-none-any.whl")
        answer = await add(notebook, "kmtest-good>=1")
        assert "kmtest-good 1.0 was there already" in answer.data["summary"]
        answer = await add(notebook, "kmtest-needs-new")
        assert (await installed(notebook))["kmtest-good"] == "2.0"
        assert "kmtest-good 2.0 (before: 1.0)" in answer.data["summary"]


@pytest.mark.ways
async def test_a_dependency_of_the_environment_can_be_opened_without_a_download(
    servers: Servers,
) -> None:
    async with servers.agent("--allow-install", "pyzmq", "--offline") as notebook:
        answer = await add(notebook, "pyzmq")
        assert "was there already: import zmq works" in answer.data["summary"]
        assert (await notebook.run("import zmq; type(zmq.__version__).__name__")).text == "'str'"


@pytest.mark.ways
async def test_what_cannot_be_resolved_changes_nothing(links: Path, servers: Servers) -> None:
    async with servers.agent(*local(links)) as notebook:
        text = await notebook.refused("install", packages=["kmtest-good<2", "kmtest-needs-new"])
        assert "contradict" in text
        assert "the session is as it was" in text
        assert "ipykernel" in await notebook.refused("install", packages=["ipykernel<7"])
        text = await notebook.refused("install", packages=["kernel-mcp-no-such-package"])
        assert "no package 'kernel-mcp-no-such-package'" in text
        assert await installed(notebook) == {}
        await add(notebook, "kmtest-good<2")
        text = await notebook.refused("install", packages=["kmtest-needs-new"])
        assert "installed before counts too: kmtest-good<2" in text


async def test_the_operator_decides_what_may_be_installed(servers: Servers) -> None:
    async with servers.agent() as notebook:
        for tool in ("install", "create_session"):
            assert "--allow-install rich" in await notebook.refused(tool, packages=["rich"])
        text = await notebook.refused("run_script", script="print(1)", dependencies=["rich"])
        assert "--allow-install rich" in text
        assert (await notebook.call("list_packages")).data["installable"] == "nothing"


async def test_what_is_not_the_name_of_a_package_is_refused(links: Path, servers: Servers) -> None:
    async with servers.agent(*local(links)) as notebook:
        for text in ("-r /etc/passwd", "git+https://x.org/x.git", "x @ file:///x.whl", "../x"):
            assert "by name" in await notebook.refused("install", packages=[text])
        assert "part of Python" in await notebook.refused("install", packages=["os"])
        assert "empty" in await notebook.refused("install", packages=[])


async def test_an_install_goes_on_while_a_cell_runs(links: Path, servers: Servers) -> None:
    async with servers.agent(*local(links)) as notebook:
        await notebook.run("import threading\ngo = threading.Event()")
        answers: list[Answer] = []

        async def wait_for_file() -> None:
            code = "from pathlib import Path\nwhile not Path('go').exists(): go.wait(0.05)\n'done'"
            answers.append(await notebook.run(code))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_for_file)
                await add(notebook, "kmtest-good")
                assert answers == []
                await notebook.call("write_file", path="go", content="")
        assert answers[0].text == "'done'"
        assert (await notebook.run("import kmtest_good as k\nk.__version__")).text == "'2.0'"


async def test_packages_belong_to_one_session_and_only_the_server_writes_them(
    links: Path, servers: Servers
) -> None:
    async with servers.agent(*local(links)) as notebook:
        async with anyio.create_task_group() as tasks:  # at once: one after the other
            tasks.start_soon(add, notebook, "kmtest-good==1.0")
            tasks.start_soon(add, notebook, "kmtest-needs-good")
        assert set(await installed(notebook)) == {"kmtest-good", "kmtest-needs-good"}
        answer = await notebook.run("import kmtest_good\nopen(kmtest_good.__file__, 'w')")
        assert "Read-only file system" in answer.text
        other = (await notebook.call("create_session")).data["session"]
        missing = await notebook.run("import kmtest_good", session=other)
        assert "No module named" in missing.text


CHILDREN = """\
import subprocess, sys
!python -c 'import kmtest_tool; kmtest_tool.main()'
!kmtest-tool
print(subprocess.run([sys.executable, '-c', 'import kmtest_tool; kmtest_tool.main()'],
                     capture_output=True, text=True).stdout)
"""


@pytest.mark.ways
@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--sandbox", "landlock"), marks=pytest.mark.ways),
        pytest.param(("--warm", "1"), marks=pytest.mark.full),
        pytest.param(("--sandbox", "none"), marks=pytest.mark.full),
    ],
)
async def test_child_processes_find_new_packages_and_programs_after_a_reset_too(
    links: Path, flags: tuple[str, ...], servers: Servers
) -> None:
    async with servers.agent(*local(links, "--allow", "*", *flags)) as notebook:
        await notebook.run("x = 1")
        await add(notebook, "kmtest-tool")
        for _ in range(2):
            answer = await notebook.run(CHILDREN)
            assert answer.text.split("\n") == ["tool ran"] * 3, answer.text
            await notebook.call("reset")
        await notebook.call("reset", packages=True)
        assert "No module named" in (await notebook.run(CHILDREN)).text


@pytest.mark.parametrize("sandbox", sampled(["landlock", "none"]))
async def test_other_sandboxes_show_new_packages_too_which_bubblewrap_unpacks(
    links: Path, sandbox: str, servers: Servers
) -> None:
    async with servers.agent(*local(links, "--sandbox", sandbox)) as notebook:
        await notebook.run("x = 41")
        answer = await add(notebook, "kmtest-good")
        assert "without a sandbox" not in answer.data["summary"]
        assert (
            await notebook.run("import kmtest_good as k\nx, k.__version__")
        ).text == "(41, '2.0')"


async def test_a_source_distribution_runs_nothing_unless_that_is_allowed(
    links: Path, servers: Servers
) -> None:
    mark = Path.home() / f".kmtest-hostile-{os.getpid()}"
    sdist(links, "kmtest-hostile", f"open({str(mark)!r}, 'w').close()\n")
    async with servers.agent(*local(links)) as notebook:
        text = await notebook.refused("install", packages=["kmtest-hostile"])
    assert "building from source is switched off" in text
    assert not mark.exists()


@pytest.mark.ways
async def test_a_build_from_source_cannot_write_to_the_home_folder(
    tmp_path: Path, servers: Servers
) -> None:
    mark = Path.home() / f".kmtest-hostile-{os.getpid()}"
    links = tmp_path / "links"
    setup = (
        "import os, pathlib, setuptools\n"
        "seen = []\n"
        f"for act in (lambda: open({str(mark)!r}, 'w').close(),\n"
        "            lambda: pathlib.Path('/workspace').mkdir(),\n"
        "            lambda: open('/etc/shadow').read(),\n"
        f"            lambda: os.kill({os.getpid()}, 0)):\n"
        "    try:\n"
        "        act(); seen.append('done')\n"
        "    except OSError as error:\n"
        "        seen.append(type(error).__name__)\n"
        "pathlib.Path('kmtest_hostile.py').write_text(f'seen = {seen!r}; uid = {os.getuid()}')\n"
        "setuptools.setup(name='kmtest-hostile', version='1.0', py_modules=['kmtest_hostile'])\n"
    )
    sdist(links, "kmtest-hostile", setup)
    async with servers.agent(*local(links, "--allow-source-builds")) as notebook:
        await add(notebook, "kmtest-hostile")
        answer = await notebook.run("import kmtest_hostile as k\nprint(k.seen, k.uid)")
    assert not mark.exists()
    assert "done" not in answer.text
    assert not answer.text.endswith(" 0")


async def test_too_many_bytes_are_not_installed(servers: Servers) -> None:
    async with servers.agent("--allow-install", "*", "--install-size", "1M") as notebook:
        assert "--install-size" in await notebook.refused("install", packages=["pillow"])
        assert await installed(notebook) == {}


@pytest.mark.ways
async def test_without_network_cached_packages_install_and_missing_ones_are_named(
    links: Path, servers: Servers
) -> None:
    async with servers.agent(*local(links)) as notebook:
        await add(notebook, "tabulate")
    async with servers.agent("--allow-install", "*", "--offline") as notebook:
        await add(notebook, "tabulate")
        text = await notebook.refused("install", packages=["kernel-mcp-never-seen"])
        assert "kernel-mcp-never-seen" in text
        assert "--offline" in text


@pytest.fixture(scope="module")
def index() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture
def silent_index(index: socket.socket) -> socket.socket:
    """An index that takes connections and never answers: it becomes readable with the first."""
    with suppress(BlockingIOError):
        while True:
            index.accept()[0].close()  # what the test before has left
    return index


def waiting_on(index: socket.socket, *flags: str) -> tuple[str, ...]:
    url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
    return ("--allow-install", "*", "--index-url", url, *flags)


@pytest.fixture(scope="module")
async def environment() -> None:
    """See to it that the environment without packages is there."""
    async with agent() as notebook:
        await notebook.run("1")


@pytest.mark.ways
@pytest.mark.usefixtures("environment")
async def test_a_cancelled_install_leaves_the_session_as_it_was(
    silent_index: socket.socket, servers: Servers
) -> None:
    async with servers.agent(*waiting_on(silent_index)) as notebook:
        await notebook.run("x = 41")
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(add, notebook, "tabulate")
                await anyio.wait_readable(silent_index)
                tasks.cancel_scope.cancel()
            assert await installed(notebook) == {}
            assert (await notebook.run("x + 1")).text == "42"


@pytest.mark.usefixtures("environment")
async def test_interrupt_stops_an_install_that_waits_for_its_index(
    silent_index: socket.socket, servers: Servers
) -> None:
    async with servers.agent(*waiting_on(silent_index)) as notebook:
        await notebook.run("x = 41")
        answers: list[Answer] = []

        async def install() -> None:
            answers.append(await notebook.call("install", packages=["tabulate"]))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(install)
                await anyio.wait_readable(silent_index)
                told = await notebook.call("interrupt")
                assert "installation is being stopped" in told.text
            assert answers[0].failed
            assert "interrupted: nothing was installed" in answers[0].text
            assert await installed(notebook) == {}
            assert (await notebook.run("x + 1")).text == "42"
            assert "Nothing is running" in (await notebook.call("interrupt")).text


@pytest.mark.ways
@pytest.mark.usefixtures("environment")
async def test_an_install_that_takes_too_long_is_stopped(silent_index: socket.socket) -> None:
    start = command(*waiting_on(silent_index), "--warm", "0", "--no-template")
    hurried = (
        "import sys; from kernel_mcp import cli; from kernel_mcp.packages import installer; "
        "installer.INSTALL_TIMEOUT_S = 1.0; sys.exit(cli.main())"
    )
    start.args[:2] = ["-c", hurried]
    async with Client(start) as client:
        notebook = Agent(client)
        await notebook.run("x = 41")
        with anyio.fail_after(60):
            text = await notebook.refused("install", packages=["tabulate"])
        assert "not done after 1 s" in text
        assert (await notebook.run("x + 1")).text == "42"


@pytest.mark.ways
@pytest.mark.usefixtures("environment")
async def test_closing_a_session_ends_its_install(
    silent_index: socket.socket, servers: Servers
) -> None:
    async with servers.agent(*waiting_on(silent_index)) as notebook:
        session = (await notebook.call("create_session")).data["session"]
        refusals: list[str] = []

        async def install() -> None:
            arguments = {"packages": ["tabulate"], "session": session}
            refusals.append(await notebook.refused("install", **arguments))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(install)
                await anyio.wait_readable(silent_index)
                await notebook.call("close_session", session=session)
        assert "closed" in refusals[0]
