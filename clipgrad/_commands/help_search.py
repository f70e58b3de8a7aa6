"""Searching the pages of the documentation: sections, ranked by the words that they have.

The site searches with the same index and the same scores: docs/sections.py writes the index, and
docs/_static/search.js looks words up in it.
"""

import collections
import functools
import math
import os.path
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from clipgrad._errors import (
    docs_found_by,
    docs_pages,
    docs_sections_found_by,
    docs_synonyms,
    docs_text,
)

K = TypeVar("K")

_WIDTH = 96  # of the line that is shown of a section
_HEADING = re.compile(r"#{1,4} (.+)")
# Words of a question that say nothing of what it is about.
STOP = frozenset(
    "a after an and any are as at be by can come comes do does find for from get gives goes has "
    "have how i if in is it its me my no not of on one or should some that the their there this to "
    "use want was what when where which who why with without you your".split()
)
# Words that say little, since they fit any question.
WEAK = frozenset(
    "about again all also always another anything because been before being better big both "
    "bring cause code could did during each else enough even every everything exact fine "
    "first full get getting give good got happen hard having help here high huge instead into "
    "just keep know large last let like little long look lot made make many may maybe mean "
    "might more most much must need new now number off often old only other our out over own "
    "part please possible problem put quite rather really right same say see seem set several "
    "show simple since single small so something sometimes still such sudden sure take tell "
    "than them then thing think though through time too try under until up using very way we "
    "well were whether while whole will work would write wrong yet".split()
)
# How much a word counts in the heading of a section, in the title of its page, among the words that
# the page is to be found by, and at most in the text; and a whole phrase that is one of these.
_IN_HEADING, _IN_TITLE, _IN_WORDS, _IN_TEXT = 4.5, 5.0, 5.0, 2.2
IS_FOUND_BY = 20.0
# Where the text of a section holds a word often, and is long (Robertson and Zaragoza, The
# Probabilistic Relevance Framework: BM25 and Beyond, 2009).
_SATURATION, _LENGTH, _AVERAGE = 1.2, 0.7, 150
LEAST = 5  # letters that words have in common, for one that is nowhere
OF_PARTS = 0.05  # how much a part of a name counts where the whole name is found
OF_SYNONYMS = 0.6  # and a word of the same meaning
OF_PAGE = 0.5  # how much the page of a section counts
OF_WEAK = 0.3  # and a word that says little
OF_LACKING = 1.5  # the power of the share of the question that a section has
OF_PHRASE = 1.5  # and of the share that a phrase is
# What is for the second reading.
_PRIORS = {
    "notebooks": 0.8,
    "benchmarks": 0.7,
    "bibliography": 0.8,
    "changelog": 0.7,
    "security": 0.7,
}


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
    in_words: Mapping[str, float]
    counts: collections.Counter[str]

    def prior(self) -> float:
        """How much its page counts among others."""
        return _PRIORS.get(self.page.partition("/")[0], 1.0)

    def weights(self) -> dict[str, float]:
        """How much each of its words counts, were all words as rare."""
        length = 1 - _LENGTH + _LENGTH * self.counts.total() / _AVERAGE
        words = self.in_heading | self.in_title | self.in_words.keys() | self.counts.keys()
        return {
            word: _IN_HEADING * (word in self.in_heading)
            + _IN_TITLE * (word in self.in_title)
            + _IN_WORDS * self.in_words.get(word, 0.0)
            + _IN_TEXT * self.counts[word] / (self.counts[word] + _SATURATION * length)
            for word in words
        }


class Index(NamedTuple):
    """Where each word is, and how much it counts there."""

    sections: Sequence[Section]
    places: Mapping[str, Mapping[int, float]]  # of each word the numbers of sections
    phrases: Mapping[str, Sequence[str]]  # that pages are to be found by, as stems
    synonyms: Mapping[str, Sequence[str]]

    def rarity(self, word: str) -> float:
        """The weight of a word in a question."""
        return math.log(1 + len(self.sections) / (1 + len(self.places.get(word, ()))))


class Term(NamedTuple):
    """A word of a question: the weights of its forms, and of words of the same meaning."""

    forms: dict[str, float]
    synonyms: dict[str, float]

    def most(self) -> float:
        """The weight of the form that counts most."""
        return max([*self.forms.values(), *self.synonyms.values()], default=0.0)


def search(words: str) -> list[PageLine]:
    """The places where some of these words are, the best first; at most two of a page."""
    index = whole_index()
    terms = _terms(words, index)
    scores = _scores(words, terms, index)
    wanted = {
        form: weight for term in terms for form, weight in (term.synonyms | term.forms).items()
    }
    seen: collections.Counter[str] = collections.Counter()
    places = []
    for number in sorted(scores, key=lambda number: (-scores[number], number)):
        section = index.sections[number]
        seen[section.page] += 1
        if seen[section.page] <= 2:
            places.append(_place(section, wanted))
    return places


def _terms(words: str, index: Index) -> list[Term]:
    """The words of a question that say what it is about, each with its weight by how rare it is."""
    asked = _asked(words)
    terms = []
    for word in asked:
        forms = [form for form in _forms(word) if form in index.places]
        same = [form for form in index.synonyms.get(stem(word), ()) if form in index.places]
        if not forms and not same:
            forms = _alike(word, index)
        most = OF_WEAK if word.lower() in WEAK or stem(word) in WEAK else 1.0
        whole = next((form for form in forms if form in _wholes(word)), None)
        terms.append(
            Term(
                {
                    form: most * (1.0 if whole in (None, form) else OF_PARTS) * index.rarity(form)
                    for form in forms
                },
                {form: most * OF_SYNONYMS * index.rarity(form) for form in same},
            )
        )
    return [term for term in terms if term.most()]


def _asked(words: str) -> list[str]:
    asked = _split(words)
    return [word for word in asked if word.lower() not in STOP] or asked


def _split(words: str) -> list[str]:
    return re.findall(r"[^\s,;:?!()\[\]{}\"'`=]+", words)


def _alike(word: str, index: Index) -> list[str]:
    """The most frequent of the words that differ by one slip, or else that begin as this one."""
    whole = stem(word)
    start = whole[: -(len(word) // 3)]
    near = [form for form in index.places if len(whole) >= LEAST and _is_a_slip(whole, form)]
    near = near or [form for form in index.places if len(start) >= LEAST and form.startswith(start)]
    return [max(near, key=lambda form: len(index.places[form]))] if near else []


def _is_a_slip(one: str, other: str) -> bool:
    """Whether one letter is missing, too much or another, or two neighbors are swapped."""
    if abs(len(one) - len(other)) > 1:
        return False
    same = len(os.path.commonprefix([one, other]))
    one, other = one[same:][::-1], other[same:][::-1]
    same = len(os.path.commonprefix([one, other]))
    one, other = one[same:], other[same:]
    return max(len(one), len(other)) <= 1 or (len(one) == 2 and one == other[::-1])


def _scores(words: str, terms: Sequence[Term], index: Index) -> dict[int, float]:
    """For each section with a word: how well it fits with its page, less if words are missing.

    A page counts what its sections have together, and the phrases that it is to be found by.
    """
    by_section = [_of_term(term, index) for term in terms]
    by_page = [_best_of_pages(places, index) for places in by_section]
    rarest = max((term.most() for term in terms), default=0.0)
    phrases = {page: IS_FOUND_BY * rarest * share for page, share in _phrases(words, index).items()}
    most = sum(term.most() for term in terms)
    pages = _fit(by_page, phrases, most)
    return {
        number: (fit + OF_PAGE * pages[index.sections[number].page])
        * index.sections[number].prior()
        for number, fit in _fit(by_section, {}, most).items()
    }


def _best_of_pages(
    places: Mapping[int, tuple[float, float]], index: Index
) -> dict[str, tuple[float, float]]:
    """Of each page the best score and the most weight that its sections have."""
    best: dict[str, tuple[float, float]] = {}
    for number, (score, weight) in places.items():
        page = index.sections[number].page
        before = best.get(page, (0.0, 0.0))
        best[page] = max(score, before[0]), max(weight, before[1])
    return best


def _fit(
    places: Sequence[Mapping[K, tuple[float, float]]], more: Mapping[K, float], most: float
) -> dict[K, float]:
    """The sum of scores, and of `more`, less if a place has only a share of the weight."""
    total: dict[K, float] = collections.defaultdict(float, more)
    there: dict[K, float] = collections.defaultdict(float)
    for each in places:
        for place, (score, weight) in each.items():
            total[place] += score
            there[place] += weight
    return {place: total[place] * (there[place] / most) ** OF_LACKING for place in there}


def _of_term(term: Term, index: Index) -> dict[int, tuple[float, float]]:
    """For each section: the score of a word, or of a synonym, and the weight of the word."""
    by_form: dict[int, float] = collections.defaultdict(float)
    weights: dict[int, float] = collections.defaultdict(float)
    for form, weight in term.forms.items():
        for number, counts in index.places[form].items():
            by_form[number] += weight * counts
            weights[number] = max(weights[number], weight)
    for form, weight in term.synonyms.items():
        for number, counts in index.places[form].items():
            by_form[number] = max(by_form[number], weight * counts)
            weights[number] = max(weights[number], weight)
    return {number: (by_form[number], weights[number]) for number in weights}


def _phrases(words: str, index: Index) -> dict[str, float]:
    """The pages to be found by a phrase whose words a question has, by what share of it that is."""
    asked = {
        stem(word): {stem(word), *index.synonyms.get(stem(word), ())} for word in _split(words)
    }
    content = {stem(word) for word in _asked(words)}
    known = set().union(*asked.values())
    shares: dict[str, float] = collections.defaultdict(float)
    for phrase, pages in index.phrases.items():
        parts = phrase.split()
        if known.issuperset(parts):
            matched = {next(word for word, same in asked.items() if part in same) for part in parts}
            exact = sum(1.0 if part in asked else OF_SYNONYMS for part in parts)
            share = exact / len(content | matched)
            for page in pages:
                shares[page] = max(shares[page], share**OF_PHRASE)
    return shares


def _place(section: Section, wanted: dict[str, float]) -> PageLine:
    """The section, with the line that has most words of the question, or the first line."""

    def weight(line: str) -> float:
        there = set(_words(line))
        return sum(weight for word, weight in wanted.items() if word in there)

    body = [i for i, line in enumerate(section.lines) if i and line and line[0] not in "`!$<:"]
    best = max(body, key=lambda i: (weight(section.lines[i]), -i), default=0)
    best = best if weight(section.lines[best]) else min(body, default=0)
    text = textwrap.shorten(section.lines[best].strip(" |#"), _WIDTH, placeholder=" ...")
    return PageLine(section.page, section.heading, section.first + best, text)


@functools.cache
def whole_index() -> Index:
    """The index of all pages."""
    found_by, of_sections = docs_found_by(), docs_sections_found_by()
    sections = [
        section
        for page, path in docs_pages().items()
        for section in _sections(page, docs_text(path), found_by.get(page, ()), of_sections)
    ]
    places: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for number, section in enumerate(sections):
        for word, weight in section.weights().items():
            places[word][number] = round(weight, 2)
    phrases: dict[str, list[str]] = collections.defaultdict(list)
    for page, each in [
        *found_by.items(),
        *((page, of_sections[page, h]) for page, h in of_sections),
    ]:
        for phrase in each:
            phrases[" ".join(map(stem, _split(phrase)))].append(page)
    return Index(sections, places, phrases, _synonyms())


def _synonyms() -> dict[str, list[str]]:
    """Of each word the stems of those of the same meaning."""
    same: dict[str, list[str]] = collections.defaultdict(list)
    for group in docs_synonyms():
        stems = list(dict.fromkeys(stem(word) for word in group.split()))
        for word in stems:
            same[word] += [other for other in stems if other != word]
    return same


def as_json(index: Index, anchors: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """The index for the site, whose sections have anchors by page and heading."""
    return {
        "sections": [
            [each.page, each.heading, anchors.get((each.page, each.heading), ""), each.prior()]
            for each in index.sections
        ],
        "places": {
            word: [[number, weight] for number, weight in places.items()]
            for word, places in index.places.items()
        },
        "phrases": index.phrases,
        "synonyms": index.synonyms,
        "stop": sorted(STOP),
        "weak": sorted(WEAK),
        "ofWeak": OF_WEAK,
        "ofPage": OF_PAGE,
        "isFoundBy": IS_FOUND_BY,
        "ofParts": OF_PARTS,
        "ofSynonyms": OF_SYNONYMS,
        "ofLacking": OF_LACKING,
        "ofPhrase": OF_PHRASE,
        "least": LEAST,
    }


def _sections(
    page: str,
    text: str,
    found_by: Sequence[str],
    of_sections: Mapping[tuple[str, str], Sequence[str]],
) -> Iterator[Section]:
    lines = text.splitlines()
    starts = _headings(lines)
    title = _HEADING.fullmatch(lines[0])
    for first, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        heading = _HEADING.fullmatch(lines[first])
        name = heading[1] if heading else page
        shown = name.replace("`", "")
        yield Section(
            page,
            shown,
            first + 1,
            lines[first:end],
            frozenset(_words(name)),
            frozenset(_words(f"{title[1] if title else ''} {page}")),
            _shares([*found_by, *of_sections.get((page, shown), ())]),
            collections.Counter(word for line in lines[first + 1 : end] for word in _words(line)),
        )


def _shares(phrases: Sequence[str]) -> dict[str, float]:
    """Of each word the share of the shortest phrase that has it: alone it says more."""
    shares: dict[str, float] = {}
    for phrase in phrases:
        share = 1 / len(_asked(phrase))
        shares |= {word: max(share, shares.get(word, 0.0)) for word in _words(phrase)}
    return shares


def _headings(lines: Sequence[str]) -> list[int]:
    """The numbers of the lines that are headings, and of the first one."""
    numbers, is_program = [0], False
    for number, line in enumerate(lines):
        is_program ^= line.startswith("```")
        if number and not is_program and _HEADING.fullmatch(line):
            numbers.append(number)
    return numbers


@functools.cache  # a search reads each line of the sections that have a word
def _words(line: str) -> tuple[str, ...]:
    """All forms of the words of a line, with what names are made of."""
    names = re.findall(r"\w+(?:[.\-&/]\w+)*", re.sub(r"\]\([^)]*\)", "] ", line))
    return tuple(form for name in names for form in _forms(name))


@functools.cache
def _forms(name: str) -> list[str]:
    """The name as it is and without what stands before a dot, then its parts, as stems."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return list(dict.fromkeys([*_wholes(name), *map(stem, parts)]))


def _wholes(name: str) -> list[str]:
    """A name in one piece, with and without its punctuation, and its last part behind a dot."""
    last = name.rpartition(".")[2]
    return [stem(name), stem(re.sub(r"\W|_", "", name)), stem(last), stem(last.strip("_"))]


@functools.cache
def stem(word: str) -> str:
    """What words of one family have in common: diverge, diverged, divergence."""
    word = re.sub(r"(?<=[a-z]{3})ies$", "y", word.lower())
    word = re.sub(r"(?<=[a-z]{2})(?<=s|x|z|h)es$|(?<=[a-z]{2}[^su])s$", "", word)
    word = re.sub(r"(?<=[a-z]{4})(ing|ed|ence|ent|er|ion)$", "", word)
    word = re.sub(r"([^aeiouls])\1$", r"\1", word)
    return re.sub(r"(?<=[a-z]{3})(?<![aeiou])e$", "", word)
