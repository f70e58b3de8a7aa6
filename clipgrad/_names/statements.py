"""The statements of source files: where each begins and ends, and what it assigns."""

import ast
import linecache
from collections.abc import Iterator
from typing import NamedTuple

_HEADS = (ast.stmt, ast.Lambda)


class Statement(NamedTuple):
    """A statement, the head of one that holds others, or a lambda."""

    first: int  # its first line
    last: int
    variable: str  # what it assigns; "" for one that assigns nothing


Lines = dict[int, Statement]
# The statements and the lambdas of each file, behind the text that they were read in.
_READ: dict[str, tuple[list[str], Lines, Lines]] = {}


def statement_at(file: str, line: int, is_lambda: bool) -> Statement:
    """The innermost statement, or lambda, of a line; the line alone if its source is not there."""
    linecache.checkcache(file)
    text = linecache.getlines(file)
    if file not in _READ or _READ[file][0] is not text:
        heads = _heads(text)
        _READ[file] = text, _by_line(heads, ast.stmt), _by_line(heads, ast.Lambda)
    _, statements, lambdas = _READ[file]
    return (lambdas if is_lambda else statements).get(line, Statement(line, line, ""))


def _heads(text: list[str]) -> list[ast.stmt | ast.Lambda]:
    """All statements and lambdas of a file, each behind those that it is inside of."""
    try:
        tree = ast.parse("".join(text))
    except (SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, _HEADS)]


def _by_line(heads: list[ast.stmt | ast.Lambda], kind: type) -> Lines:
    """The innermost of each line, which comes last."""
    return {
        line: Statement(node.lineno, _last_line(node), _variable(node))
        for node in heads
        if isinstance(node, kind)
        for line in range(node.lineno, _last_line(node) + 1)
    }


def _last_line(node: ast.stmt | ast.Lambda) -> int:
    """The last line, of a statement that holds others the last of its head."""
    body = getattr(node, "body", None)
    if isinstance(body, list):
        return max(node.lineno, body[0].lineno - 1)
    return node.end_lineno or node.lineno


def _variable(node: ast.AST) -> str:
    names = [name for name in map(ast.unparse, _targets(node)) if name != "_"]
    return names[0] if len(names) == 1 else f"({', '.join(names)})" if names else ""


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target
