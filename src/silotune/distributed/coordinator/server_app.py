"""The app that Flower starts at the coordinator: it reads its job from Flower's run configuration, and runs it."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one job."""
    from silotune.distributed.coordinator.coordinate import coordinate
    from silotune.distributed.coordinator.job import CoordinatorJob
    from silotune.distributed.flower.link import FlowerLink

    coordinate(CoordinatorJob.read(str(context.run_config["job"])), FlowerLink(grid))
