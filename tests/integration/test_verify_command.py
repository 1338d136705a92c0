"""`kernel-mcp verify`: its exit codes, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.servers import Servers

pytestmark = pytest.mark.anyio


def book(*cells: tuple[str, str]) -> str:
    """A notebook whose cells have these sources and results."""
    made = [
        {
            "cell_type": "code",
            "id": f"c{number}",
            "metadata": {},
            "source": source,
            "execution_count": number,
            "outputs": [
                {
                    "output_type": "execute_result",
                    "execution_count": number,
                    "metadata": {},
                    "data": {"text/plain": result},
                }
            ]
            if result
            else [],
        }
        for number, (source, result) in enumerate(cells, start=1)
    ]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def verify(path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "kernel_mcp", "verify", str(path), "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_notebook_that_gives_the_same_is_zero_and_its_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("41")
    (tmp_path / "a.ipynb").write_text(
        book(("n = int(open('in.txt').read())", ""), ("open('out.txt', 'w').write('x') + n", "42"))
    )
    code, found = verify(tmp_path / "a.ipynb")
    assert (code, found["verdict"]) == (0, "reproduced"), found
    assert found["text"].startswith("Reproduced: 2 of 2 cells")
    assert "Receipt" not in found["text"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.ipynb", "in.txt"]


def test_one_that_differs_is_one_and_one_that_does_not_run_three(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(
        book(
            ("1 + 1", "3"),
        )
    )
    code, found = verify(tmp_path / "a.ipynb")
    assert (code, found["verdict"], found["cell"]) == (1, "differs", "cell 1"), found
    (tmp_path / "a.ipynb").write_text(
        book(
            ("missing + 1", "3"),
        )
    )
    code, found = verify(tmp_path / "a.ipynb")
    assert (code, found["cause"]) == (3, "never_defined"), found


async def test_a_receipt_stands_for_its_notebook(servers: Servers, tmp_path: Path) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("open_notebook", path="a.ipynb")
        await notebook.run("x = 20")
        await notebook.run("x + 1")
        assert "Reproduced" in (await notebook.call("verify", path="a.ipynb", wait=300)).text
        for name in ("a.ipynb", "a.receipt.json"):
            text = (await notebook.call("read_file", path=name, limit=100_000)).text
            (tmp_path / name).write_text(text)
    receipt = tmp_path / "a.receipt.json"
    code, found = verify(receipt)
    assert (code, found["verdict"]) == (0, "reproduced"), found
    whole = receipt.read_text()
    receipt.write_text(whole.replace('"reproduced"', '"differs"', 1))
    code, found = verify(receipt)
    assert (code, found["verdict"]) == (4, "invalid"), found
    assert "changed after it was made" in found["text"]
    receipt.write_text(whole)
    (tmp_path / "a.ipynb").write_text((tmp_path / "a.ipynb").read_text().replace("x = 20", "x = 7"))
    code, found = verify(receipt)
    assert code == 4, found
    assert "the code of cells 1 is another" in found["text"]
