"""The parts that talk to Flower: apps, message framing, the link to a worker."""
