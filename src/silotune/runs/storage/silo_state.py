"""`load_silo` sets a `Silo` to its state in a checkpoint; without a file, to that before its first round."""

from __future__ import annotations

from silotune.runs.storage.run_folder import Checkpoint, RunFolder, validated_state
from silotune.training.context import TrainingContext
from silotune.training.silo import Silo, SiloState


def load_silo(folder: RunFolder, checkpoint: Checkpoint, context: TrainingContext, silo: Silo) -> None:
    """Set a silo to a checkpoint's state; without a file, it was never sampled and its state follows from the seed.

    Raises:
        InputError: the file is missing, damaged or not of this run.
    """
    file, silo.state = checkpoint.silos.get(silo.name), None
    if file:
        with validated_state(file, context.state_of(silo).private) as check:
            silo.state = SiloState.from_flat(folder.read(file))
            check(silo.state.private)
