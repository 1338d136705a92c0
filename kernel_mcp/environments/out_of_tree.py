"""Find modules of an operator's environment or project that lie outside of it.

The sentences about them name the flag that makes each visible to sessions.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kernel_mcp.config.mounts import Mount
from kernel_mcp.launch.base import KernelEnvironment, Outside

SYSTEM = (Path("/usr"), Path("/bin"))
OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_READ = 1 << 16
_MOST_MODULES = 1000


def unseen(environment: KernelEnvironment, mounts: Sequence[Mount]) -> dict[str, str]:
    """Return the modules of an environment that sessions do not see, each with a sentence.

    The sentence names the flag that shows the module. If modules are not known, the key is the name
    of the package or of the `.pth` file.
    """
    support = environment.support
    return {
        module: f"{name} lies in {each.path}, outside of the environment, where sessions do not "
        f"see it: the operator can start the server with --mount {each.path}"
        for name, each in sorted(support.outside.items() if support else ())
        if not _shown(Path(each.path), mounts)
        for module in each.modules or {name}
    }


def unseen_code(
    code: Mapping[str, Path], mounts: Sequence[Mount], local: Iterable[str] = ()
) -> dict[str, str]:
    """Return a sentence on how to import each module of a project; `code` is that of `code_of`.

    `local` are names of its packages: an index may have other packages of these names.
    """
    told = {
        key: f"{name} is a package of the project (--project), which is not installed"
        for name in local
        for key in (name, name.replace("-", "_"))
    }
    for module, folder in code.items():
        mount = f"the operator can start the server with --mount {folder}, and "
        told[module] = (
            f"{module} is code of the project (--project), which is not installed: "
            f"{'' if _shown(folder, mounts) else mount}sys.path.insert(0, {str(folder)!r}) then "
            "finds it"
        )
    return told


def _shown(place: Path, mounts: Sequence[Mount]) -> bool:
    """Return True if a mount shows a host path to sessions under the same path."""
    return any(place.is_relative_to(each.host) for each in mounts if each.guest == str(each.host))


def code_of(folder: Path, name: str) -> dict[str, Path]:
    """Return the modules of a project with the folders that they are imported from.

    Looks in `folder` and its `src`; `name` is the project's own package.
    """
    found: dict[str, Path] = {}
    for place in (folder, folder / "src"):
        if place != folder and place.is_symlink():  # the operator has not named its target
            continue
        with suppress(OSError):
            found |= dict.fromkeys(modules_in(place), place)
            if name.isidentifier() and name.isascii() and (place / name).is_dir():
                found[name] = place
    return found


def outside_of(site: Path, shown: Sequence[Path]) -> dict[str, Outside]:
    """Return the code that is imported from outside `site`.

    Keys are names of editable packages, `.pth` files and symlinks that lead to it. Code below one
    of the folders `shown` or of the system is left out. Raises OSError, and ValueError for a `.pth`
    that is no regular file.
    """
    found: dict[str, Outside] = {}
    exact: set[str] = set()
    for info in sorted(site.glob("*.dist-info")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            told = json.loads(small_text(info / "direct_url.json"))
            place = urlsplit(told["url"])
            if told["dir_info"]["editable"] and place.scheme == "file":
                name = info.stem.rpartition("-")[0]
                found[name] = Outside(os.path.normpath(unquote(place.path)))
                found[name].modules.update(small_text(info / "top_level.txt").split())
    for file in sorted(site.glob("*.pth")):
        if file.exists() and not file.is_file():
            raise ValueError(f"{file.name} is no regular file, which Python would not stop reading")
        with suppress(OSError, ValueError):
            for line in small_text(file).splitlines():
                path = Path(os.path.normpath(site / line.strip()))
                if line.startswith(("#", "import ", "import\t")) or not path.is_dir():
                    continue
                known = [name for name in found if path.is_relative_to(found[name].path)]
                name = known[0] if known else file.name
                into = found.setdefault(name, Outside(str(path)))
                into.modules.update(modules_in(path))
                if known and name not in exact:  # the imported part, not the whole project
                    exact.add(name)
                    found[name] = Outside(str(path), into.modules)
    for entry in os.scandir(site):
        path = Path(entry)
        first = path / "__init__.py" if entry.is_dir(follow_symlinks=False) else path
        if first.is_symlink():
            found[entry.name] = Outside(os.path.realpath(first), {entry.name.split(".")[0]})
    real = [Path(os.path.realpath(each)) for each in shown]
    return {
        name: each
        for name, each in found.items()
        if each.path.isprintable()
        and not is_below(Path(os.path.realpath(each.path)), [*real, *SYSTEM])
    }


def modules_in(folder: Path) -> set[str]:
    """Return the names of the importable modules in a folder. Raises OSError."""
    with os.scandir(folder) as entries:
        names = [
            entry.name.removesuffix(".py")
            for entry in itertools.islice(entries, _MOST_MODULES)
            if entry.name.endswith(".py") or Path(entry, "__init__.py").exists()
        ]
    return {name for name in names if name.isidentifier() and name.isascii()}


def is_below(path: Path, folders: Iterable[Path]) -> bool:
    """Return True if a path is one of `folders` or below one."""
    return any(path.is_relative_to(each) for each in folders)


def small_text(path: Path) -> str:
    """Return the first 64 KiB of a regular file. Raises OSError, and ValueError for others."""
    with open(os.open(path, OPEN), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        return file.read(_MOST_READ).decode()
