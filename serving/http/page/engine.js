// Engine: rows, queue, tokens a second, hit rate and memory, twice a second.

import { events, isStop, sentence } from "./api.js";
import { tile } from "./cache.js";
import { count3, h, s, size } from "./dom.js";

const KEPT = 120;

/** @returns {import("./app.js").View} */
export function engineView() {
  const told = h("p", { class: "told", role: "status" });
  const tiles = h("dl", { class: "tiles" });
  const chart = h("figure", { class: "chart" });
  const rows = h("div", { class: "rows" });
  const memory = h("div", { class: "memory" });
  const requests = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Running requests" });
  /** @type {number[]} */
  const rates = [];
  /** @type {AbortController | null} */
  let running = null;

  /** @param {any} stats */
  function show(stats) {
    told.textContent = "";
    rates.push(stats.tokens_per_second);
    if (rates.length > KEPT) rates.shift();
    const { rows: used, memory: bytes } = stats;
    tiles.replaceChildren(
      tile("Tokens a second", stats.tokens_per_second.toFixed(stats.tokens_per_second < 100 ? 1 : 0), `${stats.passes_per_second.toFixed(0)} passes a second`),
      tile("Rows in use", `${used.decoding + used.prefilling} of ${used.total}`, `${used.prefilling} read their prompts`),
      tile("Queue", count3(stats.waiting), "requests wait"),
      tile("Hit rate", stats.hit_rate === null ? "–" : `${(stats.hit_rate * 100).toFixed(1)}%`, `${count3(stats.reused_tokens)} of ${count3(stats.prompt_tokens)} tokens of prompts`),
      tile("Sessions", `${stats.sessions.running} of ${stats.sessions.total}`, "of workers are running"),
      tile("Sampled", count3(stats.sampled_tokens), "tokens of requests so far"),
    );
    chart.replaceChildren(sparkline(rates), h("figcaption", {}, "Tokens a second, over the last minute"));
    rows.replaceChildren(...dots(stats));
    memory.replaceChildren(
      meter("Keys and values", bytes.used_bytes, bytes.capacity_bytes),
      meter("of these, sessions of workers", bytes.session_bytes, bytes.capacity_bytes),
      bytes.host_capacity_bytes ? meter("In host memory", bytes.host_used_bytes, bytes.host_capacity_bytes) : "",
      bytes.logits_bytes ? h("p", {}, `Logits Cache: ${size(bytes.logits_bytes)}`) : "",
    );
    requests.replaceChildren(requestTable(stats.requests));
  }

  async function read() {
    const mine = (running = new AbortController());
    while (running === mine) {
      try {
        for await (const stats of events("/v1/engine/stats?stream=true", { signal: mine.signal })) show(stats);
        told.textContent = "The server has ended the stream.";
      } catch (error) {
        if (isStop(error)) return;
        told.textContent = sentence(error);
      }
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }

  const element = h(
    "section",
    { class: "view engine", "aria-labelledby": "engine-title" },
    h("h1", { id: "engine-title" }, "Engine"),
    told,
    tiles,
    chart,
    h("h2", {}, "Rows"),
    rows,
    h("h2", {}, "Memory"),
    memory,
    h("h2", {}, "Running requests"),
    requests,
  );
  return {
    element,
    show: () => void read(),
    hide: () => {
      running?.abort();
      running = null;
    },
  };
}

/** @param {any} stats */
function dots(stats) {
  const { total, decoding, prefilling } = stats.rows;
  const label = `${decoding} rows sample, ${prefilling} read a prompt, ${total - decoding - prefilling} are free`;
  return [
    h(
      "div",
      { class: "dots", role: "img", "aria-label": label },
      ...Array.from({ length: total }, (_, i) => h("span", { class: i < decoding ? "dot decoding" : i < decoding + prefilling ? "dot prefilling" : "dot" })),
    ),
    h("p", { class: "faint" }, `${label}.`),
  ];
}

/**
 * @param {string} name
 * @param {number} used
 * @param {number} all
 */
function meter(name, used, all) {
  const part = all ? Math.round((100 * used) / all) : 0;
  const level = h("span", { class: "level" });
  level.style.width = `${part}%`;
  const bar = h("div", { class: "gauge", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": part }, level);
  return h("div", { class: "meter" }, h("span", {}, name), bar, h("span", { class: "n" }, `${size(used)} of ${size(all)}`));
}

/** @param {number[]} values */
function sparkline(values) {
  const top = Math.max(...values, 1), width = 600, height = 90;
  const points = values.map((value, i) => `${((i + KEPT - values.length) / (KEPT - 1)) * width},${height - 4 - (value / top) * (height - 14)}`);
  const line = points.length > 1 ? points : [`${width - 6},${points[0].split(",")[1]}`, points[0]];
  const last = values[values.length - 1] ?? 0;
  return s(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Tokens a second: ${last.toFixed(1)} now, ${top.toFixed(1)} at most` },
    s("polygon", { class: "area", points: `${line[0].split(",")[0]},${height} ${line.join(" ")} ${width},${height}` }),
    s("polyline", { class: "line", points: line.join(" ") }),
  );
}

/** @param {any[]} requests */
function requestTable(requests) {
  if (!requests.length) return h("p", { class: "empty" }, "No request runs now.");
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ...["Row", "Request", "Agent", "State", "Prompt", "Sampled"].map((name, i) => h("th", { scope: "col", class: i === 2 || i === 3 ? false : "n" }, name)))),
    h(
      "tbody",
      {},
      ...requests.map((each) =>
        h(
          "tr",
          {},
          h("td", { class: "n" }, each.row),
          h("td", { class: "n" }, each.request),
          h("td", {}, each.agent || "–"),
          h("td", {}, each.state),
          h("td", { class: "n" }, each.prompt_tokens),
          h("td", { class: "n" }, `${each.sampled_tokens} of ${each.max_tokens}`),
        ),
      ),
    ),
  );
}
