// Cells know the titles of their columns: on a phone, wide tables show each row as a list.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const titles = [...table.querySelectorAll("thead th")].map((title) => title.textContent.trim());
    for (const row of table.tBodies[0]?.rows ?? []) {
      [...row.cells].forEach((cell, i) => {
        if (cell.textContent.trim()) cell.dataset.title = titles[i] ?? "";
        else cell.classList.add("blank");
      });
    }
  }
});
// Names in tables and titles may break after a dot, an underscore or a bracket, before they break elsewhere.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("table code, article h1")) {
    const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts) {
      const parts = text.data.split(/(?<=[._(,=/])(?=\S)/);
      text.replaceWith(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
    }
  }
});
