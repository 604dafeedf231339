"""The README tells what the code does: its tables are the code's, its example runs."""

from readme_tables import README, updated


def test_tables_are_the_codes_own():
    text = README.read_text()
    assert updated(text) == text, "run python tests/readme_tables.py"
