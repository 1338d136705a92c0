"""Files that list packages: names and versions are taken from them, and no place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.out_of_tree import unseen_code
from kernel_mcp.environments.pinned_requirements import PinnedRequirements, exported, read_pinned
from kernel_mcp.errors import ConfigError

INDEX = "https://index.example/simple"
HASH = "sha256:" + "ab" * 32


def reading(
    tmp_path: Path, text: str | bytes, settings: Settings | None = None, **environ: str
) -> PinnedRequirements:
    file = tmp_path / "requirements.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_pinned(replace(settings or Settings(), requirements=file), INDEX, environ)


def refusal(tmp_path: Path, text: str | bytes, settings: Settings | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        reading(tmp_path, text, settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_names_versions_markers_and_hashes_are_taken(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "base.txt").write_text("tabulate\n-c limits.txt\n-r base.txt\n")
    (tmp_path / "more" / "limits.txt").write_text("numpy<3")
    found = reading(
        tmp_path,
        "# a comment\n\nPandas[excel] >= 2, <3 ; python_version >= '3.8'  # why\n"
        f"six==1.17.0 \\\n    --hash={HASH} \\\n    --hash={HASH}\n-rmore/base.txt\n"
        "--prefer-binary\n--only-binary=:all:\n",
    )
    assert [line.text for line in found.lines] == [
        'Pandas[excel]<3,>=2; python_version >= "3.8"',
        f"six==1.17.0 --hash={HASH} --hash={HASH}",
        "tabulate",
    ]
    assert found.names == ("pandas", "six", "tabulate")
    assert [str(line) for line in found.limits] == ["limits.txt line 1: numpy<3"]
    assert found.named_in("no version of six==1.17.0") == [
        "requirements.txt line 4: six==1.17.0",
    ]
    assert found.origins == (f"--requirements {tmp_path / 'requirements.txt'}",)


PLACES = [
    "git+https://host.example/x.git",
    "x @ git+ssh://git@host.example/x.git",
    "x@https://host.example/x-1.0-py3-none-any.whl",
    "x @ file:///etc/x",
    "https://user:hunter2@host.example/x.zip",
    "./x",
    "../x",
    "/srv/x",
    "~/x",
    ".",
    "x-1.0-py3-none-any.whl",
    "hg+http://host.example/x",
    "file:x",
    "six; python_version<'4' @ https://host.example",
]
OPTIONS = [
    "--index-url https://host.example/simple",
    "--index-url=https://user:hunter2@host.example/simple",
    "-i https://host.example/simple",
    "-ihttps://host.example/simple",
    "--extra-index-url https://host.example/simple",
    "-f ./wheels",
    "--find-links=https://host.example/wheels",
    "-e .",
    "-e.",
    "--editable=git+https://host.example/x.git",
    "--no-binary :all:",
    "--trusted-host host.example",
    "--no-index",
    "--pre",
    "--config-settings x=y",
    "-r https://host.example/requirements.txt",
    "-r ../outside.txt",
    "-r /etc/passwd",
    "-c link.txt",
    "-r missing.txt",
    "-r requirements.d",
]


@pytest.mark.parametrize("line", [*PLACES, *OPTIONS])
def test_places_indexes_and_files_elsewhere_are_refused_by_line(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "project"
    (folder / "requirements.d").mkdir(parents=True)
    (tmp_path / "outside.txt").write_text("hunter2")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    said = refusal(folder, f"six\n\n{line}\n")
    assert said.startswith("requirements.txt line 3: ")
    assert "hunter2" not in said


@pytest.mark.parametrize(
    "line",
    [
        *("a b", "six==", "${SIX}", "six --hash=md5:" + "0" * 32, "-x"),
        pytest.param("six; " + "(" * 3000, id="deep"),
        pytest.param("six>=" + "9" * 6000, id="long"),
        "-r loop.txt",
    ],
)
def test_what_is_no_requirement_is_refused_by_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    assert "requirements.txt line 1: " in refusal(tmp_path, line)


@pytest.mark.parametrize(
    "text",
    [
        "name: mine\nchannels:\n  - conda-forge\ndependencies:\n  - numpy\n",
        "dependencies: [numpy]",
        "# platform: linux-64\n@EXPLICIT\nhttps://conda.anaconda.org/x/numpy.conda\n",
        "# platform: linux-64\nnumpy=1.26.4=py311h64a7726_0\n",
        "six\nnumpy=1.26\n",
        "numpy @ file:///croot/numpy_1701/work/dist/numpy.whl",
        "numpy @ file:///home/conda/feedstock_root/build_artifacts/numpy/work",
    ],
)
def test_files_of_conda_are_told_from_those_of_pip(tmp_path: Path, text: str) -> None:
    assert "conda's way" in refusal(tmp_path, text)


def test_files_without_end_text_and_number_are_refused(tmp_path: Path) -> None:
    assert "not UTF-8" in refusal(tmp_path, b"\xff\xfe")
    assert "more than" in refusal(tmp_path, "# " + "x" * 9_000_000)
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"-r {number + 1}.txt")
    assert "more than 20 files" in refusal(tmp_path, "-r 0.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_pinned(Settings(requirements=tmp_path / "pipe"), INDEX, {})
    with pytest.raises(ConfigError, match="there is no"):
        read_pinned(Settings(requirements=tmp_path / "missing"), INDEX, {})
    with pytest.raises(ConfigError, match=r"^--requirements: .* name a file in it, as requirem"):
        read_pinned(Settings(requirements=tmp_path), INDEX, {})
    with pytest.raises(ConfigError, match=r"^--project: .* is a file; name its folder"):
        read_pinned(Settings(project=tmp_path / "0.txt"), INDEX, {})


def test_an_index_that_the_operator_has_named_may_be_named_again(tmp_path: Path) -> None:
    settings = Settings(index_url="https://a.example/simple", find_links=(str(tmp_path / "w"),))
    text = "-i https://a.example/simple/\n--find-links w\n--extra-index-url https://b.example/s\n"
    assert reading(tmp_path, text, settings, UV_INDEX="b=https://b.example/s").lines == ()
    assert "https://b.example/s" in refusal(tmp_path, text, settings)


def test_hashes_that_are_asked_for_have_to_be_there(tmp_path: Path) -> None:
    assert reading(tmp_path, f"--require-hashes\nsix==1 --hash={HASH}").lines
    assert "line 2: it has no --hash" in refusal(tmp_path, "--require-hashes\nsix==1")


def test_the_same_content_is_the_same_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first, second = reading(tmp_path, "six\n"), reading(tmp_path / "a", "\n# other\nsix")
    assert first == second
    assert first.digest == second.digest
    assert first.digest != reading(tmp_path, "six>1").digest
    assert not PinnedRequirements().digest


PROJECT = """
[project]
name = "mine"
version = "0.1"
requires-python = ">=3.10"
dependencies = ["six"]
"""
LOCK = f"""
version = 1
requires-python = ">=3.10"

[[package]]
name = "mine"
version = "0.1"
source = {{ editable = "." }}
dependencies = [{{ name = "six" }}]

[[package]]
name = "six"
version = "1.17.0"
source = {{ registry = "{INDEX}" }}
wheels = [{{ url = "https://evil.example/six-1.17.0-py3-none-any.whl", hash = "{HASH}" }}]
"""


def project(
    folder: Path, more: str = "", lock: str = LOCK, settings: Settings | None = None
) -> PinnedRequirements:
    (folder / "pyproject.toml").write_text(PROJECT + more)
    (folder / "uv.lock").write_text(lock)
    return read_pinned(replace(settings or Settings(), project=folder), INDEX, {})


def test_a_lock_gives_its_project_and_changes_that_matter_are_noticed(tmp_path: Path) -> None:
    found = project(tmp_path)
    assert found.project.direct == found.names == ("six",)
    assert found.origins == (f"--project {tmp_path}",)
    assert project(tmp_path, "[tool.ruff]\nline-length = 100").digest == found.digest
    assert project(tmp_path, '[dependency-groups]\ndev = ["x"]').digest != found.digest
    assert project(tmp_path, lock=LOCK.replace("1.17.0", "1.16.0")).digest != found.digest


def test_code_of_the_project_itself_is_told_to_be_imported_from_a_mount(tmp_path: Path) -> None:
    (tmp_path / "src/mine").mkdir(parents=True)
    (tmp_path / "tool.py").touch()
    found = project(tmp_path)
    source = tmp_path / "src"
    told = unseen_code(found.project.code, [])
    assert told["mine"] == (
        "mine is code of the project (--project), which is not installed: the operator can start "
        f"the server with --mount {source}, and sys.path.insert(0, {str(source)!r}) then finds it"
    )
    assert told["tool"].endswith(f"sys.path.insert(0, {str(tmp_path)!r}) then finds it")
    assert told.keys() == {"mine", "tool"}
    source.rename(tmp_path / "elsewhere")
    source.symlink_to(tmp_path / "elsewhere")
    assert unseen_code(project(tmp_path).project.code, []).keys() == {"tool"}
    there = unseen_code(found.project.code, [Mount(tmp_path, str(tmp_path))])["mine"]
    assert there.endswith(f"not installed: sys.path.insert(0, {str(source)!r}) then finds it")
    assert "start the server" not in there


@pytest.mark.parametrize(
    "source",
    [
        '{ git = "https://host.example/x.git?rev=1#abc" }',
        '{ url = "https://host.example/x.whl" }',
        '{ path = "x.whl" }',
        '{ editable = "x", subdirectory = 3 }',
        "{ directory = 3 }",
        '{ registry = "https://host.example/simple" }',
        '{ registry = "wheels" }',
        r'{ registry = "\u0000" }',
        r'{ virtual = "\u0000" }',
        "{ }",
    ],
)
def test_an_entry_of_a_lock_from_elsewhere_is_refused_by_name(tmp_path: Path, source: str) -> None:
    entry = f'\n[[package]]\nname = "foreign"\nversion = "1"\nsource = {source}\n'
    with pytest.raises(ConfigError, match=r"uv\.lock: foreign comes from"):
        project(tmp_path, lock=LOCK + entry)


@pytest.mark.parametrize(
    "table",
    [
        '[[tool.uv.index]]\nname = "x"\nurl = "https://host.example/simple"',
        '[tool.uv]\nindex-url = "https://host.example/simple"',
        '[tool.uv]\nextra-index-url = ["https://host.example/simple"]',
        '[tool.uv]\nfind-links = ["wheels"]',
        '[tool.uv]\nindex-url = "\\u0000"',
        '[tool.uv.sources]\nx = { git = "https://host.example/x" }',
        '[tool.uv.sources]\nx = [{ url = "https://host.example/x.whl" }]',
    ],
)
def test_indexes_and_sources_of_a_project_are_refused(tmp_path: Path, table: str) -> None:
    with pytest.raises(ConfigError, match=r"pyproject\.toml: \[tool\.uv"):
        project(tmp_path, table)


@pytest.mark.parametrize(
    "text",
    [
        "a" + ".a" * 100_000 + " = 1",
        "a = " + "[" * 50_000,
        "a = " + "9" * 5000,
    ],
    ids=["keys", "deep", "long"],
)
def test_toml_that_takes_long_or_has_no_meaning_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"pyproject\.toml: it is not valid TOML"):
        project(tmp_path, text)


WORKSPACE = f"""
version = 1
requires-python = ">=3.10"

[manifest]
members = ["lib", "mine"]

[[package]]
name = "below"
version = "1"
source = {{ directory = "../below" }}
dependencies = [{{ name = "idna" }}, {{ name = "lib" }}]

[[package]]
name = "idna"
version = "1"
source = {{ registry = "{INDEX}" }}

[[package]]
name = "lib"
version = "0.1"
source = {{ editable = "packages/lib" }}
dependencies = [{{ name = "below" }}, {{ name = "tabulate" }}]

[[package]]
name = "mine"
version = "0.1"
source = {{ virtual = "." }}
dependencies = [{{ name = "lib" }}, {{ name = "six" }}]

[[package]]
name = "six"
version = "1.17.0"
source = {{ registry = "{INDEX}" }}

[[package]]
name = "tabulate"
version = "1"
source = {{ registry = "{INDEX}" }}
"""


def test_members_and_paths_are_the_projects_own_and_their_dependencies_are_kept(
    tmp_path: Path,
) -> None:
    (tmp_path / "packages/lib/src/lib").mkdir(parents=True)
    table = '[tool.uv.workspace]\nmembers = ["packages/*"]\n[tool.uv.sources]\n'
    table += 'lib = { workspace = true }\nbelow = { path = "../below" }\n'
    found = project(tmp_path, table, WORKSPACE).project
    assert found.local == ("below", "lib", "mine")
    assert set(found.direct) == {"six", "tabulate", "idna"}
    assert found.code["lib"] == tmp_path / "packages/lib/src"
    told = unseen_code(found.code, [], ("my-lib", *found.local))
    assert "sys.path.insert" in told["lib"]
    assert told["my-lib"] == told["my_lib"]
    assert "below is a package of the project" in told["below"]
    assert f"--python {tmp_path / '.venv'}" in found.absent


def test_a_member_of_a_workspace_has_the_lock_of_its_root(tmp_path: Path) -> None:
    member = tmp_path / "packages/lib"
    member.mkdir(parents=True)
    (member / "pyproject.toml").write_text(PROJECT.replace("mine", "lib").replace("six", "below"))
    with pytest.raises(ConfigError, match="run `uv lock` there"):
        read_pinned(Settings(project=member), INDEX, {})
    project(tmp_path, '[tool.uv.workspace]\nmembers = ["packages/*"]', WORKSPACE)
    found = read_pinned(Settings(project=member), INDEX, {})
    assert set(found.project.direct) == {"tabulate", "idna"}
    assert found.project.lock == WORKSPACE
    assert found.origins == (f"--project {member}",)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/pyproject.toml").write_text(PROJECT)
    with pytest.raises(ConfigError, match="no member in other"):
        read_pinned(Settings(project=tmp_path / "other"), INDEX, {})


def test_a_root_without_a_project_has_all_members(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.uv.workspace]\nmembers = ["packages/*"]')
    lock = WORKSPACE.replace('source = { virtual = "." }', 'source = { virtual = "packages/m" }')
    (tmp_path / "uv.lock").write_text(lock)
    found = read_pinned(Settings(project=tmp_path), INDEX, {})
    assert set(found.project.direct) == {"six", "tabulate", "idna"}


def test_code_outside_of_a_project_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "below/below").mkdir(parents=True)
    folder = tmp_path / "here"
    folder.mkdir()
    assert "below" not in project(folder, lock=WORKSPACE).project.code
    lock = WORKSPACE.replace("../below", str(tmp_path / "below"))
    assert "below" not in project(folder, lock=lock).project.code


def test_names_of_own_packages_are_no_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="comes from a place"):
        project(tmp_path, lock=WORKSPACE.replace('name = "below"', 'name = "x --y"'))


def test_values_of_other_types_in_a_project_are_passed_over(tmp_path: Path) -> None:
    for given in ('"abc"', "[1]", "3"):
        lock = LOCK.replace('[{ name = "six" }]', given)
        assert project(tmp_path, "[tool.uv.sources]\nx = [1]\n", lock).project.direct == ()


def test_a_lock_that_lacks_what_its_project_asks_for_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace('"six"', '"six", "Requests>=2"'))
    (tmp_path / "uv.lock").write_text(LOCK)
    (origin,) = read_pinned(Settings(project=tmp_path), INDEX, {}).origins
    assert origin.startswith(f"--project {tmp_path} (")
    assert "lacks requests: run `uv lock`" in origin
    assert origin in caplog.text


@pytest.mark.parametrize(
    ("asked", "group", "lacking"),
    [
        ("six<1.12", "", "six<1.12"),
        ("six==1.*", "attrs", "attrs"),
        ("six; python_version < '3'", 'six>2", "six', "six>2"),
        ("no requirement @@", "", ""),
    ],
)
def test_a_lock_that_is_older_than_a_version_or_a_group_is_told(
    tmp_path: Path, asked: str, group: str, lacking: str
) -> None:
    groups = f'[dependency-groups]\ndev = ["{group}", {{ include-group = "x" }}]\n' if group else ""
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace('"six"', f'"{asked}"') + groups)
    (tmp_path / "uv.lock").write_text(LOCK)
    (origin,) = read_pinned(Settings(project=tmp_path), INDEX, {}).origins
    assert origin.partition("and lacks ")[2].partition(": run")[0] == lacking


def test_an_index_of_the_operators_may_be_in_a_lock(tmp_path: Path) -> None:
    lock = LOCK.replace(INDEX, "../wheels")
    with pytest.raises(ConfigError, match=r"\.\./wheels"):
        project(tmp_path, lock=lock)
    settings = Settings(find_links=(str(tmp_path.parent / "wheels"),))
    assert project(tmp_path, lock=lock, settings=settings)


def test_a_project_for_other_pythons_names_the_flag(tmp_path: Path) -> None:
    more = PROJECT.replace(">=3.10", ">=3.15")
    (tmp_path / "pyproject.toml").write_text(more)
    (tmp_path / "uv.lock").write_text(LOCK)
    with pytest.raises(ConfigError, match="--python VERSION"):
        read_pinned(Settings(project=tmp_path, python="3.12"), INDEX, {})


def test_a_project_without_a_lock_or_with_one_from_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    with pytest.raises(ConfigError, match=r"^--project: there is no .*run `uv lock` there"):
        read_pinned(Settings(project=tmp_path), INDEX, {})
    (tmp_path / "uv.lock").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="lies outside"):
        read_pinned(Settings(project=tmp_path), INDEX, {})
    (tmp_path / "uv.lock").unlink()
    (tmp_path / "uv.lock").write_text("package = 1")
    with pytest.raises(ConfigError, match="it is not a lock of uv"):
        read_pinned(Settings(project=tmp_path), INDEX, {})
    (tmp_path / "uv.lock").write_text("= 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_pinned(Settings(project=tmp_path), INDEX, {})


def test_what_uv_makes_of_a_lock_is_read_again() -> None:
    lines = exported(f"six==1.17.0 ; python_version < '4' \\\n    --hash={HASH}\n")
    assert [line.text for line in lines] == [f'six==1.17.0; python_version < "4" --hash={HASH}']
    with pytest.raises(ConfigError):
        exported("-e .\n")
