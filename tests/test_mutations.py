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


@pytest.mark.parametrize("kind", llm.KERNELS)
@pytest.mark.parametrize("check", CHECKS)
def test_the_right_version_passes(check, kind, folders):
    llm.use_kernels(kind)
    assert CHECKS[check](folders)


@pytest.mark.parametrize("what", MUTATIONS)
def test_some_check_sees_it_and_the_readme_says_which(what, folders):
    """In the set that the table is about; and wherever else the same function stands, some check sees it there, too."""
    undo = mutations.apply(what)
    try:
        seen = [mutations.fails(check, folders) for check in CHECKS]
        for kind in mutations.other_kinds(what):
            llm.use_kernels(kind)
            assert any(mutations.fails(check, folders) for check in reversed(CHECKS)), kind
    finally:
        undo()
    assert any(seen)
    assert mutations.row(what, seen) in README.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("what", ["no mask", "fused: no mask", "numpy: scores not scaled", "last block left out"])
def test_a_wrong_version_is_put_in_place_and_taken_back_whole(what):
    def functions():
        return [*vars(llm).items(), *[item for table in vars(llm).values() if type(table) is dict
                                      for item in table.items() if callable(item[1])],
                *[item for replacements in llm.KERNELS.values() for item in replacements.items()]]

    function, before = MUTATIONS[what][0], functions()
    undo = mutations.apply(what)
    assert llm.kernels == mutations.kind_of(what)
    name = function.removeprefix(f"{llm.kernels}_")
    wrong = getattr(llm, name)
    assert wrong.__code__.co_filename == what and wrong.__name__ == function
    for kind in llm.KERNELS:
        llm.use_kernels(kind)
        assert (getattr(llm, name) is wrong) == (kind in [mutations.kind_of(what), *mutations.other_kinds(what)])
    undo()
    assert functions() == before


def test_the_readme_has_no_other_rows():
    table = README.read_text(encoding="utf-8").split("<!-- mutations -->\n")[1].split("\n<!-- end of mutations -->")[0]
    assert len(table.splitlines()) == 2 + len(MUTATIONS)
    assert len(MUTATIONS) >= 90
    assert [sum(mutations.kind_of(what) == kind for what in MUTATIONS) >= 10 for kind in llm.KERNELS] == [True] * 3


def test_each_replaced_function_has_a_wrong_version():
    tried = {function for function, *_ in MUTATIONS.values()}
    for kind, replacements in llm.KERNELS.items():
        assert {function.__name__ for function in replacements.values()} <= tried, kind
