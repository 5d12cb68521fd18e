"""Communication between silos and coordinator: messages, uplink, privacy, aggregation."""
