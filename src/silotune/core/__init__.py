"""Tensors by name, bytes, files, locks, derived randomness and numbers; imports no other room."""
