"""What coordinator and silos exchange: frames, handshake, the configuration, numbers; what is logged of it."""
