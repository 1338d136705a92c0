"""The receipt of a verification: a JSON document that says which code gave which files and values.

Its digest shows a change by accident. It is no signature: whoever changes a receipt can write
another digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kernel_mcp.errors import KernelMcpError

INVALID = 4
"""Exit status of the command for a receipt that is damaged, or not of this notebook."""
RECEIPT_BYTES = 1024 * 1024
"""Maximum bytes of a receipt that is read."""
FOLDER_NAME = "receipt.json"
"""Name of the receipt in an exported folder."""

MARK = b'"kernel-mcp-receipt"'
"""Value of the first field of each receipt."""

CellResult = Literal["same", "differs", "fragile", "failed", "not repeated", "skipped"]
Result = Literal["reproduced", "differs", "fragile", "does not run", "incomplete"]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Text = Annotated[str, Field(max_length=200)]
_Number = Annotated[int, Field(ge=1)]


class ReceiptError(KernelMcpError):
    """A document is no valid receipt."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ReceiptCell(_Part):
    """A cell: SHA-256 of its code, and how its run compares with the recorded one."""

    cell: _Number
    code: _Digest
    result: CellResult


class ReceiptFile(_Part):
    """A file and its SHA-256; `cells` have read it (inputs) or written it (outputs)."""

    path: Annotated[str, Field(max_length=4096)]
    sha256: _Digest
    cells: tuple[_Number, ...]


class Receipt(_Part):
    """A verification.

    made         Unix time in seconds
    environment  id of the lock of its packages
    hash_seeds   fingerprints of the hash seeds of the recorded run and of the replay
    doors        what the replay could reach, in words; empty for nothing
    differences  what differed, in words
    """

    format: Literal["kernel-mcp-receipt"] = "kernel-mcp-receipt"
    version: Literal[1] = 1
    made: float
    result: Result
    python: _Text
    platform: _Text
    environment: _Text
    hash_seeds: tuple[int, int]
    doors: tuple[_Text, ...] = ()
    cells: tuple[ReceiptCell, ...]
    inputs: tuple[ReceiptFile, ...] = ()
    outputs: tuple[ReceiptFile, ...] = ()
    differences: tuple[_Text, ...] = ()

    def as_json(self) -> bytes:
        """Return the document, a line for each field, with its digest."""
        values = {**self.model_dump(mode="json"), "digest": self.digest}
        rows = (f"{json.dumps(name)}:{_compact(value)}" for name, value in values.items())
        return "{{\n{}\n}}\n".format(",\n".join(rows)).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, as JSON with sorted names and without spaces."""
        return hashlib.sha256(_compact(self.model_dump(mode="json")).encode()).hexdigest()

    def stale(self, codes: Sequence[str]) -> list[int]:
        """Return the places, from 1, of cells whose code is not that of the receipt."""
        known = [each.code for each in self.cells]
        given = [code_hash(code) for code in codes]
        length = max(len(known), len(given))
        return [n for n in range(1, length + 1) if known[n - 1 : n] != given[n - 1 : n]]


class _Sealed(Receipt):
    digest_: _Digest = Field(alias="digest")


def code_hash(code: str) -> str:
    """Return the SHA-256 of a cell's code."""
    return hashlib.sha256(code.encode(errors="surrogatepass")).hexdigest()


def receipt_path(notebook: str) -> str:
    """Return the path of the receipt beside a notebook."""
    return str(PurePosixPath(notebook).with_suffix(".receipt.json"))


def read_receipt(data: bytes) -> Receipt:
    """Return the receipt that a document is. Raises ReceiptError, with the reason."""
    if len(data) > RECEIPT_BYTES:
        raise ReceiptError(f"This is no receipt: it has more than {RECEIPT_BYTES:,} bytes.")
    try:
        sealed = _Sealed.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise ReceiptError(f"This is no valid receipt: {place}: {first['msg']}.") from None
    receipt = Receipt.model_validate(sealed.model_dump(exclude={"digest_"}))
    if receipt.digest != sealed.digest_:
        raise ReceiptError(
            "This receipt was changed after it was made: its digest is that of other content. "
            "Run verify again."
        )
    return receipt


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
