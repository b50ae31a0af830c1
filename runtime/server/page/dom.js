// Elements: what the server says becomes text in them, and never HTML.
// @ts-check

/** @param {string} selector @param {ParentNode} [root] @returns {any} the one element */
export const find = (selector, root = document) => root.querySelector(selector);

/** @param {string} selector @returns {any[]} */
export const findAll = (selector) => [...document.querySelectorAll(selector)];

/**
 * @param {string} tag
 * @param {Record<string, string>} [attributes]
 * @param {...(string | Node)} children
 * @returns {any}
 */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** @param {string} id of a template @returns {any} a copy of its first element */
export const copy = (id) => find(`#${id}`).content.firstElementChild.cloneNode(true);

/** Change a text that is another one: what stays the same is not read out again. */
export function say(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

/**
 * Show a row for each item, in their order. A row that stays is the same element, so that neither
 * the focus nor a selection in it is lost.
 * @template T
 * @param {HTMLTableSectionElement} body
 * @param {T[]} items
 * @param {{heading: number, key: (item: T) => string, cells: (item: T) => (string | number)[],
 *   last?: (item: T, cell: HTMLElement) => void}} how `last` fills one more cell
 */
export function fillRows(body, items, { heading, key, cells, last }) {
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  items.forEach((item, place) => {
    const texts = cells(item);
    const row = old.get(key(item)) ?? rowOf(key(item), texts.length + (last ? 1 : 0), heading);
    old.delete(key(item));
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
    texts.forEach((text, column) => say(row.cells[column], text));
    last?.(item, row.cells[texts.length]);
  });
  for (const row of old.values()) row.remove();
}

function rowOf(key, columns, heading) {
  const row = make("tr", { "data-key": key });
  for (let column = 0; column < columns; column++) {
    row.append(column === heading ? make("th", { scope: "row" }) : make("td"));
  }
  return row;
}
