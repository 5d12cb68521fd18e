"""Processes on one machine.

- `supervisor`: starts processes with a log each and ends them together
- `ports`: free ports, and waiting until a process listens
- `fork_server`: a process that imports libraries once and forks others
- `fork_client`: the supervisor's side of the fork server
- `restart_policy`: decides whether a process may be restarted once more
- `watchdog`: ends a process group when its supervisor is gone
"""
