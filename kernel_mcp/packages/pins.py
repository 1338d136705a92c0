"""Pin the packages of a script as its session has them, and lock them by uv where it can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import anyio

from kernel_mcp.environments.build_sandbox import BuildSandbox
from kernel_mcp.environments.layer import Layer
from kernel_mcp.environments.listed_files import normalised
from kernel_mcp.environments.metadata import (
    installed_needs,
    provided_modules,
    record_digests,
)
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.packages.result import all_versions
from kernel_mcp.records import dataclass

LOCK_TIMEOUT_S = 60.0
"""Seconds for asking the index about all packages."""
SCRIPT = "script.py"


@dataclass(frozen=True, slots=True)
class PinnedScript:
    """A script with its metadata; `lock` is uv's, or `requirements` has what is installed.

    `reason` says why there is no lock.
    """

    script: bytes
    lock: bytes = b""
    requirements: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pins:
    """Versions by package: those that a script imports, and all others of its session."""

    direct: Mapping[str, str]
    others: Mapping[str, str]


def pins_of(modules: Iterable[str], environment: KernelEnvironment, layer: Path | None) -> Pins:
    """Return the packages that provide `modules`, with their optional dependencies. Blocking.

    pandas finds its engines for files, for example, without an import in the script.
    """
    versions = all_versions(environment, layer)
    provided = dict(provided_modules(environment)) | (
        {} if layer is None else Layer(layer).modules()
    )
    owners = {module: name for name, found in provided.items() for module in found}
    direct = {owner for each in modules if (owner := _owner(each, owners)) in versions}
    for site in _sites(environment, layer):
        for need in installed_needs(site, direct):
            if "extra" in str(need.marker):
                direct |= {normalised(need.name)} & versions.keys()
    return Pins(
        {name: version for name, version in versions.items() if name in direct},
        {name: version for name, version in versions.items() if name not in direct},
    )


def _owner(module: str, owners: Mapping[str, str]) -> str:
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((owners[name] for name in names if name in owners), "")


def _sites(environment: KernelEnvironment, layer: Path | None) -> Iterator[Path]:
    if environment.support is not None:
        yield from environment.support.sites
        yield environment.support.site
    else:
        yield from environment.root.glob("lib/python3*/site-packages")
    if layer is not None:
        yield from Layer(layer).folders()


def header(pins: Pins, python: str) -> str:
    """Return the metadata of a script (PEP 723), with the minor version of `python`."""
    minor = ".".join(python.split(".")[:2])
    return "\n".join(
        [
            "# /// script",
            f'# requires-python = "=={minor}.*"',
            *_array("dependencies", pins.direct),
            "#",
            "# [tool.uv]",
            *_array("constraint-dependencies", pins.others),
            "# ///",
            "",
        ]
    )


def _array(name: str, versions: Mapping[str, str]) -> list[str]:
    rows = [f'#     "{each}=={version}",' for each, version in versions.items()]
    return [f"# {name} = [", *rows, "# ]"]


async def locked(
    build: BuildSandbox, environment: KernelEnvironment, script: bytes, folder: Path
) -> PinnedScript:
    """Return a script with uv's lock, made in `folder`; without it if uv cannot lock its packages.

    That is so without an index, or if a package of the session is not on it.
    """
    await anyio.to_thread.run_sync(folder.mkdir, 0o700)
    try:
        place = folder / SCRIPT
        await anyio.Path(place).write_bytes(script)
        with anyio.move_on_after(LOCK_TIMEOUT_S):
            done = await build.lock(place, environment.bare, readonly=environment.runtime)
            if done.code:
                return PinnedScript(script, reason=done.cause().rstrip("."))
            lock = await anyio.Path(folder / f"{SCRIPT}.lock").read_bytes()
            return PinnedScript(script, lock)
        return PinnedScript(script, reason=f"the index took longer than {LOCK_TIMEOUT_S:g} s")
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(remove_tree, folder)


def installed_pins(pins: Pins, environment: KernelEnvironment, layer: Path | None) -> str:
    """Return all pins as requirements with the hash of what is installed of each. Blocking.

    The comments are SHA-256 of the packages' RECORD files, which list the hashes of all files.
    """
    digests: dict[str, str] = {}
    for site in _sites(environment, layer):
        digests |= record_digests(site)
    rows = ["# Of each package the SHA-256 of its installed RECORD: no hash of a file of an index."]
    for name, version in sorted({**pins.others, **pins.direct}.items()):
        digest = digests.get(name)
        rows.append(f"{name}=={version}" + (f"  # RECORD sha256:{digest}" if digest else ""))
    return "\n".join([*rows, ""])
