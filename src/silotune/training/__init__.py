"""The parties of a federation in one process: silos, local rounds, clients, the coordinator, cohorts."""
