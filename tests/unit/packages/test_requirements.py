"""Permitted packages, and the requirements of a script."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.interpreters import Interpreter, Interpreters
from kernel_mcp.errors import ConfigError, EnvironmentBuildError, InputError, InstallError
from kernel_mcp.packages.requirements import MAX_PACKAGES, InstallRules, Needs, ScriptReader, listed
from tests.unit.packages.wheels import requirements


def rules(
    *allow_install: str, allow: tuple[str, ...] = (), profile: str = "default"
) -> InstallRules:
    return InstallRules.of(Settings(allow=allow, allow_install=allow_install, profile=profile))


def test_nothing_may_be_installed_unless_it_was_named() -> None:
    with pytest.raises(InstallError, match=r"Permitted: nothing.*--allow-install polars"):
        rules().admit(["polars"])


def test_named_packages_may_be_installed_in_any_spelling() -> None:
    admitted = rules("Polars", "scikit_learn").admit(["polars>=1", "sklearn"])
    assert admitted == requirements("polars>=1", "scikit-learn")


def test_packages_of_the_allow_list_may_be_installed_too() -> None:
    assert rules(allow=("pandas",)).admit(["pandas<3"]) == requirements("pandas<3")


def test_a_star_permits_everything_but_allowing_every_import_does_not() -> None:
    assert rules("*").admit(["anything"]) == requirements("anything")
    with pytest.raises(InstallError):
        rules(allow=("*",)).admit(["anything"])


def test_the_refusal_names_all_that_is_refused() -> None:
    with pytest.raises(InstallError, match=r"rich, tqdm.*Permitted: polars.*rich,tqdm"):
        rules("polars").admit(["rich", "polars", "tqdm"])


def test_version_limits_of_the_operator_become_constraints() -> None:
    found = rules("polars<2", "rich", allow=("pandas>=2",))
    assert found.constraints == ("pandas>=2", "polars<2")


@pytest.mark.parametrize(
    "text",
    [
        "-r requirements.txt",
        "--index-url=http://elsewhere",
        "git+https://example.org/x",
        "x @ https://example.org/x.whl",
        "./local",
        "/etc/passwd",
        "..\\x",
        "numpy\n--index-url x",
        "",
        "a b",
    ],
)
def test_what_is_not_the_name_of_a_package_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="by name"):
        rules("*").admit([text])


def test_the_standard_library_is_passed_over_or_refused() -> None:
    assert rules("*").admit(["json", "polars"]) == requirements("polars")
    with pytest.raises(InputError, match="part of Python itself"):
        rules("*").admit(["json"], standard_library=False)


@pytest.mark.parametrize(
    ("packages", "found"),
    [
        ("polars", ["polars"]),
        (" pandas  matplotlib seaborn ", ["pandas", "matplotlib", "seaborn"]),
        ("pandas>=2, matplotlib", ["pandas>=2", "matplotlib"]),
        ("pandas>=2,<3,matplotlib ~= 3.0", ["pandas>=2,<3", "matplotlib ~= 3.0"]),
        ("polars[pandas, numpy]==1.*\nrich", ["polars[pandas, numpy]==1.*", "rich"]),
        (["pandas numpy", "rich"], ["pandas", "numpy", "rich"]),
        ("x; python_version < '3.9'", ["x; python_version < '3.9'"]),
        ("git+https://example.org/x y", ["git+https://example.org/x y"]),
        ("-r requirements.txt", ["-r requirements.txt"]),
        ("", []),
    ],
)
def test_packages_are_told_apart_in_a_text(packages: str | list[str], found: list[str]) -> None:
    assert listed(packages) == found


def test_the_last_word_on_a_package_counts() -> None:
    assert rules("*").admit(["polars<1", "polars>=1"]) == requirements("polars>=1")


def test_too_many_packages_are_refused() -> None:
    with pytest.raises(InputError, match="too many"):
        rules("*").admit([f"p{number}" for number in range(MAX_PACKAGES + 1)])


def test_a_bad_entry_of_the_operator_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="--allow-install"):
        rules("https://x")


def test_long_lists_are_described_in_short() -> None:
    described = rules(*(f"p{number:03}" for number in range(100))).describe()
    assert described.endswith("and 70 more")
    assert rules("*").describe() == "any package"


pytestmark = pytest.mark.anyio


@dataclass
class FakeInterpreters(Interpreters):
    """Interpreters of these versions, the first being the server's own."""

    installed: tuple[str, ...]
    known: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)

    async def find(
        self, request: str, progress: object = None, *, fetch: bool = False
    ) -> Interpreter:
        self.asked.append(request)
        for version in (*self.installed, *(self.offers if fetch else ())):
            if version == request or version.startswith(f"{request}.") or not request:
                return Interpreter(f"/{version}", version, "cpython", "/", "/")
        raise EnvironmentBuildError(f"there is no Python {request}")

    def recalled(self, request: str) -> Interpreter | None:
        found = (v for v in self.known if v.startswith(f"{request}."))
        version = next(found, None)
        return (version and Interpreter(f"/{version}", version, "cpython", "/", "/")) or None

    async def offered(self, version: str) -> str:
        self.asked.append(f"offered {version}")
        return next((each for each in self.offers if each.startswith(f"{version}.")), "")

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
    assert found.packages == requirements("rich>=13", "tqdm")


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
        (('dependencies = ["x @ https://e/x.whl"]',), 2, "names a place"),
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
    with pytest.raises(EnvironmentBuildError, match=r"no Python 3\.15"):
        await needs(reader("3.11.7"), script('requires-python = ">=3.12"'))


async def test_a_python_that_kernels_cannot_run_on_is_refused() -> None:
    with pytest.raises(EnvironmentBuildError, match=r"3\.10 to 3\.15"):
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


def test_the_step_to_a_module_is_one_that_is_permitted_here() -> None:
    everything = rules("*")
    assert 'install(packages=["scikit-learn"])' in everything.step("sklearn.svm", once=False)
    assert 'install(packages=["opencv-python-headless"])' in everything.step("cv2", once=False)
    assert 'dependencies=["pyyaml"] to run_script' in everything.step("yaml", once=True)
    assert everything.step("os.path", once=False) == ""
    some = rules("polars", allow=("pandas",))
    assert "install(packages=" in some.step("polars", once=False)
    assert "install(packages=" in some.step("pandas.io", once=False)
    for once in (True, False):
        assert "--allow beautifulsoup4 to have it" in some.step("bs4", once=once)
    without = InstallRules.of(Settings(allow_install=("*",), tools=("core", "files")))
    assert 'create_session(packages=["polars"])' in without.step("polars", once=False)


def test_who_wants_an_installer_is_told_how_to_install_others() -> None:
    for name in ("pip", "pip.main", "conda", "uv"):
        assert "`%pip install NAME` as a line" in rules("polars").step(name, once=False)
        assert "dependencies=[...] to run_script" in rules("*").step(name, once=True)
        assert "--allow-install NAMES" in rules().step(name, once=False)


def fetching(*allow_install: str) -> tuple[ScriptReader, FakeInterpreters]:
    settings = Settings(allow_install=allow_install)
    found = FakeInterpreters(("3.11.7",), offers=("3.14.1",))
    return ScriptReader(settings, InstallRules.of(settings), found), found


async def test_only_where_all_may_be_installed_may_a_session_fetch_a_python() -> None:
    assert await fetching("*")[0].python("3.14", quiet) == "3.14"
    for allow_install in ((), ("rich", "tqdm")):
        with pytest.raises(EnvironmentBuildError, match=r"no Python 3\.14"):
            await fetching(*allow_install)[0].python("3.14", quiet)


async def test_a_judgement_fetches_nothing_and_says_what_would_be() -> None:
    text = script('requires-python = ">=3.14"', 'dependencies = ["polars"]')
    found, interpreters = fetching("*")
    wanted = Needs(requirements("polars", "rich"), "3.14")
    assert await found.judge(text, ["rich"], "") == (wanted, [])
    assert "offered 3.14" in interpreters.asked
    _, problems = await fetching("rich")[0].judge(text, ["rich"], "")
    assert [each.line for each in problems] == [3, 2]
    assert "--allow-install polars" in problems[0].reason
    assert "no Python" in problems[1].reason


@pytest.mark.parametrize("text", ["a" + " " * 8000 + "!", "a[" * 4000, "a" + " <1," * 2000 + "!"])
def test_a_text_that_almost_is_a_list_is_refused_at_once(text: str) -> None:
    start = time.process_time()
    with pytest.raises(InputError):
        rules("*").admit(listed([text]))
    assert time.process_time() - start < 0.2
