from __future__ import annotations

import json
from typing import Any

import pytest

from kernel_mcp.verification.receipt import (
    RECEIPT_BYTES,
    Receipt,
    ReceiptCell,
    ReceiptError,
    ReceiptFile,
    code_hash,
    read_receipt,
    receipt_path,
)

CODES = [f"x{n} = {n}" for n in range(1, 11)]


def made(**changes: Any) -> Receipt:
    values: dict[str, Any] = {
        "made": 1_767_261_600.5,
        "result": "differs",
        "python": "3.12.1",
        "platform": "linux-x86_64",
        "environment": "2b7f0e51c0ffee00",
        "hash_seeds": (0, 4_294_967_295),
        "doors": ("mount /data, read-only",),
        "cells": tuple(
            ReceiptCell(cell=n, code=code_hash(code), result="same" if n != 6 else "differs")
            for n, code in enumerate(CODES, 1)
        ),
        "inputs": (ReceiptFile(path="sales.csv", sha256="0" * 64, cells=(1,)),),
        "outputs": (ReceiptFile(path="out/caf\xe9.png", sha256="f" * 64, cells=(9, 10)),),
        "differences": ("cell 6: 212 \N{RIGHTWARDS ARROW} 97",),
    }
    return Receipt(**{**values, **changes})


def test_a_receipt_is_read_as_it_was_written() -> None:
    receipt = made()
    assert read_receipt(receipt.as_json()) == receipt
    assert json.loads(receipt.as_json())["digest"] == receipt.digest


def test_a_receipt_of_ten_cells_is_small() -> None:
    assert len(made().as_json()) <= 2048


def test_a_pretty_printed_receipt_is_the_same() -> None:
    receipt = made()
    assert read_receipt(json.dumps(json.loads(receipt.as_json()), indent=4).encode()) == receipt


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(made().as_json()), **changes}).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the document"),
        (b"[]", "the document"),
        (b'{"format":"kernel-mcp-receipt"}', "made"),
        (b"[" * 100_000, "the document"),
        (b" " * (RECEIPT_BYTES + 1), "more than"),
        (b"\xff\xfe", "the document"),
        (changed(result="reproduced"), "was changed"),
        (changed(made=1.0), "was changed"),
        (changed(outputs=[]), "was changed"),
        (changed(digest="0" * 64), "was changed"),
        (changed(result="perfect"), "result"),
        (changed(version=2), "version"),
        (changed(format="other"), "format"),
        (changed(python=3.12), "python"),
        (changed(more=1), "more"),
        (changed(cells=[{"cell": 0, "code": "0" * 64, "result": "same"}]), "cells.0.cell"),
        (changed(cells=[{"cell": 1, "code": "0" * 63, "result": "same"}]), "cells.0.code"),
        (changed(inputs=[{"path": "a", "sha256": "0" * 64, "cells": ["1"]}]), "inputs.0.cells"),
        (changed(digest=""), "digest"),
    ],
)
def test_what_is_no_receipt_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ReceiptError, match=reason):
        read_receipt(data)


def test_cells_with_other_code_are_named() -> None:
    receipt = made()
    assert receipt.stale(CODES) == []
    assert receipt.stale([*CODES[:4], "x5 = 6", *CODES[5:]]) == [5]
    assert receipt.stale(CODES[:-1]) == [10]
    assert receipt.stale([*CODES, "y"]) == [11]


def test_the_place_beside_a_notebook() -> None:
    assert receipt_path("a.ipynb") == "a.receipt.json"
    assert receipt_path("/data/x.y/a.b.ipynb") == "/data/x.y/a.b.receipt.json"
