"""The tables of docs/parity.md say what is."""

from parity.page import PAGE, with_tables


def test_tables_are_true() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "PYTHONPATH=tests:. python -m parity.page writes them anew"
