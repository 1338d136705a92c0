"""Versioned, signed values in the shared store, changed by compare-and-set.

The storage creates a name only once, so only one node can make the next version. A version has an
HMAC, by the fleet's key, of its name, number and content. Write access to the storage is therefore
not enough to forge a version or to replace one by another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_mcp.errors import ConfigError, KernelMcpError
from kernel_mcp.fleet.cluster import LEAST_TOKEN_CHARS
from kernel_mcp.fleet.storage import Storage, read
from kernel_mcp.linux.folders import require_unshared
from kernel_mcp.records import dataclass

MOST_BYTES = 64 * 1024 * 1024
KEPT = 2
"""Versions that are retained: a reader of the last but one still finds it complete."""
_DIGITS = 10
_MAC = "sha256"


class NotOurs(KernelMcpError):
    """Data in the store was not written with the key of this fleet, and is not used."""


class Overtaken(KernelMcpError):
    """Another node has written the next version of a value: this node has lost the session."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version of a value. Number 0 stands for a value that does not exist.

    `old` is True if it was signed with another key than the one that signs now.
    """

    number: int = 0
    value: Mapping[str, Any] | None = None
    old: bool = False


NOTHING = StoredVersion()


class Signed:
    """The values in a storage, for nodes with the fleet's keys. The first one signs.

    Methods that access it are blocking and raise OSError.
    """

    def __init__(self, place: Storage, *keys: bytes) -> None:
        self.place = place
        self._keys = keys

    def latest(self, name: str, *, foreign: bool = False) -> StoredVersion:
        """Return the newest version of a value, or NOTHING. Raises NotOurs.

        The value of a version is None if it has ended; with `foreign`, also if it is not ours.
        """
        while numbers := self._numbers(name):
            number = numbers[-1]
            data = read(self.place, f"{name}/{number:0{_DIGITS}}", MOST_BYTES)
            if data is not None:
                try:
                    return self._opened(name, number, data)
                except NotOurs:
                    if not foreign:
                        raise
                    return StoredVersion(number)
        return NOTHING

    def advance(
        self, name: str, before: StoredVersion, value: Mapping[str, Any] | None
    ) -> StoredVersion:
        """Write the version after `before` and return it; a value of None ends it.

        Raises Overtaken if another version has been written since.
        """
        number = before.number + 1
        made = self.place.create(f"{name}/{number:0{_DIGITS}}", self._sealed(name, number, value))
        numbers = self._numbers(name)
        removed = before.number and before.number not in numbers
        if made and removed:  # others may have begun again at version 1
            self.place.remove(f"{name}/{number:0{_DIGITS}}")
        if not made or removed or numbers[-1:] != [number]:  # or it had been made and removed
            raise Overtaken(f"another node has changed {name} since version {before.number}")
        for old in numbers[:-KEPT]:
            self.place.remove(f"{name}/{old:0{_DIGITS}}")
        return StoredVersion(number, value)

    def remove(self, name: str, last: StoredVersion) -> None:
        """Remove all versions of a value if it has ended and `last` is its newest version."""
        numbers = self._numbers(name)
        if last.value is None and numbers[-1:] == [last.number]:
            for number in numbers:
                self.place.remove(f"{name}/{number:0{_DIGITS}}")

    def _sealed(self, name: str, number: int, value: Mapping[str, Any] | None) -> bytes:
        text = json.dumps(value).encode("utf-8", "surrogateescape")
        return _mac(self._keys[0], name, number, text) + b"\n" + text

    def _opened(self, name: str, number: int, data: bytes) -> StoredVersion:
        seal, _, text = data.partition(b"\n")
        seals = [_mac(key, name, number, text) for key in self._keys]
        found = [hmac.compare_digest(seal, each) for each in seals]
        if not any(found):
            raise NotOurs(
                f"{name} in the store of the fleet was not written with a key of this fleet, and "
                "is not used. Was the token of the cluster changed, or a line of --fleet-key "
                "removed too early? Else somebody else has written there."
            )
        value = json.loads(text.decode("utf-8", "surrogateescape"))
        if value is not None and not isinstance(value, dict):
            raise NotOurs(f"{name} in the store of the fleet is no value of this version")
        return StoredVersion(number, value, old=not found[0])

    def _numbers(self, name: str) -> list[int]:
        found = (each for each in self.place.names(name) if each.isdecimal())
        return sorted(int(each) for each in found)


def _mac(key: bytes, name: str, number: int, text: bytes) -> bytes:
    """Return the HMAC of a version, each part preceded by its length, in hexadecimal."""
    found = hmac.new(key, digestmod=_MAC)
    for part in (name.encode(), str(number).encode(), text):
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest().encode()


def keys_of(file: Path | None, token: str) -> list[bytes]:
    """Return the keys in the lines of a file; without one, the key from the cluster's token.

    A line with that token is that key. Raises ConfigError.
    """
    if file is None:
        return [key_of(token)]
    try:
        require_unshared(file)
        lines = [line.strip() for line in file.read_text().splitlines() if line.strip()]
        shared = file.stat().st_mode & 0o007
    except (OSError, ValueError) as error:
        raise ConfigError(f"--fleet-key {file}: {error}") from error
    if shared:
        raise ConfigError(f"--fleet-key: others may read {file}: close it with chmod o-rwx {file}")
    if not lines or min(map(len, lines)) < LEAST_TOKEN_CHARS:
        raise ConfigError(
            f"--fleet-key {file}: expected a key in each line, of {LEAST_TOKEN_CHARS} random "
            "characters or more, such as `openssl rand -hex 32` prints"
        )
    return list(map(key_of, lines))


def key_of(secret: str, use: str = "store") -> bytes:
    """Derive a key of the fleet from a secret text, by HMAC-SHA256 with a label of its use.

    Whoever has the token of the cluster controls all nodes anyway.
    """
    return hmac.new(secret.encode(), f"kernel-mcp fleet {use}".encode(), hashlib.sha256).digest()
