// Cache: which runs of tokens lie where, who reads them, and what is shared.

import { ask, isStop, sentence } from "./api.js";
import { count3, h, s, size } from "./dom.js";
import { poll } from "./poll.js";

/**
 * @typedef {{ parent: number | null, tokens: number, cached: number, place: string, offset: number, capacity: number,
 *   readers: number, writing: boolean, uses: number, agents: string[], text?: string }} Run
 * @typedef {{ capacity: number, free: number, host_capacity: number, host_used: number, bytes_per_token: number,
 *   leases: { offset: number, capacity: number }[], rows: { row: number, agent: string, run: number | null }[],
 *   runs: Run[], runs_left_out: number }} Cache
 */

const SHOWN = 400;

/** @returns {import("./app.js").View} */
export function cacheView() {
  const told = h("p", { class: "told error", role: "status" });
  const sums = h("dl", { class: "tiles" });
  const map = h("div", { class: "map" });
  const table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Cached runs" });

  const looking = poll(async (signal) => {
    try {
      /** @type {Cache} */
      const cache = await ask("/v1/engine/cache", { signal });
      told.textContent = "";
      sums.replaceChildren(...summary(cache));
      map.replaceChildren(memoryMap(cache));
      table.replaceChildren(runTable(cache));
    } catch (error) {
      if (!isStop(error)) told.textContent = sentence(error);
    }
  }, 700);

  const element = h(
    "section",
    { class: "view cache", "aria-labelledby": "cache-title" },
    h("h1", { id: "cache-title" }, "Cache"),
    h("p", { class: "lead" }, "Each block is a run of tokens that is stored once. What several requests begin with is read once for all of them."),
    told,
    sums,
    h("h2", {}, "Where it lies"),
    map,
    h(
      "ul",
      { class: "legend" },
      ...[["kept", "kept for reuse"], ["one", "read by one request"], ["many", "shared by several"], ["lease", "of sessions of workers"]].map(([kind, text]) =>
        h("li", {}, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text),
      ),
    ),
    h("h2", {}, "Runs of tokens"),
    table,
  );
  return { element, show: looking.start, hide: looking.stop };
}

/** @param {Cache} cache */
function summary(cache) {
  const used = cache.capacity - cache.free, per = cache.bytes_per_token;
  const shared = cache.runs.filter((run) => run.readers > 1);
  const saved = shared.reduce((sum, run) => sum + (run.readers - 1) * run.cached, 0);
  return [
    tile("In use", `${count3(used)} of ${count3(cache.capacity)} tokens`, size(used * per)),
    tile("Shared now", `${count3(shared.reduce((sum, run) => sum + run.cached, 0))} tokens`, `${count3(saved)} not stored again`),
    tile("Runs", count3(cache.runs.length + cache.runs_left_out), `${cache.rows.length} requests read some`),
    tile("In host memory", `${count3(cache.host_used)} tokens`, cache.host_capacity ? `of ${count3(cache.host_capacity)}` : "none was given"),
  ];
}

/**
 * A number with its name.
 * @param {string} name
 * @param {string} value
 * @param {string} [more]
 */
export function tile(name, value, more = "") {
  return h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null));
}

/** @param {Run} run */
function kind(run) {
  return run.readers > 1 ? "many" : run.readers === 1 ? "one" : "kept";
}

/** @param {Cache} cache */
function memoryMap(cache) {
  const placed = cache.runs.filter((run) => run.place === "accelerator");
  const label = `${placed.length} runs of requests and ${cache.leases.length} of sessions in a memory of ${count3(cache.capacity)} tokens`;
  const scale = 1000 / cache.capacity;
  return s(
    "svg",
    { viewBox: "0 0 1000 56", preserveAspectRatio: "none", role: "img", "aria-label": label },
    ...cache.leases.map((each) => s("rect", { class: "lease", x: each.offset * scale, width: Math.max(each.capacity * scale, 1), y: 0, height: 56 })),
    ...placed.map((run) => {
      const rect = s("rect", { class: `${kind(run)}${run.writing ? " writing" : ""}`, x: run.offset * scale, width: Math.max(run.cached * scale, 1), y: 0, height: 56 });
      rect.append(s("title", {}, `${run.cached} tokens at ${run.offset}, ${readers(run)}`));
      return rect;
    }),
  );
}

/** @param {Run} run */
function readers(run) {
  return run.readers === 0 ? "no reader" : run.readers === 1 ? "1 reader" : `${run.readers} readers`;
}

/** @param {Cache} cache */
function runTable(cache) {
  if (!cache.runs.length) return h("p", { class: "empty" }, "Nothing is cached yet. Ask something, and look again.");
  const children = new Map();
  cache.runs.forEach((run, i) => children.set(run.parent, [...(children.get(run.parent) ?? []), i]));
  /** @type {[number, number][]} */
  const order = [];
  /** @type {[number, number][]} */
  const next = (children.get(null) ?? []).map((/** @type {number} */ i) => [i, 0]).reverse();
  while (next.length) {
    const [i, depth] = /** @type {[number, number]} */ (next.pop());
    order.push([i, depth]);
    next.push(...(children.get(i) ?? []).map((/** @type {number} */ child) => /** @type {[number, number]} */ ([child, depth + 1])).reverse());
  }
  const hasTexts = cache.runs.some((run) => run.text !== undefined);
  const rest = order.length - SHOWN + cache.runs_left_out;
  return h(
    "table",
    {},
    h("caption", {}, rest > 0 ? `The first ${SHOWN}; ${count3(rest)} more are cached` : "A run follows the one above it that is less indented"),
    h(
      "thead",
      {},
      h("tr", {}, ...["Run", "Tokens", "Readers", "Used", "Place", "Agents"].map((name, i) => h("th", { scope: "col", class: i > 0 && i < 4 ? "n" : false }, name)), hasTexts ? h("th", { scope: "col" }, "Begins with") : null),
    ),
    h(
      "tbody",
      {},
      ...order.slice(0, SHOWN).map(([i, depth]) => {
        const run = cache.runs[i];
        const name = h("th", { scope: "row" }, h("span", { class: `swatch ${kind(run)}`, "aria-hidden": "true" }), `#${i + 1}`, run.writing ? h("span", { class: "badge" }, "writing") : null);
        name.style.paddingInlineStart = `${0.6 + Math.min(depth, 8) * 0.9}rem`;
        return h(
          "tr",
          {},
          name,
          h("td", { class: "n" }, run.cached === run.tokens ? run.tokens : `${run.cached} of ${run.tokens}`),
          h("td", { class: "n" }, run.readers),
          h("td", { class: "n" }, run.uses),
          h("td", {}, run.place === "accelerator" ? `at ${count3(run.offset)}` : run.place || "–"),
          h("td", {}, run.agents.join(", ") || "–"),
          hasTexts ? h("td", { class: "excerpt" }, (run.text ?? "").replace(/\s+/g, " ")) : null,
        );
      }),
    ),
  );
}
