"""Computes logits from token ids under a mix of parts.

Each of `backbone`, `tuners`, `forward` and `heads` imports only those before it.
"""
