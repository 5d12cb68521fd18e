"""The silo over Flower: its configuration, worker, sessions, state store, privacy ledger."""
