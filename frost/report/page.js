"use strict";
// Every table.data: a click on a head sorts, the field above filters. Numbers sort as numbers.
(function () {
  function value(row, column) {
    const cell = row.cells[column];
    const text = cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value;
    const number = text === "" ? NaN : Number(text);
    return Number.isNaN(number) ? text.toLowerCase() : number;
  }

  function compare(a, b) {
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1; // numbers before words
  }

  function sort(table, head) {
    const column = head.cellIndex;
    const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    const rows = Array.from(body.rows);
    rows.sort((a, b) => sign * compare(value(a, column), value(b, column)));
    body.append(...rows);
  }

  function filter(table, words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
    }
  }

  for (const table of document.querySelectorAll("table.data")) {
    for (const head of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, head));
      head.append(button);
    }
    const field = document.createElement("input");
    field.className = "filter";
    field.type = "search";
    field.placeholder = "filter";
    field.setAttribute("aria-label", "filter the table below");
    field.addEventListener("input", () => filter(table, field.value));
    table.before(field);
  }
})();
