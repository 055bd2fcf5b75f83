"""The folder of answers and stand-ins: nobody else's, and what lies in it is what was put there."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from attnsel.backends.cudnn.ask import libraries
from attnsel.backends.cudnn.ask.libraries import Untrusted, cache_folder, private

if not hasattr(os, "geteuid"):
    pytest.skip("no users as on Unix", allow_module_level=True)

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)


def directory_modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*")) if path.is_dir()}


@needs_compiler
def test_a_stand_in_lies_in_private_and_is_compiled_again_where_it_was_changed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made, note = libraries.stand_in("libcuda.c", "libcuda.so.1", tmp_path / "cache")
    finally:
        os.umask(before)
    assert not note
    assert directory_modes(tmp_path / "cache") == {0o700}
    whole = Path(made).read_bytes()
    assert libraries.stand_in("libcuda.c", "libcuda.so.1", tmp_path / "cache") == (made, "")
    for other in (whole[: len(whole) // 2], b"", whole[:-1] + b"!"):
        Path(made).write_bytes(other)
        again, _ = libraries.stand_in("libcuda.c", "libcuda.so.1", tmp_path / "cache")
        assert Path(again).read_bytes() == whole


@needs_compiler
def test_in_a_folder_of_others_nothing_is_looked_for(tmp_path: Path) -> None:
    made, _ = libraries.stand_in("libcuda.c", "libcuda.so.1", tmp_path / "cache")
    (tmp_path / "cache").chmod(0o777)
    elsewhere, note = libraries.stand_in("libcuda.c", "libcuda.so.1", tmp_path / "cache")
    assert not elsewhere.startswith(str(tmp_path))
    assert "other users can write to" in note
    assert "a temporary one is" in note
    assert elsewhere != made


def test_an_own_folder_is_made_private_below_a_sticky_one_too(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    tmp_path.chmod(0o1777)
    assert directory_modes(private(folder)) == {0o700}


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def below_one_that_is_open(folder: Path) -> None:
    folder.parent.chmod(0o777)


def of_another_user(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, -1)


def below_one_of_another_user(folder: Path) -> None:
    os.chown(folder.parent, 12345, -1)


def a_link_below_one_that_is_open(folder: Path) -> None:
    target = folder.parent / "open" / "cache"
    target.mkdir(parents=True)
    target.chmod(0o700)
    target.parent.chmod(0o777)
    folder.symlink_to(target)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (open_to_others, "(mode 0777): see what lies in it, then rm -r it or chmod 700"),
        (below_one_that_is_open, "(mode 0777): set XDG_CACHE_HOME"),
        (of_another_user, "belongs to user 12345, and you are"),
        (below_one_of_another_user, "belongs to user 12345, and you are"),
        (a_link_below_one_that_is_open, "(mode 0777): set XDG_CACHE_HOME"),
    ],
)
def test_a_folder_that_another_user_can_write_to_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None], words: str
) -> None:
    if prepare in (of_another_user, below_one_of_another_user) and os.geteuid():
        pytest.skip("only root can give folders away")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    prepare(home / "attnsel")
    with pytest.raises(Untrusted) as told:
        private(home / "attnsel")
    assert words in str(told.value)


def test_without_a_home_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(Untrusted, match="set HOME, or XDG_CACHE_HOME"):
        cache_folder()
