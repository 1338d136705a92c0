"""What a script needs, from its metadata and its caller."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.interpreters import Interpreter, Interpreters
from kernel_mcp.errors import EnvironmentBuildError, InputError, InstallError
from kernel_mcp.packages.requirements import InstallRules, Needs, ScriptReader

pytestmark = pytest.mark.anyio


@dataclass
class FakeInterpreters(Interpreters):
    """Interpreters of these versions, the first being the server's own."""

    installed: tuple[str, ...]
    known: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)

    async def find(self, request: str, progress: object = None) -> Interpreter:
        self.asked.append(request)
        for version in self.installed:
            if version == request or version.startswith(f"{request}.") or not request:
                return Interpreter(f"/{version}", version, "cpython", "/", "/")
        raise EnvironmentBuildError(f"there is no Python {request}")

    def recalled(self, request: str) -> Interpreter | None:
        found = (v for v in self.known if v.startswith(f"{request}."))
        version = next(found, None)
        return (version and Interpreter(f"/{version}", version, "cpython", "/", "/")) or None

    async def versions(self) -> list[str]:
        self.asked.append("versions")
        return sorted(self.installed, reverse=True)


def reader(
    *installed: str, known: tuple[str, ...] = (), allow: tuple[str, ...] = ("pandas",)
) -> ScriptReader:
    settings = Settings(allow=allow, allow_install=("rich", "tqdm"))
    found = FakeInterpreters(installed or ("3.11.7",), known)
    return ScriptReader(settings, InstallRules.of(settings), found)


async def quiet(_text: str) -> None:
    """Nobody listens."""


def script(*lines: str) -> str:
    return "\n".join(["# /// script", *(f"# {line}" for line in lines), "# ///", "print(1)"])


async def needs(found: ScriptReader, text: str, *dependencies: str, python: str = "") -> Needs:
    return await found.needs(text, dependencies, python, quiet)


async def test_a_plain_script_runs_in_the_servers_own_environment() -> None:
    assert await needs(reader(), "print(1)") == Needs((), "")


async def test_what_the_server_has_anyway_needs_no_environment_of_its_own() -> None:
    assert await needs(reader(), script('dependencies = ["pandas"]')) == Needs((), "")


async def test_dependencies_of_block_and_call_are_merged() -> None:
    found = await needs(reader(), script('dependencies = ["rich>=13"]'), "tqdm")
    assert found.packages == ("rich>=13", "tqdm")


async def test_dependencies_have_to_be_permitted() -> None:
    with pytest.raises(InstallError, match="--allow-install polars"):
        await needs(reader(), script('dependencies = ["polars"]'))


@pytest.mark.parametrize(
    ("lines", "line", "reason"),
    [
        (("dependencies = [pandas]",), 2, "TOML"),
        (('dependencies = "pandas"',), 2, "list of strings"),
        (('requires-python = ">=3.x"',), 2, "requires-python"),
        (('dependencies = ["a b c"]',), 2, "not a valid requirement"),
    ],
)
async def test_bad_metadata_gets_line_and_reason(
    lines: tuple[str, ...], line: int, reason: str
) -> None:
    with pytest.raises(InputError, match=f"line {line} of the script: .*{reason}"):
        await needs(reader(), script(*lines))


async def test_the_own_python_is_taken_when_it_fits() -> None:
    assert (await needs(reader(), script('requires-python = ">=3.10"'))).python == ""


async def test_another_installed_python_is_taken_when_the_own_does_not_fit() -> None:
    found = reader("3.11.7", "3.12.1", "3.13.0")
    assert (await needs(found, script('requires-python = ">=3.12,<3.13"'))).python == "3.12"


async def test_a_python_that_is_known_is_taken_without_looking_for_others() -> None:
    found = reader("3.11.7", "3.12.1", "3.13.0", known=("3.12.1",))
    assert (await needs(found, script('requires-python = ">=3.12"'))).python == "3.12"


async def test_a_patch_version_is_named_when_the_minor_would_be_another() -> None:
    found = reader("3.11.7", "3.12.1", "3.12.5")
    assert (await needs(found, script('requires-python = ">=3.12.4"'))).python == "3.12.5"


async def test_a_python_that_is_missing_is_asked_for() -> None:
    with pytest.raises(EnvironmentBuildError, match=r"no Python 3\.14"):
        await needs(reader("3.11.7"), script('requires-python = ">=3.12"'))


async def test_a_python_that_kernels_cannot_run_on_is_refused() -> None:
    with pytest.raises(EnvironmentBuildError, match=r"3\.10 to 3\.14"):
        await needs(reader(), script('requires-python = "<3.9"'))


async def test_the_callers_python_has_to_fit_the_script() -> None:
    found = reader("3.11.7", "3.12.1")
    text = script('requires-python = ">=3.12"')
    assert (await needs(found, text, python="3.12")).python == "3.12"
    with pytest.raises(InputError, match=r"is 3\.11\.7"):
        await needs(found, text, python="3.11")


async def test_naming_the_servers_own_python_changes_nothing() -> None:
    assert (await needs(reader("3.11.7"), "print(1)", python="3.11")).python == ""


@pytest.mark.parametrize("python", ["3.9", "2.7", "4", "/usr/bin/python3", "latest"])
async def test_a_python_that_cannot_be_chosen_is_refused(python: str) -> None:
    with pytest.raises(InputError, match="pass a version"):
        await needs(reader(), "print(1)", python=python)
