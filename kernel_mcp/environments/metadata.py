"""Read an environment's packages from its `*.dist-info`; map modules to their distributions.

Packages choose those names. Invalid ones are skipped, so the list is safe to show. A package with a
module named `subprocess` does not permit the import of the standard library's.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING

from kernel_mcp.config.requirements import MAX_REQUIREMENT_CHARS, parse_entry
from kernel_mcp.environments.listed_files import normalised
from kernel_mcp.environments.pinned_requirements import NOTHING, PinnedRequirements
from kernel_mcp.errors import ConfigError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.policy.missing import GONE
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# Well-known modules whose distribution has another name. No library offers this as data: pipreqs
# pins an old IPython and stops at Python 3.12, pigar's index is 40 MB. Rows up to `_SOURCE_ONLY`
# were checked against the newest wheel of the distribution; `tests/integration` checks a sample.
# A module that is not listed is assumed to have the name of its distribution.
_WITH_WHEELS = {
    "absl": "absl-py",
    "antlr4": "antlr4-python3-runtime",
    "argon2": "argon2-cffi",
    "attr": "attrs",
    "barcode": "python-barcode",
    "Bio": "biopython",
    "bs4": "beautifulsoup4",
    "bson": "pymongo",
    "cassandra": "cassandra-driver",
    "colour": "colour-science",
    "consul": "python-consul",
    "cpuinfo": "py-cpuinfo",
    "Crypto": "pycryptodome",
    "Cryptodome": "pycryptodomex",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "discord": "discord-py",
    "dns": "dnspython",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "ee": "earthengine-api",
    "Evtx": "python-evtx",
    "factory": "factory-boy",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "flint": "python-flint",
    "fpdf": "fpdf2",
    "frontmatter": "python-frontmatter",
    "git": "gitpython",
    "github": "pygithub",
    "gitlab": "python-gitlab",
    "google.protobuf": "protobuf",
    "googleapiclient": "google-api-python-client",
    "gridfs": "pymongo",
    "grpc": "grpcio",
    "ibis": "ibis-framework",
    "imblearn": "imbalanced-learn",
    "impala": "impyla",
    "jose": "python-jose",
    "jpype": "jpype1",
    "jwt": "pyjwt",
    "kafka": "kafka-python",
    "magic": "python-magic",
    "markdown_it": "markdown-it-py",
    "memcache": "python-memcached",
    "mpl_toolkits": "matplotlib",
    "mpl_toolkits.basemap": "basemap",
    "multipart": "python-multipart",
    "mysql.connector": "mysql-connector-python",
    "nacl": "pynacl",
    "openbabel": "openbabel-wheel",
    "OpenGL": "pyopengl",
    "opensearchpy": "opensearch-py",
    "OpenSSL": "pyopenssl",
    "opentelemetry": "opentelemetry-api",
    "pandas_profiling": "ydata-profiling",
    "pdfminer": "pdfminer-six",
    "PIL": "pillow",
    "playhouse": "peewee",
    "pptx": "python-pptx",
    "psycopg2": "psycopg2-binary",
    "pylab": "matplotlib",
    "pywt": "pywavelets",
    "readability": "readability-lxml",
    "rest_framework": "djangorestframework",
    "serial": "pyserial",
    "shapefile": "pyshp",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skopt": "scikit-optimize",
    "sksurv": "scikit-survival",
    "slugify": "python-slugify",
    "snappy": "python-snappy",
    "snowflake.connector": "snowflake-connector-python",
    "socks": "pysocks",
    "speech_recognition": "speechrecognition",
    "sql": "jupysql",
    "stan": "pystan",
    "talib": "ta-lib",
    "telegram": "python-telegram-bot",
    "umap": "umap-learn",
    "usb": "pyusb",
    "vl_convert": "vl-convert-python",
    "vtkmodules": "vtk",
    "websocket": "websocket-client",
    "whois": "python-whois",
    "Xlib": "python-xlib",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}

# Released as source only: requests fail instead of installing an unrelated package of that name.
_SOURCE_ONLY = {
    "cairo": "pycairo",
    "community": "python-louvain",
    "gi": "pygobject",
    "ldap": "python-ldap",
    "llama_cpp": "llama-cpp-python",
    "MySQLdb": "mysqlclient",
    "nmap": "python-nmap",
    "odf": "odfpy",
    "osgeo": "gdal",
    "whisper": "openai-whisper",
    "wx": "wxpython",
}

DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(_WITH_WHEELS | _SOURCE_ONLY)

# Roots shared by many distributions, each named after its own part: `google.cloud.storage`.
NAMESPACES = frozenset(
    {"azure", "backports", "google", "jaraco", "opentelemetry", "ruamel", "sphinxcontrib", "zope"}
)


_STDLIB = sys.stdlib_module_names | GONE.keys()
_DISTRIBUTIONS_FOLDED = {name.casefold(): dist for name, dist in DISTRIBUTIONS.items()}


def packages_for(entries: Iterable[str], flag: str = "--allow") -> tuple[Requirement, ...]:
    """Return the requirements for the operator's entries, in their order.

    The standard library and `*` need none. Raises ConfigError, naming `flag`.
    """
    try:
        found = [requirement_for(entry) for entry in entries if entry.strip() not in ("", "*")]
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    return tuple(each for each in found if each is not None)


def requirement_for(entry: str | Requirement) -> Requirement | None:
    """Return the requirement for a module or package; None for the standard library.

    Raises ValueError as `parse_entry` does.
    """
    requirement = parse_entry(entry) if isinstance(entry, str) else copy(entry)
    name = distribution_for(requirement.name)
    if name is None:
        return None
    requirement.name = name
    return requirement


def distribution_for(name: str) -> str | None:
    """Return the normalised distribution that provides a module; None for the standard library.

    A module that is not listed is assumed to have the name of its distribution.
    """
    parts = name.split(".")
    shared = parts[0] in NAMESPACES
    for count in range(len(parts), min(shared, len(parts) - 1), -1):
        known = _DISTRIBUTIONS_FOLDED.get(".".join(parts[:count]).casefold())
        if known is not None:
            return known
    if parts[0] in _STDLIB:
        return None
    return normalised(name if shared else parts[0])


def modules_of(packages: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that packages are expected to provide: their names and known aliases.

    For packages that are not installed yet.
    """
    names = set(packages)
    return (*names, *(module for module, package in DISTRIBUTIONS.items() if package in names))


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """A Python (version, path, or empty for the server's own) and packages.

    `packages` are normalised, unique and sorted; `pinned` are further requirements from files.
    """

    python: str = ""
    packages: tuple[Requirement, ...] = ()
    pinned: PinnedRequirements = NOTHING

    @classmethod
    def for_allow(
        cls,
        allow: Iterable[str],
        *,
        python: str = "",
        packages: Iterable[Requirement] = (),
        pinned: PinnedRequirements = NOTHING,
    ) -> EnvironmentSpec:
        """Return the spec of `--allow` entries with one session's packages. Raises ConfigError."""
        return cls(python, tuple(sorted({*packages_for(allow), *packages}, key=str)), pinned)

    @property
    def names(self) -> list[str]:
        """Names of all requested packages, those of files included."""
        return [*(each.name for each in self.packages), *self.pinned.names]

    def without(self, names: Container[str]) -> EnvironmentSpec:
        """Return the spec without these packages, each written as in `packages`."""
        left = tuple(each for each in self.packages if str(each) not in names)
        return EnvironmentSpec(self.python, left, self.pinned)

    def __hash__(self) -> int:  # hashing a requirement takes as long as parsing it
        return hash((self.python, *self.names))


MAX_RECORD_BYTES = 64 * 1024 * 1024
"""Most bytes of a RECORD; the largest known has some 2 MiB."""
MAX_HEAD_BYTES = 256 * 1024
"""Bytes of METADATA that are read: requirements are before the description."""
MOST_FOLDERS = 64
"""Most folders above a module; the search for its outermost package takes quadratic time."""
_NEED = "Requires-Dist:"
_SUFFIXES = (".py", ".so", ".pyd")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def import_names(env: KernelEnvironment, spec: EnvironmentSpec) -> frozenset[str]:
    """Return the modules that the packages of a spec provide, dotted below shared namespaces.

    For `pillow` that is `PIL`; dependencies are left out.
    """
    provided = provided_modules(env)
    return frozenset(module for name in spec.names for module in provided.get(name, ()))


def provided_modules(env: KernelEnvironment) -> Mapping[str, Iterable[str]]:
    """Return the modules of an environment by package."""
    if env.support is not None:
        return env.support.modules
    provided = noted_modules(env.root)
    if provided is None:
        sites = env.root.glob("lib/python3*/site-packages")
        return {name: dist for site in sites for name, dist in installed_modules(site).items()}
    return provided


def note_file(root: Path) -> Path:
    """Return the path of an environment's note: outside of its folder, which packages fill."""
    return root.with_name(f"{root.name}.json")


def noted_modules(root: Path) -> Mapping[str, Iterable[str]] | None:
    """Return the modules by package that the note of an environment lists; None if unreadable."""
    try:
        content = json.loads(note_file(root).read_text(encoding="utf-8"))
        modules = content["modules"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return modules if isinstance(modules, dict) else None


def installed_modules(site_packages: Path) -> dict[str, tuple[str, ...]]:
    """Return the modules by distribution (normalised name), from each RECORD."""
    return {
        name: tuple(sorted(_modules(folder / "RECORD")))
        for name, folder in _distributions(site_packages).items()
    }


def installed_versions(site_packages: Path) -> tuple[str, ...]:
    """Return all distributions as `name==version`, sorted."""
    return tuple(
        f"{name}=={folder.stem.rpartition('-')[2]}"
        for name, folder in sorted(_distributions(site_packages).items())
    )


def record_digests(site_packages: Path) -> dict[str, str]:
    """Return the SHA-256 of the RECORD of each distribution; those that cannot be read are skipped.

    A RECORD lists the hashes of all files of its distribution.
    """
    found: dict[str, str] = {}
    for name, place in _distributions(site_packages).items():
        with suppress(OSError), open(os.open(place / "RECORD", _OPEN), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_RECORD_BYTES:
                found[name] = hashlib.sha256(file.read()).hexdigest()
    return found


def installed_needs(
    site_packages: Path, only: Container[str] | None = None
) -> Iterator[Requirement]:
    """Yield the dependencies of all distributions, or of those in `only`.

    Those that cannot be read are skipped.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    for name, folder in _distributions(site_packages).items():
        if only is not None and name not in only:
            continue
        with suppress(OSError), open(os.open(folder / "METADATA", _OPEN), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                continue
            head, _, _ = file.read(MAX_HEAD_BYTES).partition(b"\n\n")
            for line in head.decode(errors="replace").split("\n"):
                if line.startswith(_NEED) and len(line) <= MAX_REQUIREMENT_CHARS:
                    with suppress(InvalidRequirement, ValueError, RecursionError):
                        yield Requirement(line.removeprefix(_NEED).strip())


def _distributions(site_packages: Path) -> dict[str, Path]:
    return {
        normalised(folder.stem.rpartition("-")[0]): folder
        for folder in sorted(site_packages.glob("*.dist-info"))
        if _is_distribution(folder.stem)
    }


def _is_distribution(stem: str) -> bool:
    from packaging.version import InvalidVersion, Version

    name, _, version = stem.rpartition("-")
    try:
        Version(version)
    except InvalidVersion:
        return False
    return version.isascii() and _NAME.fullmatch(name) is not None


def _modules(record: Path) -> set[str]:
    try:
        with open(os.open(record, _OPEN), encoding="utf-8", newline="") as lines:
            status = os.fstat(lines.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECORD_BYTES:
                return set()
            names = (row[0] for row in csv.reader(lines) if row)
            files = [PurePosixPath(name) for name in names if name.endswith(_SUFFIXES)]
    except (OSError, ValueError, csv.Error):
        return set()
    code = [file for file in files if _is_code(file)]
    packages = {file.parent for file in code if file.name.split(".")[0] == "__init__"}
    found = set()
    for file in code:
        top = _top(file, packages)
        # letters of other scripts can look like ASCII, or be invisible
        named = all(part.isidentifier() and part.isascii() for part in top)
        if named and top[0] not in sys.stdlib_module_names:
            found.add(".".join(top))
    return found


def _is_code(file: PurePosixPath) -> bool:
    parts = file.parts
    known = file.suffix in _SUFFIXES and len(parts) <= MOST_FOLDERS
    return known and not file.is_absolute() and ".." not in parts


def _top(file: PurePosixPath, packages: set[PurePosixPath]) -> tuple[str, ...]:
    """Return the outermost package of a file; without any `__init__` the file's own dotted name."""
    for depth in range(1, len(file.parts)):
        if PurePosixPath(*file.parts[:depth]) in packages:
            return file.parts[:depth]
    return (*file.parts[:-1], file.name.split(".")[0])
