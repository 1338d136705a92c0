"""Environments of the operator's, read from their files and never started."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.requirements import python
from kernel_mcp.environments.metadata import EnvironmentSpec
from kernel_mcp.environments.out_of_tree import unseen
from kernel_mcp.environments.own import (
    OwnEnvironment,
    own_environment,
    own_folder,
    remarks,
)
from kernel_mcp.errors import ConfigError, EnvironmentBuildError
from kernel_mcp.launch.base import KernelEnvironment
from tests.unit.environments.kit import Kit

MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
VERSION = platform.python_version()
BASE = Path(os.path.realpath(sys.base_prefix))
LIBRARIES = BASE if str(BASE) == "/usr" else BASE / "lib"
"""The part of the base that sessions see: all of /usr, or the libraries of another base."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with an environment in `.venv`, and what belongs to nobody else beside it."""
    root = tmp_path / "project"
    venv.create(root / ".venv")
    (root / "secret.txt").write_text("of the project")
    (root / ".venv/pip.conf").write_text("[global]\nindex-url = https://u:p@example.org\n")
    return root


def site(root: Path) -> Path:
    return root / f"lib/python{MINOR}/site-packages"


def add(root: Path, name: str, version: str, *requires: str) -> Path:
    """A package of one module; its `.dist-info`."""
    info = site(root) / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    module = name.replace("-", "_")
    (site(root) / f"{module}.py").write_text("")
    (info / "RECORD").write_text(f"{module}.py,,\n")
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n{needs}")
    return info


def read(root: Path) -> OwnEnvironment:
    found = own_environment(str(root), apart=False)
    assert found is not None
    return found


def refusal(root: Path, *, apart: bool = False) -> str:
    with pytest.raises(EnvironmentBuildError) as caught:
        own_environment(str(root), apart=apart)
    return str(caught.value)


def rewrite(root: Path, old: str, new: str) -> None:
    config = root / "pyvenv.cfg"
    lines = [line for line in config.read_text().splitlines() if not line.startswith(old)]
    config.write_text("\n".join([*lines, new]) + "\n")


def ours(folder: Path, *packages: str) -> KernelEnvironment:
    """An environment of ours; each of `packages` as `name==version`."""
    named = {"ipykernel": "7.1.0", "ipython": "9.5.0", "cloudpickle": "3.1.0", "traitlets": "5.14"}
    named |= dict(each.split("==") for each in packages)
    for name, version in named.items():
        needs = ["traitlets>=5.4", "tornado>=6.4"] if name == "ipykernel" else []
        add(folder, name, version, *needs)
    found = tuple(f"{name}=={version}" for name, version in named.items())
    python = folder / "bin/python"
    return KernelEnvironment(python, (folder, BASE), VERSION, found, Path(sys.executable))


def test_the_folder_and_its_interpreter_name_one_environment(project: Path) -> None:
    root = project / ".venv"
    found = read(root)
    assert own_environment(f"{root}/bin/python", apart=False) == found
    assert own_folder(f"{root}/bin/python3") == root
    assert (found.root, found.minor, found.interpreter.version) == (root, MINOR, VERSION)
    assert found.interpreter.prefix == str(BASE)


@pytest.mark.parametrize(
    "given", ["", "3.12", "3", os.path.realpath(sys.base_prefix + "/bin/python3")]
)
def test_versions_and_bare_interpreters_are_no_environments(given: str) -> None:
    assert own_environment(given) is None


def test_a_folder_that_is_no_environment_is_refused(tmp_path: Path) -> None:
    assert "no environment" in refusal(tmp_path)


def test_names_of_folders_that_begin_with_a_dot_are_paths() -> None:
    assert python(".venv") == "./.venv"
    assert "/" in python("venv/")
    with pytest.raises(ValueError, match=r"such as \./\.venv"):
        python("venv")


def test_only_the_environment_and_its_base_are_shown(project: Path) -> None:
    shown = read(project / ".venv").readonly
    assert project / ".venv/lib" in shown
    assert LIBRARIES in shown
    secrets = (project / "secret.txt", project / ".venv/pip.conf")
    assert not any(secret.is_relative_to(path) for secret in secrets for path in shown)


def test_an_environment_that_is_the_folder_of_a_project_does_not_show_the_project(
    tmp_path: Path,
) -> None:
    venv.create(tmp_path)
    (tmp_path / "notes.txt").write_text("private")
    shown = read(tmp_path).readonly
    assert not any((tmp_path / "notes.txt").is_relative_to(path) for path in shown)


def test_links_to_the_base_are_shown_as_they_are(project: Path, tmp_path: Path) -> None:
    root = project / ".venv"
    hop = tmp_path / "hop/python3"
    hop.parent.mkdir()
    hop.symlink_to(os.path.realpath(sys.executable))
    for name in ("python", "python3", f"python{MINOR}"):
        (root / "bin" / name).unlink(missing_ok=True)
    (root / "bin/python").symlink_to(hop)
    rewrite(root, "home", f"home = {hop.parent}")
    shown = read(root).readonly
    assert hop in shown
    assert hop.parent not in shown


def test_a_link_to_the_folder_of_the_base_is_shown_as_that_and_told_from_what_may_change(
    project: Path, tmp_path: Path
) -> None:
    root, current = project / ".venv", tmp_path / "pythons/current"
    current.parent.mkdir()
    current.symlink_to(BASE)
    for name in ("python", "python3", f"python{MINOR}"):
        (root / "bin" / name).unlink(missing_ok=True)
    (root / "bin/python").symlink_to(current / f"bin/python{MINOR}")
    rewrite(root, "home", f"home = {current / 'bin'}")
    found = read(root)
    seen = {path.relative_to(current) for path in found.readonly if path.is_relative_to(current)}
    assert seen == {path.relative_to(BASE) for path in found.readonly if path.is_relative_to(BASE)}
    assert LIBRARIES.relative_to(BASE) in seen
    assert current in found.links
    found.require_steady([Mount(tmp_path, str(tmp_path)), Mount(root, "/data", "rw")])
    with pytest.raises(ConfigError, match=f"{current} leads to the Python of --python {root}"):
        found.require_steady([Mount(current.parent, "/data", "rw")])


def test_an_environment_whose_base_is_gone_is_refused(project: Path) -> None:
    rewrite(project / ".venv", "home", "home = /nowhere/bin")
    said = refusal(project / ".venv")
    assert "base interpreter is gone from /nowhere/bin" in said
    assert "Make it anew" in said


def test_an_environment_of_an_old_python_is_refused(project: Path) -> None:
    rewrite(project / ".venv", "version", "version = 3.8.18")
    assert "Python 3.8.18, and kernels run on Python 3.10 to" in refusal(project / ".venv")


def test_an_environment_whose_python_has_changed_its_version_is_refused(project: Path) -> None:
    rewrite(project / ".venv", "version", "version = 3.14.1")
    assert "Python 3.14" in refusal(project / ".venv")


@pytest.mark.parametrize(
    ("head", "words"),
    [(b"\x7fELF" + bytes(14) + b"\x15\x00", "for another machine"), (b"#!/bin/sh\n", "no program")],
)
def test_a_base_that_is_no_program_here_is_refused(
    project: Path, tmp_path: Path, head: bytes, words: str
) -> None:
    base = tmp_path / f"base/bin/python{MINOR}"
    base.parent.mkdir(parents=True)
    base.write_bytes(head)
    rewrite(project / ".venv", "home", f"home = {base.parent}")
    assert words in refusal(project / ".venv")


def test_a_base_without_a_standard_library_shows_nothing(project: Path, tmp_path: Path) -> None:
    """A repository's file does not make any folder readable by calling it a base."""
    base = tmp_path / f"home/bin/python{MINOR}"
    base.parent.mkdir(parents=True)
    base.write_bytes(Path(os.path.realpath(sys.executable)).read_bytes()[:64])
    rewrite(project / ".venv", "home", f"home = {base.parent}")
    assert "no standard library" in refusal(project / ".venv")


def test_a_base_that_lies_in_a_project_shows_no_more_than_a_python_has(project: Path) -> None:
    """A repository cannot have its folder shown, with the keys that its user keeps there."""
    base = project / f"bin/python{MINOR}"
    base.parent.mkdir()
    base.write_bytes(Path(os.path.realpath(sys.executable)).read_bytes()[:64])
    library = project / f"lib/python{MINOR}"
    library.mkdir(parents=True)
    (library / "os.py").write_text("")
    (project / ".env").write_text("KEY=1")
    (project / "share/keyrings").mkdir(parents=True)
    (project / "include").symlink_to(".")
    root = project / ".venv"
    (root / "bin/python").unlink()
    (root / "bin/python").symlink_to(base)
    rewrite(root, "home", f"home = {base.parent}")
    shown = read(root).readonly
    assert project / "bin" in shown
    assert project / "lib" in shown
    assert not any(path in (project, project / "share", project / "include") for path in shown)


def test_a_program_that_leads_to_files_of_others_does_not_show_them(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/id").write_text("secret")
    root = project / ".venv"
    for key in (tmp_path / "keys", tmp_path / "keys/id"):
        (root / "hop").unlink(missing_ok=True)
        (root / "hop").symlink_to(key)
        (root / "bin/python").unlink()
        (root / "bin/python").symlink_to(root / "hop")
        assert "neither in it nor in its base" in refusal(root)


@pytest.mark.parametrize(
    "needs",
    ["y; " + "(" * 20_000, "y>=" + "9" * 6000, "y; python_version > '" + "9" * 6000 + "'"],
    ids=["deep", "digits", "marker"],
)
def test_what_cannot_be_read_of_a_package_is_passed_over(
    project: Path, tmp_path: Path, needs: str
) -> None:
    info = add(project / ".venv", "x", "1.0", needs, "y>=1")
    (info / "direct_url.json").write_text("[" * 60_000)
    add(project / ".venv", "y", "1.0")
    above = read(project / ".venv").above(ours(tmp_path / "ours", "ipykernel==7.0"), ())
    assert above.support is not None
    assert "y>=1" in above.support.needs


def test_packages_that_kernels_of_a_root_server_may_not_read_are_refused(project: Path) -> None:
    add(project / ".venv", "private", "1.0")
    (site(project / ".venv") / "private.py").chmod(0o600)
    said = refusal(project / ".venv", apart=True)
    assert "private.py" in said
    assert f"chmod -R o+rX {project / '.venv'}" in said
    assert read(project / ".venv")


def test_a_file_that_never_ends_is_not_waited_for(project: Path) -> None:
    add(project / ".venv", "queue-like", "1.0")
    os.mkfifo(site(project / ".venv") / "queue-like-1.0.dist-info/direct_url.json")
    assert read(project / ".venv").outside == {}
    os.mkfifo(site(project / ".venv") / "endless.pth")
    with pytest.raises(EnvironmentBuildError, match=r"endless\.pth is no regular file"):
        read(project / ".venv")


def test_packages_elsewhere_are_told_until_a_mount_shows_them(
    project: Path, tmp_path: Path
) -> None:
    root = project / ".venv"
    info = add(root, "mine", "1.0")
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    (site(root) / "__editable__.mine-1.0.pth").write_text(f"{project / 'src'}\n")
    for module in (project / "src/my_module.py", tmp_path / "more/also.py"):
        module.parent.mkdir()
        module.touch()
    (tmp_path / "linked").mkdir()
    (site(root) / "linked").symlink_to(tmp_path / "linked")
    (site(root) / "more.pth").write_text(f"import os\n{tmp_path / 'more'}\nnot-there\n")
    found = read(root)
    places = {name: each.path for name, each in found.outside.items()}
    assert places.pop("linked") == str(tmp_path / "linked")
    assert places == {"mine": str(project / "src"), "more.pth": str(tmp_path / "more")}
    environment = found.above(ours(tmp_path / "ours"), ())
    told = unseen(environment, ())
    assert told.keys() == {"my_module", "also", "linked"}
    third, first, second = told.values()
    assert f"mine lies in {project / 'src'}" in first
    assert f"--mount {project / 'src'}" in first
    assert unseen(environment, [Mount(project, str(project))]) == {
        "also": second,
        "linked": third,
    }
    assert len(unseen(environment, [Mount(project, "/elsewhere")])) == 3
    assert remarks(environment, ())[1:] == [third, first, second]


def test_a_prefix_of_conda_needs_no_configuration(tmp_path: Path) -> None:
    root = tmp_path / "conda"
    (root / "bin").mkdir(parents=True)
    library = root / f"lib/python{MINOR}"
    (library / "site-packages").mkdir(parents=True)
    (library / "os.py").write_text("")
    (root / "bin/python").symlink_to(f"python{MINOR}")
    real = Path(os.path.realpath(sys.executable)).read_bytes()[:64]
    (root / f"bin/python{MINOR}").write_bytes(real)
    (root / "conda-meta").mkdir()
    (root / f"conda-meta/python-{VERSION}-h1234_0_cpython.json").write_text("{}")
    (root / "conda-meta/state").write_text('{"env_vars": {"KEY": "secret"}}')
    (root / "etc/conda/activate.d").mkdir(parents=True)
    (root / ".condarc").write_text("channels: [https://u:p@example.org]")
    add(root, "numpy", "2.0")
    found = read(root)
    assert found.interpreter.version == VERSION
    assert found.versions() == {"numpy": "2.0"}
    assert root / "lib" in found.readonly
    hidden = ("conda-meta/state", "etc/conda", ".condarc")
    assert not any((root / name).is_relative_to(path) for name in hidden for path in found.readonly)


def test_what_the_kernel_needs_comes_behind_packages_that_it_works_with(
    project: Path, tmp_path: Path
) -> None:
    add(project / ".venv", "traitlets", "5.9")
    add(project / ".venv", "numpy", "1.26")
    needs = ("numpy<2", "numpy>=9", "numpy>5; python_version<'3'", "!", "numpy; os_name~='x'")
    add(project / ".venv", "pandas", "2.0", *needs)
    found = read(project / ".venv").above(ours(tmp_path / "ours"), ())
    assert found.support is not None
    assert {"numpy<2", "tornado>=6.4"} >= set(found.support.needs) >= {"numpy<2"}
    assert not found.support.first
    assert {"traitlets==5.9", "pandas==2.0", "ipykernel==7.1.0"} <= set(found.packages)
    assert found.support.modules["pandas"] == ("pandas",)
    assert found.support.replaced == {}
    assert found.bare == Path(sys.executable)
    assert found.runtime == (tmp_path / "ours", BASE)[1:]


@pytest.mark.parametrize("old", ["traitlets==5.1", "ipython==7.34.0", "tornado==6.1"])
def test_what_the_kernel_needs_comes_before_packages_that_it_does_not_work_with(
    project: Path, tmp_path: Path, old: str
) -> None:
    name, _, version = old.partition("==")
    add(project / ".venv", name, version)
    found = read(project / ".venv").above(ours(tmp_path / "ours", "tornado==6.5"), ())
    assert found.support is not None
    assert found.support.first
    assert old not in found.packages
    assert f"in place of {version}" in "".join(remarks(found, ()))


def test_a_package_that_is_asked_for_in_another_version_comes_before_that_which_is_there(
    project: Path, tmp_path: Path
) -> None:
    add(project / ".venv", "pandas", "2.0")
    own = read(project / ".venv")
    wanted = EnvironmentSpec.for_allow(["pandas<2", "numpy"]).packages
    assert [each.name for each in own.lacks(wanted)] == ["numpy", "pandas"]
    assert own.lacks(EnvironmentSpec.for_allow(["pandas>=1"]).packages) == ()
    found = own.above(ours(tmp_path / "ours", "pandas==1.5", "numpy==1.0"), wanted)
    assert found.support is not None
    assert found.support.first
    assert "pandas==1.5" in found.packages


def test_packages_without_bytecode_are_told(project: Path, tmp_path: Path) -> None:
    package = site(project / ".venv") / "large"
    package.mkdir()
    (package / "__init__.py").touch()
    own, below = read(project / ".venv"), ours(tmp_path / "ours")
    assert "no bytecode" in "".join(remarks(own.above(below, ()), ()))
    (package / "__pycache__").mkdir()
    assert "no bytecode" not in "".join(remarks(own.above(below, ()), ()))


@pytest.mark.anyio
async def test_a_python_that_is_not_found_is_answered_with_what_to_do(
    kit: Kit, project: Path
) -> None:
    root = project / ".venv"
    library = root.parent / "base/lib/python3.14"
    library.mkdir(parents=True)
    (library / "os.py").touch()
    programs = root.parent / "base/bin"
    programs.mkdir()
    head = Path(os.path.realpath(sys.executable)).read_bytes()[:64]
    (programs / "python3.14").write_bytes(head)
    rewrite(root, "home", f"home = {programs}")
    rewrite(root, "version", "version = 3.14.1")
    (root / "lib" / f"python{MINOR}").rename(root / "lib/python3.14")
    (root / "bin/python").unlink()
    (root / "bin/python").symlink_to(programs / "python3.14")
    with pytest.raises(EnvironmentBuildError) as caught:
        await kit.store().ensure(EnvironmentSpec(python=str(root)))
    assert f"put {programs} on the server's PATH" in str(caught.value)
    assert "a Python 3.14 of the machine's own has to install" in str(caught.value)


def test_an_environment_is_stale_once_packages_have_come(project: Path, tmp_path: Path) -> None:
    found = read(project / ".venv").above(ours(tmp_path / "ours"), ())
    assert not found.stale
    assert not replace(found, support=None).stale
    add(project / ".venv", "pandas", "2.0")
    assert found.stale


@pytest.mark.anyio
async def test_the_store_puts_ours_below_and_starts_nothing_of_theirs(
    kit: Kit, project: Path, tmp_path: Path
) -> None:
    root = project / ".venv"
    add(root, "numpy", "2.0")
    for name in ("python", "python3", f"python{MINOR}"):
        (root / "bin" / name).unlink(missing_ok=True)
    trap = root / "bin/python"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    trap.chmod(0o755)
    (site(root) / "trap.pth").write_text(f"import os; os.mkdir({str(tmp_path / 'imported')!r})\n")
    store = kit.store()
    spec = EnvironmentSpec.for_allow(["numpy"], python=str(root))
    found = await store.ensure(spec)
    assert found.support is not None
    assert found.python == trap
    assert "numpy==2.0" in found.packages
    assert store.stored()[0].requested == ()
    assert (await store.interpreters.find(str(trap))).version == VERSION
    assert store.size(found) > 0
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "imported").exists()
    store.release(spec)
    assert await store.prune(0)


@pytest.mark.parametrize("name", ["share", "include"])
@pytest.mark.parametrize("to", ["keys", "project/.venv"])
def test_links_out_of_the_environment_show_nothing(
    project: Path, tmp_path: Path, name: str, to: str
) -> None:
    keys = tmp_path / to
    keys.mkdir(exist_ok=True)
    root = project / ".venv"
    shutil.rmtree(root / name, ignore_errors=True)
    (root / name).symlink_to(keys)
    shown = read(root).readonly
    assert not any(Path(os.path.realpath(path)) == keys for path in shown)


def test_an_environment_whose_packages_are_a_link_to_elsewhere_is_refused(
    project: Path, tmp_path: Path
) -> None:
    root = project / ".venv"
    (root / "lib").rename(tmp_path / "lib")
    (root / "lib").symlink_to(tmp_path / "lib")
    assert "another Python made it" in refusal(root)


def test_an_environment_that_is_named_by_a_link_is_the_one_behind_it(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(project / ".venv")
    assert read(tmp_path / "link").root == project / ".venv"
    assert read(tmp_path / "link").fixed == (project / ".venv", BASE)
