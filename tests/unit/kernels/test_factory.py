"""The factory's requests to the environment store, and their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.build import Terms
from kernel_mcp.environments.store import EnvironmentStore
from kernel_mcp.environments.uv import silence
from kernel_mcp.kernels import factory as module
from kernel_mcp.kernels.factory import KernelFactory, KernelRequest
from kernel_mcp.policy import Policy
from tests.unit.fake_kernels import FakeStore
from tests.unit.packages.wheels import requirements

pytestmark = pytest.mark.anyio

NOWHERE = cast(Any, None)


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path / "env")


@pytest.fixture
def requests() -> list[KernelRequest]:
    """Those of the sessions there are."""
    return []


@pytest.fixture
def factory(store: FakeStore, requests: list[KernelRequest]) -> KernelFactory:
    return KernelFactory(
        settings=Settings(allow=("pillow",), install_bytes=500, cache_bytes=9000),
        policy=Policy.for_allow(("pillow",)),
        environments=cast(EnvironmentStore, store),
        launcher=NOWHERE,
        requests=lambda: requests,
    )


def request(*packages: str) -> KernelRequest:
    return KernelRequest("s", Path("/"), packages=requirements(*packages))


async def test_an_environment_in_use_is_not_looked_up_again(
    factory: KernelFactory, store: FakeStore
) -> None:
    for _ in range(2):
        environment, policy = await factory.environment(request(), silence)
        assert environment.python == store.python
        assert policy.allows("PIL")
    assert len(store.asked) == 1


async def test_other_packages_are_another_environment(
    factory: KernelFactory, store: FakeStore
) -> None:
    await factory.environment(request(), silence)
    _, policy = await factory.environment(request("numpy"), silence)
    assert policy.allows("numpy")
    assert len(store.asked) == 2
    assert not factory.policy(request()).allows("numpy")


async def test_an_environment_that_was_removed_is_looked_up_again(
    factory: KernelFactory, store: FakeStore
) -> None:
    await factory.environment(request(), silence)
    store.python.unlink()
    await factory.environment(request(), silence)
    assert len(store.asked) == 2


async def test_the_store_hears_of_long_use(
    factory: KernelFactory, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await factory.environment(request(), silence)
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    await factory.environment(request(), silence)
    assert len(store.asked) == 2


async def test_agents_may_add_to_what_the_operator_has_and_the_operator_may_fill_the_cache(
    factory: KernelFactory, store: FakeStore
) -> None:
    await factory.environment(request("numpy"), silence)
    assert store.asked == [("pillow",), ("numpy", "pillow")]
    assert store.terms == [
        Terms(agent=False, most_bytes=9000, flag="--cache-size"),
        Terms(agent=True, most_bytes=1500),
    ]


async def test_environments_of_closed_sessions_are_let_go_and_no_others(
    factory: KernelFactory, store: FakeStore, requests: list[KernelRequest]
) -> None:
    requests += [request("numpy"), request("polars")]
    for each in list(requests):
        await factory.environment(each, silence)
    assert store.released == []
    del requests[0]
    requests.append(request("rich"))
    await factory.environment(requests[-1], silence)
    assert store.released == [("numpy", "pillow")]
