"""What coordinator and silos exchange: frames, handshake, the configuration, numbers that may be said; records."""
