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
from typing import Any

from kernel_mcp.errors import KernelMcpError
from kernel_mcp.fleet.storage import Storage, read
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
    """One version of a value. Number 0 stands for a value that does not exist."""

    number: int = 0
    value: Mapping[str, Any] | None = None


NOTHING = StoredVersion()


class Signed:
    """The values in a storage, for nodes with the fleet's key.

    Methods that access it are blocking and raise OSError.
    """

    def __init__(self, place: Storage, key: bytes) -> None:
        self.place = place
        self._key = key

    def latest(self, name: str) -> StoredVersion:
        """Return the newest version of a value, or NOTHING. Raises NotOurs.

        The value of a version is None if it has ended.
        """
        while numbers := self._numbers(name):
            number = numbers[-1]
            data = read(self.place, f"{name}/{number:0{_DIGITS}}", MOST_BYTES)
            if data is not None:
                return StoredVersion(number, self._opened(name, number, data))
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

    def mac(self, *parts: bytes) -> str:
        """Return the HMAC of `parts`, each preceded by its length, in hexadecimal."""
        found = hmac.new(self._key, digestmod=_MAC)
        for part in parts:
            found.update(len(part).to_bytes(8, "big"))
            found.update(part)
        return found.hexdigest()

    def _sealed(self, name: str, number: int, value: Mapping[str, Any] | None) -> bytes:
        text = json.dumps(value).encode("utf-8", "surrogateescape")
        return self.mac(name.encode(), str(number).encode(), text).encode() + b"\n" + text

    def _opened(self, name: str, number: int, data: bytes) -> Mapping[str, Any] | None:
        seal, _, text = data.partition(b"\n")
        wanted = self.mac(name.encode(), str(number).encode(), text).encode()
        if not hmac.compare_digest(seal, wanted):
            raise NotOurs(
                f"{name} in the store of the fleet was not written with the key of this fleet, and "
                "is not used. Was the token of the cluster changed? Else somebody else has written "
                "there."
            )
        value = json.loads(text.decode("utf-8", "surrogateescape"))
        if value is not None and not isinstance(value, dict):
            raise NotOurs(f"{name} in the store of the fleet is no value of this version")
        return value

    def _numbers(self, name: str) -> list[int]:
        found = (each for each in self.place.names(name) if each.isdecimal())
        return sorted(int(each) for each in found)


def key_of(secret: str, use: str = "store") -> bytes:
    """Derive a key of the fleet from the cluster's token, by HMAC-SHA256 with a label of its use.

    Whoever has the token controls all nodes anyway.
    """
    return hmac.new(secret.encode(), f"kernel-mcp fleet {use}".encode(), hashlib.sha256).digest()
