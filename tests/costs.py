"""What the tests cost: `python -m pytest --costs`, in seconds of the processor.

It lists each file, and each row that costs more than `LIMIT` and is not marked `slow`. The seconds
say the same on a machine that does other work too, and include the processes that a test starts. A
program that several tests share, as a fixture of a file, counts in the first of them.
"""

import collections
import resource

import pytest

# What a row may cost that runs by default.
LIMIT = 0.3


def cpu_seconds(*of: int) -> float:
    used = map(resource.getrusage, of or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Costs:
    """Measures each phase of a test where it runs, and adds up in the process that prints."""

    def __init__(self):
        self.files, self.rows = collections.Counter(), collections.Counter()
        self.slow = set()
        self.total = 0.0

    def pytest_collection_finish(self):
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.before = now - self.before, now
        return report

    def pytest_runtest_logreport(self, report):
        self.rows[report.nodeid] += report.cpu_seconds
        self.files[report.nodeid.partition("::")[0]] += report.cpu_seconds
        if "slow" in report.keywords:
            self.slow.add(report.nodeid)

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.total += node.workeroutput["cpu_seconds"]

    def pytest_terminal_summary(self, terminalreporter):
        # The processes of pytest-xdist are children, whose costs are in `self.total` already.
        total = self.total + cpu_seconds(*[resource.RUSAGE_SELF] * bool(self.total))
        terminalreporter.section("CPU seconds of each file")
        for file, seconds in self.files.most_common():
            terminalreporter.line(f"{seconds:8.1f}  {file}")
        terminalreporter.line(f"{total - self.files.total():8.1f}  imports and collection")
        terminalreporter.line(f"{total:8.1f}  all")
        terminalreporter.section(f"rows over {LIMIT} CPU seconds that are not marked slow")
        for row, seconds in self.rows.most_common():
            if seconds > LIMIT and row not in self.slow:
                terminalreporter.line(f"{seconds:8.1f}  {row}")
