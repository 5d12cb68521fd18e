"""Scores of models: on own and other silos' rows, at test time, of silos that join late, under attack."""
