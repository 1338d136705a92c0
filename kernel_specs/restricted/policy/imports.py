"""Package layers on sys.path, and imports that verify an installation in this kernel.

The host adds generations to a layer while the kernel runs: folders named 1, 2, 3 …, the newest
first on sys.path. Each is complete once it has its name, and never changes afterwards. Child
processes find them through environment variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.machinery
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernel_specs.restricted.config import BootConfig
from kernel_specs.restricted.confine import SHIMS
from kernel_specs.restricted.interrupts import InterruptGate

LISTS = ("PYTHONPATH", "PATH")
"""Variables of the environment that list the folders of layers."""
_SITES = ("site-packages", "dist-packages")
_modules: dict[str, Any] = sys.modules
_own_flags: Callable[[], list[str]] = vars(subprocess)["_args_from_interpreter_flags"]


def entries(layers: Iterable[str]) -> list[str]:
    """Return the sys.path entries of layers: generations, newest first, and each folder itself."""
    found: list[str] = []
    for layer in layers:
        found += [f"{layer}/{number}" for number in sorted(_generations(layer), reverse=True)]
        found.append(layer)
    return found


def refresh(layers: Sequence[str]) -> None:
    """Update the layers' entries in sys.path, at the same place."""
    own = tuple(f"{layer}/" for layer in layers)
    rest = [path for path in sys.path if path not in layers and not path.startswith(own)]
    place = next((at for at, path in enumerate(sys.path) if path in layers), None)
    if place is None:
        place = before_sites(rest)
    else:
        kept = [path for path in sys.path[:place] if path in rest]
        place = len(kept)
    rest[place:place] = entries(layers)
    sys.path[:] = rest


def export(layers: Sequence[str]) -> None:
    """Update PYTHONPATH and PATH for child processes: generations first."""
    own = tuple(f"{layer}/" for layer in layers)
    found = [path for path in entries(layers) if path not in layers]
    _lead("PYTHONPATH", found, own)
    if found and sys.version_info >= (3, 11):
        _let_look()
    _lead("PATH", [path for path in (f"{each}/bin" for each in found) if Path(path).is_dir()], own)


def before_sites(paths: Sequence[str]) -> int:
    """Return the index in sys.path for package layers: that of the first site-packages folder."""
    return next((at for at, path in enumerate(paths) if path.endswith(_SITES)), len(paths))


def support(given: Sequence[str]) -> None:
    """Add the folder of the kernel's own packages to sys.path.

    `given` is empty, or folder and place: `first` is before site-packages, `last` the end.
    """
    if given:
        folder, order = given
        place = before_sites(sys.path) if order == "first" else len(sys.path)
        sys.path.insert(place, folder)


TOOLS = str(Path(__file__).parents[1] / "importable")
"""Folder of the modules by which code of cells calls tools."""
TOOLS_FD = "KERNEL_MCP_TOOLS_FD"
"""Variable with the descriptor of the socket where such code waits for the gateway of tools."""


def open_tools(fd: int) -> None:
    """Let code import `tools`, in child processes too; it calls over the listening socket `fd`."""
    sys.path.insert(before_sites(sys.path), TOOLS)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{before}{os.pathsep}{TOOLS}" if before else TOOLS
    os.environ[TOOLS_FD] = str(fd)


def _let_look() -> None:
    """Make workers of multiprocessing and joblib read PYTHONPATH although this process has -I."""
    for name in ("subprocess", "multiprocessing.util"):
        if name in _modules:
            _modules[name]._args_from_interpreter_flags = _worker_flags


def _worker_flags() -> list[str]:
    """Return the interpreter's options, with -s and -P in place of -I."""
    flags: list[str] = []
    for flag in _own_flags():
        flags += ("-s", "-P") if flag == "-I" else (flag,)
    return flags


def _lead(name: str, paths: Sequence[str], own: tuple[str, ...]) -> None:
    """Put `paths` first in a variable, replacing its paths that begin with one of `own`.

    The shim of pip stays before them: an installed pip could not write anywhere.
    """
    before = os.environ.get(name, "")
    kept = [path for path in before.split(os.pathsep) if path and not path.startswith(own)]
    shims = [path for path in kept if path.startswith(str(SHIMS))]
    after = os.pathsep.join([*shims, *paths, *(path for path in kept if path not in shims)])
    if after:
        os.environ[name] = after
    elif before:
        del os.environ[name]


def _generations(layer: str) -> list[int]:
    try:
        names = [entry.name for entry in Path(layer).iterdir()]
    except OSError:
        return []
    return [int(name) for name in names if name.isascii() and name.isdigit()]


MAIN_THREAD_WAIT_S = 0.05
"""Seconds to wait for an idle main thread, which some packages require, before using another."""
ERROR_CHARS = 500

Report = dict[str, dict[str, str]]


class LiveImports:
    """Adds new packages of the layers to the running session, and imports them."""

    def __init__(
        self,
        boot: BootConfig,
        allow: Callable[[Iterable[str]], None],
        gate: InterruptGate,
        in_main_loop: Callable[[Callable[[], None]], object],
    ) -> None:
        """`in_main_loop` has a function called in the loop of the main thread."""
        self._layers = boot.layers
        self._folders = [f"{each}/" for each in dict.fromkeys((boot.start, boot.workspace)) if each]
        self._others = tuple(f"{each}/" for each in boot.runtime)
        self._allow = allow
        self._gate = gate
        self._in_main_loop = in_main_loop

    async def take(self, allowed: Iterable[str], modules: Sequence[str]) -> Report:
        """Allow names, then import modules; return the state of each.

        `imported`; `earlier`: loaded before from another place, and kept; `shadowed`: hidden by a
        file of the session; `failed`.
        """
        refresh(self._layers)
        export(self._layers)
        importlib.invalidate_caches()
        self._allow(allowed)
        return await self._in_main_thread(modules) if modules else {}

    async def _in_main_thread(self, modules: Sequence[str]) -> Report:
        """Import in the main thread if no cell runs, else in another thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Report] = loop.create_future()
        started = asyncio.Event()
        once = threading.Lock()

        def run() -> None:
            report = {name: self._bring_in(name) for name in modules}
            loop.call_soon_threadsafe(done.set_result, report)

        def in_main_thread() -> None:
            if not self._gate.busy and once.acquire(blocking=False):
                loop.call_soon_threadsafe(started.set)
                with self._interruptible(), _silence():
                    run()

        self._in_main_loop(in_main_thread)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(started.wait(), MAIN_THREAD_WAIT_S)
        if once.acquire(blocking=False):
            threading.Thread(target=run, name="verify-imports", daemon=True).start()
        return await done

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let SIGINT end an import, as it ends a cell."""
        self._gate.begin()
        try:
            self._gate.open()
            yield
        except KeyboardInterrupt:
            return  # SIGINT came after the last import
        finally:
            self._gate.close()
            self._gate.end()

    def _bring_in(self, name: str) -> dict[str, str]:
        try:
            place = _place(name)
            loaded = sys.modules.get(name)
            if loaded is not None and place and _loaded_from(loaded) != place:
                return {"state": "earlier"}
            own = [each for each in self._folders if place.startswith(each)]
            if own and not place.startswith(self._others):
                return {"state": "shadowed", "detail": place[len(own[0]) :]}
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001  # SystemExit and panics of extensions too
            text = f"{type(error).__name__}: {error}".strip()
            return {"state": "failed", "detail": text[:ERROR_CHARS]}
        return {"state": "imported"}


def _place(name: str) -> str:
    """Return the file or folder that `name` would be imported from, or "". Raises ImportError."""
    parent = name.rpartition(".")[0]
    path = None
    if parent:
        importlib.import_module(parent)
        path = sys.modules[parent].__path__
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None:
        return ""
    if spec.origin and spec.origin != "namespace":
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), "")


def _loaded_from(module: Any) -> str:
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if origin and origin != "namespace":
        return str(origin)
    file = getattr(module, "__file__", None)
    return str(file or next(iter(getattr(module, "__path__", ())), ""))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard what packages print during their import."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
