"""The Ray cluster that a fleet runs on: connecting to it, and checks of its security."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from kernel_mcp.config.serving import is_loopback
from kernel_mcp.errors import ConfigError, KernelMcpError
from kernel_mcp.extensions import install_line
from kernel_mcp.linux.folders import from_home
from kernel_mcp.network.rules import Address, is_own, literal, split_port

NAMESPACE = "kernel-mcp"
REGISTRY = "registry"
AUTH, TOKEN, TOKEN_FILE, TLS = (
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_USE_TLS",
)
"""Environment variables of Ray."""
DEFAULT_TOKEN = Path("~/.ray/auth_token")
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")
LEAST_TOKEN_CHARS = 32
_STRANGER = (
    "import sys\n"
    "from ray._raylet import GcsClient\n"
    "try:\n"
    "    GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None)\n"
    "except Exception as error:\n"
    "    print('REFUSED' if 'authenticat' in str(error).lower() else error)\n"
    "else:\n"
    "    print('LET IN')\n"
)
"""Program that tries to read the cluster's control store without a token, which must fail."""
STRANGER_S = 60.0
HELLO_S = 5.0
"""Timeout in seconds for probing whether the head speaks TLS."""
HEAD_S = 10.0
"""Timeout in seconds for an answer of the head."""
_BOUNDS = {"RAY_NUM_REDIS_GET_RETRIES": "5", "RAY_gcs_server_request_timeout_seconds": "20"}
"""Variables that bound how long Ray waits for a head that has just stopped to answer."""


class FleetUnavailable(KernelMcpError):
    """The fleet cannot be reached or cannot do this now; the message says what to do."""


def import_ray() -> ModuleType:
    """Import Ray, which only this function does. Raises ConfigError if it is not installed."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    for name, value in (quiet | _BOUNDS).items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"--fleet: Ray is not installed here: {install_line('fleet')}, the same version of "
            "both, and of Python, on all machines of the fleet"
        ) from None
    module: ModuleType = ray
    return module


def check_address(address: str) -> str:
    """Return the host of a cluster's `HOST:PORT`, without brackets. Raises ConfigError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(
            f"--fleet {address}: expected HOST:PORT of the head of a Ray cluster, such as "
            "10.0.0.5:6379, as `ray start --head --port=6379` prints it"
        )
    return found["host"].strip("[]")


def secret_of(address: str) -> str:
    """Return the token by which the machines of the cluster trust each other.

    Raises ConfigError if there is none, if it is too short, or if authentication is off here. Also
    if the token would be sent to another machine without TLS.
    """
    host = check_address(address)
    if os.environ.get(AUTH, "").lower() != "token":
        raise ConfigError(
            f"--fleet: whoever reaches a Ray cluster without authentication runs any program on "
            f"its machines. Set {AUTH}=token and {TOKEN} (or {TOKEN_FILE}) here and where "
            "`ray start` runs"
        )
    if not is_loopback(host) and os.environ.get(TLS) != "1":
        raise ConfigError(
            f"--fleet {address}: that is not this machine, and without TLS the token and what "
            f"sessions hold could be read on the way. Set {TLS}=1 and the certificates "
            "(RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT) on all machines"
        )
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        path = Path(os.environ.get(TOKEN_FILE) or DEFAULT_TOKEN)
        try:
            token = from_home(path).read_text().strip()
        except (OSError, ValueError) as error:
            reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else error
            raise ConfigError(
                f"--fleet: there is no token: set {TOKEN}, or {TOKEN_FILE} to a file ({reason})"
            ) from error
    if len(token) < LEAST_TOKEN_CHARS:
        raise ConfigError(
            f"--fleet: the token has {len(token)} characters; whoever guesses it runs any program "
            f"on all machines, so take at least {LEAST_TOKEN_CHARS} random ones"
        )
    return token


def check_head(address: str) -> None:
    """Check that a head answers, and that it uses TLS if and only if this process does.

    Ray would wait for minutes, without an error. Raises FleetUnavailable, ConfigError.
    """
    wanted = os.environ.get(TLS) == "1"
    speaks = _speaks_tls(address)
    if speaks and not wanted:
        raise ConfigError(
            f"--fleet {address}: that cluster speaks TLS. Set {TLS}=1 and the certificates "
            "(RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT) here, too"
        )
    if wanted and not speaks:
        raise ConfigError(
            f"--fleet {address}: that cluster does not speak TLS, which {TLS}=1 asks for here. "
            f"Start `ray start` on all of its machines with {TLS}=1 and the certificates"
        )


def _speaks_tls(address: str) -> bool:
    """Return True if a server speaks TLS. Its certificate is not verified.

    Raises FleetUnavailable if it cannot be reached or does not answer.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    place = check_address(address), int(address.rpartition(":")[2])
    try:
        connection = socket.create_connection(place, HELLO_S)
    except OSError as error:
        raise FleetUnavailable(
            f"nobody listens at {address}: {error.strerror or error}. Is that the address of the "
            "head, and is `ray start --head` done there?"
        ) from error
    with connection:
        try:
            context.wrap_socket(connection).close()
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")  # it requires a client certificate
        except TimeoutError:
            raise FleetUnavailable(
                f"the head at {address} accepts connections, but has not answered for "
                f"{HELLO_S:g} s: it hangs, or its machine is overloaded. Look at it, then try again"
            ) from None
        except OSError:
            return False
    return True


def _check_token(ray: ModuleType, address: str) -> None:
    """Raise ConfigError if the cluster refuses the token, which Ray would try for many seconds."""
    try:
        ray._raylet.GcsClient(address=address).internal_kv_keys(b"", None)
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(
            f"--fleet {address}: the head refuses the token of this process: "
            f"{str(error).partition('. ')[0]}. Set {TOKEN} (or {TOKEN_FILE}) as on the head"
        ) from error
    except ray.exceptions.RayError as error:
        raise FleetUnavailable(f"the head at {address} does not answer: {error}") from error


def require_authentication(address: str) -> None:
    """Raise ConfigError if the cluster accepts programs without a token. Blocks for some seconds.

    A successful connection with a token proves nothing: a cluster without authentication accepts
    any token. Raises FleetUnavailable if the cluster could not be probed.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in (TOKEN, TOKEN_FILE) and not name.startswith("PYTHON")
    }
    environ |= {AUTH: "disabled", "HOME": "/nonexistent"}
    command = [sys.executable, "-I", "-c", _STRANGER, address]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=STRANGER_S, check=False
        )
        said = done.stdout.strip() or done.stderr.strip()
    except subprocess.TimeoutExpired:
        said = f"it has not answered within {STRANGER_S:g} s"
    if said == "LET IN":
        raise ConfigError(
            f"--fleet {address}: that cluster asks nobody for its token: whoever reaches it runs "
            f"any program on its machines. Start every one of its machines with {AUTH}=token"
        )
    if said != "REFUSED":
        reason = said.splitlines()[-1] if said else "it has said nothing"
        raise FleetUnavailable(
            f"the cluster at {address} could not be asked whether it refuses who has no token: "
            f"{reason[:300]}. Is its head running?"
        )


def check_network(hosts: Iterable[str], machines: Iterable[str]) -> None:
    """Raise ConfigError if `--network` permits an address of the cluster or of this machine.

    Ray listens on all of them. Names need no check, as they are never followed to private ones.
    """
    theirs = {ipaddress.ip_address(each) for each in machines if is_address(each)}
    for entry in hosts:
        host, _ = split_port(entry)
        address = literal(host)
        if address is not None and (address in theirs or address.is_loopback or _is_here(address)):
            raise ConfigError(
                f"--network {entry}: that is a machine of the fleet. Who reaches its ports of Ray, "
                "with the token, runs any program on all machines: leave it out"
            )


def _is_here(address: Address) -> bool:
    try:
        return is_own(address)
    except OSError:
        return False


def connect(address: str, *, place: str = "") -> Any:
    """Connect this process to a cluster and return the `ray` module.

    `place` is this machine's IP address in the cluster; if empty, Ray chooses it. Raises
    ConfigError, FleetUnavailable.
    """
    secret_of(address)
    if place and not is_address(place):
        raise ConfigError(f"--fleet-place {place}: expected an address of IP")
    check_head(address)
    ray = import_ray()
    _check_token(ray, address)
    given = {"_node_ip_address": place} if place else {}
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            **given,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        text = str(error).strip().splitlines()
        raise FleetUnavailable(
            f"the cluster at {address} cannot be reached from here: "
            f"{text[0] if text else type(error).__name__}. Is `ray start` done on this machine, "
            "with the same versions of Ray and Python as on the head?"
        ) from error
    return ray


def answer_of(ray: Any, reference: Any, within_s: float = HEAD_S) -> Any:
    """Wait for the value of a Ray reference, and return it. Raises FleetUnavailable after that."""
    try:
        return ray.get(reference, timeout=within_s)
    except ray.exceptions.GetTimeoutError as error:
        raise FleetUnavailable(
            f"the fleet has not answered for {within_s:g} s: its head has stopped, or is "
            "overloaded. Look at its machine, then try again"
        ) from error


def is_address(text: str) -> bool:
    """Return True if a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


async def awaited(reference: Any) -> Any:
    """Await a Ray reference and return its value; asyncio functions need a coroutine."""
    return await reference
