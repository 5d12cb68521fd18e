"""A silo's side of a run over Flower.

- `silo_config`: the operator's settings
- `worker`: the process that serves requests on a Unix socket
- `session`: the replies to requests
- `setup`: backbone, rows and parts for the coordinator's configuration
- `state_store`: the silo's states and last replies on disk
- `privacy_ledger`: every noised reply that left the silo
- `policy`: the operator's limits for a run, with `policy_config` (their keys and presets) and `policy_keys`
- `limits`: limits on requests, which `request_ledger` records over all runs
- `admission`: the operator's approval of a run, with `approval` (the decisions) and `run_description`
"""
