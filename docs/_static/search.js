// The site searches as `clipgrad help` does: clipgrad/_commands/help_search.py says how. The index is in
// search_sections.js, which docs/sections.py writes.

function stem(word) {
  return word.toLowerCase()
    .replace(/(?<=[a-z]{3})ies$/, "y")
    .replace(/(?<=[a-z]{2})(?<=s|x|z|h)es$|(?<=[a-z]{2}[^su])s$/, "")
    .replace(/(?<=[a-z]{4})(ing|ed|ence|ent|er|ion)$/, "")
    .replace(/([^aeiouls])\1$/, "$1")
    .replace(/(?<=[a-z]{3})(?<![aeiou])e$/, "");
}

function wholes(name) {
  const last = name.slice(name.lastIndexOf(".") + 1);
  const bare = name.replace(/[^\p{L}\p{N}]/gu, "");
  return [name, bare, last, last.replace(/^_+|_+$/g, "")].map(stem);
}

function formsOf(name) {
  const parts = name.match(/[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+/g) || [];
  return [...new Set([...wholes(name), ...parts.map(stem)])];
}

const split = (words) => words.match(/[^\s,;:?!()[\]{}"'`=]+/g) || [];

// Whether one letter is missing, too much or another, or two neighbors are swapped.
function isASlip(one, other) {
  if (Math.abs(one.length - other.length) > 1) return false;
  const least = Math.min(one.length, other.length);
  let first = 0, last = 0;
  while (first < least && one[first] === other[first]) first++;
  while (last < least - first && one.at(-1 - last) === other.at(-1 - last)) last++;
  const [a, b] = [one, other].map((word) => word.slice(first, word.length - last));
  return Math.max(a.length, b.length) <= 1 || (a.length === 2 && a[0] === b[1] && a[1] === b[0]);
}

// The most frequent of the words that differ by one slip, or else that begin as this one.
function alike(word, index) {
  const whole = [...stem(word)], all = Object.keys(index.places);
  const start = whole.slice(0, Math.max(0, whole.length - Math.floor([...word].length / 3)));
  const slips = all.filter((form) => whole.length >= index.least && isASlip(whole, [...form]));
  const near = slips.length ? slips : all.filter(
    (form) => start.length >= index.least && form.startsWith(start.join("")));
  const count = (form) => index.places[form].length;
  return near.length ? [near.reduce((best, form) => (count(form) > count(best) ? form : best))] : [];
}

function asked(words, index) {
  const all = split(words);
  const some = all.filter((word) => !index.stop.includes(word.toLowerCase()));
  return some.length ? some : all;
}

function termOf(word, index) {
  const has = (form) => Object.hasOwn(index.places, form);
  const rarity = (form) => Math.log(1 + index.sections.length / (1 + index.places[form].length));
  let forms = formsOf(word).filter(has);
  const same = (Object.hasOwn(index.synonyms, stem(word)) ? index.synonyms[stem(word)] : []).filter(has);
  if (!forms.length && !same.length) {
    forms = alike(word, index);
  }
  const whole = forms.find((form) => wholes(word).includes(form));
  const isWeak = index.weak.includes(word.toLowerCase()) || index.weak.includes(stem(word));
  const most = isWeak ? index.ofWeak : 1;
  const share = (form) => most * (whole === undefined || whole === form ? 1 : index.ofParts);
  return {
    forms: forms.map((form) => [form, share(form) * rarity(form)]),
    synonyms: same.map((form) => [form, most * index.ofSynonyms * rarity(form)]),
  };
}

const mostOf = (term) => Math.max(0, ...[...term.forms, ...term.synonyms].map(([, weight]) => weight));

// Of each section: the score of a word there, or of one of the same meaning, and its weight.
function placesOf(term, index) {
  const score = new Map(), weights = new Map();
  const see = (number, weight) => weights.set(number, Math.max(weights.get(number) || 0, weight));
  for (const [form, weight] of term.forms) {
    for (const [number, counts] of index.places[form]) {
      score.set(number, (score.get(number) || 0) + weight * counts);
      see(number, weight);
    }
  }
  for (const [form, weight] of term.synonyms) {
    for (const [number, counts] of index.places[form]) {
      score.set(number, Math.max(score.get(number) || 0, weight * counts));
      see(number, weight);
    }
  }
  return new Map([...weights].map(([number, weight]) => [number, [score.get(number), weight]]));
}

// Of each page the best score and the most weight that its sections have.
function bestOfPages(places, index) {
  const best = new Map();
  for (const [number, [score, weight]] of places) {
    const page = index.sections[number][0];
    const [most, heaviest] = best.get(page) || [0, 0];
    best.set(page, [Math.max(score, most), Math.max(weight, heaviest)]);
  }
  return best;
}

function fitOf(places, more, most, index) {
  const total = new Map(more), there = new Map();
  for (const each of places) {
    for (const [place, [score, weight]] of each) {
      total.set(place, (total.get(place) || 0) + score);
      there.set(place, (there.get(place) || 0) + weight);
    }
  }
  return new Map([...there].map(([place, weight]) =>
    [place, total.get(place) * (weight / most) ** index.ofLacking]));
}

function phraseShares(words, index) {
  const sameAs = (word) => (Object.hasOwn(index.synonyms, word) ? index.synonyms[word] : []);
  const stems = [...new Set(split(words).map(stem))], shares = new Map();
  const content = asked(words, index).map(stem);
  for (const [phrase, pages] of Object.entries(index.phrases)) {
    const parts = phrase.split(" ");
    const matched = parts.map((part) => stems.find((word) => word === part || sameAs(word).includes(part)));
    if (matched.includes(undefined)) continue;
    const exact = parts.reduce((sum, part) => sum + (stems.includes(part) ? 1 : index.ofSynonyms), 0);
    const share = (exact / new Set([...content, ...matched]).size) ** index.ofPhrase;
    for (const page of pages) {
      shares.set(page, Math.max(shares.get(page) || 0, share));
    }
  }
  return shares;
}

// The sections for a question, the best first, at most two of a page: page, heading, anchor.
function searchSections(words, index) {
  const terms = asked(words, index).map((word) => termOf(word, index)).filter(mostOf);
  const bySection = terms.map((term) => placesOf(term, index));
  const byPage = bySection.map((places) => bestOfPages(places, index));
  const rarest = Math.max(0, ...terms.map(mostOf));
  const most = terms.reduce((sum, term) => sum + mostOf(term), 0);
  const phrases = [...phraseShares(words, index)].map(
    ([page, share]) => [page, index.isFoundBy * rarest * share]);
  const pageFit = fitOf(byPage, phrases, most, index);
  const fit = new Map([...fitOf(bySection, [], most, index)].map(([number, ofSection]) => {
    const [page, , , prior] = index.sections[number];
    return [number, (ofSection + index.ofPage * pageFit.get(page)) * prior];
  }));
  const pages = new Map();
  return [...fit.keys()]
    .sort((a, b) => fit.get(b) - fit.get(a) || a - b)
    .map((number) => index.sections[number])
    .filter(([page]) => pages.set(page, (pages.get(page) || 0) + 1).get(page) <= 2);
}

// Before what Sphinx finds, unless that is a name of the library. Sphinx shows the last one first.
function searchBoth(theirs, query, index) {
  const files = Object.fromEntries(Search._index.docnames.map((page, i) => [page, i]));
  const ours = searchSections(query, index).slice(0, 12)
    .filter(([page]) => page in files)
    .map(([page, heading, anchor]) => {
      const title = Search._index.titles[files[page]];
      const name = title === heading ? title : `${title} > ${heading}`;
      return [page, name, anchor && "#" + anchor, null, 1, Search._index.filenames[files[page]], "title"];
    });
  const isName = (result) => result[1].split(".").pop().toLowerCase() === query.toLowerCase().split(".").pop();
  const names = theirs.filter((result) => result[6] === "object" && isName(result));
  const pages = new Set(ours.map(([page]) => page));
  const others = theirs.filter((result) => !pages.has(result[0]) && !names.includes(result));
  return [...others, ...ours.reverse(), ...names];
}

if (typeof Search !== "undefined") {
  const ofSphinx = Search._performSearch;
  Search._performSearch = (query, ...rest) => searchBoth(ofSphinx(query, ...rest), query, SEARCH_SECTIONS);
}
