"""The modules of a running server: only those that it has used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.rawclient import raw_client

pytestmark = pytest.mark.anyio

UNWANTED = {"IPython", "ipykernel", "jupyter_client", "jupyter_core", "tornado", "traitlets", "zmq"}
AT_FIRST_USE = {"PIL", "difflib", "nbformat", "packaging", "platformdirs", "tomli", "tomllib"}
"""Modules that a server without settings needs for some requests only."""
OF_THE_SDK = {"click", "h11", "httpcore2", "idna", "python_multipart", "sse_starlette", "uvicorn"}
"""Modules that come with HTTP and clients of the SDK."""
LIBRARIES = re.compile(r"zmq|sodium|tornado|traitlets|jupyter|cryptography", re.IGNORECASE)
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys, kernel_mcp
for module in pkgutil.walk_packages(kernel_mcp.__path__, "kernel_mcp."):
    if module.name not in ("kernel_mcp.__main__", "kernel_mcp.launch.provisioner"):
        importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


async def test_a_server_that_has_run_cells_has_loaded_no_more_than_it_used(
    tmp_path: Path,
) -> None:
    """`-X importtime` writes a line on stderr for each module that a process loads."""
    log = tmp_path / "imports"
    build = [sys.executable, "-m", "kernel_mcp", "env", "build"]  # a build uses `packaging`
    subprocess.run(build, check=True, cwd=tmp_path, capture_output=True)

    def traced(argv: list[str]) -> list[str]:
        # in a folder without settings
        return ["env", f"--chdir={tmp_path}", argv[0], "-X", "importtime", *argv[1:]]

    async with raw_client(through=traced, log=log) as client:
        assert "42" in await client.call("execute", code="x = 40 + 2; x")
        assert "x" in await client.call("list_variables")
        await client.call("execute", code="while True: pass", wait=0)
        await client.call("interrupt")
        await client.call("execute", code="1 / 0")
        await client.call("export_notebook")
        await client.call("reset")
        await client.call("close_session")
        maps = Path(f"/proc/{client.process.pid}/maps").read_text()
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in log.read_text().splitlines()
        if line.startswith("import time:")
    }
    assert {"mcp", "kernel_mcp"} <= imported
    assert imported & (UNWANTED | AT_FIRST_USE | OF_THE_SDK) == set()
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    assert any("_asyncio" in path for path in mapped), mapped
    assert [path for path in mapped if LIBRARIES.search(path)] == []


def test_no_module_but_the_provisioner_loads_them() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True, check=True
    )
    assert "kernel_mcp" in loaded.stdout.split()
    assert not UNWANTED & set(loaded.stdout.split())
