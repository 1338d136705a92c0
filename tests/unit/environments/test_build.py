"""Packages that cannot be had take down themselves, and are told."""

from __future__ import annotations

import anyio
import pytest

from kernel_mcp.environments import build
from kernel_mcp.environments.build import Fitting, Terms, brief, remark
from kernel_mcp.environments.metadata import EnvironmentSpec
from kernel_mcp.environments.uv import silence
from kernel_mcp.errors import EnvironmentBuildError, UnfitPackages
from tests.unit.environments.kit import Kit

pytestmark = [pytest.mark.anyio]

WANTED = EnvironmentSpec.for_allow(["numpy", "pandsa", "nosuch>=2"])
UNFIT = {"FAKE_UV_UNFIT": "pandsa nosuch>=2"}


async def test_the_environment_is_built_of_the_rest(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    fitting = Fitting(kit.store(UNFIT), WANTED)
    told: list[str] = []

    async def tell(text: str) -> None:
        told.append(text)

    env = await fitting.ensure(tell)
    assert "numpy==1.0" in env.packages
    assert not any(each.startswith(("pandsa", "nosuch")) for each in env.packages)
    assert set(fitting.unfit) == {"pandsa", "nosuch>=2"}
    assert [str(each) for each in fitting.spec.packages] == ["numpy"]
    assert "pandsa of --allow or --profile is not installed" in " ".join(fitting.remarks)
    for place in (told, caplog.messages):
        assert (
            sum(
                "pandsa of --allow or --profile is left out: the package index" in text
                for text in place
            )
            == 1
        )


async def test_what_is_missing_is_known_to_the_next_server_for_a_while(
    kit: Kit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Fitting(kit.store(UNFIT), WANTED).ensure(silence)
    asked = len(kit.calls())
    caplog.clear()
    again = Fitting(kit.store(UNFIT), WANTED)
    assert set(again.unfit) == {"pandsa", "nosuch>=2"}
    assert any("pandsa of --allow" in text for text in caplog.messages)
    await again.ensure(silence)
    assert len(kit.calls()) == asked
    elsewhere = {**UNFIT, "UV_DEFAULT_INDEX": "https://index.example"}
    assert Fitting(kit.store(elsewhere), WANTED).unfit == {}
    store = kit.store(UNFIT)
    store.forget_unfit()
    assert Fitting(store, WANTED).unfit == {}
    await Fitting(store, WANTED).ensure(silence)
    monkeypatch.setattr(build, "KEPT_S", 0.0)
    assert Fitting(store, WANTED).unfit == {}


async def test_without_network_what_was_missing_lately_does_not_count_against_the_rest(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = await Fitting(kit.store(UNFIT), WANTED).ensure(silence)
    monkeypatch.setattr(build, "KEPT_S", -1.0)
    failing = kit.store({"FAKE_UV_ERROR": "error sending request for url"})
    fitting = Fitting(failing, WANTED)
    assert fitting.unfit == {}
    assert await fitting.ensure(silence) == built
    assert set(fitting.unfit) == {"pandsa", "nosuch>=2"}


async def test_all_that_wait_for_it_ask_once(kit: Kit) -> None:
    store = kit.store(UNFIT)
    fittings = [Fitting(store, WANTED) for _ in range(3)]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for each in fittings:
                tasks.start_soon(each.ensure, silence)
    assert len({each.spec for each in fittings}) == 1
    # one attempt, one for each package and for the kernels' own, and one without the missing
    assert len(kit.calls()) == 1 + 4 + 1


async def test_packages_of_agents_are_all_or_none(kit: Kit) -> None:
    store = kit.store(UNFIT)
    with pytest.raises(EnvironmentBuildError, match="no package 'pandsa'") as failure:
        await store.ensure(WANTED, silence, Terms(agent=True))
    assert not isinstance(failure.value, UnfitPackages)
    assert kit.calls() == ["pip install"]


async def test_what_draws_pictures_comes_along_and_is_left_out_where_it_cannot_be_had(
    kit: Kit,
) -> None:
    spec = EnvironmentSpec.for_allow(["altair"])
    env = await kit.store().ensure(spec, silence)
    assert {"resvg_py==1.0", "vl_convert_python==1.0"} <= {
        each.replace("-", "_") for each in env.packages
    }
    other = Kit(kit.cache.parent / "other")
    env = await other.store({"FAKE_UV_UNFIT": "resvg-py"}).ensure(spec, silence)
    assert "altair==1.0" in env.packages
    assert not any(each.startswith(("resvg", "vl")) for each in env.packages)
    assert build.implied(["", "numpy"]) == ["resvg-py"]


async def test_what_only_contradicts_each_other_is_no_reason_to_drop_one(kit: Kit) -> None:
    with pytest.raises(EnvironmentBuildError, match="contradict each other"):
        await Fitting(kit.store({"FAKE_UV_CONFLICT": "1"}), WANTED).ensure(silence)


async def test_an_index_that_cannot_be_reached_drops_nothing(kit: Kit) -> None:
    failing = kit.store({"FAKE_UV_ERROR": "error sending request for url"})
    fitting = Fitting(failing, WANTED)
    with pytest.raises(EnvironmentBuildError, match="cannot be reached"):
        await fitting.ensure(silence)
    assert fitting.unfit == {}
    assert kit.calls() == ["pip install"]


def test_a_familiar_name_is_offered_and_a_model_is_told_who_can_help() -> None:
    why = "the package index has no package 'pandsa'. Check the spelling."
    assert remark("pandsa>=2", why).endswith("Check the spelling. Was pandas meant?")
    assert brief("pandsa", why) == (
        "pandsa of --allow or --profile is not installed: the package index has no package "
        "'pandsa'. Was pandas meant? The operator can correct it; nothing else is affected."
    )
    assert "meant" not in brief("pandsa", "it has no wheel for this Python.")
