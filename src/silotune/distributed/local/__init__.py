"""`--engine flower-local`: all parties of a federation as processes on this machine."""
