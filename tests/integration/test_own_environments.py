"""Virtual and conda environments of the operator's under a real server, without network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import uv
from mcp import StdioServerParameters
from mcp.client import Client

from tests.integration.agent import Agent, command
from tests.integration.unprivileged import USER, as_ordinary_user
from tests.unit.packages.wheels import wheel

pytestmark = pytest.mark.anyio

BASE = Path(os.path.realpath(sys.base_prefix))
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
FORKED = "forked from a template that was tried"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that the ordinary user may reach."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="own-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def add(root: Path, wheels: Path, name: str, *given: str, **more: dict[str, str]) -> None:
    """Put a package into an environment as uv does."""
    file = wheel(wheels, name, *given, **more)  # type: ignore[arg-type]
    argv = [uv.find_uv_bin(), "pip", "install", "--quiet", "--offline", "--no-deps", "--no-index"]
    # copied: a link to uv's cache may be closed to others
    argv += ["--link-mode", "copy", "--python", str(root), str(file)]
    if (root / "conda-meta").is_dir():  # a distribution's Python has its own place for packages
        argv += ["--target", str(root / f"lib/python{MINOR}/site-packages")]
    subprocess.run(argv, check=True)
    subprocess.run(["chmod", "-R", "o+rX", str(root)], check=True)


def environment(place: Path) -> Path:
    """A project whose environment has a package, and a trap for who starts it on the host.

    Its base is named by a link to the folder of a Python, as uv names those that it has fetched.
    """
    root = place / "project/.venv"
    make = [uv.find_uv_bin(), "venv", "--quiet", "--offline", "--python", sys.executable, str(root)]
    subprocess.run(make, check=True)
    (place / "current").symlink_to(BASE)
    (root / "bin/python").unlink()
    (root / "bin/python").symlink_to(place / f"current/bin/python{MINOR}")
    config = (root / "pyvenv.cfg").read_text().splitlines()
    config = [line for line in config if not line.startswith("home")]
    (root / "pyvenv.cfg").write_text("\n".join([*config, f"home = {place / 'current/bin'}\n"]))
    trap = f"import os; os.access({str(place)!r}, 2) and os.mkdir({str(place / 'sprung')!r})\n"
    files = {"greeting/__init__.py": "words = 'hello'\n", "trap.pth": trap}
    add(root, place / "wheels", "greeting", files=files)
    (place / "project/notes.txt").write_text("of the project")
    return root


def conda(place: Path) -> Path:
    """A prefix as conda lays it out, by hand: its own interpreter, and no `pyvenv.cfg`."""
    root = place / "conda"

    def left_out(_folder: str, names: list[str]) -> set[str]:
        # the mark of a distribution, by which its own interpreter takes no packages
        left = {"site-packages", "test", "idlelib", "__pycache__", "EXTERNALLY-MANAGED"}
        return left.intersection(names)

    shutil.copytree(BASE / f"lib/python{MINOR}", root / f"lib/python{MINOR}", ignore=left_out)
    for library in (BASE / "lib").glob("libpython*.so*"):
        shutil.copy2(library, root / "lib", follow_symlinks=False)
    site = root / f"lib/python{MINOR}/site-packages"
    site.mkdir()
    if "dist-packages" in (root / f"lib/python{MINOR}/site.py").read_text():
        # Debian's interpreter, which conda never has, looks for packages elsewhere
        custom = root / f"lib/python{MINOR}/sitecustomize.py"
        custom.unlink(missing_ok=True)
        custom.write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
    (root / "bin").mkdir()
    shutil.copy2(os.path.realpath(sys.executable), root / f"bin/python{MINOR}")
    (root / "bin/python").symlink_to(f"python{MINOR}")
    (root / "conda-meta").mkdir()
    version = ".".join(map(str, sys.version_info[:3]))
    (root / f"conda-meta/python-{version}-h1_0_cpython.json").write_text("{}")
    (root / "etc/conda").mkdir(parents=True)
    (root / "etc/conda/secret").write_text("of activation")
    return root


def written(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


async def info(notebook: Agent, session: str = "") -> dict[str, object]:
    return (await notebook.call("info", session=session)).data


CODE = """
import greeting, pathlib, sys
print(greeting.words, sys.prefix, sys.executable)
for path in (pathlib.Path(greeting.__file__), pathlib.Path(sys.prefix, 'bin/new')):
    try:
        path.write_text('changed')
    except OSError as error:
        print(type(error).__name__, error.errno)
print(pathlib.Path(sys.prefix).with_name('notes.txt').exists())
"""
CHILD = """
import subprocess, sys
code = 'import greeting, importlib.util; print(importlib.util.find_spec("ipykernel"))'
print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True))
"""


async def test_sessions_use_the_packages_that_are_there_and_change_nothing(place: Path) -> None:
    root = environment(place)
    before = written(place / "project")
    wheel(place / "wheels", "farewell")
    flags = ("--python", f"{root}/bin/python", "--warm", "1", "--allow-install", "*")
    async with Client(command(*flags, "--find-links", str(place / "wheels"))) as client:
        notebook = Agent(client)
        text = (await notebook.run(CODE)).text
        assert text.split()[:3] == ["hello", str(root), f"{root}/bin/python"]
        assert text.count("OSError 30") == 2
        assert text.split()[-1] == "False"
        assert "None" in (await notebook.run(CHILD)).text
        told = await info(notebook)
        assert told["interpreter"] == f"{root}/bin/python"
        assert "greeting==1.0" in str(told["packages"])
        assert str(root) in str(told["environment"])
        added = await notebook.call("install", packages=["farewell"])
        assert "import farewell works" in added.text
        assert "1.0" in (await notebook.run("import farewell; farewell.__version__")).text
        missing = (await notebook.run("import greetin")).text
        assert "Did you mean greeting?" in missing
        judged = (await notebook.call("check_syntax", code="import greeting")).data
        assert judged["valid"]
        assert written(place / "project") == before
        # what comes on the host is there for sessions that begin then, forked ones at last
        add(root, place / "wheels", "later", "2.0")
        with anyio.fail_after(120):
            for _ in iter(int, 1):
                session = (await notebook.call("create_session")).data["session"]
                seen = await notebook.run("import later; later.__version__", session=session)
                assert "2.0" in seen.text
                if FORKED in str((await info(notebook, session))["sandbox_found"]):
                    break
                await notebook.call("close_session", session=session)
        other = await notebook.call("create_session", packages=["farewell"])
        both = await notebook.run("import farewell, greeting", session=other.data["session"])
        assert both.status == "ok"
    assert not (place / "sprung").exists()


@pytest.mark.ways
async def test_versions_that_the_kernel_does_not_work_with_stay_behind_its_own(
    place: Path,
) -> None:
    root = conda(place)
    broken = {"traitlets/__init__.py": "raise ImportError('too old')\n"}
    add(root, place / "wheels", "traitlets", "5.1.0", files=broken)
    add(root, place / "wheels", "greeting")
    before = written(root)
    flags = ("--python", str(root), "--profile", "guarded", "--allow", "greeting")
    async with Client(command(*flags, "--warm", "0")) as client:
        notebook = Agent(client)
        seen = await notebook.run("import greeting; greeting.__version__, greeting.__file__")
        assert "1.0" in seen.text
        assert str(root) in seen.text
        assert "not allowed" in (await notebook.run("import traitlets")).text
        told = await info(notebook)
        assert told["interpreter"] == f"{root}/bin/python"
        assert "in place of 5.1.0" in str(told["environment"])
        assert "traitlets==5.1.0" not in str(told["packages"])
    cold = ("--python", str(root), "--no-template", "--warm", "0")
    async with Client(command(*cold)) as client:
        code = f"import os, sys; sys.prefix, os.path.exists({str(root / 'etc/conda/secret')!r})"
        assert f"'{root}', False" in (await Agent(client).run(code)).text
    async with Client(command(*cold, "--mount", f"{place}:rw")) as client:
        notebook = Agent(client)
        await notebook.run(f"import os; os.chdir({str(place)!r}); open('beside', 'w').close()")
        for change in ("open('conda/new', 'w')", "os.symlink('/', 'conda/lib64')"):
            assert "Errno 30" in (await notebook.run(change)).text
        assert "OSError" in (await notebook.run("os.rename('conda', 'other')")).text
    assert (place / "beside").exists()
    assert written(root) == before


@pytest.mark.parametrize(
    "how", [("--warm", "1"), pytest.param(("--sandbox", "landlock"), marks=pytest.mark.ways)]
)
async def test_an_ordinary_server_uses_them_too(place: Path, how: tuple[str, ...]) -> None:
    root = environment(place)
    # closed to others: kernels are of the server's own user
    words = [sys.executable, "-m", "kernel_mcp", "--python", str(root), *how]
    if os.geteuid() == 0:
        os.chown(place, USER, USER)
        for path in place.rglob("*"):
            os.chown(path, USER, USER, follow_symlinks=False)
    root.chmod(0o700)
    argv = as_ordinary_user(words)
    server = StdioServerParameters(command=argv[0], args=argv[1:], env={}, cwd="/")
    async with Client(server) as client:
        text = (await Agent(client).run("import greeting, sys; print(greeting.words)")).text
    assert text == "hello"
    assert not (place / "sprung").exists()


def test_a_server_does_not_start_with_one_that_cannot_be_used(place: Path) -> None:
    root = environment(place)
    config = root / "pyvenv.cfg"
    config.write_text(config.read_text().replace("home = ", "home = /nowhere"))
    argv = [sys.executable, "-m", "kernel_mcp", "--python", str(root)]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "base interpreter is gone" in done.stderr
    assert "Make it anew" in done.stderr
