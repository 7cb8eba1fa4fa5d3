// The form that begins a session of workers.

import { ask, sentence } from "./api.js";
import { field, h, number } from "./dom.js";

/** @typedef {import("./workers.js").Session} Session */

/**
 * The form that begins a session.
 * @param {(message?: string, isError?: boolean) => void} tell
 * @param {(session: Session) => void} open
 */
export function sessionForm(tell, open) {
  const problem = h("textarea", { rows: 3, required: true });
  problem.value = "Solve: 1. 17 + 25 2. 60 - 18 3. 6 * 7 4. 84 / 2";
  const names = h("input", { value: "Alice, Bob", required: true, spellcheck: "false" });
  const layout = h("select", {}, ...["combined", "interleaved", "contiguous"].map((name) => h("option", { value: name }, name)));
  const budget = h("input", { type: "number", min: 1, step: 1, value: 512 });
  const room = h("input", { type: "number", min: 1, step: 1 });
  const format = h("input", { spellcheck: "false" });
  const temperature = h("input", { type: "number", min: 0, step: "any" });
  const seed = h("input", { type: "number", step: 1 });
  const askEvery = h("input", { type: "number", min: 0, step: 1 });
  const finishAt = h("input", { spellcheck: "false", inputmode: "numeric" });
  const kind = h("select", {}, h("option", { value: "box" }, "in a box"), h("option", { value: "code" }, "a program"));
  const stopOn = h("select", {}, ...[["answer", "at an answer"], ["eos", "when one stops"], ["never", "at the budget"]].map(([value, text]) => h("option", { value }, text)));
  const begin = h("button", { class: "primary" }, "Begin");

  /** @param {Event} event */
  async function submit(event) {
    event.preventDefault();
    /** @type {Record<string, unknown>} */
    const body = {
      problem: problem.value,
      names: names.value.split(",").map((name) => name.trim()).filter(Boolean),
      layout: layout.value,
      kind: kind.value,
      stop_on: stopOn.value,
    };
    const given = { budget: number(budget), max_workers: number(room), temperature: number(temperature), seed: number(seed), ask_every: number(askEvery) };
    for (const [name, value] of Object.entries(given)) if (value !== null) body[name] = value;
    const budgets = finishAt.value.split(/[\s,]+/).filter(Boolean).map(Number);
    if (budgets.length) body.finish_at = budgets;
    if (format.value.trim()) body.format = format.value.trim();
    begin.disabled = true;
    tell("The prompt is read …", false);
    try {
      open(await ask("/v1/workers", { body }));
      tell();
    } catch (error) {
      tell(sentence(error));
    } finally {
      begin.disabled = false;
    }
  }

  return h(
    "details",
    { class: "panel", open: true },
    h("summary", {}, "New session"),
    h(
      "form",
      { onsubmit: submit },
      field("Problem", problem),
      h(
        "div",
        { class: "grid" },
        field("Names", names, "separated by commas"),
        field("Layout", layout, "which blocks each worker sees, in which order"),
        field("Budget", budget, "forward passes"),
      ),
      h(
        "details",
        { class: "settings" },
        h("summary", {}, "More settings"),
        h(
          "div",
          { class: "grid" },
          field("Room for workers", room, "empty: for those named"),
          field("Format of prompts", format, "such as qwen3; empty: the model's own"),
          field("Temperature", temperature, "empty: the model's own"),
          field("Seed", seed, "empty: 0"),
          field("Redundancy question", askEvery, "tokens between two; 0 for none"),
          field("Answers at", finishAt, "passes, such as 64, 128, 256"),
          field("Answer", kind),
          field("Ends", stopOn),
        ),
      ),
      h("div", { class: "actions" }, begin),
    ),
  );
}
