"""Dumps of the variables of other languages, passed as a file in the session's workspace.

A dump is hostile data: the server bounds, stores and returns it, but never parses it.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.errors import HibernationError, KernelMcpError
from kernel_mcp.linux.pipes import Checksum
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

PIECE_BYTES = 4 * MIB
EXTRA_BYTES = 32 * MIB
"""Bytes of a dump beyond those of the variables."""
REASON_CHARS = 200

Evaluate = Callable[[str, float], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class DumpCode:
    """Code of a language that writes and reads dumps, with placeholders for JSON string literals.

    write  replaces FILE, LEAVE (a JSON list of names) and MOST (bytes); prints an object with the
           fields of `sessions.snapshot.Dump`
    read   replaces FILE and LEAVE; prints an object with `names` and `lost`
    """

    write: str
    read: str


class FileSnapshots:
    """The `Snapshots` of one kernel."""

    def __init__(self, code: DumpCode, evaluate: Evaluate, workspace: Path, seen_at: str) -> None:
        """The kernel sees the folder `workspace` at the path `seen_at`."""
        self._code = code
        self._evaluate = evaluate
        self._workspace = workspace
        self._seen_at = seen_at

    async def write(
        self, path: Path, *, max_bytes: int, leave: Iterable[str], seconds: float
    ) -> tuple[Mapping[str, Any], int, str]:
        """Write the variables to `path`; return the kernel's description, size and checksum.

        The description is hostile data. Raises HibernationError, OSError.
        """
        with self._exchange() as name:
            said = await self._ask(self._code.write, name, leave, seconds, max_bytes)
            size, checksum = await anyio.to_thread.run_sync(
                partial(self._fetch, name, path, max_bytes + EXTRA_BYTES)
            )
        return said, size, checksum

    async def read(self, path: Path, *, leave: Iterable[str], seconds: float) -> Mapping[str, Any]:
        """Load the dump in `path`; return the kernel's description, which is hostile data.

        Raises HibernationError, OSError.
        """
        with self._exchange() as name:
            await anyio.to_thread.run_sync(self._hand_over, path, name)
            return await self._ask(self._code.read, name, leave, seconds)

    async def _ask(
        self, code: str, name: str, leave: Iterable[str], seconds: float, most: int = 0
    ) -> Mapping[str, Any]:
        texts = {"FILE": f"{self._seen_at}/{name}", "LEAVE": json.dumps(sorted(leave))}
        for key, text in texts.items():
            code = code.replace(key, json.dumps(text, ensure_ascii=False))
        try:
            said = await self._evaluate(code.replace("MOST", str(most)), seconds)
        except KernelMcpError as error:
            raise HibernationError(f"its kernel could not do it: {error}") from error
        if not isinstance(said, dict):
            raise HibernationError("its kernel did not answer as expected")
        if reason := said.get("failure"):
            raise HibernationError(one_line(str(reason))[:REASON_CHARS])
        return said

    @contextmanager
    def _exchange(self) -> Iterator[str]:
        """Yield the name of a file in the workspace, which is removed afterwards."""
        name = f".kernel-mcp-{secrets.token_hex(8)}"
        try:
            yield name
        finally:
            (self._workspace / name).unlink(missing_ok=True)

    def _fetch(self, name: str, path: Path, most: int) -> tuple[int, str]:
        """Copy the file of a kernel to `path`. Blocking. Raises HibernationError, OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        passed, size = Checksum(), 0
        with open(os.open(self._workspace / name, flags), "rb", buffering=0) as source:
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                raise HibernationError("its kernel wrote no file")
            with open(_created(path), "wb") as target:
                while piece := source.read(PIECE_BYTES):
                    size += len(piece)
                    if size > most:
                        raise HibernationError("its kernel wrote more than was permitted")
                    passed.add(piece)
                    target.write(piece)
        return size, str(passed)

    def _hand_over(self, path: Path, name: str) -> None:
        """Copy `path` to a file that the kernel may read. Blocking. Raises OSError."""
        owner = self._workspace.stat()
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            open(os.open(path, flags), "rb", buffering=0) as source,
            open(_created(self._workspace / name), "wb") as target,
        ):
            if owner.st_uid != os.geteuid():
                os.fchown(target.fileno(), owner.st_uid, owner.st_gid)
            while piece := source.read(PIECE_BYTES):
                target.write(piece)


def _created(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


R_WRITE = """\
home <- globalenv()
named <- function(x) if (length(x)) as.list(x) else structure(list(), names = character())
seen <- new.env()
unsavable <- function(x, depth) {
  kind <- typeof(x)
  if (kind %in% c("externalptr", "weakref")) return("it refers to memory outside R")
  if (inherits(x, "connection")) return("it is an open connection")
  if (depth > 400L) return("it is nested too deeply to be searched")
  parts <- list()
  if (kind == "environment") {
    known <- identical(x, home) || isNamespace(x) || nzchar(environmentName(x))
    key <- format(x)
    if (known || exists(key, envir = seen, inherits = FALSE)) return("")
    assign(key, TRUE, envir = seen)
    inner <- ls(x, all.names = TRUE)
    parts <- mget(inner[!vapply(inner, bindingIsActive, NA, x)], envir = x)
    parts <- c(parts, list(parent.env(x)))
  } else if (kind == "closure") {
    parts <- list(environment(x))
  } else if (is.list(x)) {
    parts <- unclass(x)
  } else if (isS4(x)) {
    parts <- lapply(methods::slotNames(x), function(each) methods::slot(x, each))
  }
  hung <- attributes(x)
  hung[[".internal.selfref"]] <- NULL
  parts <- c(parts, hung)
  for (i in seq_along(parts)) {
    if (identical(parts[[i]], quote(expr = ))) next
    part <- parts[[i]]
    if (is.atomic(part) && is.null(attributes(part))) next
    if (nzchar(found <- unsavable(part, depth + 1L))) return(found)
  }
  ""
}
why <- function(name) {
  if (bindingIsActive(name, home)) return("it is an active binding")
  tryCatch(unsavable(get(name, envir = home), 0L),
    error = function(reason) paste("it cannot be read:", conditionMessage(reason)))
}
names <- setdiff(ls(home, all.names = TRUE), jsonlite::fromJSON(LEAVE))
lost <- vapply(names, why, "")
good <- names[!nzchar(lost)]
lost <- lost[nzchar(lost)]
sizes <- vapply(good, function(name) as.numeric(utils::object.size(get(name, home))), 0)
fits <- cumsum(sort(sizes)) <= MOST
large <- names(fits)[!fits]
lost[large] <- "too large to be saved"
good <- setdiff(good, large)
saveRDS(list(packages = rev(.packages()), values = mget(good, envir = home)), FILE,
  compress = FALSE)
shown <- good[!startsWith(good, ".")]
about <- lapply(shown, function(name)
  list(name = name, type = class(get(name, home))[1], size = sizes[[name]], preview = ""))
told <- list(names = I(shown), stored = I(good), groups = list(I(good)), lost = named(lost),
  variables = about)
"""
R_READ = """\
found <- readRDS(FILE)
attached <- function(each)
  suppressWarnings(suppressMessages(require(each, character.only = TRUE, quietly = TRUE)))
gone <- Filter(Negate(attached), setdiff(found$packages, .packages()))
gone <- structure(as.list(rep("it cannot be attached now", length(gone))),
  names = sprintf("package:%s", gone))
values <- found$values[setdiff(names(found$values), jsonlite::fromJSON(LEAVE))]
list2env(values, globalenv())
shown <- names(values)
told <- list(names = I(shown[!startsWith(shown, ".")]), lost = gone)
"""
"""RDS keeps shared environments; attached packages are attached again."""
