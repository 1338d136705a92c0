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
