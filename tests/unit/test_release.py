"""A release: one version everywhere, the command that builds it, and the workflows that run it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernel_mcp import __version__
from kernel_mcp.config.requirements import NEWEST_PYTHON, OLDEST_PYTHON
from tests.proof import STEPS

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"
CHANGES = """# Changelog

## [Unreleased]

- Later.

## [1.2.0] - 2026-01-31

- First, see [a page](docs/a.md#part) and [the site](https://example.com/x).

## [1.1.0] - 2025-01-31

- Earlier.
"""
Release = Callable[..., "subprocess.CompletedProcess[str]"]


def found(path: str, pattern: str) -> set[str]:
    """Return what a pattern finds in a file, once at least."""
    versions = set(re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE))
    assert versions, path
    return versions


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("packaging/server.json", r'"version": "(.*)"'),
        ("packaging/server.json", r'"identifier": ".*:(.*)"'),
        ("packaging/mcpb/manifest.json", r'"version": "(.*)"'),
        ("packaging/claude-code/.claude-plugin/plugin.json", r'"version": "(.*)"'),
        ("packaging/kubernetes/kernel-mcp.yaml", r"image: \S+:(\S+)"),
        ("packaging/kubernetes/fleet.yaml", r"image: \S+:(\S+)"),
        *(
            (f"docs/{name}.md", r"kernel_mcp-(.*?)-py3-none-any")
            for name in ("deploy", "fleet", "install", "jupyter", "notebooks", "operations")
        ),
    ],
)
def test_every_file_has_the_version_of_the_server(path: str, pattern: str) -> None:
    assert found(path, pattern) == {__version__}


def test_the_project_and_the_changelog_have_the_version_of_the_server() -> None:
    assert found("pyproject.toml", r'^path = "(.*)"') == {"kernel_mcp/__init__.py"}
    (latest, *_) = re.findall(r"^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest == __version__


@pytest.fixture
def release(tmp_path: Path) -> Release:
    """Runs the command in a small repository with the tag v1.2.0 and two that are not ready."""
    for name, text in {
        "kernel_mcp/__init__.py": '__version__ = "1.2.0"\n',
        "CHANGELOG.md": CHANGES,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "packaging").mkdir()
    shutil.copy(ROOT / "packaging/release", tmp_path / "packaging/release")

    def git(*words: str) -> None:
        own = ("-c", "user.name=Test", "-c", "user.email=test@example.com", "-C", str(tmp_path))
        subprocess.run(["git", *own, *words], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "--message", "first")
    git("tag", "v1.2.0")
    git("tag", "v1.3.0")
    (tmp_path / "CHANGELOG.md").write_text(CHANGES.replace(" - 2026-01-31", " - not released"))
    (tmp_path / "kernel_mcp/__init__.py").write_text('__version__ = "1.2.1"\n')
    git("commit", "--all", "--message", "second")
    git("tag", "v1.2.1")

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "packaging/release"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return call


def test_the_page_is_the_part_of_the_changelog_with_links_to_the_tag(release: Release) -> None:
    done = release("--notes", "v1.2.0")
    assert (done.returncode, done.stderr) == (0, "")
    page = "https://github.com/kernel-mcp/kernel-mcp/blob/v1.2.0/docs/a.md#part"
    expected = f"- First, see [a page]({page}) and [the site](https://example.com/x).\n"
    assert done.stdout.strip() == expected.strip()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("v9.9.9",), "there is no tag v9.9.9"),
        (("v1.3.0",), "the tag v1.3.0 is of version 1.2.0: name it v1.2.0"),
        (("v1.2.1",), "CHANGELOG.md of v1.2.1 has no date for 1.2.1"),
        ((), "usage: release [--notes] TAG"),
    ],
)
def test_a_tag_that_is_not_ready_is_refused(
    release: Release, words: tuple[str, ...], reason: str
) -> None:
    done = release(*words)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {reason}")


def workflow(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_the_weekly_workflow_runs_every_step_and_every_python() -> None:
    jobs = workflow("weekly")["jobs"]
    steps = set(jobs["full"]["strategy"]["matrix"]["step"])
    assert steps | {"newest", "libraries"} == set(STEPS)  # `libraries` is a part of `exhaustive`
    pythons = jobs["newest"]["strategy"]["matrix"]["python"]
    assert pythons == workflow("checks")["jobs"]["checks"]["strategy"]["matrix"]["python"]
    minors = range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1)
    assert set(pythons) <= {f"3.{minor}" for minor in minors}


def test_only_jobs_that_publish_have_more_rights_than_reading() -> None:
    for name in ("checks", "weekly", "release"):
        assert workflow(name)["permissions"] == {"contents": "read"}
    jobs = workflow("release")["jobs"]
    writes = {
        name: {key for key, value in job["permissions"].items() if value == "write"}
        for name, job in jobs.items()
    }
    assert writes == {
        "build": {"attestations", "id-token"},
        "packages": {"id-token"},
        "image": {"attestations", "id-token", "packages"},
        "page": {"contents"},
    }
    assert all(jobs[name]["environment"] == "release" for name in ("packages", "image"))


def test_packages_are_published_without_a_stored_password() -> None:
    text = (WORKFLOWS / "release.yml").read_text()
    assert set(re.findall(r"secrets\.(\w+)", text)) == {"GITHUB_TOKEN"}
    (publish,) = (
        step
        for step in workflow("release")["jobs"]["packages"]["steps"]
        if "pypi-publish" in step.get("uses", "")
    )
    assert publish["with"] == {"attestations": True}


def test_a_maintainer_is_told_what_the_workflow_requires() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Release")[2].partition("\n## ")[0]
    for word in ("environment `release`", "workflow `release.yml`", "packaging/release v"):
        assert word in text
    assert json.loads((ROOT / "packaging/server.json").read_text())["version"] in text
