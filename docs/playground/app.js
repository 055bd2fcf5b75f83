// The page: the question in the form and in the address, the answer in four forms.
import { Python } from "./ask.js";
import { asked, blame, fill, written } from "./fields.js";
import { elements } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const START = JSON.parse(byId("start").textContent);
const CODES = new Set(START.codes);
const SLOW = 3000; // ms of one question, after which it can be stopped
const PAUSE = 250; // ms without a key, after which what is typed is asked
const STALE = 150; // ms after which an answer that is no longer the form's is dimmed: most come sooner

const form = byId("question");
const python = new Python(START, showState);
const FORMS = ["report", "text", "json", "markdown"];

// What was worked out when the page was built, by question: shown until Python is up, and marked so.
const prepared = new Map([[START.first, START.answers]]);
let latest = 0; // the newest question; an answer to an older one is not shown
let typed = null; // the control that made the newest entry of the history
let shown = { query: "", words: [] };

/** The question of the address; without one, the first question. */
const ofAddress = () => location.search.slice(1) || START.first;

/** The same question, however its address is spelt. */
const canonical = (query) => written([...new URLSearchParams(query)]);

/**
 * Ask ``query`` and show the answer. Resolves when it is shown, with what the command said by form.
 * live: it was typed and may not be finished, so that an error leaves the answer before it in sight, dimmed.
 */
async function answer(query, live = false) {
  const mine = ++latest;
  markPreset(query);
  const before = python.up ? undefined : prepared.get(query);
  if (before) show(query, before, "Worked out when this page was built. It is asked again once Python is up.");
  else if (!python.up && byId("panel-report").dataset.query === undefined) waiting();
  shown = { query, words: before?.json.words ?? [] };
  const dim = setTimeout(() => mine === latest && !before && stale(true), STALE);
  const slow = setTimeout(() => (byId("stop").hidden = mine !== latest || !python.up), SLOW);
  byId("answer").setAttribute("aria-busy", "true");
  try {
    const said = {};
    for (const name of ["markdown", "json"]) {
      said[name] = await python.ask(query, name);
      if (mine !== latest) return null;
      if (said[name].code === 2) {
        said.json = said[name]; // refused: it says so in every form
        break;
      }
    }
    clearTimeout(dim);
    stale(live && said.json.code === 2);
    show(query, said, "", live);
    return said;
  } catch (error) {
    if (mine === latest && !before) fail(error.message);
    return null;
  } finally {
    clearTimeout(slow);
    clearTimeout(dim);
    if (mine === latest) {
      byId("stop").hidden = true;
      byId("answer").removeAttribute("aria-busy");
    }
  }
}

/** Whether what is shown is an older question's answer. */
function stale(is) {
  byId("answer").classList.toggle("stale", is);
  byId("peek").classList.toggle("stale", is);
}

function markPreset(query) {
  for (const link of document.querySelectorAll("#presets a")) {
    const here = canonical(link.search.slice(1)) === canonical(query);
    if (here) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

/** What the command says to a question in one form, without showing it. */
export const ask = (query, name) => python.ask(query, name);

/** Go to a question: into the address, the form and the answer. */
export function go(query) {
  if (canonical(query) !== canonical(ofAddress())) history.pushState(null, "", `?${query}`);
  typed = null;
  fill(form, query);
  return answer(query);
}

function askForm(control = null, live = false) {
  const query = asked(form);
  if (query === canonical(shown.query) && !byId("answer").classList.contains("stale")) return;
  const address = query === "" ? location.pathname : `?${query}`;
  // one entry of the history for each field that is edited, not for each key
  if (control !== null && control === typed) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  typed = control;
  answer(query, live);
}

// ---- what is shown --------------------------------------------------------------------------------------------

function show(query, said, remark = "", live = false) {
  const { words, code, out, err } = said.json;
  shown = { query, words };
  byId("command").textContent = command(words);
  const error = code === 2 ? err.replace(/^attnsel: /, "").trim() : "";
  blame(form, error);
  if (error) {
    fail(error, live);
    return;
  }
  byId("error").hidden = true;
  byId("tabs").hidden = false;
  const report = elements(said.markdown.out, { codes: CODES, copy: (text) => copyButton("Copy", () => text) });
  if (words[0] === "can-i-use") linkCells(report, query, JSON.parse(out));
  const notes = err.trim().split("\n").filter(Boolean);
  report.prepend(...notes.map((note) => element("p", note.replace(/^attnsel: /, "Note: "), "note")));
  if (remark) report.append(element("p", remark, "note"));
  byId("panel-report").replaceChildren(report);
  byId("panel-report").dataset.query = query;
  byId("panel-json").firstChild.textContent = out;
  byId("panel-markdown").firstChild.textContent = said.markdown.out;
  select(document.querySelector("[role=tab][aria-selected=true]"));
  const headline = byId("panel-report").querySelector("h3")?.textContent;
  byId("said").textContent = headline ?? "A grid of answers is shown.";
  byId("peek").firstElementChild.textContent = headline ?? "A grid of answers";
}

function fail(message, live = false) {
  byId("error").textContent = message;
  byId("error").hidden = false;
  byId("peek").firstElementChild.textContent = message;
  if (live && byId("panel-report").dataset.query !== undefined) return; // the answer before it stays, dimmed
  stale(false);
  delete byId("panel-report").dataset.query;
  byId("tabs").hidden = true;
  byId("said").textContent = "";
  for (const name of FORMS) byId(`panel-${name}`).hidden = true;
}

function waiting() {
  byId("panel-report").replaceChildren(element("p", "The answer comes when Python is up.", "note"));
  byId("command").textContent = "";
  byId("error").hidden = true;
}

function showState({ bytes, total, seconds, ready, failed, step }) {
  const [have, all, time] = [(bytes / 1e6).toFixed(1), (total / 1e6).toFixed(1), seconds.toFixed(1)];
  // the files are about half of it; then Python starts, and loads the rules
  byId("progress").value = (total ? bytes / total : 0) * 0.5 + { loading: 0, starting: 0.1, rules: 0.3 }[step];
  byId("progress").hidden = ready || failed !== "";
  byId("loading").classList.toggle("failed", failed !== "");
  byId("again").hidden = failed === "";
  let text = `Python is loading: ${have} of ${all} MB, ${time} s. The form can be filled in meanwhile.`;
  if (step === "starting") text = `Python is starting: ${all} MB loaded, ${time} s.`;
  if (step === "rules") text = `Python is up, and loads the rules: ${time} s.`;
  if (ready) text = `Ready in ${time} s, ${all} MB loaded. Answers follow what you type, and are worked out in this tab.`;
  if (failed) text = `Python did not start: ${failed}. The attnsel command gives the same answers.`;
  byId("state").textContent = text;
  if (ready) document.documentElement.dataset.python = "up";
  if (failed) document.documentElement.dataset.python = "failed";
}

/** Each cell of a grid opens its own answer. */
function linkCells(report, query, grid) {
  if (!grid.rows) return; // of features
  const flag = (field) => (field === "is_training" ? "" : field.replaceAll("_", "-"));
  const [down, along] = [flag(grid.rows.field), flag(grid.cols.field)];
  if (!down || !along) return;
  const rest = [...new URLSearchParams(query)].filter(
    ([name]) => !["rows", "cols", "kernel", down, along].includes(name.replaceAll("_", "-")),
  );
  const value = (text) => String(text).replace(/^(-?\d+)x(-?\d+)$/, "$1,$2");
  for (const [y, row] of [...report.querySelectorAll("tbody tr")].entries()) {
    for (const [x, cell] of [...row.querySelectorAll("td")].entries()) {
      const here = [[down, value(grid.rows.values[y])], [along, value(grid.cols.values[x])]];
      const link = element("a", "");
      link.href = `?${written([...here, ...rest])}`;
      link.dataset.question = "";
      link.append(...[...cell.childNodes].map((node) => document.createTextNode(node.textContent)));
      cell.replaceChildren(link);
    }
  }
}

/** ``words`` as a line for a shell. */
function command(words) {
  if (!words.length) return "";
  const quoted = words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`));
  return `attnsel ${quoted.join(" ")}`;
}

function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// ---- copying, tabs, theme ---------------------------------------------------------------------------------------

function copyButton(label, text) {
  const button = element("button", label, "copy");
  button.type = "button";
  copies(button, text);
  return button;
}

function copies(button, text) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    let said = "Copied";
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      said = "Not allowed here";
    }
    button.textContent = said;
    byId("said").textContent = said;
    setTimeout(() => (button.textContent = label), 2000);
  });
}

/** The report as text, which is asked when it is looked at. */
async function fillText(query) {
  const place = byId("panel-text").firstChild;
  if (place.dataset.query === query) return;
  place.textContent = "";
  try {
    const { out } = (python.up ? undefined : prepared.get(query)?.text) ?? (await python.ask(query, "text"));
    if (shown.query !== query) return;
    place.textContent = out;
    place.dataset.query = query;
  } catch (error) {
    place.textContent = error.message;
  }
}

function select(tab) {
  for (const other of byId("tabs").children) {
    const on = other === tab;
    other.setAttribute("aria-selected", String(on));
    other.tabIndex = on ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !on;
  }
  if (tab.id === "tab-text") fillText(shown.query);
}

byId("tabs").addEventListener("click", (event) => event.target.role === "tab" && select(event.target));
byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const tabs = [...byId("tabs").children];
  if (step === undefined || !tabs.includes(event.target)) return;
  const next = tabs.at((tabs.indexOf(event.target) + step) % tabs.length);
  select(next);
  next.focus();
  event.preventDefault();
});

const THEMES = ["system", "light", "dark"];
const theme = () => document.documentElement.dataset.theme ?? "system";
const nameTheme = () => (byId("theme").textContent = `Theme: ${theme()}`);
byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("attnsel-theme", next);
  } catch {
    // it holds for this visit
  }
  nameTheme();
});

// ---- the question ---------------------------------------------------------------------------------------------

let pause = 0;
form.addEventListener("input", (event) => {
  clearTimeout(pause);
  pause = setTimeout(() => askForm(event.target, true), PAUSE);
});
form.addEventListener("change", (event) => {
  clearTimeout(pause);
  askForm(event.target);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(pause);
  stale(byId("answer").classList.contains("stale") || asked(form) !== canonical(shown.query));
  askForm(typed);
  toAnswer();
});

/** Into view, and the next key of the keyboard to it. */
function toAnswer() {
  byId("answer").focus({ preventScroll: true });
  byId("answer").scrollIntoView({ block: "start" });
}

// Where the answer stands below the form, its headline stays at the edge of the screen until it is in sight.
new IntersectionObserver(([entry]) => {
  byId("peek").hidden = entry.isIntersecting || entry.boundingClientRect.top < 0;
}, { rootMargin: "0px 0px -96px 0px" }).observe(byId("panels"));
byId("peek").addEventListener("click", (event) => {
  event.preventDefault();
  toAnswer();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
byId("clear").addEventListener("click", () => go(START.first));
byId("stop").addEventListener("click", () => python.stop());
byId("again").addEventListener("click", () => location.reload());
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-question]");
  if (link === null || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(new URL(link.href).search.slice(1));
  if (link.closest("#presets")) toAnswer();
});
addEventListener("popstate", () => {
  typed = null;
  fill(form, ofAddress());
  answer(ofAddress());
});
copies(byId("copy-link"), () => new URL(`?${shown.query}`, location.href).href);
copies(byId("copy-command"), () => command(shown.words));

nameTheme();
fill(form, ofAddress());
answer(ofAddress());
fetch(`answers.json?v=${START.edition}`)
  .then((response) => response.json())
  .then((answers) => {
    for (const [query, said] of Object.entries(answers)) prepared.set(query, said);
    // one of them may be the question that waits for Python
    const waiting = prepared.get(ofAddress());
    if (waiting && !python.up && byId("panel-report").dataset.query === undefined) answer(ofAddress());
  })
  .catch(() => {}); // they come when Python is up
