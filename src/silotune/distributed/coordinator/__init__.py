"""The coordinator's side of a run over Flower: Flower's ServerApp, handshake, requests, rounds, status files."""
