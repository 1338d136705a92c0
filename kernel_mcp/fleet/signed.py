"""Values that nodes of a fleet agree on: each has versions, and one node alone makes the next.

A version is created where there is none, which a place does for one at a time: that is
compare-and-set. It carries an HMAC of the fleet's key, its name and its number, so that who can
write to the place can neither forge one nor pass off another for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from kernel_mcp.errors import KernelMcpError
from kernel_mcp.fleet.places import Place, read
from kernel_mcp.records import dataclass

MOST_BYTES = 64 * 1024 * 1024
KEPT = 2
"""Versions that stay: who reads the last but one while another is made finds it whole."""
_DIGITS = 10
_MAC = "sha256"


class NotOurs(KernelMcpError):
    """What was read was not written with the key of this fleet; nothing of it is believed."""


class Overtaken(KernelMcpError):
    """Another node has made the next version of a value: this one has lost the session."""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a value; version 0 is that of one that is not there."""

    number: int = 0
    value: Mapping[str, Any] | None = None


NOTHING = Version()


class Signed:
    """The values in a place, for nodes that have the key of the fleet. All methods block.

    All raise OSError.
    """

    def __init__(self, place: Place, key: bytes) -> None:
        self.place = place
        self._key = key

    def latest(self, name: str) -> Version:
        """The newest version of a value. Raises NotOurs."""
        while numbers := self._numbers(name):
            number = numbers[-1]
            data = read(self.place, f"{name}/{number:0{_DIGITS}}", MOST_BYTES)
            if data is not None:
                return Version(number, self._opened(name, number, data))
        return NOTHING

    def advance(self, name: str, before: Version, value: Mapping[str, Any] | None) -> Version:
        """Make the next version of a value after the one that was read; None ends it.

        Raises Overtaken where another has been made since.
        """
        number = before.number + 1
        made = self.place.create(f"{name}/{number:0{_DIGITS}}", self._sealed(name, number, value))
        numbers = self._numbers(name)
        removed = before.number and before.number not in numbers
        if made and removed:  # others may have begun with the first version again
            self.place.remove(f"{name}/{number:0{_DIGITS}}")
        if not made or removed or numbers[-1:] != [number]:  # or it had been made and removed
            raise Overtaken(f"another node has changed {name} since version {before.number}")
        for old in numbers[:-KEPT]:
            self.place.remove(f"{name}/{old:0{_DIGITS}}")
        return Version(number, value)

    def remove(self, name: str, last: Version) -> None:
        """Remove all versions of a value that has ended with this one, which nobody needs."""
        numbers = self._numbers(name)
        if last.value is None and numbers[-1:] == [last.number]:
            for number in numbers:
                self.place.remove(f"{name}/{number:0{_DIGITS}}")

    def mac(self, *parts: bytes) -> str:
        """The HMAC of some bytes, each with its length, as hexadecimal digits."""
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


def key_of(secret: str) -> bytes:
    """The key of a fleet whose cluster has this token: who has that is obeyed by all nodes anyway.

    HMAC-SHA256 as a key derivation, with a fixed label.
    """
    return hmac.new(secret.encode(), b"kernel-mcp fleet store", hashlib.sha256).digest()
