"""Engines run the rounds of a federation; the method code is the same under every engine."""
