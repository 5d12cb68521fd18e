"""The command line: the entry point `main`, and one module per group of commands, named after them."""
