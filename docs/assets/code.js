// The button that copies a block of a terminal takes the commands alone: what follows "$ ", with the lines that a
// backslash joins to it. Output and prompts are no use in a shell.
"use strict";

function commandsOf(text) {
  const kept = [];
  let goesOn = false;
  for (const line of text.split("\n")) {
    if (!goesOn && !line.startsWith("$ ")) continue;
    kept.push(goesOn ? line : line.slice(2));
    goesOn = line.endsWith("\\");
  }
  return kept.join("\n");
}

// Before the theme's own listener, which takes the text of this attribute where there is one.
document.addEventListener(
  "click",
  (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-clipboard-target]") : null;
    const block = button?.closest(".language-console")?.querySelector("code");
    const commands = block ? commandsOf(block.textContent) : "";
    if (commands) button.dataset.clipboardText = commands;
  },
  true,
);

// The theme puts a <nav> around the buttons of every block: each gets a name of its own, by which readers who go from
// landmark to landmark tell them apart.
function named() {
  document.querySelectorAll("nav.md-code__nav").forEach((nav, i) => {
    if (!nav.hasAttribute("aria-label")) nav.setAttribute("aria-label", `Code block ${i + 1}`);
  });
}
new MutationObserver(named).observe(document.documentElement, { childList: true, subtree: true });
named();
