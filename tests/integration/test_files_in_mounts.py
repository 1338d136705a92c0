"""Names of files and modules that only mounted folders have: where an answer says that they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.agent import agent

pytestmark = pytest.mark.anyio


async def test_relative_names_are_found_in_mounted_folders(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "pack").mkdir(parents=True)
    two.mkdir()
    for file, text in {
        one / "sales.csv": "a\n1\n",
        one / "both.csv": "",
        two / "both.csv": "",
        one / "mymod.py": "value = 7",
        one / "pack" / "__init__.py": "value = 8",
    }.items():
        file.write_text(text)
    async with agent("--mount", str(one), "--mount", str(two)) as notebook:

        async def said(code: str) -> str:
            return (await notebook.run(code)).text.rpartition("[kernel-mcp] ")[2]

        assert (
            await said("open('sales.csv')")
            == f"There is {one}/sales.csv, in a mounted folder: open it by this path"
        )
        assert await said("open('both.csv')") == (
            f"There is {one}/both.csv and {two}/both.csv, in a mounted folder: open the one "
            "that is meant"
        )
        step = f"in a mounted folder: import it after sys.path.append('{one}')"
        assert await said("import mymod") == f"There is {one}/mymod.py, {step}"
        assert await said("import pack.sub") == f"There is {one}/pack/__init__.py, {step}"
        assert "neither installed nor" in await said("import nothing_of_that_name")
        assert "There is" not in await said("open('none.csv')")
        taken = f"import sys; sys.path.append('{one}')\nimport mymod, pack; mymod.value, pack.value"
        assert (await notebook.run(taken)).text == "(7, 8)"
        refused = await notebook.call("read_file", path="both.csv")
        assert f"several in mounted folders: {one}/both.csv and {two}/both.csv" in refused.text


async def test_modules_of_subfolders_are_found(tmp_path: Path) -> None:
    (tmp_path / "lib" / "tools").mkdir(parents=True)
    (tmp_path / "lib" / "tools" / "deep.py").touch()
    (tmp_path / "lib" / ".hidden").mkdir()
    (tmp_path / "lib" / ".hidden" / "unseen.py").touch()
    async with agent("--mount", f"{tmp_path}/lib") as notebook:

        async def told(code: str) -> str:
            return (await notebook.run(code)).text.rpartition("[kernel-mcp] ")[2]

        await notebook.call("write_file", path="src/mymod.py", content="value = 7")
        await notebook.call("write_file", path="src/pack/__init__.py", content="value = 8")
        step = "in the workspace: import it after sys.path.append('/workspace/src')"
        assert await told("import mymod") == f"There is /workspace/src/mymod.py, {step}"
        assert await told("import pack") == f"There is /workspace/src/pack/__init__.py, {step}"
        folder = tmp_path / "lib" / "tools"
        step = f"in a mounted folder: import it after sys.path.append('{folder}')"
        assert await told("import deep") == f"There is {folder}/deep.py, {step}"
        assert "neither installed nor" in await told("import unseen")
        taken = "import sys; sys.path.append('/workspace/src')\nimport mymod, pack"
        assert (await notebook.run(f"{taken}\nmymod.value + pack.value")).text == "15"
