// Elements of the page. What models and people write becomes text nodes, never markup.

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Makes an element.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any>} [props] attributes; functions are listeners, named as `onclick`
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  add(made, children);
  return made;
}

/**
 * Makes an element of a picture.
 * @param {string} tag
 * @param {Record<string, string | number>} [props]
 * @param {...Child} children
 * @returns {SVGElement}
 */
export function s(tag, props = {}, ...children) {
  const made = /** @type {SVGElement} */ (document.createElementNS("http://www.w3.org/2000/svg", tag));
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, String(value));
  add(made, children);
  return made;
}

/**
 * @param {Element} parent
 * @param {Child[]} children
 */
function add(parent, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : String(child));
  }
}

let count = 0;

/**
 * Makes a labelled field.
 * @param {string} label
 * @param {HTMLElement} input
 * @param {string} [hint]
 * @returns {HTMLElement}
 */
export function field(label, input, hint) {
  count += 1;
  input.id = input.id || `field-${count}`;
  const told = hint ? h("small", { id: `${input.id}-hint` }, hint) : null;
  if (told) input.setAttribute("aria-describedby", told.id);
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input, told);
}

/**
 * Reads a number from a field; null where it is empty.
 * @param {HTMLInputElement} input
 * @returns {number | null}
 */
export function number(input) {
  return input.value.trim() === "" ? null : Number(input.value);
}

/** True where people have asked for less motion. */
export function isCalm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/**
 * Writes a size in bytes.
 * @param {number} bytes
 */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes, unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/**
 * Writes a whole number with spaces between thousands.
 * @param {number} value
 */
export function count3(value) {
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/**
 * Keeps a list at its end while something is added, unless a person has scrolled up.
 * @param {HTMLElement} box
 * @param {() => void} change
 */
export function following(box, change) {
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}
