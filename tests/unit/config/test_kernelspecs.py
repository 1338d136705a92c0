"""The values of `--kernel`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.config.kernelspecs import NamedKernelspec, kernelspecs


def test_a_kernel_spec_is_given_by_name_folder_or_file() -> None:
    assert kernelspecs(["r=ir", "Bash = bash"]) == (
        NamedKernelspec("r", "ir"),
        NamedKernelspec("bash", "bash"),
    )
    assert kernelspecs("r=/opt/ir/kernel.json")[0].spec == "/opt/ir/kernel.json"
    assert kernelspecs("r=specs/ir")[0].below(Path("/srv/x")).spec == "/srv/x/specs/ir"
    assert kernelspecs("r=ir")[0].below(Path("/srv/x")).spec == "ir"


def test_further_paths_are_those_that_the_kernel_reads() -> None:
    (found,) = kernelspecs("r=ir+/etc/R+/opt/library")
    assert found.readonly == (Path("/etc/R"), Path("/opt/library"))
    assert str(found) == "r=ir+/etc/R+/opt/library"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("ir", "expected NAME=KERNELSPEC"),
        ("r=", "expected NAME=KERNELSPEC"),
        ("=ir", "expected NAME=KERNELSPEC|is no name"),
        ("a b=ir", "is no name of a language"),
        ("python=ir", "is this server's own"),
        ("r=ir+etc", "must be absolute"),
        ("r=ir\0", "expected NAME=KERNELSPEC"),
        (["r=ir", "R=other"], "is named twice"),
        (3, "expected NAME=KERNELSPEC"),
    ],
)
def test_anything_else_is_refused(given: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kernelspecs(given)
