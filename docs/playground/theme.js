// The colours that were chosen here before, set before anything is drawn; without a choice, the system's.
try {
  const chosen = localStorage.getItem("attnsel-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage may be closed to a page: then nothing was remembered
}
