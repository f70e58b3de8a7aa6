"""Which rows of a table run by default: those that differ in kind.

`@pytest.mark.kinds("case apply", "scale")` on a test says that each pair of a case and a place
runs by default, and each scale once; `kinds(row=kind)` that rows with an equal `kind(row)` are of
one kind; `kinds()` that one row stands for all. The others are exhaustive. A test without the mark
runs whole, and so does what a path, a node id or `-k` selects.
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


def covering(rows: list[dict[str, Any]], groups: Iterable[str]) -> list[int]:
    """The fewest rows, or nearly, that show each combination of each group; always one.

    Of rows that show equally many new ones, that with the most new pairs of any two parameters.
    """
    pairs = [" ".join(pair) for pair in itertools.combinations(sorted(rows[0]), 2)]
    wanted, other = ([shown_by(row, names) for row in rows] for names in (tuple(groups), pairs))
    missing, unseen = set().union(*wanted), set().union(*other)
    picked: list[int] = []
    while missing or not picked:
        best = max(
            range(len(rows)), key=lambda i: (len(wanted[i] & missing), len(other[i] & unseen), -i)
        )
        picked.append(best)
        missing -= wanted[best]
        unseen -= other[best]
    return picked


def _row(item: Any, kind_of: dict[str, Callable]) -> dict[str, Any]:
    """The parameters of a test by their kinds, or by which object of the table they are."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: kind_of.get(name, id)(value) for name, value in params.items()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as exhaustive the rows that show no new kind."""
    tests = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("exhaustive"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for rows in tests.values():
        if mark := rows[0].get_closest_marker("kinds"):
            table = [_row(row, mark.kwargs) for row in rows]
            picked = covering(table, (*mark.args, *mark.kwargs))
            for i in set(range(len(rows))) - set(picked):
                rows[i].add_marker("row")
                rows[i].add_marker("exhaustive")


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
