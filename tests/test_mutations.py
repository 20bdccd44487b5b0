"""Every wrong version in mutations.py is seen by some check, the right one by none, and the README's table is true."""
from pathlib import Path

import mutations
import pytest
from mutations import CHECKS, MUTATIONS

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return mutations.make_folders(tmp_path_factory.mktemp("mutations"))


@pytest.mark.parametrize("check", CHECKS)
def test_the_right_version_passes(check, folders):
    assert CHECKS[check](folders)


@pytest.mark.parametrize("what", MUTATIONS)
def test_some_check_sees_it_and_the_readme_says_which(what, folders):
    undo = mutations.apply(what)
    try:
        seen = [mutations.fails(check, folders) for check in CHECKS]
    finally:
        undo()
    assert any(seen)
    assert mutations.row(what, seen) in README.read_text().splitlines()


def test_the_readme_has_no_other_rows():
    table = README.read_text().split("<!-- mutations -->\n")[1].split("\n<!-- end of mutations -->")[0]
    assert len(table.splitlines()) == 2 + len(MUTATIONS)
    assert len(MUTATIONS) >= 25
