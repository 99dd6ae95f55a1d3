// A box above a table that hides the rows without the words typed into it.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll("input.table-filter")) {
    const table = box.parentElement.parentElement.querySelector("table.filtered");
    const count = box.parentElement.querySelector("output");
    const rows = [...table.tBodies[0].rows];
    const filter = () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      count.textContent = `${shown} of ${rows.length}`;
    };
    box.addEventListener("input", filter);
    filter();
  }
});
