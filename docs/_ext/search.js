// The same words as mixed_search.py: English words, and pairs of Chinese characters.
function splitQuery(query) {
  const words = [];
  for (const run of query.match(/[\u3400-\u9fff]+|(?:(?![\u3400-\u9fff])[\p{Letter}\p{Number}_])+/gu) || []) {
    if (/^[\u3400-\u9fff]{2,}/.test(run)) for (let i = 0; i + 1 < run.length; i++) words.push(run.slice(i, i + 2));
    else words.push(run);
  }
  return words;
}

// Headings that have every word come first, and lead to their section; logs of results come last.
if (typeof Search !== "undefined") {
  const findPages = Search.performTermsSearch;
  Search.performTermsSearch = (terms, excluded) => {
    const { alltitles, titles, docnames, filenames } = Search._index;
    const stemmer = new Stemmer();
    const found = findPages(terms, excluded);
    for (const [title, places] of Object.entries(alltitles)) {
      const stems = splitQuery(title.toLowerCase()).filter((word) => !stopwords.has(word)).map((word) => stemmer.stemWord(word));
      if (![...terms].every((term) => stems.includes(term))) continue;
      for (const [file, id] of places) {
        const name = titles[file] === title ? title : `${titles[file]} > ${title}`;
        const score = 20 + Math.round((20 * terms.size) / stems.length);
        found.push([docnames[file], name, id ? `#${id}` : "", null, score, filenames[file], SearchResultKind.title]);
      }
    }
    for (const result of found) if (result[0].startsWith("results/") || result[0] === "changelog") result[4] -= 12;
    return found;
  };
}
