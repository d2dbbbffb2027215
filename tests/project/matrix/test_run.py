"""What ``make matrix`` chooses, counts and writes, without environments."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from torchrec_recstore.triples import DEFAULT, TRIPLES, Triple

from .run import (
    BEGIN,
    END,
    Result,
    choose_pythons,
    count,
    main,
    requirements_of,
    save_result,
    saved_results,
    table,
    write_table,
)

OLD, _, NEW = TRIPLES


@pytest.mark.parametrize(
    ("at_hand", "expected"),
    [
        ([10, 11, 12, 13], {OLD: 10, DEFAULT: 11, NEW: 13}),
        ([10, 11], {OLD: 10, DEFAULT: 11, NEW: 10}),
        ([11], {OLD: 11, DEFAULT: 11, NEW: 11}),
    ],
)
def test_the_outer_triples_have_the_oldest_and_the_newest_python(
    at_hand: list[int], expected: dict[Triple, int]
) -> None:
    chosen = choose_pythons([(3, minor) for minor in at_hand], (3, 11))
    assert {triple: minor for triple, (_, minor) in chosen.items()} == expected


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_the_pins_but_for_the_triple(triple: Triple) -> None:
    lines = requirements_of(triple)
    assert {
        line for line in lines if line.startswith(("torch=", "torchrec", "fbgemm"))
    } == {
        f"torch=={triple.torch}",
        f"fbgemm-gpu-cpu=={triple.fbgemm}",
    }
    assert {"torchmetrics==1.0.3", "setuptools>=77"} <= set(lines)
    assert all("==" in line or line == "setuptools>=77" for line in lines)


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passes"/>
<testcase classname="a" name="fails"><failure message="no">...</failure></testcase>
<testcase classname="a" name="then its fixture fails"/>
<testcase classname="a" name="then its fixture fails"><error message="no">...</error></testcase>
<testcase classname="a" name="skipped"><skipped type="pytest.skip" message="no redis-server"/></testcase>
<testcase classname="b" name="skipped"><skipped type="pytest.skip" message="no redis-server"/></testcase>
<testcase classname="a" name="expected to fail"><skipped type="pytest.xfail" message="gloo"/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_by_outcome(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    counts, skips = count(tmp_path / "report.xml")
    assert counts == {"passed": 1, "failed": 2, "skipped": 2, "xfailed": 1}
    assert skips == {"no redis-server": 2}
    assert not Result(NEW, "3.13", counts, "abc1234").good


def test_the_table_replaces_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    counts = Counter(passed=2799, failed=0, skipped=8, xfailed=35)
    result = Result(NEW, "3.13", counts, "abc1234")
    assert result.good
    for _ in range(2):
        write_table(table([result]), page)
        text = page.read_text()
        assert text.startswith(f"before\n{BEGIN}\n\n| torch |")
        assert text.endswith(
            "| 2.14.1 | 1.9.2 | 1.9.0 | 3.13 | 2,799 | 0 | 8 | 35 | abc1234"
            f" |\n\n{END}\nafter\n"
        )
        assert "stale" not in text


def test_the_newest_result_of_each_triple_is_kept(tmp_path: Path) -> None:
    for triple in TRIPLES:
        assert saved_results(tmp_path) is None
        (tmp_path / triple.torch).mkdir()
        save_result(
            Result(triple, "3.11", Counter(passed=5, failed=1), "abc1234"),
            tmp_path / triple.torch,
        )
    newest = Result(OLD, "3.12", {"passed": 6, "failed": 0}, "def5678")
    save_result(newest, tmp_path / OLD.torch)
    results = saved_results(tmp_path)
    assert results is not None
    assert results[0] == newest
    assert [result.commit for result in results] == ["def5678", "abc1234", "abc1234"]


def test_environments_in_the_repository_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--directory", str(Path(__file__).parent / "environments")])
    assert "is in the repository" in capsys.readouterr().err
