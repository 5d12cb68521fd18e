"""What the tests of several rooms share: tiny models and data, rigs, and computations by hand."""
