"""Score a backbone without any training: on a setting's test rows or a file, and each template on validation rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silotune.config import Config
from silotune.config.head import PLAIN
from silotune.core.numeric import mean_ignoring_none
from silotune.data.loading import load_silos
from silotune.data.rows import SiloData, Splits
from silotune.data.tasks import lower_is_better
from silotune.data.templates import CHAT
from silotune.errors import InputError
from silotune.evaluation.score_details import LEVEL, Bootstrap, score_details
from silotune.evaluation.untouched import measure_untouched, with_shots
from silotune.models.backbone.backbone import Backbone
from silotune.models.backbone.stored_model import has_chat_template
from silotune.models.heads import HEADS
from silotune.runs.build.model import model_for
from silotune.runs.build.resolve import read_config
from silotune.runs.evaluation import Evaluation
from silotune.training.context import TrainingContext

_TEMPLATE_ROWS = 50
"""Rows of a silo on which templates are compared."""

_CLEAR = 0.05
"""Difference of two means, as a share of the larger, from which one template is better."""


def backbone_setting(
    backbone: str, data: str, overrides: Sequence[str] = (), text: Sequence[str] = (), label: str = ""
) -> tuple[Config, list[SiloData]]:
    """Return the configuration and the rows on which a backbone is scored.

    `data` is a preset, a YAML file, or a file of rows with these columns (or the usual ones), which are all test rows.
    """
    words = [*overrides, f"backbone={backbone}", "rounds=0"]
    path = Path(data)
    if not path.is_file() or path.suffix in (".yaml", ".yml"):
        if text or label:
            raise InputError("--text, --label: belong to a file of rows")
        config = read_config(data, words)
        return config, load_silos(config)
    columns = {**({"text": list(text)} if text else {}), **({"label": label} if label else {})}
    silos: Any = [{"name": "rows", "path": str(path.resolve()), **columns}]
    for head in ("lm", "verbalizer"):
        config = read_config("", ["method=local", "tuner=lora", f"head={head}", *words], silos=silos)
        (silo,) = load_silos(config)
        if silo.task.labeled != (head == "lm"):
            break
    splits = silo.splits
    return config, [SiloData(silo.name, silo.task, Splits(test=splits.all()))]


def evaluate_backbone(config: Config, silos: Sequence[SiloData]) -> tuple[Config, dict[str, Evaluation]]:
    """Score a backbone on silos' test rows, without any training; return also the configuration as it took effect.

    With `evaluation.shots`, that many training rows go before each question (of a file without training rows its
    first ones, which are not scored then).
    """
    config, context = _context(config, silos)
    shots, evaluations = config.evaluation.shots, {}
    for silo in silos:
        test, tokenize = silo.splits.test, context.head.row_tokenizer(context.backbone, context.max_length)
        if shots:
            examples = silo.splits.train[:shots] or test[:shots]
            test = test if silo.splits.train else test[shots:]
            tokenize = with_shots(context, silo.task, examples)
        rows = tokenize(silo.task, test)
        measured = measure_untouched(context, rows, with_loss=not shots)
        details = score_details(measured, rows, Bootstrap(config.evaluation.bootstrap, config.seed, silo.name))
        evaluations[silo.name] = Evaluation({"silo": silo.name, "file": "", "level": LEVEL, **(details or {})})
    return config, evaluations


@dataclass(frozen=True)
class TemplateScores:
    """What each template scores with an untouched backbone, by silo, on validation rows (`training` without those).

    The template with the better mean is proposed; without a clear difference, of a twentieth, the model's own.
    """

    silos: dict[str, dict[str, float | None]]
    split: str
    proposed: str
    clear: bool

    def mean(self, template: str) -> float | None:
        """Return a template's mean over the silos."""
        return mean_ignoring_none(scores[template] for scores in self.silos.values())


def score_templates(config: Config, silos: Sequence[SiloData]) -> TemplateScores:
    """Score the tokenizer's chat template and the plain one on rows that are not test rows."""
    if not config.head.writes:
        raise InputError(f"--templates: head={config.head.name} asks no questions; allowed: head=lm")
    if any(row.turns for silo in silos for row in silo.splits.train):
        raise InputError("--templates: rows are conversations, which only the tokenizer's chat template writes")
    if not has_chat_template(config.backbone, None):
        raise InputError(f"--templates: the tokenizer of {config.backbone.name} has no chat template; plain is all")
    split = "validation" if all(silo.splits.validation for silo in silos) else "train"
    backbone: Backbone | None = None
    table: dict[str, dict[str, float | None]] = {silo.name: {} for silo in silos}
    for template in (CHAT, PLAIN):
        _, context = _context(config.replace(head={"template": template}), silos, backbone)
        backbone = context.backbone
        tokenize = context.head.row_tokenizer(backbone, context.max_length)
        for silo in silos:
            rows = tokenize(silo.task, getattr(silo.splits, split)[:_TEMPLATE_ROWS])
            table[silo.name][template] = measure_untouched(context, rows).score
    means = {name: mean_ignoring_none(scores[name] for scores in table.values()) or 0.0 for name in (CHAT, PLAIN)}
    clear = abs(means[CHAT] - means[PLAIN]) > _CLEAR * max(map(abs, means.values()))
    better = min if lower_is_better(silos[0].task.metric) else max
    return TemplateScores(
        table, "training" if split == "train" else split, better(means, key=means.__getitem__) if clear else CHAT, clear
    )


def _context(
    config: Config, silos: Sequence[SiloData], backbone: Backbone | None = None
) -> tuple[Config, TrainingContext]:
    """Build the model of a setting whose rounds do not matter."""
    if HEADS[config.head.name].has_tensors:
        raise InputError(
            f"head={config.head.name}: has tensors that are not trained; an untouched backbone answers with head=lm or "
            "verbalizer"
        )
    return model_for(config, silos, backbone)
