"""The result of a run: its scores and rounds, and its silos' models."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silotune.core.notebook import html_table, notebook_figure
from silotune.core.numeric import score_text
from silotune.data.tasks import lower_is_better, metric_title
from silotune.models.backbone.backbone import Backbone
from silotune.runs.callbacks import RoundEnd
from silotune.runs.callbacks.base import read_rounds, silo_values
from silotune.runs.model_file import check_has_models, model_folder
from silotune.runs.personal_model import PersonalModel
from silotune.runs.restore import restore
from silotune.runs.storage.readers import read_summary
from silotune.training.federation import Federation

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class Run:
    """A finished run: its summary, and every silo's personalized model at the best round.

    Args:
        folder: the run folder.
        summary: the content of `summary.json`.
        federation: the federation that ran; if None, it is restored from the folder on first access.
        backbone: the run's backbone; if None, the federation's, or without one it is loaded with the first model.
        precision: the precision in which to load the backbone, instead of the run's.
        device: the device onto which to load the backbone, as in the key `device`.
    """

    def __init__(
        self,
        folder: Path,
        summary: dict[str, Any],
        federation: Federation | None = None,
        backbone: Backbone | None = None,
        precision: str | None = None,
        device: str = "auto",
    ) -> None:
        self.folder = folder
        self.summary = summary
        self._backbone = backbone if federation is None else federation.backbone
        self._precision = precision
        self._device = device
        if federation is not None:
            self.federation = federation

    @cached_property
    def federation(self) -> Federation:
        """Backbone, method, silos and coordinator at the best round; of a run that was opened, silos have no rows."""
        federation = restore(self.folder, self._backbone, self._precision, self._device)
        self._backbone = federation.backbone
        return federation

    @property
    def silos(self) -> dict[str, dict[str, Any]]:
        """Per silo: metric, validation and test score (percent), row counts."""
        return dict(self.summary["silos"])

    def model(self, silo: str) -> PersonalModel:
        """Return the silo's personalized model."""
        folder = model_folder(self.folder, silo)
        model = PersonalModel.open(folder, self._backbone, self._precision, self._device)
        self._backbone = model.context.backbone
        return model

    @cached_property
    def history(self) -> list[RoundEnd]:
        """The rounds that have ended, with scores, losses and bytes, as the event log says."""
        return read_rounds(self.folder, int(self.summary["rounds"]))

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rounds as a table: a line for each silo and round, with score, loss, its terms and bytes.

        Where A and B of LoRA are averaged, `product_error` is that of the line's round.
        """
        import pandas

        lines: list[dict[str, Any]] = []
        for ended in self.history:
            silos: dict[str, dict[str, Any]] = {name: {"validation": score} for name, score in ended.validation.items()}
            for event in ended.events:
                if event["event"] == "silo":
                    silos.setdefault(event["silo"], {}).update(silo_values(event))
            of_round = {} if ended.product_error is None else {"product_error": ended.product_error}
            lines += [{"round": ended.round, "silo": name} | values | of_round for name, values in silos.items()]
        return pandas.DataFrame(lines)

    def plot(self) -> Figure:
        """Draw every silo's validation score by round."""
        from matplotlib.ticker import MaxNLocator

        figure = notebook_figure(6, 3.5)
        axes = figure.subplots()
        for silo in sorted({name for ended in self.history for name in ended.validation}):
            points = [(ended.round, ended.validation.get(silo)) for ended in self.history]
            judged = [(number, score) for number, score in points if score is not None]
            axes.plot([number for number, _ in judged], [score for _, score in judged], marker=".", label=silo)
        metrics = sorted({metric_title(str(entry["metric"])) for entry in self.silos.values()})
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="round", ylabel=f"validation {', '.join(metrics)}", title=str(self.summary["method"]))
        axes.legend(fontsize="small")
        return figure

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}): {self._heading()}\n{self._scores()}"

    def _heading(self) -> str:
        summary = self.summary
        return (
            f"{summary['method']}, {len(self.silos)} silos, best round {summary['best_round']} of {summary['rounds']}, "
            f"backbone {summary['backbone']}"
        )

    def _scores(self) -> str:
        scores = [f"{name} {score_text(entry['test'])}" for name, entry in list(self.silos.items())[:8]]
        more = ", …" if len(self.silos) > len(scores) else ""
        return f"test average {score_text(self.summary['average'])} ({', '.join(scores)}{more})"

    def _repr_html_(self) -> str:
        rows = [
            (name, metric_title(str(entry["metric"])), *(score_text(entry.get(key)) for key in ("validation", "test")))
            for name, entry in self.silos.items()
        ]
        rows.append(("average", "", "", score_text(self.summary["average"])))
        better = "lower" if all(lower_is_better(entry["metric"]) for entry in self.silos.values()) else "higher"
        caption = f"{self._heading()}; {better} is better"
        return html_table(caption, ("silo", "metric", "validation", "test"), rows)


def load_run(
    folder: str | Path, backbone: Backbone | None = None, precision: str | None = None, device: str = "auto"
) -> Run:
    """Open a finished run at its best round: its summary, and every silo's personalized model.

    Args:
        folder: the run folder.
        backbone: the run's backbone, if it is loaded already.
        precision: load the backbone in this precision instead of the run's.
        device: load it onto this device, as the key `device`; the run's own may be missing here.
    """
    path = Path(folder)
    summary = read_summary(path)
    check_has_models(path, summary)
    return Run(path, summary, None, backbone, precision, device)
