// How the search ranks: Sphinx's own scores, and how-tos first where the words are in their titles.
var Scorer = {
  score: ([page, , , , score]) => score + (page.startsWith("howto/") && score > 5 ? 20 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
