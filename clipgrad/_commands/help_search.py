"""Searching the pages of the documentation: sections, ranked by the words that they have."""

import collections
import functools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from clipgrad._errors import docs_found_by, docs_pages, docs_text

_WIDTH = 96  # of the line that is shown of a section
_HEADING = re.compile(r"#{1,4} (.+)")
# Words of a question that say nothing of what it is about.
_STOP = frozenset(
    "a an and are as at be by can do does for from how i if in is it its me my no not of on or "
    "should that the there this to use what when where which who why with you your".split()
)
# How much a word counts in the heading of a section, in the title of its page, among the words that
# the page is to be found by, and at most in the text; and a whole question that is one of these.
_IN_HEADING, _IN_TITLE, _IN_WORDS, _IN_TEXT = 6.0, 5.0, 5.0, 2.2
_IS_FOUND_BY = 6.0
# Where the text of a section holds a word often, and is long (Robertson and Zaragoza, The
# Probabilistic Relevance Framework: BM25 and Beyond, 2009).
_LEAST = 5  # letters that words have in common, for one that is nowhere
_OF_PARTS = 0.05  # how much a part of a name counts where the whole name is found
_SATURATION, _LENGTH, _AVERAGE = 1.2, 0.7, 150


class PageLine(NamedTuple):
    """A place in a page: the section, and the line of the page that has most of the words."""

    page: str
    section: str
    line: int
    text: str


class Section(NamedTuple):
    """A part of a page below one heading, with its words."""

    page: str
    heading: str
    first: int  # the number of its first line
    lines: Sequence[str]
    in_heading: frozenset[str]
    in_title: frozenset[str]
    in_words: frozenset[str]
    found_by: frozenset[str]  # whole words and phrases
    counts: collections.Counter[str]


def search(words: str) -> list[PageLine]:
    """The places where some of these words are, the best first; at most two of a page."""
    sections = _all_sections()
    frequency = collections.Counter(word for section in sections for word in _vocabulary(section))
    wanted = _wanted(words, frequency, len(sections))
    question = words.strip().lower()
    scored = [(_score(section, wanted, question), section) for section in sections]
    ranked = sorted((pair for pair in scored if pair[0]), key=lambda pair: -pair[0])
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for _, section in ranked:
        seen[section.page] += 1
        if seen[section.page] <= 2:
            found.append(_place(section, wanted))
    return found


def _wanted(words: str, frequency: collections.Counter[str], sections: int) -> dict[str, float]:
    """The weight of each word of a question, by how rare it is; its parts if it is nowhere."""
    asked = re.findall(r"[^\s,;:?!()\[\]{}\"'`=]+", words)
    asked = [word for word in asked if word.lower() not in _STOP] or asked
    wanted: dict[str, float] = {}
    for word in asked:
        forms = [form for form in _forms(word) if frequency[form]] or _alike(word, frequency)
        whole = next((form for form in forms if form in _wholes(word)), None)
        for form in forms:
            share = 1.0 if whole in (None, form) else _OF_PARTS
            weight = share * math.log(1 + sections / (1 + frequency[form]))
            wanted[form] = max(wanted.get(form, 0), weight)
    return wanted


def _alike(word: str, frequency: collections.Counter[str]) -> list[str]:
    """The words that begin as this one does, but for its last letters."""
    start = _stem(word)[: -(len(word) // 3)]
    return [form for form in frequency if len(start) >= _LEAST and form.startswith(start)]


def _score(section: Section, wanted: dict[str, float], question: str) -> float:
    length = 1 - _LENGTH + _LENGTH * section.counts.total() / _AVERAGE
    there = 0.0
    total = _IS_FOUND_BY * max(wanted.values(), default=0.0) * (question in section.found_by)
    for word, weight in wanted.items():
        count = section.counts[word]
        there += weight * (word in _vocabulary(section))
        total += weight * (
            _IN_HEADING * (word in section.in_heading)
            + _IN_TITLE * (word in section.in_title)
            + _IN_WORDS * (word in section.in_words)
            + _IN_TEXT * count / (count + _SATURATION * length)
        )
    return total * (there / sum(wanted.values())) ** 2 if there else 0.0


def _place(section: Section, wanted: dict[str, float]) -> PageLine:
    """The section with its line that has most of what is wanted, the heading if none has any."""

    def weight(line: str) -> float:
        there = set(_words(line))
        return sum(weight for word, weight in wanted.items() if word in there)

    best = max(range(len(section.lines)), key=lambda i: (weight(section.lines[i]), -i))
    text = textwrap.shorten(section.lines[best].strip(" |#"), _WIDTH, placeholder=" ...")
    return PageLine(section.page, section.heading, section.first + best, text)


@functools.cache
def _all_sections() -> list[Section]:
    found_by = docs_found_by()
    return [
        section
        for page, path in docs_pages().items()
        for section in _sections(page, docs_text(path), found_by.get(page, ()))
    ]


def _sections(page: str, text: str, found_by: Sequence[str]) -> Iterator[Section]:
    lines = text.splitlines()
    starts = _headings(lines)
    title = _HEADING.fullmatch(lines[0])
    for first, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        heading = _HEADING.fullmatch(lines[first])
        own = heading[1] if heading else page
        yield Section(
            page,
            own.replace("`", ""),
            first + 1,
            lines[first:end],
            frozenset(_words(own)),
            frozenset(_words(f"{title[1] if title else ''} {page}")),
            frozenset(_words(" ".join(found_by))),
            frozenset(word.lower() for word in found_by),
            collections.Counter(word for line in lines[first + 1 : end] for word in _words(line)),
        )


def _headings(lines: Sequence[str]) -> list[int]:
    """The numbers of the lines that are headings, and of the first one."""
    found, is_program = [0], False
    for number, line in enumerate(lines):
        is_program ^= line.startswith("```")
        if number and not is_program and _HEADING.fullmatch(line):
            found.append(number)
    return found


def _vocabulary(section: Section) -> frozenset[str]:
    return section.in_heading | section.in_title | section.in_words | section.counts.keys()


def _words(line: str) -> tuple[str, ...]:
    """All forms of the words of a line, with what names are made of."""
    names = re.findall(r"\w+(?:[.\-&/]\w+)*", re.sub(r"\]\([^)]*\)", "] ", line))
    return tuple(form for name in names for form in _forms(name))


@functools.cache
def _forms(name: str) -> list[str]:
    """The name as it is and without what stands before a dot, then its parts, as stems."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return list(dict.fromkeys([*_wholes(name), *map(_stem, parts)]))


def _wholes(name: str) -> list[str]:
    """A name in one piece, with and without its punctuation, and its last part behind a dot."""
    last = name.rpartition(".")[2]
    return [_stem(name), _stem(re.sub(r"\W|_", "", name)), _stem(last), _stem(last.strip("_"))]


def _stem(word: str) -> str:
    word = re.sub(r"(?<=[a-z]{3})ies$", "y", word.lower())
    word = re.sub(r"(?<=[a-z]{2})(?<=s|x|z|h)es$|(?<=[a-z]{2}[^su])s$", "", word)
    return re.sub(r"([^aeiouls])\1$", r"\1", re.sub(r"(?<=[a-z]{4})(ing|ed)$", "", word))
