"""A template forks kernels while it imports more, and each of its stages is tried."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

import kernel_specs
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.template import outer
from kernel_mcp.launch.template.process import TemplateProcess
from kernel_mcp.sessions.checkpoints import none_of
from tests.integration.processes import named
from tests.integration.template.bench import Bench, bench, clone_environment, run

pytestmark = pytest.mark.anyio

GATED = """\
import os
while not os.path.exists(os.path.join(os.path.dirname(__file__), 'open')):
    pass
"""
"""A module whose import goes on until a test opens the gate."""
ENDING = {
    "it exits": "import os; os._exit(3)",
    "it raises SystemExit": "raise SystemExit(3)",
    "it crashes": "import faulthandler; faulthandler._sigsegv()",
    "it is killed": "import os; os.kill(os.getpid(), 9)",
    "it starts a thread": (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
    "it keeps a socket": "import socket; pair = socket.socketpair()",
    "it closes all descriptors": "import os; os.closerange(3, 1000)",
}
MODULES = "import sys; print(*(name in sys.modules for name in ('statistics', 'odd', 'netrc')))"


class Library:
    """A folder of modules for an environment, and a gate for one of them."""

    def __init__(self, folder: Path, **modules: str) -> None:
        self.folder = folder / "library"
        self.folder.mkdir()
        for name, code in {**modules, "gated": GATED}.items():
            (self.folder / f"{name}.py").write_text(code + "\n")
        path = f"import sys; sys.path.insert(0, {str(self.folder)!r})\n"
        (self.folder / "enter.pth").write_text(path)
        self.environment = clone_environment(folder, self.folder)

    def open(self) -> None:
        """Let the import of `gated` end."""
        (self.folder / "open").touch()


def changed(folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of the guest's package with a change to a file of the template."""
    copy = folder / "kernel_specs"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(kernel_specs.__file__).parent, copy, ignore=ignored)
    file = copy / "template" / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return copy


def template(b: Bench, environment: KernelEnvironment) -> TemplateProcess:
    found = b.launcher.template(environment)
    assert found is not None
    return found


async def loaded(b: Bench, environment: KernelEnvironment) -> TemplateProcess:
    """The template once it has everything."""
    with anyio.fail_after(60):
        assert await b.launcher.ready(environment)
    return template(b, environment)


async def test_kernels_are_forked_while_a_module_is_imported(tmp_path: Path) -> None:
    library = Library(tmp_path)
    async with bench(ready=False) as b:
        b.launcher.prepare(library.environment, ("statistics", "gated", "netrc"))
        before = await b.forked(environment=library.environment)
        assert template(b, library.environment).stage == 1
        assert await run(before, MODULES) == "False False False\n"
        library.open()
        assert (await loaded(b, library.environment)).stage > 1
        after = await b.forked(environment=library.environment)
        assert await run(after, MODULES) == "True False True\n"
        assert await run(before, "print(6 * 7)") == "42\n"


async def test_the_end_of_a_kernel_is_told_when_its_stage_is_over(tmp_path: Path) -> None:
    library = Library(tmp_path)
    async with bench(ready=False) as b:
        b.launcher.prepare(library.environment, ("gated",))
        exiting, killed, kept = [await b.forked(environment=library.environment) for _ in range(3)]
        library.open()
        await loaded(b, library.environment)
        exiting.submit("import os; os._exit(5)", lambda _event: None)
        with anyio.fail_after(60):
            assert (await exiting.handle.wait()).code == 5
            killed.handle.kill()
            assert (await killed.handle.wait()).signal == signal.SIGKILL
        assert await run(kept, "print(1)") == "1\n"


@pytest.mark.parametrize("code", ENDING.values(), ids=ENDING)
async def test_a_module_that_does_harm_costs_itself_only(
    code: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    library = Library(tmp_path, odd=code)
    async with bench(ready=False) as b:
        b.launcher.prepare(library.environment, ("statistics", "odd", "netrc"))
        found = await loaded(b, library.environment)
        assert list(found.missing) == ["odd"]
        kernel = await b.forked(environment=library.environment)
        assert await run(kernel, MODULES) == "True False True\n"
    assert "not preloaded: odd" in caplog.text


async def test_a_module_whose_import_never_ends_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = changed(tmp_path, "stages.py", "IMPORT_S = 60.0", "IMPORT_S = 1.0")
    monkeypatch.setattr(outer, "BOOT_FOLDER", guest)
    library = Library(tmp_path)
    async with bench(ready=False) as b:
        b.launcher.prepare(library.environment, ("gated", "netrc"))
        found = await loaded(b, library.environment)
        assert found.missing == {"gated": "it was not imported within 1 s"}
        kernel = await b.forked(environment=library.environment)
        assert await run(kernel, "import sys; print('netrc' in sys.modules)") == "True\n"


async def test_a_stage_that_does_not_confine_is_refused_though_the_one_before_passed(
    tmp_path: Path,
) -> None:
    library = Library(
        tmp_path,
        loosening="import gated\nfrom kernel_specs import linux\n"
        "linux.install_filter = lambda program: None",
    )
    async with bench(ready=False) as b:
        b.launcher.prepare(library.environment, ("loosening",))
        confined = await b.forked(environment=library.environment)
        assert template(b, library.environment).self_test.stage == 1
        library.open()
        with anyio.fail_after(60):
            assert not await b.launcher.ready(library.environment)
        assert "system call filters" in b.launcher.refusal(library.environment)
        cold = await b.kernel(environment=library.environment)
        assert cold.handle.report.boundary[0] == "started cold"
        assert "its template was not ready, or had failed" in none_of(cold)
        assert await run(confined, "print(1)") == "1\n"


async def test_no_request_is_lost_between_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guest = changed(tmp_path, "stages.py", "STAGE_S = 0.15", "STAGE_S = 0.0")
    monkeypatch.setattr(outer, "BOOT_FOLDER", guest)
    library = Library(tmp_path)
    modules = ("statistics", "netrc", "fractions", "wave", "csv", "bisect", "heapq", "shelve")
    async with bench(ready=False) as b:
        b.launcher.prepare(library.environment, modules)
        answers: list[str] = []

        async def one(number: int) -> None:
            kernel = await b.forked(environment=library.environment)
            answers.append(await run(kernel, f"print({number})"))

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                for number in range(12):
                    tasks.start_soon(one, number)
        assert sorted(answers) == sorted(f"{number}\n" for number in range(12))
        assert (await loaded(b, library.environment)).stage == 1 + len(modules)
    assert "could not be forked" not in caplog.text


async def test_a_zygote_that_ends_while_another_imports_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = Library(tmp_path)
    async with bench(ready=False) as b:
        b.launcher.prepare(library.environment, ("gated", "netrc"))
        kernel = await b.forked(environment=library.environment)
        first = template(b, library.environment)
        for zygote in named("kernel-template", below=os.getpid()):
            with suppress(ProcessLookupError):  # which ends with the one before
                os.kill(zygote, signal.SIGKILL)
        library.open()
        with anyio.fail_after(60):
            while b.launcher.template(library.environment) in (None, first):
                await anyio.lowlevel.checkpoint()
        await loaded(b, library.environment)
        assert await run(kernel, "print(1)") == "1\n"
    assert "has ended: it was killed by SIGKILL" in caplog.text
