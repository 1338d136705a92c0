"""Find the paths below writable mounts that Git's settings name, and follow changes.

Git itself parses the settings, in a sandbox.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.host_folders import settings
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.host_folders.links import below, links_on
from kernel_mcp.host_folders.namespaces import parts_of, weight
from kernel_mcp.host_folders.secrets import Parts, executed
from kernel_mcp.host_folders.settings import Entries, Repository
from kernel_mcp.linux.commands import output_of
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Builder, BuildRequest

ASK_S = 20.0
"""Time limit in seconds for Git to read a batch of settings files; each file takes some 3 ms."""
MOST_FILES = 256
"""Maximum number of settings files of one mount, included files counted."""
MOST_BYTES = 8 << 20
"""Maximum size in bytes of all settings files of one mount together."""
_READ = """\
for number in "$@"; do
    printf '\\0'
    git config --file "/proc/self/fd/$number" --no-includes --list -z || :
done
"""

logger = logging.getLogger(__name__)


class GitUnavailable(Exception):
    """Git could not read the settings; the text has the reason."""


@dataclass(frozen=True)
class SettingsReply:
    """The paths below one mount that settings name, and the files that were read for that."""

    paths: tuple[Parts, ...] = ()
    read: tuple[str, ...] = ()

    def messages(self, shown: ExposedMount) -> Iterator[dict[str, Any]]:
        """Yield the messages to the keeper, split to fit into packets."""
        items: list[tuple[str, Parts]] = [("paths", path) for path in self.paths]
        for path in self.read:
            inside = below(path, str(shown.mount.host))
            items += [("outside", (path,)) if inside is None else ("sources", inside)]
        pieces = list(parts_of(items, lambda item: weight(item[1]))) or [[]]
        for number, piece in enumerate(pieces, 1):
            message: dict[str, Any] = {"paths": [], "sources": [], "outside": []}
            for kind, parts in piece:
                message[kind].append(parts[0] if kind == "outside" else parts)
            yield {**message, "last": number == len(pieces)}


class GitSettingsQuery:
    """Reads the settings of a mount with Git; `builder` returns the sandbox for Git, and blocks."""

    def __init__(self, builder: Callable[[], Builder]) -> None:
        self._find = builder
        self._builder: Builder | None = None

    async def ask(self, shown: ExposedMount, *, again: bool) -> SettingsReply:
        """Read all settings that concern one mount. Raises GitUnavailable, OSError.

        With `again`, code may have changed the mount since it was first shown.
        """
        about = await anyio.to_thread.run_sync(partial(_MountSurvey, shown, again=again))
        pending = list(dict.fromkeys(about.files))
        seen: set[str] = set()
        size = count = 0
        while pending:
            contents = await anyio.to_thread.run_sync(partial(_contents, pending))
            seen.update(pending)
            size += sum(map(len, contents.values()))
            count += len(contents)
            if count > MOST_FILES or size > MOST_BYTES:
                raise GitUnavailable(
                    f"Git has more than {MOST_FILES} files of settings for it, or than "
                    f"{MOST_BYTES >> 20} MiB of them"
                )
            read = await self._read(contents) if contents else {}
            found = await anyio.to_thread.run_sync(partial(about.take, read))
            pending = [path for path in dict.fromkeys(found) if path not in seen]
        paths = await anyio.to_thread.run_sync(about.named)
        return SettingsReply(tuple(paths), (*seen, *about.entries))

    async def _read(self, contents: Mapping[str, bytes]) -> dict[str, Entries]:
        """Parse these files with Git, in a sandbox without network or access to their folders.

        Raises GitUnavailable.
        """
        program = shutil.which("git")
        if program is None:
            raise GitUnavailable("there is no git on this server's PATH")
        if self._builder is None:
            self._builder = await anyio.to_thread.run_sync(self._find)
        if not self._builder.confined:
            raise GitUnavailable("there is no sandbox in which Git could read foreign settings")
        files = [_memory(content) for content in contents.values()]
        try:
            async with self._builder.owner([], hostile=True) as identity:
                request = BuildRequest(
                    argv=["/bin/sh", "-c", _READ, "sh", *map(str, files)],
                    env={},
                    writable=[],
                    readonly=[Path(program)],
                    hostile=True,
                    network=False,
                )
                command = self._builder.command(request, identity)
                try:
                    with anyio.fail_after(ASK_S):
                        done = await output_of(
                            command.argv, env=command.env, pass_fds=[*command.pass_fds, *files]
                        )
                finally:
                    command.close_passed()
        except (OSError, TimeoutError) as reason:
            raise GitUnavailable(f"Git does not answer: {reason!r}") from reason
        finally:
            for file in files:
                os.close(file)
        if done.code:
            raise GitUnavailable(
                f"Git could not be asked: {done.stderr.decode(errors='replace')[-300:]}"
            )
        return dict(zip(contents, _parsed(done.stdout), strict=True))


def _contents(paths: Iterable[str]) -> dict[str, bytes]:
    return {path: content for path in paths if (content := settings.small(path))}


def _memory(content: bytes) -> int:
    file = os.memfd_create("settings", os.MFD_CLOEXEC)
    try:
        os.write(file, content)
    except OSError:
        os.close(file)
        raise
    return file


def _parsed(output: bytes) -> list[Entries]:
    """Return the entries of each file; an empty record marks the beginning of each."""
    files: list[list[tuple[str, str]]] = []
    for record in output.split(b"\0")[:-1]:
        if not record:
            files.append([])
            continue
        name, _, value = os.fsdecode(record).partition("\n")
        files[-1].append((name, value))
    return list(files)


class _MountSurvey:
    """Findings about one mount: its repositories, their settings, and those of the users.

    Users are the owner of the mount and the server's user. All methods block.
    """

    def __init__(self, shown: ExposedMount, *, again: bool) -> None:
        self._shown = shown
        self._again = again
        self._top = str(shown.mount.host)
        self._above = shown.mount.host.parts[1:]
        self._home = settings.homes(Path(self._top).stat().st_uid)
        self._repositories = list(dict.fromkeys(self._found()))
        self._read: dict[str, Entries] = {}
        tops = [each.top for each in self._repositories]
        self._tops = list(dict.fromkeys([self._top, *tops]))
        outer = [
            entry
            for top in self._tops[1:]
            if below(top, self._top) is None
            for entry in settings.executed_in(top)
        ]
        self.entries = [*outer, *map(self._path, shown.executable)]
        """Paths that hosts execute by name, in the mount and at the top of repositories around it.

        Also scripts and folders of hooks that settings name, wherever they are.
        """

    def _found(self) -> list[Repository]:
        known = [each for each in self._shown.git if self._shown.in_read_only_folder((*each, ""))]
        repositories = [settings.repository_in(self._path(each)) for each in known]
        dots = [each for each in self._shown.executable if each[-1].lower() == ".git"]
        repositories += [settings.repository_at(self._path(each)) for each in dots]
        around = settings.repository_around(self._top)
        return [*repositories, *([around] if around is not None else [])]

    def _path(self, parts: Parts) -> str:
        return "/".join((self._top, *parts))

    @property
    def files(self) -> list[str]:
        """Settings files of the repositories, the machine and the users, to be read first."""
        own = [path for each in self._repositories for path in each.settings]
        return [*own, *settings.of_the_user(Path(self._top).stat().st_uid)]

    def take(self, read: Mapping[str, Entries]) -> list[str]:
        """Add the entries of files; return the paths of files that they include."""
        self._read.update(read)
        return [
            path
            for file, entries in read.items()
            for path in settings.included(file, entries, self._home)
        ]

    def named(self) -> list[Parts]:
        """Return the paths below the mount that the settings name, and the links to them.

        The paths are resolved.
        """
        bases = [each.folder for each in self._repositories]
        for file, entries in self._read.items():
            bases += settings.worktrees(file, entries)
        bases = list(dict.fromkeys([*self._tops, *bases]))
        found: dict[str, None] = {}
        for file, entries in self._read.items():
            found.update(dict.fromkeys(settings.included(file, entries, self._home)))
            found.update(dict.fromkeys(settings.named_by(entries, bases, self._home, self._tops)))
        known = (each for each in found if each not in self._tops and self._passable(each))
        self.entries += filter(settings.is_script, list(known))
        for entry in self.entries:
            found.update(dict.fromkeys(settings.links_of(entry)))
            near = [os.path.dirname(entry), *self._tops]  # noqa: PTH120
            found.update(dict.fromkeys(settings.referred(entry, near)))
        for repository in self._repositories:
            found.update(dict.fromkeys(repository.folders))
        inside: dict[Parts, None] = {}
        for path in found:
            inside.update(dict.fromkeys(self._inside(path)))
        return list(inside)

    def _passable(self, link: str) -> bool:
        """Return True for a link that code cannot have made: outside the mount, or masked."""
        inside = below(link, self._top)
        return inside is None or not self._again or inside in self._shown.covers

    def _inside(self, path: str) -> Sequence[Parts]:
        links, end = links_on(path, self._passable)
        places = [below(each, self._top) for each in (*links, *([end] if end else []))]
        return [
            each
            for each in places
            if each
            and not (self._shown.in_read_only_folder(each) or executed((*self._above, *each)))
        ]


class GitSettingsTracker:
    """Tracks the paths below writable mounts that settings name; `send` passes them on."""

    def __init__(
        self,
        shown: Sequence[ExposedMount],
        query: GitSettingsQuery,
        send: Callable[[Mapping[str, Any]], Awaitable[object]],
    ) -> None:
        self._shown = shown
        self._query = query
        self._send = send
        self._stale: dict[int, None] = {}
        self._changed = anyio.Event()
        self._turn = anyio.Lock()
        self._read: dict[int, tuple[str, ...]] = {}
        """Files that were read, by mount."""
        self._stamps: tuple[object, ...] = ()
        self._failures: dict[int, str] = {}

    @property
    def gaps(self) -> list[str]:
        """Messages about mounts whose settings could not be read, with the reason."""
        found = self._failures.items()
        return [f"{self._shown[number].mount.guest}: {_UNKNOWN} ({why})" for number, why in found]

    def changed(self, number: int) -> None:
        """Record that settings of the mount with this number have changed."""
        self._stale[number] = None
        self._changed.set()

    async def look(self) -> None:
        """Refresh if a file that was read has changed since. Raises LaunchError."""
        if self._read and await self._stamped() != self._stamps:
            self._stale.update(dict.fromkeys(self._read))
        await self.refresh()

    async def follow(self) -> None:
        """Refresh after each `changed`, until cancelled; failures are logged."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            try:
                await self.refresh()
            except LaunchError as reason:
                logger.warning("%s", reason)

    async def refresh(self, *, again: bool = True) -> None:
        """Read the settings of mounts where they have changed. Raises LaunchError.

        `again` is False before the first session, while no code can have changed the mounts.
        """
        async with self._turn:
            while self._stale:
                number = next(iter(self._stale))
                del self._stale[number]
                await self._refresh(number, again=again)

    async def _refresh(self, number: int, *, again: bool) -> None:
        shown = self._shown[number]
        try:
            answer = await self._query.ask(shown, again=again)
        except (GitUnavailable, OSError) as reason:
            if self._failures.get(number) != str(reason):
                self._failures[number] = str(reason)
                logger.warning("--mount %s: %s (%s)", shown.mount, _UNKNOWN, reason)
            return
        self._failures.pop(number, None)
        self._read[number] = answer.read
        self._stamps = await self._stamped()
        about = {"op": "named", "mount": number, "again": again}
        for message in answer.messages(shown):
            await self._send({**about, **message})

    async def _stamped(self) -> tuple[object, ...]:
        paths = [path for files in self._read.values() for path in files]
        return await anyio.to_thread.run_sync(partial(settings.stamps, paths))


_UNKNOWN = (
    "it is not known which paths in it Git's settings name, so that sessions can change what Git "
    "runs there: mount a folder for results instead"
)
