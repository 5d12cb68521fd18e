"""From files to silos' rows, their splits, token ids and micro-batches; metrics."""
