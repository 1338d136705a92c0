"""Extensions of other distributions: found by entry point, loaded if a flag names them.

They are installed beside the server by its operator, and run with its rights. Extras of this
distribution are installed the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kernel_mcp import __version__
from kernel_mcp.errors import ConfigError, KernelMcpError

SANDBOXES = "kernel_mcp.sandboxes"
"""Group of callables that return a `Sandbox`, by its name for `--sandbox`.

They take no argument, and raise SandboxUnavailable with the remedy."""
INTERPRETERS = "kernel_mcp.interpreters"
"""Group of functions that return a `backends.interface.Backend`, by the name of that back-end."""
TOOLS = "kernel_mcp.tools"
"""Group of functions such as `tools.files.register`, by the name of their group in `--tools`."""


def install_line(extra: str) -> str:
    """Return the command that installs the wheel of this version with an extra."""
    return f"uv tool install './dist/kernel_mcp-{__version__}-py3-none-any.whl[{extra}]'"


def offered(group: str) -> tuple[str, ...]:
    """Return the names of a group that installed distributions offer."""
    from importlib.metadata import entry_points  # takes 20 ms, for names of extensions only

    return tuple(sorted({each.name for each in entry_points(group=group)}))


def load(group: str, name: str) -> Callable[..., Any]:
    """Import the callable that a distribution offers under a name. Raises ConfigError."""
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group=group, name=name)), None)
    if found is None:
        raise ConfigError(f"no installed distribution offers {name!r} in {group}")
    whose = f" of {found.dist.name}" if found.dist else ""
    try:
        loaded = found.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # third-party code raises anything
        raise ConfigError(
            f"{name!r}{whose} cannot be loaded ({found.value}): {type(error).__name__}: {error}"
        ) from None  # the command line passes on a SystemExit that is the cause
    if not callable(loaded):
        raise ConfigError(
            f"{name!r}{whose} cannot be used ({found.value}): it is "
            f"{type(loaded).__name__}, not a function or class"
        )
    return partial(_called, f"{name!r}{whose}", loaded)


def _called(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a distribution. Raises ConfigError, SandboxUnavailable."""
    try:
        return function(*arguments)
    except (KeyboardInterrupt, KernelMcpError):
        raise
    except BaseException as error:  # noqa: BLE001  # SystemExit, too
        raise ConfigError(f"{what} fails: {type(error).__name__}: {error}") from None
