"""The tables of docs/parity.md are up to date."""

from parity.page import PAGE, with_tables


def test_tables_are_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "PYTHONPATH=tests:. python -m parity.page updates them"
