"""Calls of uv for a session, with a stand-in for uv."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kernel_mcp.environments.build_sandbox import BuildSandbox
from kernel_mcp.environments.uv import CACHE, Sources, Uv
from kernel_mcp.errors import InstallError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.packages.pip import ConfinedPip
from kernel_mcp.sandbox.select import PlainBuilder

pytestmark = pytest.mark.anyio

FAKE = """\
#!/bin/sh
echo "$@" >> "$FAKE/log"
case "$*" in
  *--no-build*) [ -z "$NO_WHEEL" ] || { echo "Wheels are required for x"; exit 1; } ;;
esac
[ -z "$FAILS" ] || { echo "$FAILS"; exit 1; }
answer="$FAKE/scratch/resolved.txt"
[ -z "$LINK" ] || { rm -f "$answer"; exec ln -s "$LINK" "$answer"; }
case "$*" in
  *"pip compile"*) printf 'one==2.0\\ntwo==1.0 ; python_version > "3"\\n' > "$answer" ;;
  *"pip install"*)
    head -c "${CACHED:-10}" /dev/zero > "$UV_CACHE_DIR/.tmp-archive"
    head -c "${BYTES:-10}" /dev/zero > "$FAKE/target/module.bin"
    [ -z "$STAYS" ] || exec sleep 1000 ;;
esac
"""
ENVIRONMENT = KernelEnvironment(Path("/env/bin/python"), (), base=Path(sys.executable))


@asynccontextmanager
async def pip(
    root: Path, builds: bool = False, most_bytes: int = 0, **variables: str
) -> AsyncIterator[ConfinedPip]:
    program = root / "uv"
    program.write_text(FAKE)
    program.chmod(0o755)
    (root / "target").mkdir()
    environ = {"PATH": os.environ["PATH"], "FAKE": str(root), **variables}
    uv = Uv(str(program), environ, root, Sources(index_url="https://mirror", offline=True))
    opened = ConfinedPip.opened(
        BuildSandbox(uv, PlainBuilder()),
        ENVIRONMENT,
        scratch=root / "scratch",
        most_bytes=most_bytes,
        source_builds=builds,
    )
    async with opened as found:
        yield found
    assert not (root / "scratch").exists()


async def resolve(found: ConfinedPip, *earlier: str) -> dict[str, str]:
    return await found.resolve(
        wanted=["one", *earlier],
        earlier=earlier,
        present={"one": "1.0"},
        constraints=["one<3"],
        excludes=["jedi"],
        progress=quiet,
    )


async def install(found: ConfinedPip, root: Path) -> None:
    await found.install({"one": "2.0"}, into=root / "target", known_as="/seen", progress=quiet)


async def quiet(_text: str) -> None:
    """Nobody listens."""


async def test_versions_are_read_from_what_uv_resolved(tmp_path: Path) -> None:
    async with pip(tmp_path) as found:
        assert await resolve(found) == {"one": "2.0", "two": "1.0"}
        for name, content in {"wanted": "one", "constraints": "one<3", "excludes": "jedi"}.items():
            assert (tmp_path / f"scratch/{name}.txt").read_text().strip() == content


async def test_wheels_only_from_the_sources_of_the_operator(tmp_path: Path) -> None:
    async with pip(tmp_path) as found:
        await resolve(found)
        await install(found, tmp_path)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "--no-build --default-index https://mirror --offline" in line
    assert lines[1].endswith("-- one==2.0")


async def test_a_failure_leaves_word_of_what_was_installed_before(tmp_path: Path) -> None:
    said = "No solution found: one needs three>=2 and you require three[a]<2 and four-more."
    async with pip(tmp_path, FAILS=said) as found:
        with pytest.raises(InstallError, match=r"installed before counts too: three\[a\]<2\. Ask"):
            await resolve(found, "three[a]<2", "four", "more")


async def test_what_was_installed_before_is_not_blamed_for_what_is_not_there(
    tmp_path: Path,
) -> None:
    said = "No solution found: Because onee was not found in the package registry and you require"
    async with pip(tmp_path, FAILS=said) as found:
        with pytest.raises(InstallError, match="has no package 'onee'") as caught:
            await resolve(found, "one", "three")
    assert "installed before" not in str(caught.value)


async def test_without_wheels_nothing_is_built_unless_that_is_allowed(tmp_path: Path) -> None:
    async with pip(tmp_path, NO_WHEEL="1") as found:
        with pytest.raises(InstallError, match="building from source is switched off"):
            await resolve(found)
    assert len((tmp_path / "log").read_text().splitlines()) == 1


async def test_builds_use_a_cache_of_their_own(tmp_path: Path) -> None:
    async with pip(tmp_path, builds=True, NO_WHEEL="1") as found:
        await resolve(found)
        await install(found, tmp_path)
    first, second, third = (tmp_path / "log").read_text().splitlines()
    assert "--no-build" in first
    assert f"--cache-dir {tmp_path}/{CACHE} " in first
    for line in (second, third):  # once it is known that something has to be built
        assert "--no-build" not in line
        assert f"--cache-dir {tmp_path}/scratch/cache " in line


@pytest.mark.parametrize("sizes", [{"BYTES": "500000"}, {"CACHED": "500000", "STAYS": "1"}])
async def test_too_many_bytes_unpacked_or_cached_are_an_error_and_leave_nothing(
    tmp_path: Path, sizes: dict[str, str]
) -> None:
    async with pip(tmp_path, False, 200_000, **sizes) as found:
        with anyio.fail_after(30), pytest.raises(InstallError, match="--install-size"):
            await install(found, tmp_path)
    assert not (tmp_path / CACHE / ".tmp-archive").exists() or "BYTES" in sizes


async def test_what_is_cached_and_then_unpacked_counts_once(tmp_path: Path) -> None:
    async with pip(tmp_path, most_bytes=200_000, CACHED="150000", BYTES="150000") as found:
        await install(found, tmp_path)


async def test_uv_gets_the_base_interpreter_and_compiles_nothing(tmp_path: Path) -> None:
    async with pip(tmp_path) as found:
        await resolve(found)
        await install(found, tmp_path)
    for line in (tmp_path / "log").read_text().splitlines():
        assert f"--python {sys.executable} " in line
        assert "/env/bin/python" not in line
    assert "--no-compile-bytecode" in line


async def test_a_link_in_the_place_of_uvs_answer_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root==secret")
    async with pip(tmp_path, LINK=str(tmp_path / "secret")) as found:
        with pytest.raises(InstallError, match="something else"):
            await resolve(found)
