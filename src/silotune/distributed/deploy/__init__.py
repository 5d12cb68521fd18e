"""The commands of a deployment.

- `commands`: `silotune federation up`, `start`, `join`, `status` and `down`
- `party_configs`: the coordinator's and a node's settings
- `node_keys`: registers silos' public keys at the SuperLink
- `initialize`: `silotune federation init` and `renew`
- `certificates`: authority, server certificates, silos' keys
- `invitations`, `enrollment`: one-time tokens; the coordinator registers invited silos' keys
- `joining`: `silotune silo join`
- `doctor`, `checks`: what `federation doctor` and `silo doctor` check
- `owned_files`: modes, owners, users and units; `templates/` holds nginx's file and the units
- `local_run`: `--engine flower-local`
- `local_processes`: the processes of such a run
"""
