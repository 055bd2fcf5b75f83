"use strict";
// The page is whole without this: it adds search, a switch of themes, tips and movement by arrows.
const $ = (selector, among = document) => [...among.querySelectorAll(selector)];
const root = document.documentElement;
for (const tools of $(".tools")) tools.hidden = false;

// ---- light and dark ----
const theme = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const kept = (value) => { try { return value === undefined ? localStorage.getItem("attnsel-theme") : localStorage.setItem("attnsel-theme", value); } catch { return null; } };
const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
const named = () => { theme.textContent = isDark() ? "Light" : "Dark"; theme.setAttribute("aria-label", `Show the page ${isDark() ? "light" : "dark"}`); };
if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; kept(root.dataset.theme); named(); });
dark.addEventListener("change", named);
named();

// ---- opening: all of it, what is printed, what a link leads to ----
const folds = $("details.fold");
const all = document.getElementById("all");
all.hidden = !folds.length;
const openAll = (open) => { for (const one of folds) one.open = open; all.setAttribute("aria-pressed", open); all.textContent = open ? "Close all" : "Open all"; };
all.addEventListener("click", () => openAll(all.getAttribute("aria-pressed") !== "true"));
let before = [];
addEventListener("beforeprint", () => { before = folds.filter((one) => !one.open); for (const one of before) one.open = true; });
addEventListener("afterprint", () => { for (const one of before) one.open = false; });
const reveal = () => {
  const place = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!place) return;
  for (let one = place; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
  (place.querySelector(":scope > summary") || place).focus({ preventScroll: true });
  place.scrollIntoView();
};
addEventListener("hashchange", reveal);
reveal();

// ---- what is said of a tile: with the pointer and with the focus; Escape takes it away ----
const tip = document.getElementById("tip");
let about = null;
const hide = () => { tip.hidden = true; about = null; };
const show = (tile) => {
  about = tile;
  tip.textContent = tile.getAttribute("aria-label");
  tip.hidden = false;
  const at = tile.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const below = at.bottom + 8 + own.height < innerHeight;
  tip.style.top = `${Math.max(4, below ? at.bottom + 8 : at.top - own.height - 8)}px`;
  tip.style.left = `${Math.min(Math.max(8, at.left + at.width / 2 - own.width / 2), innerWidth - own.width - 8)}px`;
};
for (const tile of $("[data-tip]")) {
  tile.addEventListener("pointerenter", () => show(tile));
  tile.addEventListener("focus", () => show(tile));
  tile.addEventListener("pointerleave", () => { if (document.activeElement !== tile) hide(); });
  tile.addEventListener("blur", hide);
}
addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
addEventListener("scroll", () => { if (about) show(about); }, { passive: true, capture: true });

// ---- a large map is one stop of the Tab key, and arrows move in it ----
const toward = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const middle = (one) => { const box = one.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2, box]; };
for (const map of $("[data-roving]")) {
  const tiles = $("[data-tip]", map);
  const large = tiles.length > 40;
  const settle = (chosen) => { if (large) for (const one of tiles) one.setAttribute("tabindex", one === chosen ? 0 : -1); };
  settle(map.querySelector(".here") || tiles[0]);
  map.addEventListener("focusin", (event) => { if (tiles.includes(event.target)) settle(event.target); });
  map.addEventListener("keydown", (event) => {
    const way = toward[event.key];
    if (!way || !tiles.includes(event.target)) return;
    event.preventDefault();
    const [x, y, own] = middle(event.target);
    const rated = tiles.filter((one) => one !== event.target).map((one) => {
      const [u, v, box] = middle(one);
      const along = (u - x) * way[0] + (v - y) * way[1];
      const aside = way[0] ? Math.max(0, box.top - y, y - box.bottom) : Math.max(0, box.left - x, x - box.right);
      return { one, along: Math.round(along), aside };
    }).filter(({ along, aside }) => along > 1 && (way[1] || !aside)).sort((a, b) => a.along - b.along || a.aside - b.aside);
    if (rated.length) rated[0].one.focus();
  });
}

// ---- search: a code, or any word ----
const find = document.getElementById("find");
const found = document.getElementById("found");
const places = [...$(".fold, .explained, .items > li, .remark, .note"), ...$("[data-tip]")];
const innermost = new Set(places.filter((one) => !one.querySelector(".fold, .explained, .items > li, .remark, .note, [data-tip]")));
const texts = new Map(places.map((one) => [one, (one.getAttribute("aria-label") || one.textContent).toLowerCase()]));
let opened = null;
find.addEventListener("input", () => {
  const wanted = find.value.trim().toLowerCase();
  if (!opened) opened = folds.filter((one) => one.open);
  let count = 0;
  for (const one of places) {
    const hit = !wanted || texts.get(one).includes(wanted);
    one.classList.toggle("missed", !hit);
    if (one.tagName === "DETAILS") one.open = wanted ? hit : opened.includes(one);
    if (hit && innermost.has(one)) count += 1;
  }
  if (!wanted) opened = null;
  found.textContent = wanted ? (count ? `${count} ${count === 1 ? "place" : "places"}` : "nowhere") : "";
});
find.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  const rule = document.getElementById(`rule-${find.value.trim().toUpperCase()}`);
  const first = rule || places.find((one) => !one.hasAttribute("data-tip") && texts.get(one).includes(find.value.trim().toLowerCase()));
  if (first) { first.scrollIntoView(); (first.querySelector("summary, a") || first).focus({ preventScroll: true }); }
});

// ---- lines to paste, and the record ----
const copies = (button, text) => button.addEventListener("click", async () => {
  const words = button.textContent;
  await navigator.clipboard.writeText(text());
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = words; }, 2000);
});
if (navigator.clipboard) {
  const copy = document.getElementById("copy");
  copy.hidden = false;
  copies(copy, () => document.getElementById("record").textContent);
  for (const paste of $(".paste")) {
    const around = document.createElement("div");
    const button = document.createElement("button");
    around.className = "copied";
    button.type = "button";
    button.textContent = "Copy";
    paste.replaceWith(around);
    around.append(paste, button);
    copies(button, () => paste.textContent);
  }
}
