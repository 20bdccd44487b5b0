"""Every wrong version in mutations.py is seen by some check, the right one by none, and tests/README.md says which."""
from pathlib import Path

import llm_inference as llm
import mutations
import pytest
from mutations import CHECKS, MUTATIONS

README = Path(__file__).resolve().parent / "README.md"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return mutations.make_folders(tmp_path_factory.mktemp("mutations"))


@pytest.mark.parametrize("kind", llm.KINDS)
@pytest.mark.parametrize("check", CHECKS)
def test_the_right_version_passes(check, kind, folders):
    llm.use_kernels(kind)
    assert CHECKS[check](folders)


@pytest.mark.parametrize("what", MUTATIONS)
def test_some_check_sees_it_and_the_readme_says_which(what, folders):
    undo = mutations.apply(what)
    try:
        seen = [mutations.fails(check, folders) for check in CHECKS]
    finally:
        undo()
    assert any(seen)
    assert mutations.row(what, seen) in README.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("what", ["no mask", "fused: no mask", "numpy: scores not scaled", "last block left out"])
def test_a_wrong_version_is_taken_back_whole(what):
    function = MUTATIONS[what][0]
    before, right, kernels = dict(llm.KERNELS), getattr(llm, function), llm.kernels
    undo = mutations.apply(what)
    in_place = [f for versions in llm.KERNELS.values() for f in versions if f.__name__ == function]
    assert in_place == [getattr(llm, function)] * (function != "forward")
    assert getattr(llm, function) is not right
    assert llm.kernels == mutations.kind_of(function)
    undo()
    assert (llm.KERNELS, getattr(llm, function), llm.kernels) == (before, right, kernels)


def test_the_readme_has_no_other_rows():
    table = README.read_text(encoding="utf-8").split("<!-- mutations -->\n")[1].split("\n<!-- end of mutations -->")[0]
    assert len(table.splitlines()) == 2 + len(MUTATIONS)
    assert len(MUTATIONS) >= 75
    assert sum(mutations.kind_of(function) == "fused" for function, *_ in MUTATIONS.values()) >= 10
    assert sum(mutations.kind_of(function) == "numpy" for function, *_ in MUTATIONS.values()) >= 12
