const table = document.querySelector("#rows table"), filter = document.querySelector("#filter");
if (table) {
  const body = table.tBodies[0], value = (row, n) => row.cells[n].dataset.value ?? row.cells[n].textContent;
  filter.hidden = false;
  filter.oninput = () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  };
  table.classList.add("sortable");
  table.tHead.onclick = event => {
    const head = event.target.closest("th"), up = head.ariaSort !== "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.ariaSort = up ? "ascending" : "descending";
    // What was not measured comes last either way.
    const order = (a, b) => (a === "–") - (b === "–") || (up ? 1 : -1) * a.localeCompare(b, "en", { numeric: true });
    body.append(...[...body.rows].sort((a, b) => order(value(a, head.cellIndex), value(b, head.cellIndex))));
  };
}
