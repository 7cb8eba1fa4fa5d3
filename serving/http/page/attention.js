// A table of how workers share their attention between blocks.

import { h } from "./dom.js";

/**
 * Makes the table: a row for each worker, a column for each block that any of them sees.
 * @param {{ passes: number, shares: Record<string, Record<string, number>> }} found
 * @param {{ names: string[], blocks: Record<string, number> }} session
 * @returns {HTMLElement}
 */
export function attentionTable(found, session) {
  const blocks = Object.keys(session.blocks).filter((block) => Object.values(found.shares).some((row) => block in row));
  const rows = session.names.filter((name) => name in found.shares);
  if (!rows.length) return h("p", { class: "faint" }, "No worker writes now, so there is nothing to measure.");
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Attention shares" },
    h(
      "table",
      { class: "shares" },
      h("caption", {}, `Shares of the attention of each worker's newest token, after ${found.passes} passes`),
      h(
        "thead",
        {},
        h("tr", {}, h("th", { scope: "col" }, "Worker"), ...blocks.map((block) => h("th", { scope: "col" }, block, h("small", {}, `${session.blocks[block]} tokens`)))),
      ),
      h(
        "tbody",
        {},
        ...rows.map((name) =>
          h("tr", {}, h("th", { scope: "row" }, name), ...blocks.map((block) => cell(found.shares[name][block]))),
        ),
      ),
    ),
  );
}

/** @param {number | undefined} share */
function cell(share) {
  if (share === undefined) return h("td", { class: "faint" }, "–");
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  bar.style.width = `${Math.round(share * 100)}%`;
  return h("td", {}, h("span", { class: "value" }, `${(share * 100).toFixed(share < 0.1 ? 1 : 0)}%`), bar);
}
