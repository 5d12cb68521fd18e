"""From files to tokenized rows and batches: readers, splits, partitions, templates, metrics."""
