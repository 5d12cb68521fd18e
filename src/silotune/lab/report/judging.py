"""Judge a report's entries against a reference that is named before the run, never the winner on test rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from silotune.data.tasks import metric_title
from silotune.errors import InputError, unknown_name_error
from silotune.lab.report.entries import ReportEntry
from silotune.lab.report.frame import Results
from silotune.lab.report.judging_plan import JudgingPlan
from silotune.lab.report.paired_rows import paired_differences
from silotune.lab.report.tables import ResultTable, plain_table
from silotune.lab.report.verdicts import Verdict, judge
from silotune.runs.scores import AVERAGE, metric_of_column

NOTE = (
    "A difference is the mean over silos and seeds, in points. Its interval adds the variance of seeds and that of the "
    "test rows they share (rows resampled in all seeds, silos and both entries together). Equal: the 90 % interval "
    "lies within ± the margin; better or worse: the 95 % interval excludes 0; else undecided. All comparisons but a "
    "primary one share an error of 5 % (Bonferroni): the interval of each is the wider for their number."
)


@lru_cache(maxsize=1)  # the terminal, the files and the page of one report all show them
def verdicts(results: Results) -> tuple[Verdict, ...]:
    """Judge each entry against the reference of its data, in each column of averages.

    The reference is the plan's; without one it is `local` if that is an entry, else the first entry. Entries on other
    data than the reference's are not judged.
    """
    plan = results.plan
    if plan.against and all(entry.label != plan.against for entry in results.entries):
        raise unknown_name_error("--against", plan.against, [entry.label for entry in results.entries])
    compared = [
        (entry, reference, column)
        for part in results.parts
        for reference in _reference(part.entries, plan)
        for column in ([AVERAGE] if plan.metric else part.averages)
        for entry in part.entries
        if entry is not reference
    ]
    corrected = max(1, sum(entry.label != plan.primary for entry, _, _ in compared))
    return tuple(_verdict(*each, plan, corrected) for each in compared)


def _reference(entries: Sequence[ReportEntry], plan: JudgingPlan) -> list[ReportEntry]:
    """Return the reference among entries on the same data, or nothing where the plan's is not among them."""
    labels = {entry.label: entry for entry in entries}
    if plan.against:
        return [labels[plan.against]] if plan.against in labels else []
    return [labels.get("local", entries[0])]


def _verdict(entry: ReportEntry, reference: ReportEntry, column: str, plan: JudgingPlan, corrected: int) -> Verdict:
    metric, primary = metric_of_column(column), entry.label == plan.primary
    verdict = Verdict(entry.label, reference.label, "not judged", primary=primary, column=column)
    try:
        differences = paired_differences(entry, reference, metric, plan.metric)
    except InputError as error:
        return replace(verdict, remark=str(error))
    seeds = len(differences.by_seed)
    word, remark, interval = judge(differences, plan.margin, 1 if primary else corrected)
    exploratory = any(count < seeds and count not in plan.looks for count in plan.seen)
    return replace(
        verdict,
        word=word,
        remark=remark,
        mean=differences.mean,
        interval=interval,
        seeds=seeds,
        exploratory=exploratory,
    )


def verdict_table(results: Results) -> ResultTable | None:
    """Make the table of verdicts; None where there is nothing to compare."""
    plan, judged = results.plan, verdicts(results)
    if not judged:
        return None
    several = len({verdict.column for verdict in judged}) > 1
    rows = [
        (
            f"{each.entry} − {each.reference}"
            + (f", {metric_title(metric_of_column(each.column))}" if several else ""),
            _texts(each),
        )
        for each in judged
    ]
    claim = f"{plan.claim}: " if plan.claim else ""
    return plain_table(f"{claim}differences in points, margin {plan.margin:g}", rows, "entry − reference")


def _texts(verdict: Verdict) -> dict[str, str]:
    judged = verdict.seeds > 0
    return {
        "difference": f"{verdict.mean:+.2f}" if judged else "–",
        "interval": verdict.interval_text,
        "seeds": str(verdict.seeds) if judged else "–",
        "verdict": verdict.text,
    }
