"""What is made of uv's last words."""

from __future__ import annotations

import pytest

from kernel_mcp.environments.uv import Sources, UvResult


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "No solution found\n Because nosuch was not found in the package registry",
            "no package 'nosuch'",
        ),
        (
            "Because nosuch was not found in the provided package locations and you require it",
            "no package 'nosuch'",
        ),
        (
            "No solution found\n Because x was not found in the cache and you require x",
            "--offline) and x is not in its cache",
        ),
        (
            "is disabled, but the requested data wasn't found in the cache for: `https://x/p.whl`",
            "p.whl is not in its cache",
        ),
        ("error: error sending request for url\n dns error", "--index-url"),
        ("failed to copy: No space left on device (os error 28)", "disk is full"),
        ("Failed to build `thing==1.0`\n The build backend returned an error", "building it from"),
        ("Because only thing<=1 is available and you require thing>2", "no release of thing"),
        ("hint: Wheels are required for `thing`", "no wheel"),
        ("No solution found: Because a depends on b<1 and you require b>2", "contradict"),
        ("something new", "uv failed"),
    ],
)
def test_a_failure_says_what_to_do(said: str, cause: str) -> None:
    assert cause in UvResult(1, said).cause()


def test_long_words_are_cut_at_the_start() -> None:
    said = UvResult(1, "x" * 10_000 + "the end").said()
    assert len(said) < 2000
    assert said.endswith("the end")


def test_a_success_lacks_no_wheel() -> None:
    assert not UvResult(0, "Wheels are required for x").lacks_wheel


def test_sources_become_options_and_folders() -> None:
    found = Sources("file:///mirror", True, ("/wheels", "https://x/wheels"))
    assert found.options() == [
        *("--default-index", "file:///mirror"),
        *("--find-links", "/wheels", "--find-links", "https://x/wheels"),
        "--offline",
    ]
    assert [str(folder) for folder in found.folders()] == ["/mirror", "/wheels"]
    assert Sources().options() == []
