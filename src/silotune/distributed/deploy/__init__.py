"""The commands of a deployment.

- `commands`: `silotune federation up`, `start`, `join`, `status` and `down`
- `party_configs`: the coordinator's and a node's settings
- `node_keys`: registers silos' public keys at the SuperLink
- `local_run`: `--engine flower-local`
- `local_processes`: the processes of such a run
"""
