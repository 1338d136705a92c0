"""The entries that a walk through a mounted folder covers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kernel_mcp.config.mounts import Mount
from kernel_mcp.host_folders import covers, names, secrets
from kernel_mcp.host_folders.covers import TooManySecrets
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.host_folders.inodes import SharedInodes
from kernel_mcp.host_folders.secrets import FILE, FIXED, FOLDER, KEPT
from kernel_mcp.host_folders.walking import Walk, WalkRules


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def make(folder: Path, *names: str, text: str = "x") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def looked(walk: Walk, *parts: str) -> list[tuple[str, ...]]:
    """Return what has to be covered once an entry has changed."""
    return [path for found in walk.one(parts) for path in found]


def covered(found: dict[tuple[str, ...], str]) -> dict[str, str]:
    return {"/".join(path): kind for path, kind in found.items()}


def test_known_names_are_covered_at_any_depth(tmp_path: Path, root: int) -> None:
    make(tmp_path, ".env", "a/.env.local", "a/b/.ssh/id", ".config/gcloud/x", "a/.netrc")
    make(tmp_path, ".config/other/x", "env", "a/environment.yml", "a/b/ssh")
    assert covered(Walk(root).all().kinds) == {
        ".env": FILE,
        "a/.env.local": FILE,
        "a/.netrc": FILE,
        "a/b/.ssh": FOLDER,
        ".config/gcloud": FOLDER,
    }


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("url = https://me:pass@host/x", True),
        ("url = https://token@host/x", True),
        ("extraheader = AUTHORIZATION: basic abc", True),
        ("url = ssh://git@host/x", False),
        ("url = git@host:x", False),
        ("[core]\n\tbare = false", False),
    ],
)
def test_a_configuration_is_covered_when_it_holds_credentials(
    tmp_path: Path, root: int, text: str, wanted: bool
) -> None:
    make(tmp_path, ".git/config", ".git/modules/m/config", "config", text=text)
    names = {".git/config", ".git/modules/m/config"} if wanted else set()
    assert set(Walk(root).all().kinds) == {tuple(name.split("/")) for name in names}


def test_copies_of_secrets_are_covered_whatever_their_names_end_in(
    tmp_path: Path, root: int
) -> None:
    ends = (".bak", "~", ".bak2", ".old.1", "-backup", "_bak", ".1", ".2024-01-01", ".save.bak.1")
    files = (".netrc", ".bash_history", ".cargo/credentials", ".history", ".zhistory")
    wanted = {f"{name}{end}" for name in files for end in ends}
    wanted |= {".bash_history-12345.tmp", ".netrc.swp", "..netrc.swp", ".zsh_sessions", ".npmrc"}
    keys = {f"{name}{end}" for name in ("key.pem", "a.key") for end in (*ends, ".swp")}
    folders = {f"{name}{end}" for name in (".ssh", ".aws", ".gnupg") for end in ends}
    make(tmp_path, *(wanted - {".zsh_sessions"}), ".zsh_sessions/1.history")
    make(tmp_path, *keys, text="-----BEGIN PRIVATE KEY-----")
    make(tmp_path, *(f"{folder}/x" for folder in folders))
    plain = (
        "notes.bak",
        "chapter-1",
        "log.1",
        "cert.pem.bak",
        "history",
        "ssh.bak/x",
        "x_history.1",
    )
    make(tmp_path, *plain)
    assert {"/".join(path) for path in Walk(root).all().kinds} == wanted | keys | folders


@pytest.mark.parametrize("moment", ["before", "after"])
def test_links_to_what_the_host_has_saved_anew_are_fixed_whenever_they_were_made(
    tmp_path: Path, root: int, moment: str
) -> None:
    """Code can make them until the new file is covered, or later by what it opened until then."""
    make(tmp_path, ".mcp.json", "other")
    (tmp_path / "twin of other").hardlink_to(tmp_path / "other")
    walk = Walk(root, WalkRules(writable=True))
    walk.all()
    make(tmp_path, "new")
    (tmp_path / "new").rename(tmp_path / ".mcp.json")
    if moment == "before":
        (tmp_path / "link").hardlink_to(tmp_path / ".mcp.json")
        assert looked(walk, ".mcp.json") == [(".mcp.json",)]
        assert walk.linked() == [("link",)]
    else:
        looked(walk, ".mcp.json")
        (tmp_path / "link").hardlink_to(tmp_path / ".mcp.json")
        assert looked(walk, "link") == [("link",)]
    assert walk.covers.kinds[("link",)] == FIXED
    assert looked(walk, "other") == looked(walk, "twin of other") == []


def test_the_quick_look_misses_no_name_that_has_a_verdict() -> None:
    flat = [names.SECRET_FILES, names.SECRET_FOLDERS, names.SETTINGS, names.EXECUTED]
    whole = [name for table in flat for name in table]
    below = [names.SECRET_FILES_BELOW, names.SECRET_FOLDERS_BELOW, names.EXECUTED_BELOW]
    whole += [path[-1] for table in below for path in table]
    whole += [f"{first}x{last}" for first, last in names.FRAMES]
    whole += [*names.KEY_KINDS, names.KEYS, ".x_history", ".env.x", "x.pem", "config"]
    for name in whole:
        assert secrets.remarkable(name), name
        for copy in (*(f"{name}{end}" for end in names.BACKUPS), f".{name}.swp", f"#{name}#"):
            assert secrets.remarkable(copy.upper()), copy
    assert not secrets.remarkable("some_file.py")


def test_what_was_set_aside_is_executed_by_nothing() -> None:
    whole = [*names.EXECUTED, *(path[-1] for path in names.EXECUTED_BELOW)]
    for name in (*whole, *(f"{first}x{last}" for first, last in names.FRAMES)):
        assert not secrets.executed((".config", f"{name}.set-aside-1")), name


@pytest.mark.parametrize(
    "path",
    [
        *(".yarnrc.yml", "a/.pnpmfile.cjs", ".bazelrc", ".emacs", ".cargo/config.toml"),
        *("a/.mvn/jvm.config", ".bundle/config"),
    ],
)
def test_settings_of_build_tools_that_name_programs_are_executed(path: str) -> None:
    assert secrets.executed(path.split("/"))


def test_doors_are_covered(tmp_path: Path, root: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    with closing(socket.socket(socket.AF_UNIX)) as one:
        one.bind(str(tmp_path / "s"))
        assert covered(Walk(root).all().kinds) == {"pipe": FILE, "s": FILE}


def test_other_names_of_a_secret_are_covered(tmp_path: Path, root: int) -> None:
    make(tmp_path, ".env", "sub/real", "sub/plain")
    (tmp_path / "sub" / "hard").hardlink_to(tmp_path / ".env")
    (tmp_path / ".env.link").symlink_to("sub/real")
    (tmp_path / ".env.out").symlink_to("/etc/passwd")
    (tmp_path / ".env.gone").symlink_to("nothing")
    assert covered(Walk(root).all().kinds) == {".env": FILE, "sub/hard": FILE, "sub/real": FILE}


def test_a_covered_folder_keeps_its_cover_under_another_name(tmp_path: Path, root: int) -> None:
    make(tmp_path, ".ssh/id", ".env")
    walk = Walk(root)
    walk.all()
    (tmp_path / ".ssh").rename(tmp_path / "keys")
    (tmp_path / ".env").rename(tmp_path / "plain")
    assert looked(walk, "keys") == [("keys",)]
    assert looked(walk, "plain") == [("plain",)]
    assert walk.covers.kinds[("keys",)] == FOLDER


def test_nothing_is_covered_in_what_is_covered(tmp_path: Path, root: int) -> None:
    make(tmp_path, ".aws/.env")
    walk = Walk(root)
    walk.all()
    assert looked(walk, ".aws", ".env") == []
    assert covered(walk.covers.kinds) == {".aws": FOLDER}


def test_other_names_of_a_secret_that_is_new_are_covered(tmp_path: Path, root: int) -> None:
    make(tmp_path, "sub/plain")
    walk = Walk(root)
    walk.all()
    (tmp_path / ".env").hardlink_to(tmp_path / "sub" / "plain")
    assert looked(walk, ".env") == [(".env",)]
    assert walk.linked() == [("sub", "plain")]
    assert walk.linked() == []


def test_what_is_new_is_looked_through(tmp_path: Path, root: int) -> None:
    walk = Walk(root)
    walk.all()
    make(tmp_path, "new/deep/.env", "new/plain")
    assert looked(walk, "new") == [("new", "deep", ".env")]
    assert looked(walk, "new") == [("new", "deep", ".env")]  # it may be another file by now
    assert looked(walk, "new", "plain") == []
    assert looked(walk, "gone") == []


def test_other_mounts_in_a_folder_are_left_to_themselves(tmp_path: Path, root: int) -> None:
    make(tmp_path, "inner/.env", ".env")
    found = Walk(root, WalkRules(inner=frozenset({("inner",), (".env",)}))).all()
    assert found.kinds == {}


def test_the_server_may_have_more_covered(tmp_path: Path, root: int) -> None:
    make(tmp_path, "plain", "log/x")
    own: dict[tuple[str, ...], str] = {("plain",): FILE, ("log",): FOLDER}
    assert Walk(root, WalkRules(own=own)).all().kinds == own


def test_too_many_secrets_are_an_error_and_those_gone_do_not_count(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(covers, "MOST_COVERS", 2)
    walk = Walk(root)
    for number in range(5):
        make(tmp_path, f".env.{number}")
        assert looked(walk, f".env.{number}")
        (tmp_path / f".env.{number}").unlink()
    make(tmp_path, ".env.a", ".env.b", ".env.c")
    with pytest.raises(TooManySecrets):
        Walk(root).all()


def test_links_are_never_followed_by_the_walk(tmp_path: Path, root: int) -> None:
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "out").symlink_to("/")
    walk = Walk(root)
    walk.all()
    assert walk.folders == 1


def test_below_a_writable_mount_what_hosts_execute_is_fixed(tmp_path: Path, root: int) -> None:
    make(tmp_path, ".git/config", ".mcp.json", "a/.git/HEAD", "e/pyvenv.cfg", "e/bin/python")
    make(tmp_path, ".envrc", "a/plain", ".claude/.credentials.json")
    assert covered(Walk(root, WalkRules(writable=True)).all().kinds) == {
        ".git": FIXED,
        ".mcp.json": FIXED,
        "a": KEPT,
        "a/.git": FIXED,
        "e": FIXED,
        ".envrc": FILE,
        ".claude": FIXED,
        ".claude/.credentials.json": FILE,
    }
    assert FIXED not in Walk(root).all().kinds.values()


def test_a_folder_becomes_an_environment_by_a_file_that_is_new(tmp_path: Path, root: int) -> None:
    make(tmp_path, "env/bin/python", "pyvenv.cfg")
    walk = Walk(root, WalkRules(writable=True))
    assert walk.all().kinds == {}
    make(tmp_path, "env/pyvenv.cfg")
    assert looked(walk, "env", "pyvenv.cfg") == [("env",)]
    assert walk.covers.kinds == {("env",): FIXED}


@pytest.mark.parametrize("inner", ["", "env/.envrc"])
def test_a_folder_is_fixed_for_a_file_as_long_as_that_is_there(
    tmp_path: Path, root: int, inner: str
) -> None:
    make(tmp_path, "env/bin/python", *filter(None, (inner,)))
    walk = Walk(root, WalkRules(writable=True))
    before = dict(walk.all().kinds)
    for _ in range(2):
        make(tmp_path, "env/pyvenv.cfg")
        assert looked(walk, "env", "pyvenv.cfg") == [("env",)]
        (tmp_path / "env/pyvenv.cfg").unlink()
        assert walk.left(("env", "pyvenv.cfg"))
        assert walk.covers.kinds == before
    assert not walk.left(("env", "pyvenv.cfg"))


def test_a_fixed_path_is_told_by_its_name_where_nothing_is_yet(tmp_path: Path) -> None:
    shown = ExposedMount(Mount(tmp_path, "/data", "rw"))
    for path in (".mcp.json", "a/.git/hooks/x", ".vscode/tasks.json", "b/HEAD", "b/pyvenv.cfg"):
        assert shown.is_read_only(tuple(path.split("/"))), path
    for path in ("git/hooks/x", "mcp.json", "a/b.py", "objects/x", "refs"):
        assert not shown.is_read_only(tuple(path.split("/"))), path


def test_strictly_covered_is_what_may_come_to_hold_credentials(tmp_path: Path, root: int) -> None:
    make(tmp_path, "a/.git/config", "a/.git/HEAD", "b/plain", "c/inner/x")
    walk = Walk(root, WalkRules(strict=True, inner=frozenset({("c", "inner")})))
    assert covered(walk.all().kinds) == {"a/.git/config": FILE}
    assert walk.closed() == {(), ("a",), ("a", ".git"), ("c",)}

    def shows(path: str) -> str | None:
        fd = os.open(tmp_path / path, os.O_PATH)
        try:
            return walk.shows(tuple(path.split("/")), fd, os.fstat(fd))
        finally:
            os.close(fd)

    seen = {path: shows(path) for path in ("a/.git/HEAD", "a/.git/config", "c/inner", "b")}
    assert seen == {"a/.git/HEAD": "", "a/.git/config": None, "c/inner": None, "b": ""}
    (tmp_path / "b" / "hard").hardlink_to(tmp_path / "a" / ".git" / "config")
    assert shows("b/hard") is None


def test_a_file_that_has_the_number_of_a_deleted_secret_is_shown(tmp_path: Path, root: int) -> None:
    make(tmp_path, ".env", "plain")
    walk = Walk(root)
    walk.all()
    (key,) = walk.inodes.hidden
    other = (tmp_path / "plain").stat()
    # as Linux uses numbers again; the births differ
    walk.inodes.hidden[other.st_dev, other.st_ino] = walk.inodes.hidden[key] - 1
    assert looked(walk, "plain") == []
    assert walk.inodes.reused == [(other.st_dev, other.st_ino)]
    (tmp_path / "hard").hardlink_to(tmp_path / ".env")
    assert looked(walk, "hard") == [("hard",)]


def test_what_is_in_a_covered_folder_is_covered_under_names_elsewhere(
    tmp_path: Path, root: int
) -> None:
    make(tmp_path, ".ssh/deep/id", "cluster/of-one", "plain")
    (tmp_path / "key").hardlink_to(tmp_path / ".ssh/deep/id")
    (tmp_path / ".kube").symlink_to("cluster")
    walk = Walk(root)
    assert covered(walk.all().kinds) == {".ssh": FOLDER, "cluster": FOLDER, "key": FILE}
    make(tmp_path, ".ssh/fresh")
    assert looked(walk, ".ssh", "fresh") == []
    (tmp_path / ".ssh" / "fresh").rename(tmp_path / "taken")
    assert looked(walk, "taken") == [("taken",)]
    assert looked(walk, "plain") == []
    assert list(walk.one(("plain",), hidden=True)) == [[("plain",)]]


def test_walks_that_share_what_they_know_cover_names_in_several_folders(tmp_path: Path) -> None:
    make(tmp_path, "one/.env", "two/plain")
    (tmp_path / "two" / "hard").hardlink_to(tmp_path / "one" / ".env")
    shared = SharedInodes()
    roots = [os.open(tmp_path / name, os.O_PATH | os.O_DIRECTORY) for name in ("one", "two")]
    try:
        one, two = (Walk(each, shared=shared) for each in roots)
        two.all()
        one.all()
        assert two.linked(anyway=True) == [("hard",)]
    finally:
        for fd in roots:
            os.close(fd)


def test_what_was_covered_is_covered_again_however_many_there_are(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(covers, "MOST_COVERS", 2)
    make(tmp_path, ".env", ".env.1")
    walk = Walk(root)
    walk.all()
    make(tmp_path, ".env.2")
    with pytest.raises(TooManySecrets):
        looked(walk, ".env.2")
    assert looked(walk, ".env") == [(".env",)]


def test_folders_deeper_than_a_path_can_name_are_covered(tmp_path: Path, root: int) -> None:
    current = os.dup(root)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=current)
        deeper = os.open("d" * 200, os.O_PATH | os.O_DIRECTORY, dir_fd=current)
        os.close(current)
        current = deeper
    os.close(os.open(".env", os.O_CREAT | os.O_WRONLY, dir_fd=current))
    os.close(current)
    ((path, kind),) = Walk(root).all().kinds.items()
    assert kind == FOLDER
    assert len(path) == 21


@pytest.mark.parametrize(
    "name",
    [*(".ENV", ".Ssh/id", "ID_RSA", ".envs/.production/.django", ".kaggle/kaggle.json")],
)
def test_names_are_known_in_any_case(tmp_path: Path, root: int, name: str) -> None:
    make(tmp_path, name)
    assert list(Walk(root).all().kinds) == [(name.split("/")[0],)]


@pytest.mark.parametrize("name", ["bare.git/config", ".git/config.worktree", ".gitconfig"])
def test_settings_of_git_are_judged_wherever_they_are(tmp_path: Path, root: int, name: str) -> None:
    make(tmp_path, name, text="url = https://me:pass@host/x")
    assert list(Walk(root).all().kinds) == [tuple(name.split("/"))]


@pytest.mark.parametrize(
    ("mounted", "name", "kind"),
    [
        (".git", "config", FILE),
        (".git/modules", "inner/config", FILE),
        (".config", "gcloud", FOLDER),
        (".local/share", "keyrings", FOLDER),
        (".local", "share/keyrings", FOLDER),
        (".cargo", "credentials.toml", FILE),
    ],
)
def test_names_are_judged_with_those_of_folders_above_the_mount(
    tmp_path: Path, mounted: str, name: str, kind: str
) -> None:
    path = tmp_path / mounted
    make(path, name if kind == FILE else f"{name}/x", text="url = https://me:pass@host/x")
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        walk = Walk(fd, WalkRules(above=path.parts[1:]))
        assert covered(walk.all().kinds) == {name: kind}
        again = Walk(fd, WalkRules(above=path.parts[1:]))
        assert looked(again, *name.split("/")) == [tuple(name.split("/"))]
        shown = ExposedMount(Mount(path, str(path)))
        assert shown.covers_path(fd, tuple(name.split("/")))
    finally:
        os.close(fd)


def test_servers_of_models_are_judged_by_what_they_are_given(tmp_path: Path, root: int) -> None:
    make(tmp_path, "a/.mcp.json", text='{"env": {"API_KEY": "x"}}')
    make(tmp_path, "b/.mcp.json", text='{"command": "server"}')
    assert list(Walk(root).all().kinds) == [("a", ".mcp.json")]


def test_paths_for_people_are_text_of_one_line() -> None:
    assert secrets.readable(("a\nb", os.fsdecode(b"\xff"), "ü")) == "a\\nb/\\xff/ü"


def test_other_names_of_what_hosts_execute_are_fixed_when_a_walk_begins(
    tmp_path: Path, root: int
) -> None:
    make(tmp_path, ".git/hooks/post-commit", ".mcp.json", "data/plain")
    (tmp_path / "data" / "hook").hardlink_to(tmp_path / ".git/hooks/post-commit")
    (tmp_path / "servers").hardlink_to(tmp_path / ".mcp.json")
    (tmp_path / "data" / "same").hardlink_to(tmp_path / "data/plain")
    covers = Walk(root, WalkRules(writable=True)).all().kinds
    assert {path for path, kind in covers.items() if kind == FIXED} == {
        (".git",),
        (".mcp.json",),
        ("data", "hook"),
        ("servers",),
    }


def test_what_takes_the_place_of_something_fixed_that_has_gone_is_new(
    tmp_path: Path, root: int
) -> None:
    make(tmp_path, "repo/.git/HEAD")
    walk = Walk(root, WalkRules(writable=True))
    walk.all()
    assert not walk.left(("other",))
    assert walk.left(("repo", ".git"))
    assert walk.covers.removed == [("repo", ".git"), ("repo",)]
    assert walk.covers.kinds == {}


def test_what_hosts_execute_is_told_when_no_more_can_be_covered(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(covers, "MOST_COVERS", 2)
    walk = Walk(root, WalkRules(writable=True))
    walk.all()
    make(tmp_path, ".env.1", ".env.2", "repo/.git/HEAD", ".envrc")
    for name in (".env.1", ".env.2", "repo", ".envrc"):
        looked(walk, name)
    assert walk.covers.over_limit == [("repo", ".git"), (".envrc",)]


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    "name",
    [
        *("id_ed25519_sk", "id_rsa_work", "id_ecdsa-github", ".config/git/credentials"),
        *(".cargo/credentials", ".config/containers/auth.json", ".cache/huggingface/token"),
        *(".cache/huggingface/stored_tokens", ".ksh_history", ".node_repl_history", ".lesshst"),
        *(".sqlite_history", ".local/share/fish/fish_history", ".config/hub", ".m2/settings.xml"),
        *(".netrc~", ".netrc.bak", ".netrc.swp", "#.netrc#", ".netrc.un~", ".netrc.orig"),
        *("id_rsa~", ".id_rsa.swp", ".npmrc.save", ".pgpass.~2~", ".netrc.bak~", ".env.local.swo"),
        *(".cargo/credentials.toml.old", "_netrc.tmp", ".#.netrc", ".psql_history.swp"),
    ],
)
def test_secrets_and_their_copies_are_covered(tmp_path: Path, root: int, name: str) -> None:
    make(tmp_path, name)
    assert list(Walk(root).all().kinds) == [tuple(name.split("/"))]


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("id_work", KEY, True),
        ("server.key", KEY, True),
        ("chain.pem", "-----BEGIN CERTIFICATE-----\n", False),
        ("id_mapping.csv", "id,name\n", False),
        ("id_ed25519.pub", "ssh-ed25519 AAAA", False),
        (".mcp.json~", '{"API_KEY": "x"}', True),
        (".git/config.lock", "url = https://me:pass@host/x", True),
        (".claude/settings.local.json", '{"env": {"token": "x"}}', True),
        ("mise.toml", "API_KEY = 'x'", True),
    ],
)
def test_keys_and_settings_are_judged_by_what_they_hold(
    tmp_path: Path, root: int, name: str, text: str, wanted: bool
) -> None:
    make(tmp_path, name, text=text)
    assert (tuple(name.split("/")) in Walk(root).all().kinds) == wanted
    assert (tuple(name.split("/")) in Walk(root, WalkRules(strict=True)).all().kinds) == (
        wanted or secrets.settings_by_name(tuple(name.split("/")))
    )


def test_a_key_beside_its_public_half_is_covered(tmp_path: Path, root: int) -> None:
    make(tmp_path, "id_of-a-token", "id_of-a-token.pub")
    assert list(Walk(root).all().kinds) == [("id_of-a-token",)]


def test_what_a_link_of_a_secrets_name_will_lead_to_is_covered_once_it_is_there(
    tmp_path: Path, root: int
) -> None:
    (tmp_path / ".netrc").symlink_to("later")
    walk = Walk(root)
    walk.all()
    make(tmp_path, "later")
    assert looked(walk, "later") == [("later",)]


def test_bare_repositories_are_fixed(tmp_path: Path, root: int) -> None:
    make(tmp_path, "own.git/HEAD", "own.git/objects/x", "own.git/refs/x", "own.git/config")
    make(tmp_path, "HEAD", "data/objects/x", "data/refs/x", "data/HEAD.csv")
    covers = Walk(root, WalkRules(writable=True)).all().kinds
    assert {path for path, kind in covers.items() if kind == FIXED} == {("own.git",)}
