"""Every row of the interface lists has a test of its name (:mod:`tests.conformance.rows`)."""

from __future__ import annotations

from tests.conformance.rows import all_rows, interface_rows, rows_with_tests


def test_the_lists_have_125_rows() -> None:
    assert len(interface_rows()) == 125
    assert len(set(all_rows())) == len(all_rows())


def test_every_row_has_a_test() -> None:
    missing = [row for row, test in rows_with_tests().items() if test is None]
    assert not missing, f"{len(missing)} of {len(all_rows())} rows have no test"


def test_the_test_of_a_row_is_defined_once() -> None:
    assert not [test for test in rows_with_tests().values() if test is not None and "," in test]
