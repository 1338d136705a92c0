from __future__ import annotations

from pathlib import Path

from kernel_mcp.policy import Policy, check, own_modules

POLICY = Policy.for_allow([])


def test_files_and_folders_of_the_workspace_are_modules(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").touch()
    (tmp_path / "package").mkdir()
    for other in ("data.csv", "not-a-name.py", "1st.py", "os.py", "a.b.py", ".hidden"):
        (tmp_path / other).touch()
    assert own_modules(tmp_path) == {"helpers", "package"}


def test_a_workspace_that_is_not_there_has_no_modules(tmp_path: Path) -> None:
    assert own_modules(tmp_path / "missing") == frozenset()


def test_a_huge_workspace_is_read_in_part(tmp_path: Path) -> None:
    for number in range(2100):
        (tmp_path / f"m{number}.py").touch()
    assert len(own_modules(tmp_path)) == 2000


def test_modules_of_the_workspace_may_be_imported() -> None:
    code = "import helpers\nfrom package.inner import f"
    assert check(code, POLICY, own_modules=frozenset({"helpers", "package"})).valid
    assert not check(code, POLICY).valid


def test_a_module_of_the_workspace_hands_nothing_out() -> None:
    report = check("import helpers\nhelpers.os", POLICY, own_modules=frozenset({"helpers"}))
    assert [item.kind for item in report.refusals] == ["attribute"]
