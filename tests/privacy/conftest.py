"""The invariants' silos and backbone, and the command line, for runs with noise."""

from commandline import command, place
from invariants.conftest import federate, reference, silos_folder, small_backbone

__all__ = ["command", "federate", "place", "reference", "silos_folder", "small_backbone"]
