// What `attnsel --markdown` prints, as elements. Only what it writes is read: a bold sentence, blocks of code, tables,
// lists, code within a line, escapes. Text becomes text nodes: nothing in it can be markup.

const make = (tag, ...children) => {
  const element = document.createElement(tag);
  element.append(...children);
  return element;
};

/**
 * @param {string} source Markdown of the command
 * @param {{codes: Set<string>, copy: (text: string) => HTMLElement}} page rules that have a page; a copy button
 * @returns {DocumentFragment}
 */
export function elements(source, page) {
  const out = new DocumentFragment();
  const lines = source.replace(/\n+$/, "").split("\n");
  while (lines.length) {
    if (lines[0].trim() === "") lines.shift();
    else if (/^`{3,}/.test(lines[0])) out.append(fenced(lines, page));
    else if (lines[0].startsWith("|")) out.append(table(lines, page));
    else if (/^(-|\d+\.) /.test(lines[0])) out.append(list(lines, page));
    else out.append(paragraph(lines.shift(), page));
  }
  return out;
}

function paragraph(line, page) {
  const bold = /^\*\*(.*)\*\*$/.exec(line);
  return bold ? make("h3", ...inline(bold[1], page)) : make("p", ...inline(line, page));
}

function fenced(lines, page) {
  const [, ticks, language] = /^(`{3,})(.*)$/.exec(lines.shift());
  const inside = [];
  while (lines.length && lines[0] !== ticks) inside.push(lines.shift());
  lines.shift();
  const text = inside.join("\n");
  const block = make("pre", make("code", ...(language === "text" ? linked(text, page) : [text])));
  block.tabIndex = 0; // what is wider than the page can be scrolled from the keyboard
  block.setAttribute("role", "group");
  block.setAttribute("aria-label", language === "text" ? "facts" : "to paste");
  const shown = make("div", block);
  shown.className = language === "text" ? "facts" : "paste";
  if (language !== "text") shown.append(page.copy(text));
  return shown;
}

function table(lines, page) {
  const rows = [];
  while (lines.length && lines[0].startsWith("|")) {
    const cells = lines.shift().slice(1, -1).split(/(?<!\\)\|/);
    rows.push(cells.map((cell) => cell.trim().replaceAll("\\|", "|")));
  }
  const [head, , ...body] = rows;
  const cell = (tag, text, scope) => {
    const element = make(tag, ...inline(text, page));
    if (scope) element.scope = scope;
    return element;
  };
  const ofHead = head.map((text) => (text === "" ? cell("td", "") : cell("th", text, "col")));
  const ofBody = body.map((row) => {
    const at = head[0] === "" ? 1 : 0; // which column names the row
    const made = make("tr", ...row.map((text, i) => (i === at ? cell("th", text, "row") : cell("td", text))));
    made.className = { "✔": "yes", "✖": "no", "?": "unknown" }[/[✔✖?]/.exec(row[0])?.[0]] ?? "";
    return made;
  });
  const shown = make("div", make("table", make("thead", make("tr", ...ofHead)), make("tbody", ...ofBody)));
  shown.className = "scroll";
  shown.tabIndex = 0;
  shown.setAttribute("role", "group");
  shown.setAttribute("aria-label", head[0] === "" ? "candidates" : "grid");
  return shown;
}

function list(lines, page, indent = 0) {
  const ordered = /^\s*\d+\./.test(lines[0]);
  const made = make(ordered ? "ol" : "ul");
  while (lines.length) {
    const item = /^( *)(-|\d+\.) (.*)$/.exec(lines[0]);
    if (item === null || item[1].length < indent) break;
    if (item[1].length > indent && made.lastElementChild) {
      made.lastElementChild.append(list(lines, page, item[1].length));
      continue;
    }
    made.append(make("li", ...inline(item[3], page)));
    lines.shift();
  }
  return made;
}

/** A line: code within it, escapes undone, rules as links to their pages. */
function inline(text, page) {
  const out = [];
  let plain = "";
  const flush = () => {
    out.push(...linked(plain, page));
    plain = "";
  };
  const parts = /\\([\s\S])|(`+)( ?)([\s\S]*?)\3\2(?!`)|<!-- -->|([\s\S])/g;
  for (const [, escaped, ticks, , code, other] of text.matchAll(parts)) {
    if (escaped !== undefined) plain += escaped;
    else if (ticks !== undefined) {
      flush();
      out.push(make("code", code));
    } else plain += other ?? "";
  }
  flush();
  return out;
}

/** Text with its rule codes as links. */
function linked(text, page) {
  return text.split(/\b([A-Z]{2,}\d{3})\b/).map((part, i) => {
    if (i % 2 === 0 || !page.codes.has(part)) return part;
    const link = make("a", part);
    link.href = `../rules/${part}/`;
    return link;
  });
}
