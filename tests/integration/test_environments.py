"""Environments built by the real uv from the package index."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import uv

from kernel_mcp.environments.metadata import EnvironmentSpec, import_names
from kernel_mcp.environments.store import EnvironmentStore
from kernel_mcp.environments.uv import Uv
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.linux.safe_tree import remove_tree
from tests.integration.agent import agent, notices
from tests.sampled import sampled

pytestmark = pytest.mark.anyio

# Modules whose distribution has another name, all small: a sample of `known`.
RENAMED = ("attr", "bs4", "dateutil", "dotenv", "jwt", "slugify", "websocket", "yaml")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache folder for the whole module."""
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    remove_tree(folder)


def _run(env: KernelEnvironment, code: str) -> str:
    done = subprocess.run(
        [env.python, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_a_kernel_and_its_packages_can_be_imported_and_nothing_else(cache: Path) -> None:
    spec = EnvironmentSpec.for_allow(["tabulate>=0.9", "os"])
    env = await EnvironmentStore(cache).ensure(spec)
    code = "import ipykernel.kernelapp, cloudpickle, tabulate, sys; print(sys.prefix)"
    assert _run(env, code) == str(env.python.parent.parent)
    assert import_names(env, spec) == {"tabulate"}
    for missing in ("mcp", "pytest", "debugpy"):
        _run(env, f"import importlib.util as u; assert u.find_spec({missing!r}) is None")


async def test_everything_is_compiled_ahead(cache: Path) -> None:
    env = await EnvironmentStore(cache).ensure(EnvironmentSpec.for_allow(["tabulate>=0.9"]))
    compiled = _run(
        env,
        "import tabulate, IPython, zmq, os\n"
        "print(all(os.path.exists(m.__cached__) for m in (tabulate, IPython, zmq)))",
    )
    assert compiled == "True"


@pytest.mark.ways
async def test_modules_with_another_name_than_their_package_are_found(cache: Path) -> None:
    spec = EnvironmentSpec.for_allow(RENAMED)
    env = await EnvironmentStore(cache).ensure(spec)
    assert set(RENAMED) <= import_names(env, spec)
    _run(env, f"import {', '.join(RENAMED)}")


@pytest.mark.parametrize("version", sampled(["3.10", "3.12", "3.13", "3.14"]))
async def test_any_python_that_is_installed_makes_an_environment(cache: Path, version: str) -> None:
    environ = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    store = EnvironmentStore(cache, uv=Uv(uv.find_uv_bin(), environ, cache))
    try:
        env = await store.ensure(EnvironmentSpec(python=version))
    except EnvironmentBuildError as error:
        if "there is no Python" in str(error):
            pytest.skip(f"Python {version} is not installed here")
        raise
    assert env.version.startswith(version)
    assert _run(env, "import ipykernel.kernelapp, platform; print(platform.python_version())") == (
        env.version
    )
    prefix = _run(env, "import sys, os; print(os.path.realpath(sys.base_prefix))")
    assert Path(prefix) in env.readonly


@pytest.mark.ways
async def test_two_processes_build_one_environment_once(tmp_path: Path) -> None:
    code = (
        "import anyio, sys\n"
        "from pathlib import Path\n"
        "from kernel_mcp.environments.metadata import EnvironmentSpec\n"
        "from kernel_mcp.environments.store import EnvironmentStore\n"
        "async def tell(line): print(line, flush=True)\n"
        "async def main():\n"
        "    env = await EnvironmentStore(Path(sys.argv[1])).ensure(EnvironmentSpec(), tell)\n"
        "    print(env.python)\n"
        "anyio.run(main)\n"
    )
    outputs: list[str] = []

    async def build() -> None:
        done = await anyio.run_process([sys.executable, "-c", code, str(tmp_path / "cache")])
        outputs.append(done.stdout.decode())

    with anyio.fail_after(90):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(build)
            tasks.start_soon(build)
    told = [line for output in outputs for line in output.splitlines()]
    assert len({line for line in told if line.startswith("Resolved")}) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


@pytest.mark.ways
async def test_the_command_builds_lists_and_prunes(tmp_path: Path) -> None:
    def env(*words: str) -> str:
        argv = [sys.executable, "-m", "kernel_mcp", "env", *words, "--cache-dir", str(tmp_path)]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    built = env("build", "--allow", "tabulate")
    assert "Resolved" in built
    assert "ready after" in built
    assert "ready after 0." in env("build", "--allow", "tabulate")
    assert "tabulate\n1 environment," in env("list")
    assert "0 environments removed" in env("prune")
    assert "1 environment removed" in env("prune", "--older-than", "1ms")
    assert "0 environments" in env("list")


async def test_a_source_distribution_runs_no_code_of_its_own(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    _hostile_sdist(tmp_path / "links", mark)
    environ = {**os.environ, "UV_FIND_LINKS": str(tmp_path / "links")}
    store = EnvironmentStore(
        tmp_path / "cache", uv=Uv(uv.find_uv_bin(), environ, tmp_path / "links")
    )
    with pytest.raises(EnvironmentBuildError, match="no wheel"):
        await store.ensure(EnvironmentSpec.for_allow(["kernel-mcp-hostile-example"]))
    assert not mark.exists()
    assert store.stored() == []


async def test_a_package_nobody_published_is_named(cache: Path) -> None:
    with pytest.raises(EnvironmentBuildError, match="no package 'kernel-mcp-no-such-package'"):
        await EnvironmentStore(cache).ensure(
            EnvironmentSpec.for_allow(["kernel-mcp-no-such-package"])
        )


@pytest.mark.ways
async def test_a_misspelt_package_takes_down_itself_and_the_first_answer_says_so(
    tmp_path: Path,
) -> None:
    flags = ("--allow", "tabulate,tabulaet-no-such-package", "--cache-dir", str(tmp_path))
    told: list[str | None] = []
    async with agent(*flags) as notebook:
        first = await notebook.run(
            "import tabulate\ntabulate.__name__",
            on_progress=lambda _count, _of, text: told.append(text),
        )
        assert "'tabulate'" in first.text
        listed = await notebook.call("list_files")
        wrong = await notebook.call("wait", session="nobody")
        unknown = await notebook.call("execute", session_id="x", code="1")
        no_tool = await notebook.call("exec")
        every = await notebook.call("list_sessions")
        said = "no package 'tabulaet-no-such-package'"
        assert said in "".join(notices(first))
        assert said in "".join(notices(wrong))  # an answer about another session
        for answer in (listed, unknown, no_tool, every):
            assert said not in "".join(notices(answer))
        info = (await notebook.call("info")).data
        assert (
            "tabulaet-no-such-package of --allow or --profile is not installed"
            in info["ignored_settings"]
        )
    heard = "\n".join(filter(None, told))
    assert "tabulaet-no-such-package of --allow or --profile is left out" in heard
    assert "Compiling" in heard
    async with agent(*flags) as notebook:
        assert "Missing, though" in (notebook.client.instructions or "")
    argv = [sys.executable, "-m", "kernel_mcp", "env", "build", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "without tabulaet-no-such-package" in done.stdout


async def test_an_unreachable_index_is_told_from_a_missing_package(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple",
        "UV_HTTP_RETRIES": "0",
        "UV_CACHE_DIR": str(tmp_path / "uv"),
    }
    store = EnvironmentStore(tmp_path / "cache", uv=Uv(uv.find_uv_bin(), environ, tmp_path))
    with pytest.raises(EnvironmentBuildError, match="cannot be reached"):
        await store.ensure(EnvironmentSpec())


@pytest.mark.ways
async def test_without_network_what_is_not_cached_is_named(tmp_path: Path) -> None:
    environ = {**os.environ, "UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv")}
    store = EnvironmentStore(tmp_path / "cache", uv=Uv(uv.find_uv_bin(), environ, tmp_path))
    with pytest.raises(EnvironmentBuildError, match="network is switched off"):
        await store.ensure(EnvironmentSpec())


def _hostile_sdist(folder: Path, mark: Path) -> None:
    folder.mkdir()
    name = "kernel_mcp_hostile_example-1.0"
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: kernel-mcp-hostile-example\nVersion: 1.0\n",
        "setup.py": f"open({str(mark)!r}, 'w').close()\n",
    }
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content.encode()))
