"use strict";
(() => {
  // Tables: each head is a button that sorts, a field above keeps the rows that have all its words.
  const numbers = (cell) => (cell.dataset.v ? Number(cell.dataset.v) : NaN);
  const order = (a, b, at, sign) => {
    const [x, y] = [a.cells[at], b.cells[at]];
    if (x.dataset.v === undefined && y.dataset.v === undefined)
      return sign * x.textContent.localeCompare(y.textContent, "en", { numeric: true });
    const [p, q] = [numbers(x), numbers(y)];
    if (isNaN(p) || isNaN(q)) return isNaN(p) - isNaN(q); // no number comes last, always
    return sign * (p - q);
  };
  document.querySelectorAll("table.sorts").forEach((table) => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const texts = rows.map((row) => [...row.cells].map((one) => one.textContent).join(" ").toLowerCase());
    heads.forEach((head, at) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...[...rows].sort((a, b) => order(a, b, at, down ? -1 : 1)));
      });
    });
    const bar = document.createElement("div");
    bar.className = "filter";
    bar.innerHTML = '<label>Filter <input type="search"></label><output></output>';
    const [field, count] = bar.querySelectorAll("input, output");
    const filter = () => {
      const words = field.value.toLowerCase().split(/\s+/);
      rows.forEach((row, at) => (row.hidden = !words.every((word) => texts[at].includes(word))));
      count.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
    };
    field.addEventListener("input", filter);
    filter();
    table.parentElement.before(bar);
    table.parentElement.classList.add("tall");
  });
})();
