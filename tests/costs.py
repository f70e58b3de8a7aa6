"""What each file of tests costs: `python -m pytest --costs`, in seconds of the processor.

They say the same on a machine that does other work too, and include the processes that a test
starts. A program that several tests share counts where it is compiled, in the first of them.
"""

import collections
import resource

import pytest


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Costs:
    """Measures each phase of a test where it runs, and adds up in the process that prints."""

    def __init__(self):
        self.files, self.tests = collections.Counter(), collections.Counter()
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
        test = report.nodeid.partition("[")[0]
        self.tests[test] += report.cpu_seconds
        self.files[test.partition("::")[0]] += report.cpu_seconds

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.total += node.workeroutput["cpu_seconds"]

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("CPU seconds of each file, and of what is 1 % of all or more")
        total = self.total + cpu_seconds()
        for file, seconds in self.files.most_common():
            terminalreporter.line(f"{seconds:8.1f}  {file}")
            for test, part in self.tests.most_common():
                if test.startswith(file + "::") and part >= total / 100:
                    terminalreporter.line(f"{part:16.1f}  {test.partition('::')[2]}")
        terminalreporter.line(f"{total - self.files.total():8.1f}  imports and collection")
        terminalreporter.line(f"{total:8.1f}  all")
