"""Builds, executes, stores, summarizes and loads one run."""
