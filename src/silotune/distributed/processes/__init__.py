"""Processes on one machine.

- `supervisor`: starts processes with a log each and ends them together
- `fork_server`: a process that imports libraries once and forks others
- `fork_client`: the supervisor's side of the fork server
- `restart_policy`: decides when to stop restarting
- `watchdog`: ends a process group when its supervisor is gone
"""
