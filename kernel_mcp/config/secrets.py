"""Variables and secrets for code: the values of `--env` and `--secret`. No error contains one."""

from __future__ import annotations

import re
from dataclasses import field, replace

from kernel_mcp.config.values import texts
from kernel_mcp.records import dataclass

LEAST_MASKED = 6
"""Characters from which a value is masked in outputs: shorter ones occur in ordinary text."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAKEN_NAMES = re.compile(
    r"(PYTHON|LD_|KERNEL_MCP_|JPY_|JUPYTER|IPYTHON|GLIBC_|MALLOC_|XDG_|UV_|PIP_|BASH_FUNC_).*"
    r"|[A-Z]+_NUM_THREADS|POLARS_MAX_THREADS|OPENBLAS_THREAD_TIMEOUT|PATH|HOME|USER|LANG|TMPDIR"
    r"|TERM|NO_COLOR|PAGER"
    r"|MPLBACKEND|MPLCONFIGDIR|ARROW_DEFAULT_MEMORY_POOL|JE_ARROW_MALLOC_CONF|VIRTUAL_ENV"
    r"|BASH_ENV|ENV|IFS|SHELLOPTS|BASHOPTS|GCONV_PATH|LOCPATH|HOSTALIASES|RES_OPTIONS"
)
"""Variables that the server sets for kernels, or that change the kernel's own programs."""
LEAST_SECRET, MOST_SECRET = 8, 8192
"""Least and greatest number of characters of a header secret."""
_NO_SECRET_IN = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "te", "trailer", "upgrade"}
    | {"expect", "accept-encoding", "keep-alive", "range", "if-range"}
    | {"proxy-authorization", "proxy-connection"}
)


@dataclass(frozen=True, slots=True)
class EnvVariable:
    """A variable of the environment for code; None stands for the server's own value."""

    name: str
    value: str | None = field(default=None, repr=False)

    @property
    def short(self) -> bool:
        """True if its value is too short to be masked in outputs."""
        return len((self.value or "").strip()) < LEAST_MASKED

    def __str__(self) -> str:
        """Return its name, for people."""
        return f"{self.name} (too short to be masked)" if self.short else self.name


def variables(given: object) -> tuple[EnvVariable, ...]:
    """Read `NAME` or `NAME=VALUE`, one or a list. No error contains a value."""
    found = texts(given, "expected names such as API_TOKEN, or NAME=VALUE")
    read = (_variable(each) for each in found)
    return tuple({variable.name: variable for variable in read}.values())


def _variable(text: str) -> EnvVariable:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise ValueError(
            "expected NAME or NAME=VALUE, where NAME has letters, digits and underscores only"
        )
    _check_name(name)
    if "\0" in value:
        raise ValueError(f"the value of {name} holds a zero byte")
    return EnvVariable(name, value if equals else None)


@dataclass(frozen=True, slots=True)
class HeaderSecret:
    """A secret that code can use but not read: the `value` for one header of one host.

    The value is taken from the server's own environment once all settings are known.
    """

    name: str
    host: str
    header: str = "Authorization"
    value: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.name}@{self.host}:{self.header}"

    def with_value(self, value: str) -> HeaderSecret:
        """Return the secret with its value.

        Raises ValueError for a value that no header can hold, or too short to find in replies.
        """
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise ValueError("its value has characters that no header can hold, or blanks around")
        if not LEAST_SECRET <= len(value) <= MOST_SECRET:
            raise ValueError(
                f"its value has {len(value)} characters: with fewer than {LEAST_SECRET} replies "
                f"cannot be searched for it, and more than {MOST_SECRET} fit in no header"
            )
        return replace(self, value=value)


def header_secrets(given: object) -> tuple[HeaderSecret, ...]:
    """Read `NAME@HOST[:HEADER]` in comma lists, without their values."""
    found = texts(given, "expected NAME@HOST[:HEADER], such as API_KEY@api.example.com")
    return tuple(_header_secret(text.strip()) for each in found for text in each.split(","))


def _header_secret(text: str) -> HeaderSecret:
    name, at, rest = text.partition("@")
    host, colon, header = rest.partition(":")
    if not at or not _NAME.fullmatch(name):
        raise ValueError(
            "expected NAME@HOST[:HEADER], such as API_KEY@api.example.com: NAME is a variable in "
            "the server's own environment, which has the value; the value itself is never given"
        )
    _check_name(name)
    host = host.lower().removesuffix(".")
    if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host) or host.rpartition(".")[2].isdigit():
        raise ValueError(f"{host[:80]!r} is not the name of one host")
    if colon and not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", header):
        raise ValueError(f"{header[:80]!r} is not the name of a header")
    if header.isdigit():
        raise ValueError(
            f":{header} would be the name of a header, and no port: name the host alone, and its "
            f"port with --network {host}:{header}, where the secret holds then, too"
        )
    if header.lower() in _NO_SECRET_IN:
        raise ValueError(f"{header}: the connection itself needs that header")
    return HeaderSecret(name, host, header or "Authorization")


def _check_name(name: str) -> None:
    if _TAKEN_NAMES.fullmatch(name):
        raise ValueError(
            f"{name} is a variable that the kernel itself runs by, and would change more than what "
            "code reads; let code set it in os.environ where that is wanted"
        )
