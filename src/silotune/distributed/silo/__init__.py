"""A silo's side of a run over Flower: the worker, its replies, the operator's settings, policy and ledgers."""
