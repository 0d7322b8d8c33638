"""The table of docs/modules.md."""

from megatron.diagnosis.module_table import PAGE, table


def test_the_page_has_the_table_of_the_model() -> None:
    """`python -m megatron.diagnosis.module_table` writes it."""
    assert PAGE.read_text("utf-8").endswith(f"\n\n{table()}")
