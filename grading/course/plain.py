"""Text that learners wrote, made safe to show: in a terminal, characters can move, hide and retype what is there."""

import re

SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]", re.DOTALL)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str, *, colours: bool = False) -> str:
    r"""The text without terminal sequences, with ? for other characters that control; lines and tabs stay.

    colours: those stay too, for a notebook.

    >>> plain("\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2Jgone\rback\n\x07")
    'red gone\nback\n?'
    >>> plain("\x1b[31mred\x1b[2J", colours=True)
    '\x1b[31mred'
    """
    text = re.sub(r"\r\n?", "\n", text)
    parts = COLOUR.split(text) if colours else [text]
    kept = [*COLOUR.findall(text), ""] if colours else [""]
    return "".join(CONTROL.sub("?", SEQUENCE.sub("", part)) + mark for part, mark in zip(parts, kept, strict=True))
