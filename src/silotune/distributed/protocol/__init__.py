"""Messages between coordinator and silos: frames, handshake, agreement on the configuration."""
