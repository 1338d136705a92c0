"""Installations that stand in the text of a cell."""

from __future__ import annotations

import pytest

from kernel_mcp.errors import InputError
from kernel_mcp.packages.lines import install_cell, runs
from kernel_mcp.sessions.checking import Checks

pytestmark = [pytest.mark.anyio]


@pytest.mark.parametrize(
    ("line", "packages"),
    [
        ("%pip install polars", ("polars",)),
        ("%pip -q install polars rich", ("polars", "rich")),
        ("!pip install -q -U 'numpy<3' pandas>=2 \"scipy [x] >= 1\"", ("numpy<3", "pandas>=2")),
        ("! pip3 install --quiet --upgrade polars  # for later", ("polars",)),
        ("!!pip install polars, rich", ("polars", "rich")),
        ("!python -m pip install --no-cache-dir polars[pandas,numpy]==1.*", ("polars[pandas",)),
        ("!{sys.executable} -m pip install --timeout 100 polars", ("polars",)),
        ("!uv pip install --system polars ; ", ("polars",)),
        ("%uv pip install polars;", ("polars",)),
        ("pip install polars", ("polars",)),
        ("python3 -m pip install polars", ("polars",)),
        ("!pip install polars >= 1 , < 2", ("polars>=1,<2",)),
        ("!pip install polars > /dev/null 2>&1", ("polars",)),
        ("!pip install -qq polars 2>/dev/null | tail -n 1", ("polars",)),
        ("!pip install 'x; python_version < \"3.9\"'", ('x; python_version < "3.9"',)),
        ("found = !pip install polars", ("polars",)),
    ],
)
async def test_every_usual_way_to_write_one_is_seen(line: str, packages: tuple[str, ...]) -> None:
    found = install_cell(f"before = 1\n{line}\nafter = 2")
    assert found is not None
    assert await runs(found.rest, Checks())
    assert all(each.startswith(name) for each, name in zip(found.packages, packages, strict=False))
    first, shown, last = found.code(lambda _line: "it's done").split("\n")
    assert (first, last) == ("before = 1", "after = 2")
    assert shown.removeprefix("found = ") in ('print("it\'s done")', '["it\'s done"]')


def test_lines_keep_their_numbers_when_one_goes_on_below() -> None:
    found = install_cell("!pip install \\\n    polars \\\n    rich\n1 / 0\n%pip install tqdm")
    assert found is not None
    assert found.packages == ("polars", "rich", "tqdm")
    assert found.code(lambda line: line.packages[0]).split("\n") == [
        "print('polars')", "", "", "1 / 0", "print('tqdm')",
    ]  # fmt: skip


async def test_a_cell_that_hides_its_output_or_is_timed_is_python_too() -> None:
    for head in ("%%capture", "%%time"):
        found = install_cell(f"{head}\n!pip install polars\nimport polars")
        assert found is not None
        assert await runs(found.rest, Checks())
        assert found.code(lambda _line: "") == f"{head}\nprint('')\nimport polars"


@pytest.mark.parametrize(
    "code",
    [
        "text = '''\n!pip install polars\n'''",
        "%%bash\npip install polars",
        "%%writefile x.sh\n!pip install polars",
        "if True:\n    !pip install polars",
        "def add():\n    %pip install polars",
        "for name in names: print('pip install', name)",
        "# !pip install polars",
        "'pip install polars'",
        "!echo pip install polars",
        "!pip list  # what install has brought",
        "!pip download polars install",
        "pip.install(x)",
        "\0 pip install",
    ],
)
def test_what_only_looks_like_one_is_left_alone(code: str) -> None:
    assert install_cell(code) is None


async def test_a_cell_that_python_cannot_read_installs_nothing() -> None:
    for code in ("%pip install polars\n1 +", "%pip install x\nreturn 5"):
        found = install_cell(code)
        assert found is not None
        assert not await runs(found.rest, Checks())


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("-r requirements.txt", "read that file"),
        ("-rrequirements.txt", "read that file"),
        ("--requirement=x.txt", "read that file"),
        ("--index-url https://example.org polars", "--index-url"),
        ("--extra-index-url=https://example.org polars", "index of this server"),
        ("-e .", "imported without an installation"),
        (".", "imported without an installation"),
        ("./dist/x-1.0-py3-none-any.whl", "by name"),
        ("git+https://example.org/x", "by name"),
        ("'x @ https://example.org/x.zip'", "by name"),
        ("--no-deps polars", "leave the option out"),
        ("--target lib polars", "leave the option out"),
        ("--pre polars", "name the version"),
        ("{name}", "write the names"),
        ("$name", "write the names"),
        ("polars && ls", "on a line of its own"),
        ("polars; ls", "on a line of its own"),
        ("'polars", "No closing quotation"),
        ("", "names no package"),
        ("-q", "names no package"),
        ("polars " * 2000, "fewer packages at once"),
    ],
)
def test_what_cannot_be_followed_is_told_with_what_to_do(words: str, instead: str) -> None:
    with pytest.raises(InputError) as refused:
        install_cell(f"x = 1\n!pip install {words}")
    assert instead in str(refused.value)
    assert str(refused.value).startswith("line 2: ")
    assert "No line of this cell was run." in str(refused.value)
