"""`text_fault` says why a text cannot be tokenized (empty, NUL, half a character): for file readers and predictions."""

from __future__ import annotations


def text_fault(text: str) -> str:
    """Describe why a text cannot be tokenized, as the end of an error message; empty if it can."""
    if not text.strip():
        return "is empty"
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "holds half a character (a lone surrogate)"
    if "\0" in text:
        return "holds a NUL character; only text is allowed"
    return ""
