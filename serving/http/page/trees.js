// Trees: searches of agents as they grow, and samples of one prompt as a tree of what they share.

import { ask, events, isStop, sentence } from "./api.js";
import { field, h, number } from "./dom.js";
import { poll } from "./poll.js";
import { Samples } from "./samples.js";

/** @typedef {{ id: string, parent: string | null, label: string, score: number | null, fate: string, text: string | null }} TreeNode */

/** @returns {import("./app.js").View} */
export function treesView() {
  const told = h("p", { class: "told", role: "status" });
  const chosen = h("select", { "aria-label": "Tree", onchange: () => void look(new AbortController().signal) });
  const posted = h("div", { class: "picker" });
  const box = h("div", { class: "tree" });
  let drawn = "";

  /** @param {AbortSignal} signal */
  async function look(signal) {
    try {
      const { data } = await ask("/v1/trees", { signal });
      const names = data.map((/** @type {{ name: string }} */ each) => each.name);
      posted.hidden = !names.length;
      if (names.join("\n") !== [...chosen.options].map((option) => option.value).join("\n")) {
        const kept = chosen.value;
        chosen.replaceChildren(...names.map((/** @type {string} */ name) => h("option", { value: name }, name)));
        if (names.includes(kept)) chosen.value = kept;
      }
      const head = data.find((/** @type {{ name: string }} */ each) => each.name === chosen.value);
      if (!head || isSampling) return;
      const state = `${head.name} ${head.version}`;
      if (state === drawn) return;
      const tree = await ask(`/v1/trees/${encodeURIComponent(head.name)}`, { signal });
      drawn = state;
      box.replaceChildren(outline(tree.nodes));
    } catch (error) {
      if (!isStop(error)) tell(sentence(error), true);
    }
  }

  /** @param {string} message */
  function tell(message, isError = false) {
    told.textContent = message;
    told.classList.toggle("error", isError);
  }

  let isSampling = false;
  /** @type {AbortController | null} */
  let running = null;
  const prompt = h("textarea", { rows: 2, required: true });
  prompt.value = "What is 17 + 25?";
  const count = h("input", { type: "number", min: 1, max: 32, step: 1, value: 6, required: true });
  const temperature = h("input", { type: "number", min: 0, step: "any", value: 1 });
  const most = h("input", { type: "number", min: 1, step: 1, value: 48, required: true });
  const start = h("button", { class: "primary" }, "Sample");
  const stop = h("button", { type: "button", onclick: () => running?.abort() }, "Stop");
  stop.hidden = true;

  /** @param {Event} event */
  async function sample(event) {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    isSampling = true;
    drawn = "";
    start.hidden = true;
    stop.hidden = false;
    tell("Sampling …");
    const samples = new Samples(prompt.value, number(count) ?? 1);
    const body = {
      messages: [{ role: "user", content: prompt.value }],
      n: number(count),
      temperature: number(temperature),
      max_tokens: number(most),
      logprobs: true,
      stream: true,
    };
    try {
      for await (const chunk of events("/v1/chat/completions", { body, signal: running.signal })) {
        for (const choice of chunk.choices ?? []) samples.add(choice);
        box.replaceChildren(outline(samples.nodes()));
      }
      tell("A score is the mean log-probability of the tokens so far.");
    } catch (error) {
      tell(isStop(error) ? "Stopped." : sentence(error), !isStop(error));
    } finally {
      running = null;
      start.hidden = false;
      stop.hidden = true;
    }
  }

  const looking = poll(look, 1000);
  posted.append(
    field("Tree of a program", chosen),
    h("button", { type: "button", onclick: () => { isSampling = false; drawn = ""; } }, "Show"),
  );
  posted.hidden = true;
  const element = h(
    "section",
    { class: "view trees", "aria-labelledby": "trees-title" },
    h("h1", { id: "trees-title" }, "Trees"),
    h("p", { class: "lead" }, "A search of agents as it grows, with its scores, where their program posts it to /v1/trees; or samples of one prompt, as the tree of what they share."),
    h(
      "details",
      { class: "panel", open: true },
      h("summary", {}, "Sample a prompt"),
      h(
        "form",
        { onsubmit: sample },
        field("Prompt", prompt),
        h("div", { class: "grid" }, field("Samples", count), field("Temperature", temperature), field("Most tokens", most)),
        h("div", { class: "actions" }, stop, start),
      ),
    ),
    posted,
    told,
    box,
  );
  return { element, show: looking.start, hide: looking.stop };
}

/**
 * Draws nodes, parents before their children, as nested lists.
 * @param {TreeNode[]} nodes
 */
export function outline(nodes) {
  if (!nodes.length) return h("p", { class: "empty" }, "The tree is empty.");
  const scores = nodes.flatMap((node) => (node.score === null ? [] : [node.score]));
  const least = Math.min(...scores), range = Math.max(...scores) - least || 1;
  const top = h("ul", { class: "outline" });
  /** @type {Map<string, HTMLElement>} */
  const lists = new Map();
  for (const node of nodes) {
    const list = h("ul");
    lists.set(node.id, list);
    const score = node.score === null ? null : scoreOf(node.score, (node.score - least) / range);
    const item = h(
      "li",
      {},
      h(
        "div",
        { class: `node ${/^[a-z]+$/.test(node.fate) ? node.fate : ""}` },
        h("span", { class: "label" }, node.label),
        node.fate ? h("span", { class: "badge" }, node.fate) : null,
        score,
        node.text ? h("span", { class: "text" }, node.text) : null,
      ),
      list,
    );
    (node.parent === null ? top : (lists.get(node.parent) ?? top)).append(item);
  }
  return top;
}

/**
 * @param {number} score
 * @param {number} part of the way from the least score to the greatest
 */
function scoreOf(score, part) {
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  bar.style.width = `${(0.3 + 2.7 * part).toFixed(2)}rem`;
  return h("span", { class: "score" }, bar, h("span", { class: "n" }, score.toFixed(2)));
}
