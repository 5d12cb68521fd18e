"""Federations over processes and messages."""
