"""Communication between silos and coordinator: messages, uplink, privacy, sums under masks."""
