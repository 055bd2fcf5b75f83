// The filter of "Can I use it?": words, a kernel and an answer. It stands in the address, so that a link and the way
// back lead to the same rows, and goes along to the pages of other architectures. Without a script all rows are shown.
"use strict";

(() => {
  const tables = [...document.querySelectorAll(".ciu-table table")].filter(
    (table) => table.querySelector("th")?.textContent === "feature",
  );
  if (tables.length === 0) return;

  const first = tables[0].closest(".ciu-table");
  const before = first.previousElementSibling?.tagName === "H3" ? first.previousElementSibling : first;
  const kernels = [...tables[0].querySelectorAll("thead th")].slice(1).map((cell) => cell.textContent);
  // every answer that the legend explains: its class, and its word
  const answers = new Map();
  for (const sign of document.querySelectorAll("p > .ciu, li > .ciu")) {
    const name = /ciu-(\w+)/.exec(sign.className)?.[1];
    if (name) answers.set(name, `${sign.textContent} ${name}`);
  }

  const make = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const options = (none, values) => [
    make("option", { value: "", textContent: none }),
    ...values.map(([value, text]) => make("option", { value, textContent: text })),
  ];
  const words = make("input", { type: "search", name: "filter", id: "ciu-filter", autocomplete: "off" });
  words.placeholder = "softcap, paged, fp8 …";
  const kernel = make("select", { name: "kernel", id: "ciu-kernel" });
  kernel.append(...options("all kernels", kernels.map((name) => [name, name])));
  const answer = make("select", { name: "answer", id: "ciu-answer" });
  answer.append(...options("any answer", [...answers]));
  const count = make("p", { className: "ciu-count" });
  count.setAttribute("role", "status");
  const field = (text, control) => make("label", { htmlFor: control.id }, make("span", { textContent: text }), control);
  const form = make("form", { className: "ciu-filter" });
  form.setAttribute("role", "search");
  form.setAttribute("aria-label", "Filter the features");
  form.append(
    field("Features with", words),
    field("Kernel", kernel),
    field("Answer", answer),
    make("button", { type: "reset", textContent: "Show all", className: "md-button" }),
    count,
  );
  before.before(form);

  const CONTROLS = [words, kernel, answer];

  function show() {
    const asked = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const column = kernels.indexOf(kernel.value) + 1; // 0: all
    let shown = 0;
    let all = 0;
    for (const table of tables) {
      const place = table.closest(".ciu-table");
      const heading = place.previousElementSibling?.tagName === "H3" ? place.previousElementSibling : null;
      let here = 0;
      for (const row of table.rows) {
        const cells = [...row.cells];
        cells.forEach((cell, i) => (cell.hidden = column !== 0 && i !== 0 && i !== column));
        if (row.parentElement.tagName === "THEAD") continue;
        all += 1;
        const link = row.querySelector("a");
        const text = `${cells[0].textContent} ${link?.pathname ?? ""} ${heading?.textContent ?? ""}`.toLowerCase();
        const said = !answer.value || cells.some((cell) => !cell.hidden && cell.querySelector(`.ciu-${answer.value}`));
        row.hidden = !(said && asked.every((word) => text.includes(word)));
        here += row.hidden ? 0 : 1;
      }
      place.hidden = here === 0;
      if (heading) heading.hidden = here === 0;
      shown += here;
    }
    count.textContent = shown ? `${shown} of ${all} features` : "No feature has all of this: show all, or use fewer words.";
  }

  /** The filter as a query string, or "". */
  function written() {
    const query = new URLSearchParams(location.search);
    for (const control of CONTROLS) {
      if (control.value.trim()) query.set(control.name, control.value.trim());
      else query.delete(control.name);
    }
    const text = query.toString();
    return text ? `?${text}` : "";
  }

  const others = [...document.querySelectorAll("article a")].filter((link) =>
    /\/can-i-use\/(sm\d+\/)?$/.test(link.pathname),
  );

  function changed() {
    show();
    history.replaceState(history.state, "", `${location.pathname}${written()}${location.hash}`);
    for (const link of others) link.search = written();
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", changed);
  form.addEventListener("reset", () => setTimeout(changed));
  const given = new URLSearchParams(location.search);
  for (const control of CONTROLS) control.value = given.get(control.name) ?? "";
  for (const select of [kernel, answer]) if (select.selectedIndex < 0) select.value = "";
  changed();
})();
