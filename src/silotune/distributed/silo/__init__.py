"""A silo's side of a run over Flower.

- `silo_config`: the operator's settings
- `worker`: the process that serves requests on a Unix socket
- `session`: the replies to requests
- `setup`: backbone, rows and parts for the coordinator's configuration
- `state_store`: the silo's states and last replies on disk
- `privacy_ledger`: every noised reply that left the silo
"""
