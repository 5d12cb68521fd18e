"""The invariants' silos and backbone, for runs with an uplink."""

from invariants.conftest import federate, reference, silos_folder, small_backbone

__all__ = ["federate", "reference", "silos_folder", "small_backbone"]
