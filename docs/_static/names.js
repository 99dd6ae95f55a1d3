// Names in tables may break after a dot, an underscore or a bracket, before they break elsewhere.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("table code")) {
    const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts) {
      const parts = text.data.split(/(?<=[._(,=/])(?=\S)/);
      text.replaceWith(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
    }
  }
});
