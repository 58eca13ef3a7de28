from __future__ import annotations

from pathlib import Path

from paceline.runtime.compile_cache import VARIABLE, keep_compiled


def test_a_folder_of_the_user_s_own_unless_one_is_named(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert keep_compiled(environ) == tmp_path / "paceline" / "compiled"
    assert Path(environ[VARIABLE]).is_dir()
    named = {"XDG_CACHE_HOME": str(tmp_path), VARIABLE: "/elsewhere"}
    assert keep_compiled(named) == Path("/elsewhere") and named[VARIABLE] == "/elsewhere"


def test_torch_s_default_where_it_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    assert keep_compiled(environ) is None and VARIABLE not in environ
