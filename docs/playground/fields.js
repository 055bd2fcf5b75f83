// The form and the address: each control is a flag of the command, by the flag's own names.

/** @type {Map<string, HTMLInputElement|HTMLSelectElement>} every name that a flag has, and its control */
const CONTROLS = new Map();
for (const control of document.querySelectorAll("form [data-names]")) {
  for (const name of control.dataset.names.split(" ")) CONTROLS.set(name, control);
  // of a yes-or-no flag, the name that says no
  if (control.dataset.kind === "yes-or-no" && control.options[2]) CONTROLS.set(control.options[2].value, control);
}

/** The control of a flag, without its dashes, or undefined. */
export const controlOf = (name) => CONTROLS.get(name.replaceAll("_", "-"));

/** A query string as people can read it: what is safe in an address stays as it is. */
export function written(pairs) {
  const plain = (text) =>
    encodeURIComponent(text).replace(/%(2C|3A|3D|2F|2A)/g, decodeURIComponent).replaceAll("%20", "+");
  const name = (text) => plain(text).replaceAll("=", "%3D");
  return pairs.map(([key, value]) => (value === "" ? name(key) : `${name(key)}=${plain(value)}`)).join("&");
}

/** What the form asks, as a query string. */
export function asked(form) {
  const pairs = [];
  for (const control of form.querySelectorAll("[data-names]")) {
    const value = control.value.trim();
    if (value === "") continue;
    if (control.dataset.kind === "yes-or-no") pairs.push([value, ""]);
    else if (control.dataset.kind === "many") for (const one of value.split(/\s+/)) pairs.push([control.name, one]);
    else pairs.push([control.name, value]);
  }
  return written(pairs);
}

/** Show a query string in the form. What the form has no control for stays with the address alone. */
export function fill(form, query) {
  const values = new Map();
  for (const [name, value] of new URLSearchParams(query)) {
    const control = controlOf(name);
    if (control === undefined) continue;
    const yesOrNo = control.dataset.kind === "yes-or-no" && value === "";
    const before = control.dataset.kind === "many" && values.has(control) ? `${values.get(control)} ` : "";
    values.set(control, before + (yesOrNo ? name.replaceAll("_", "-") : value));
  }
  for (const control of form.querySelectorAll("[data-names]")) {
    const value = values.get(control) ?? "";
    if (control instanceof HTMLSelectElement) chosen(control, value);
    else control.value = value;
    if (value !== "") control.closest("details")?.setAttribute("open", "");
  }
}

/** Choose ``value``, which an address may spell in another way than the list does. */
function chosen(select, value) {
  select.querySelector("[data-added]")?.remove();
  if (![...select.options].some((option) => option.value === value)) {
    const option = new Option(value, value);
    option.dataset.added = "";
    select.add(option);
  }
  select.value = value;
}

/** Mark the control that an error message names, if it names one. */
export function blame(form, message) {
  for (const control of form.querySelectorAll("[aria-invalid]")) {
    control.removeAttribute("aria-invalid");
    control.removeAttribute("aria-describedby");
  }
  const control = controlOf(/--([a-z0-9-]+)/.exec(message)?.[1] ?? "");
  if (control === undefined) return;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", "error");
  control.closest("details")?.setAttribute("open", "");
}
