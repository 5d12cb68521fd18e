"""Sums under masks (`aggregation.secure`): the coordinator learns the sum of the silos' changes and no single one.

The protocol of Bonawitz et al. 2017 between all pairs of silos, against a coordinator that lies (docs/masks.md).
Only `fixed_point` and `shares` can be imported without the packages of `silotune[federation]`.
"""
