"""From what people write after `--allow` to requirements an installer understands."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from copy import copy
from types import MappingProxyType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kernel_mcp.config.values import parse_entry
from kernel_mcp.errors import ConfigError

# Well-known modules whose distribution has another name.
#
# No library offers this as data that can be depended on: the mapping inside pipreqs pins an old
# IPython and stops at Python 3.12, pigar's index is 40 MB, the other collections are inside
# applications. So the facts that matter are kept here. Every row up to `_SOURCE_ONLY` was checked
# against the files in the newest wheel of the distribution; `tests/integration` checks a sample.
# A module that is not listed is taken to have the name of its distribution.

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

# Released as source only: asking for one says so, instead of installing a stranger of that name.
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


# Gone from the newest Python, still part of the oldest one that kernels run on.
_REMOVED_STDLIB = frozenset(
    {
        "aifc", "asynchat", "asyncore", "audioop", "binhex", "cgi", "cgitb", "chunk",
        "crypt", "distutils", "imghdr", "imp", "lib2to3", "mailcap", "msilib", "nis",
        "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau",
        "telnetlib", "uu", "xdrlib",
    }
)  # fmt: skip
_STDLIB = sys.stdlib_module_names | _REMOVED_STDLIB
_DISTRIBUTIONS_FOLDED = {name.casefold(): dist for name, dist in DISTRIBUTIONS.items()}


def packages_for(entries: Iterable[str], flag: str = "--allow") -> tuple[Requirement, ...]:
    """What to install for the operator's entries, in their order.

    Modules of the standard library and `*` need nothing. Raises ConfigError, naming `flag`.
    """
    try:
        found = [requirement_for(entry) for entry in entries if entry.strip() not in ("", "*")]
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    return tuple(each for each in found if each is not None)


def requirement_for(entry: str | Requirement) -> Requirement | None:
    """What to install for a module or package name, None when Python itself brings it.

    Raises ValueError as `parse_entry` does.
    """
    requirement = parse_entry(entry) if isinstance(entry, str) else copy(entry)
    name = distribution_for(requirement.name)
    if name is None:
        return None
    requirement.name = name
    return requirement


def distribution_for(name: str) -> str | None:
    """The normalised distribution that provides a module, or None for the standard library.

    A name nobody listed is taken to be a distribution's own, as it is for most packages.
    """
    parts = name.split(".")
    shared = parts[0] in NAMESPACES
    for count in range(len(parts), min(shared, len(parts) - 1), -1):
        known = _DISTRIBUTIONS_FOLDED.get(".".join(parts[:count]).casefold())
        if known is not None:
            return known
    if parts[0] in _STDLIB:
        return None
    return str(canonicalize_name(name if shared else parts[0]))
