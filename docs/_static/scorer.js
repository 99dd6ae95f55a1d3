// How the search ranks: Sphinx's own scores, and how-tos first where the words are in their titles.
var Scorer = {
  score: ([page, title, , , score]) => {
    if (!page.startsWith("howto/") || score <= 5) return score;
    const words = new URLSearchParams(window.location.search).get("q").toLowerCase().match(/\w{3,}/g) ?? [];
    const found = words.filter((word) => title.toLowerCase().includes(word.slice(0, 6)));
    return score + 20 + 5 * found.length;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
