"""What a machine wrote, on a terminal: colours, and nothing that the terminal would obey."""

import pytest

from contract.readable import shown, table

COLOURED = "\x1b[1;38:5:9mloss\x1b[0m"


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("loss 0.3\tété 損失 👩‍🔬\nnext", "loss 0.3\tété 損失 👩‍🔬\nnext"),
        (COLOURED, COLOURED),
        ("\x1b[31mnever reset", "\x1b[31mnever reset\x1b[0m"),
        ("\x1b]0;title\x07a\x1b[2J\x1b[3Ab", r"\x1b]0;title\x07a\x1b[2J\x1b[3Ab"),
        ("\x1b]52;c;aGk=\x1b\\\x9b2J\x9d8;;u", r"\x1b]52;c;aGk=\x1b\\x9b2J\x9d8;;u"),
        ("\x1bc\x1b[?1049h\x1b[>4;2m\x08\x7f", r"\x1bc\x1b[?1049h\x1b[>4;2m\x08\x7f"),
        ("rm\u202egpj.\u2066", r"rm\u202egpj.\u2066"),
        ("cut in a letter\udcc3", r"cut in a letter\udcc3"),
        ("\r 1%\r50%|# |\r99%|##|\r\r\ndone\r\n", "99%|##|\ndone\n"),
        ("50%\r\x1b[31mKilled", "\x1b[31mKilled\x1b[0m"),
    ],
)
def test_colours_stay_and_the_rest_is_shown_not_obeyed(written: str, printed: str) -> None:
    assert shown(written) == printed
    assert shown(printed) == printed


def test_a_cell_of_a_table_is_shown_too() -> None:
    assert table([{"why": "\x1b[2Jgone"}]) == ["why", r"\x1b[2Jgone"]
