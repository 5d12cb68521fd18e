"""Section `generation`: how many prompts are answered at once; beams and answer length are keys of `head`."""

from __future__ import annotations

from silotune.config.section import Section
from silotune.config.validators import RowsAtOnce


class GenerationConfig(Section):
    """How answers are written (`head=lm`).

    Attributes:
        rows_at_once: prompts that are answered together; each takes the memory of `head.beams` answers.
    """

    rows_at_once: RowsAtOnce = 32
