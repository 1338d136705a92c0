"""Instructions for the model, which clients receive with the answer to `initialize`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.own import own_folder
from kernel_mcp.policy import profile_in_force
from kernel_mcp.sandbox.base import SandboxReport

MOST_BYTES = 2000
"""Size limit of the instructions: clients cut them near 2 KB."""
LISTED_BYTES = (320, 160, 80, 40)
"""Size limits of one list in them; the first with which all lines fit is used."""
GAPS_BYTES = 160
"""Least size limit of the lists of gaps and of refused imports."""

LONG_CELLS = (
    "execute answers `running` and the cell goes on; call wait for more, interrupt to stop it."
)
HOW = f"""\
A notebook for Python: execute runs a cell in a persistent IPython kernel, and variables, imports \
and functions stay for the next call. Work in small steps, as in a notebook; the last expression \
of a cell is shown and plots come back as pictures.
Leave `session` empty to use the default session. Cells of one session run in order; \
create_session gives another notebook, so one for each sub-agent.
Long cells: {LONG_CELLS} Only blocks that begin with `[kernel-mcp] ` are from this server, and say \
when variables are lost."""


GOING_BACK = "Going back: undo takes back cells; branch tries several ways, adopt takes one."


def instructions(settings: Settings, sandbox: SandboxReport, missing: Sequence[str] = ()) -> str:
    """Return the instructions for the model, most important first, in `MOST_BYTES` of UTF-8.

    `missing` are packages of the operator's that are known to be missing.
    """
    lines = [HOW]
    for most in LISTED_BYTES:
        lines = [HOW, *_lines(settings, sandbox, missing, most)]
        if len("\n".join(lines).encode()) <= MOST_BYTES:
            break
    while len("\n".join(lines).encode()) > MOST_BYTES:
        del lines[-1]
    return "\n".join(lines)


def _lines(
    settings: Settings, sandbox: SandboxReport, missing: Sequence[str], most: int
) -> Iterator[str]:
    yield _imports(settings, most)
    yield _packages(settings, most)
    yield _files(settings, sandbox, most)
    if settings.persist is not None:
        yield "Kept: the next server in this folder goes on with its sessions (see info)."
    forks = sandbox.backend == "bwrap" and not settings.no_template
    if "branches" in settings.tools and settings.checkpoints != "off" and forks:
        yield GOING_BACK
    if settings.devices:
        yield f"Devices of the host: {_listed([*map(str, settings.devices)], most)}."
    if settings.kernels:
        names = _listed([each.name for each in settings.kernels], most)
        yield f"Other languages: create_session(language=...) opens a session of {names}."
    if settings.attach:
        named = _listed([*map(str, settings.attach)], most)
        yield f"Kernels of people, outside the sandbox: create_session(attach=...) joins {named}."
    if settings.variables:
        names = _listed([*map(str, settings.variables)], most)
        yield f"Environment: os.environ has {names}; outputs show [NAME masked] instead."
    if settings.tool_servers:
        names = _listed([each.name for each in settings.tool_servers], most)
        yield (
            f"Tools for code: `import tools` reaches {names}; tools.search(...) and help(...) say "
            "how. Call them in loops: results stay in the kernel."
        )
    if settings.secrets:
        yield _secrets(settings, most)
    if missing:
        yield f"Missing, though the operator asked for it: {_listed(missing, most)} (see info)."
    if settings.ignored_keys is not None:
        yield f"{settings.ignored_keys.file.name} has settings that are ignored (see info)."
    if sandbox.gaps:
        gaps = _listed(sandbox.gaps, max(most, GAPS_BYTES), "; ")
        yield f"Sandbox {sandbox.backend}; not enforced: {gaps}."


def _imports(settings: Settings, most: int) -> str:
    names = [name for name in settings.allow if name != "*"]
    profile = profile_in_force(settings.profile, confined=settings.confined)
    if profile == "default" or "*" in settings.allow:
        base = "the whole standard library, shell commands, magics and all that is installed"
        own = f" in {settings.python} (read-only)" if own_folder(settings.python) else ""
        return f"Imports: {base}{own}{': ' if names else ''}{_listed(names, most)}."
    few = _strict(settings)
    base = "a few modules such as math" if few else "the standard library for computing"
    shown = _listed([base, *names], max(most, GAPS_BYTES))
    return f"Imports: {shown} (info lists all). Others are refused."


def _packages(settings: Settings, most: int) -> str:
    here = "packages" in settings.tools
    if not settings.allow_install:
        shows = "list_packages" if here else "info"
        return f"Packages: what is there cannot be added to; {shows} shows it."
    every = "*" in settings.allow_install
    names = "any package" if every else _listed(settings.allow_install, most)
    if not here:
        return f"Packages: create_session(packages=[...]) opens a session with {names} besides."
    return f"Packages: install adds {names} to the session without losing variables."


def _files(settings: Settings, sandbox: SandboxReport, most: int) -> str:
    network = _network(settings, most // 2)
    if _strict(settings):
        return f"Files: code cannot open files, and has no eval, exec, compile or input.{network}"
    if settings.mounts and sandbox.backend != "none":
        closing = any(each.strict for each in settings.mounts) or sandbox.backend == "landlock"
        later = " What appears there later may be readable only after a reset." * closing
        ways = {"read-only": False, "writable": True}
        shown = "; ".join(
            f"{way}: {_listed(names, most)}"
            for way, writable in ways.items()
            if (names := [each.guest for each in settings.mounts if each.writable is writable])
        )
        network = f" Of the host, without secrets, {shown}.{later}{network}"
    moves = "; write_file and read_file move files in and out" if "files" in settings.tools else ""
    if moves and settings.http is not None:
        moves += ", GET and PUT of this server's /sessions/HANDLE/files/PATH those of any size"
    begins = sandbox.backend not in ("none", "landlock")
    start = [each.guest for each in settings.mounts if each.start and begins]
    where = f"and relative paths begin in {start[0]}" if start else "works in its workspace folder"
    return f"Files: code {where}{moves}.{network}"


def _secrets(settings: Settings, most: int) -> str:
    named = [f"{each.name} in {each.header} of https://{each.host}" for each in settings.secrets]
    return (
        "Secrets: os.environ has placeholders to use as they are, for "
        f"{_listed(named, most)}; they become values on the way there, and nowhere else."
    )


def _network(settings: Settings, most: int) -> str:
    if not settings.confined:
        return ""
    names = dict.fromkeys((*settings.network, *(each.host for each in settings.secrets)))
    if not names:
        return " There is no network."
    hosts = _listed(list(names), most)
    return f" Network: {hosts}, by the proxy in HTTP_PROXY; nothing else."


def _strict(settings: Settings) -> bool:
    return settings.profile == "strict" and "*" not in settings.allow


def _listed(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first names that fit into `most` bytes, and the number of others."""
    shown = between.join(names)
    count = len(names)
    while count and len(shown.encode()) > most:
        count -= 1
        shown = between.join([*names[:count], f"{len(names) - count} more"])
    return shown
