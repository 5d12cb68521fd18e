"""What must hold for every method: one suite, parametrised over `METHODS`."""
