"""What a text must be to be tokenized."""

from __future__ import annotations


def text_fault(text: str) -> str:
    """What is wrong with a text, to be put behind its name in a complaint; empty where nothing is."""
    if not text.strip():
        return "is empty"
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "holds half a character (a lone surrogate)"
    if "\0" in text:
        return "holds a NUL character; only text is allowed"
    return ""
