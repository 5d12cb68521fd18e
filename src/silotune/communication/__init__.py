"""What leaves a silo and how it is combined: messages, uplink, privacy, aggregation."""
