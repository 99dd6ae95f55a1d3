// An address of an entry that has moved to a page of its own leads there.
const follow = () => {
  const name = decodeURIComponent(window.location.hash.slice(1));
  if (!name || document.getElementById(name)?.matches("dt")) return;
  // (regrad.Variable.assign is on the page of regrad.Variable)
  for (let stem = name; stem; stem = stem.slice(0, Math.max(stem.lastIndexOf("."), 0))) {
    const row = document.getElementById(stem);
    if (!row?.matches("span.moved")) continue;
    const page = row.closest("td").querySelector("a").href.replace(/#.*/, "");
    window.location.replace(`${page}#${name}`);
    return;
  }
};
document.addEventListener("DOMContentLoaded", follow);
window.addEventListener("hashchange", follow);
