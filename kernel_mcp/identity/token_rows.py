"""Rows of a tokens file: one JSON object a line, for a token and the permissions of its owner.

{"principal": "alice", "sha256": "…", "scopes": ["kernel:run"], "quotas": {"sessions": 4},
 "doors": ["mount:/data"], "added": "2026-11-23T08:00:00Z"}

A row for access tokens of the issuer has a `claim` ("NAME=VALUE") in place of `sha256`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NoReturn

from kernel_mcp.config.quotas import Quotas, quotas
from kernel_mcp.errors import ConfigError
from kernel_mcp.identity import EVERY_SCOPE, PRINCIPAL, SCOPES
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB, MIB

MOST_BYTES = 4 * MIB
"""Most bytes of a tokens file."""
MOST_ROWS = 10_000
"""Most rows. Each call compares its token with all of them, which takes 1 ms for so many."""
MOST_LINE = 16 * KIB
MOST_DIGITS = 18
ISSUED = re.compile(r".*@[0-9a-f]{8}")
"""Names of an issuer's principals (`issuer.principal_name`), which rows may not have."""

_KEYS = ("principal", "sha256", "claim", "scopes", "quotas", "doors", "added")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DOOR = re.compile(
    r"\*|network|attach|ask|(mount|device):/.*|(env|secret):[A-Za-z_][A-Za-z0-9_]*"
    r"|kernel:[a-z][a-z0-9_+#.-]*|tools:[A-Za-z][A-Za-z0-9_-]*"
)
GRANTS_ARE = (
    "mount:GUEST, env:NAME, secret:NAME, device:PATH, kernel:NAME, tools:NAME, network, attach, "
    "ask or *"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A condition on access tokens: claim `name` is `value`, or a list that contains it."""

    name: str
    value: str

    def holds(self, claims: Mapping[str, Any]) -> bool:
        """Return True if these claims of a token fulfil the condition."""
        found = claims.get(self.name)
        return found == self.value or (isinstance(found, list) and self.value in found)

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row of a tokens file: for the token with `digest`, or for all tokens with `claim`.

    line       its number, from 1
    principal  empty if tokens with the claim keep the issuer's names
    digest     SHA-256 of the token; empty in a row with a claim
    """

    line: int
    principal: str
    digest: bytes = b""
    claim: Claim | None = None
    scopes: frozenset[str] = frozenset(SCOPES)
    quotas: Quotas = field(default_factory=Quotas)
    grants: tuple[str, ...] = ()
    added: str = ""


def parse(content: bytes, source: str) -> tuple[TokenRow, ...]:
    """Parse a tokens file. Raises ConfigError, which names `source` and the line."""
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{source}: larger than the {MOST_BYTES // MIB} MiB that are read of it")
    rows: list[TokenRow] = []
    first: dict[str, TokenRow] = {}
    digests: dict[bytes, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_row(line, number)
            if row.digest and (other := digests.setdefault(row.digest, number)) != number:
                raise ValueError(f"it has the same `sha256` as line {other}")
            known = first.setdefault(row.principal, row) if row.principal else row
            same = {"quotas": row.quotas == known.quotas, "doors": row.grants == known.grants}
            for name, is_same in same.items():
                if not is_same:
                    raise ValueError(
                        f"`{name}` of {row.principal} are others than in line {known.line}; all "
                        "rows of a principal have the same"
                    )
            if len(rows) == MOST_ROWS:
                raise ValueError(f"more than {MOST_ROWS:,} rows")
        except ValueError as error:
            raise ConfigError(f"{source}, line {number}: {error}") from None
        rows.append(row)
    return tuple(rows)


def parse_row(line: bytes, number: int) -> TokenRow:
    """Parse line `number`. Raises ValueError."""
    table = _table(line)
    if unknown := [name for name in table if name not in _KEYS]:
        raise ValueError(f"there is no key {unknown[0][:40]!r}; there are {', '.join(_KEYS)}")
    if ("sha256" in table) == ("claim" in table):
        raise ValueError("expected one of `sha256` and `claim`")
    claim = _claim(table["claim"]) if "claim" in table else None
    digest = b"" if claim else _digest(table["sha256"])
    principal = ""
    if "principal" in table or not claim:
        principal = principal_named(table.get("principal"))
    given = table.get("quotas", {})
    if not isinstance(given, dict):
        raise ValueError('`quotas`: expected an object such as {"sessions": 4}')
    try:
        own = quotas(given)
    except ValueError as error:
        raise ValueError(f"`quotas`: {error}") from None
    added = table.get("added", "")
    if not isinstance(added, str) or len(added) > 40 or not added.isprintable():
        raise ValueError("`added`: expected a time such as 2026-11-23T08:00:00Z")
    return TokenRow(
        line=number,
        principal=principal,
        digest=digest,
        claim=claim,
        scopes=scopes_named(_texts(table, "scopes", EVERY_SCOPE if claim else SCOPES)),
        quotas=own,
        grants=grants_named(_texts(table, "doors", ())),
        added=added,
    )


def principal_named(given: object) -> str:
    """Return the name of a principal unchanged. Raises ValueError if it is not valid."""
    if not isinstance(given, str) or not PRINCIPAL.fullmatch(given):
        raise ValueError(
            "a principal has a name of 1 to 64 letters, digits and . _ - @, not dots alone"
        )
    if ISSUED.fullmatch(given):
        raise ValueError(
            "names that end in @ and eight hexadecimal digits are those of an issuer's subjects"
        )
    return given


def scopes_named(given: Sequence[str]) -> frozenset[str]:
    """Return scopes as a set. Raises ValueError for an unknown one."""
    if unknown := [each for each in given if each not in EVERY_SCOPE]:
        raise ValueError(f"{unknown[0][:40]!r} is no scope; there are {', '.join(EVERY_SCOPE)}")
    return frozenset(given)


def grants_named(given: Sequence[str]) -> tuple[str, ...]:
    """Return the grants of a row (`doors`), sorted and unique. Raises ValueError if not valid."""
    for each in given:
        if not _DOOR.fullmatch(each) or not each.isprintable() or len(each) > 4096:
            raise ValueError(f"{each[:40]!r} is no door; there are {GRANTS_ARE}")
    return tuple(sorted(set(given)))


def _table(line: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly: no duplicate keys, NaN or huge numbers. Raises ValueError."""
    if len(line) > MOST_LINE:
        raise ValueError(f"longer than {MOST_LINE // KIB} KiB")
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    try:
        table = json.loads(
            text,
            object_pairs_hook=_once,
            parse_constant=_no_constant,
            parse_int=_short_number,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("not a row: it is nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError('expected an object such as {"principal": …, "sha256": …}')
    return table


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:40]!r} is there twice")
        found[name] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name}")


def _short_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError("a number is too large")
    return int(digits)


def _digest(given: object) -> bytes:
    if not isinstance(given, str) or not _DIGEST.fullmatch(given):
        raise ValueError("`sha256`: expected 64 hexadecimal digits in lower case")
    return bytes.fromhex(given)


def _claim(given: object) -> Claim:
    name, equals, value = given.partition("=") if isinstance(given, str) else ("", "", "")
    if not (name and equals and value and (name + value).isprintable()):
        raise ValueError("`claim`: expected NAME=VALUE, such as groups=analysts")
    return Claim(name, value)


def _texts(table: Mapping[str, Any], key: str, default: Sequence[str]) -> Sequence[str]:
    given = table.get(key, default)
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, str) for each in given):
        raise ValueError(f"`{key}`: expected a list of texts")
    return given
