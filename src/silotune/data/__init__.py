"""Turns files into silos' rows, splits, token ids and micro-batches; defines metrics."""
