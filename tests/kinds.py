"""Which rows of a table run by default, and which in CI: those that differ in kind.

`@pytest.mark.kinds("case apply", "scale")` on a test says that each pair of a case and a place
runs by default, and each scale once; `kinds(row=kind)` that rows with an equal `kind(row)` are of
one kind; `kinds()` that one row stands for all. The others are exhaustive. A test without the mark
runs whole, and so does what a path, a node id or `-k` selects.

CI runs of a test with the mark each pair of any two parameters, or what `@pytest.mark.ci` says with
the same arguments. The rows that are left, which repeat those in another combination, are marked
`product` as well.
"""

import collections
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Shown = set[tuple[str, tuple]]


def shown_by(row: dict[str, Any], groups: Iterable[str]) -> Shown:
    """For each group of parameters, which combination of them a row has."""
    return {(group, tuple(row[name] for name in group.split())) for group in groups}


def pairs_of(row: dict[str, Any]) -> list[str]:
    """The groups that are two parameters each, or the one that there is."""
    return [" ".join(names) for names in itertools.combinations(sorted(row), min(2, len(row)))]


def covering(
    rows: list[dict[str, Any]], groups: Iterable[str], first: Iterable[int] = ()
) -> list[int]:
    """The fewest rows, or nearly, that show each combination of each group; always one.

    Of rows that show equally many new ones, that with the most new pairs of any two parameters, and
    then that whose parameters the fewest have. Those that come first are among them.
    """
    wanted, other = (
        [shown_by(row, names) for row in rows] for names in (tuple(groups), pairs_of(rows[0]))
    )
    picked = list(first)
    missing, unseen = (
        set().union(*shown).difference(*(shown[i] for i in picked)) for shown in (wanted, other)
    )
    used = collections.Counter(pair for i in picked for pair in rows[i].items())
    while missing or not picked:
        best = max(
            range(len(rows)),
            key=lambda i: (
                len(wanted[i] & missing),
                len(other[i] & unseen),
                -sum(used[pair] for pair in rows[i].items()),
                -i,
            ),
        )
        picked.append(best)
        used.update(rows[best].items())
        missing -= wanted[best]
        unseen -= other[best]
    return picked


def _row(item: Any, kind_of: dict[str, Callable]) -> dict[str, Any]:
    """The parameters of a test by their kinds, or by which object of the table they are."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: kind_of.get(name, id)(value) for name, value in params.items()}


def of_the_core(rows: list[Any]) -> list[int]:
    """Which rows of a test run by default: none of those that are marked as exhaustive."""
    open_rows = [i for i, row in enumerate(rows) if not row.get_closest_marker("exhaustive")]
    mark = rows[0].get_closest_marker("kinds")
    if not (mark and open_rows):
        return open_rows
    table = [_row(rows[i], mark.kwargs) for i in open_rows]
    return [open_rows[i] for i in covering(table, (*mark.args, *mark.kwargs))]


def of_ci(rows: list[Any], first: list[int]) -> Iterable[int]:
    """Which rows of a test run in CI, besides the first."""
    mark = rows[0].get_closest_marker("ci")
    if not (mark or rows[0].get_closest_marker("kinds")):
        return range(len(rows))
    table = [_row(row, mark.kwargs if mark else {}) for row in rows]
    return covering(table, (*mark.args, *mark.kwargs) if mark else pairs_of(table[0]), first)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as exhaustive the rows that show no new kind."""
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for rows in tests.values():
        core_rows = of_the_core(rows)
        in_ci = set(of_ci(rows, core_rows))
        for i in set(range(len(rows))) - set(core_rows):
            if not rows[i].get_closest_marker("exhaustive"):
                rows[i].add_marker("row")
                rows[i].add_marker("exhaustive")
            if i not in in_ci:
                rows[i].add_marker("row")
                rows[i].add_marker("product")


core = pytest.StashKey[bool]()


def pytest_configure(config):
    """What a path, a node id or `-k` selects runs whole, unless `-m` says otherwise."""
    if hasattr(config, "workerinput"):
        config.option.markexpr, config.stash[core] = config.workerinput["selection"]
        return
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
    asked = any(str(arg).startswith("-m") for arg in config.invocation_params.args)
    if chosen and not asked:
        config.option.markexpr = ""
    config.stash[core] = not (chosen or asked)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """What pytest-xdist starts has other arguments."""
    node.workerinput["selection"] = node.config.option.markexpr, node.config.stash[core]


def only_in_ci(source: str) -> bool:
    """Whether all tests of a file are exhaustive."""
    return bool(re.search(r"^pytestmark = .*pytest\.mark\.exhaustive", source, re.MULTILINE))


def pytest_ignore_collect(collection_path, config):
    """Files without a test of the core need libraries that README's command does not install."""
    if config.stash[core] and collection_path.suffix == ".py":
        return only_in_ci(collection_path.read_text()) or None
    return None
