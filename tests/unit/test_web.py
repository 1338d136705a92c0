"""Grants that rows of a tokens file name."""

from __future__ import annotations

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.web import warn_of_unknown_grants
from tests.unit.config.test_grants import ALL


def test_a_grant_that_the_server_does_not_have_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown_grants(ALL, {"*": "row 1", "network": "row 2", "mount:/c": "row 3"})
    (record,) = caplog.records
    assert "row 3 of the tokens file names the door mount:/c" in record.getMessage()
    assert "attach, device:/dev/kvm, env:TOKEN" in record.getMessage()
    warn_of_unknown_grants(Settings(ask=()), {"network": "row 2"})
    assert caplog.records[-1].getMessage().endswith("it has none")
