"""Run all parties of a federation as processes on this machine (`--engine flower-local`)."""
