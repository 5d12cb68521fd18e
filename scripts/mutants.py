"""`python -m scripts.mutants --modules FILE … --tests PATH …`: which small changes of modules no test notices.

Tests are collected and modules imported once. A fork runs all tests and notes which lines each of them runs; then every
mutant has a fork of its own, in which the tests run that reach its line, the quickest first, and then the others of
their files (fixtures of a module or session run in its first test only), as far as `--limit` seconds go. A failure
counts if the same tests, in the same order, pass in a fork without the mutant. A mutant whose fork dies or takes too
long is told as such, since not a test has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from scripts.mutations import Mutant, functions_of, mutants_of, patch


def forked(action: Callable[[], Any], wall: float, cpu: float = 0) -> Any:
    """Return what `action` returns in a fork, as JSON tells it; None if it took too long, raised or died.

    Args:
        action: what is done; it prints nothing.
        wall: seconds after which the fork is ended.
        cpu: seconds of its own processor time after which it is ended; 0: any.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        if cpu:
            spent = resource.getrusage(resource.RUSAGE_SELF)
            most = int(spent.ru_utime + spent.ru_stime + cpu) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        try:
            with os.fdopen(writer, "w", encoding="utf-8") as answer:
                answer.write(json.dumps(action()))
        finally:
            os._exit(0)
    os.close(writer)
    end, answer = time.monotonic() + wall, b""
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(reader, 1 << 20)
        if not piece:
            break
        answer += piece
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what tests have started
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


class Mutants:
    """The plug-in that runs mutants where pytest would run tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._paths = [Path(name).resolve() for name in options.modules]
        self._failed = ""
        self._pass: dict[tuple[str, ...], bool] = {}  # which tests pass without a mutant, in this order

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the first failure."""
        if report.failed and not self._failed:
            self._failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all mutants and print those that no test noticed."""
        functions = {path: functions_of(path) for path in self._paths}
        tests = {item.nodeid: item for item in session.items}
        traced = forked(lambda: self._trace(session.items), 3600)
        if traced is None:
            raise pytest.UsageError("the tests end the process, or take more than an hour")
        if failed := [name for name, (_, _, failed) in traced.items() if failed]:
            raise pytest.UsageError(f"tests fail without a mutant: {', '.join(failed)}")
        seconds, reached = {name: spent for name, (spent, _, _) in traced.items()}, defaultdict(list)
        for name, (_, lines, _) in traced.items():
            for path, line in lines:
                reached[path, line].append(name)
        mutants = [mutant for path in self._paths for mutant in mutants_of(path)]
        if self._options.sample:
            number = min(self._options.sample, len(mutants))
            sampled = random.Random(self._options.seed).sample(range(len(mutants)), number)
            mutants = [mutants[n] for n in sorted(sampled)]
        counts: Counter[str] = Counter()
        for mutant in mutants:
            names = self._chosen(reached[str(mutant.path), mutant.line], seconds)
            outcome = self._outcome(mutant, [tests[name] for name in names], sum(map(seconds.get, names)), functions)
            kind, _, killer = outcome.partition(" by ")
            counts[kind] += 1
            if not killer or self._options.kills:
                print(f"{outcome}: {mutant.place}", flush=True)
        print(dict(counts), f"of {sum(len([*mutants_of(path)]) for path in self._paths)} mutants")
        return True

    def _outcome(self, mutant: Mutant, tests: list[pytest.Item], needed: float, functions: dict[Path, Any]) -> str:
        if not tests:
            return "no test runs it"

        def action() -> str:
            if not patch(mutant, functions[mutant.path]):
                return "not made"
            return self._run(tests) or "survived"

        word = forked(action, 20 * self._options.limit, 3 * needed + 30)
        if word in (None, "not made", "survived"):
            return word or "died or took too long"
        names = [test.nodeid for test in tests]
        return f"killed by {word}" if self._passes(tests[: names.index(word) + 1]) else f"fails without it, too, {word}"

    def _passes(self, tests: list[pytest.Item]) -> bool:
        """Return whether tests pass in this order without a mutant, as the trace's order need not tell."""
        names = tuple(test.nodeid for test in tests)
        if names not in self._pass:
            self._pass[names] = forked(lambda: self._run(tests), 20 * self._options.limit) == ""
        return self._pass[names]

    def _chosen(self, reaching: list[str], seconds: dict[str, float]) -> list[str]:
        """Return the tests that reach a line and those of their files, quickest first, within the limit."""
        files = {name.partition("::")[0] for name in reaching}
        others = [name for name in seconds if name.partition("::")[0] in files and name not in reaching]
        rest, selection = self._options.limit, []
        for name in [*sorted(reaching, key=seconds.__getitem__), *sorted(others, key=seconds.__getitem__)]:
            if seconds[name] <= rest:
                rest -= seconds[name]
                selection.append(name)
        return selection

    def _run(self, tests: list[pytest.Item]) -> str:
        """Run tests up to the first that fails, and return its name."""
        self._failed = ""
        for test, after in zip(tests, [*tests[1:], None], strict=True):
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=after)
            if self._failed:
                break
        return self._failed

    def _trace(self, tests: list[pytest.Item]) -> dict[str, tuple[float, list[tuple[str, int]], bool]]:
        """Return for each test its seconds, the lines of the modules that it ran, and whether it failed."""
        paths, traces = {str(path) for path in self._paths}, {}
        lines: set[tuple[str, int]] = set()

        def note(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in paths:
                return None
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return note

        for test, after in zip(tests, [*tests[1:], None], strict=True):
            self._failed, begin = "", time.process_time()
            lines.clear()
            sys.settrace(note)
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=after)
            sys.settrace(None)
            traces[test.nodeid] = (time.process_time() - begin, sorted(lines), bool(self._failed))
        return traces


def main() -> None:
    """Read the words of the command and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", required=True, metavar="FILE", help="what is changed")
    parser.add_argument("--tests", nargs="+", required=True, metavar="PATH", help="what should notice")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of tests for one mutant")
    parser.add_argument("--kills", action="store_true", help="tell what killed the others, too")
    options = parser.parse_args()
    words = ["-q", "-s", "-p", "no:cacheprovider", "-m", "not long", *options.tests]
    sys.exit(pytest.main(words, plugins=[Mutants(options)]))


if __name__ == "__main__":
    main()
