// Saved sessions of workers, on servers that keep some.

import { ask, sentence } from "./api.js";
import { h, size } from "./dom.js";

/** @typedef {import("./workers.js").Session} Session */
/** @typedef {{ id: string, names: string[], problem: string, passes: number, saved_at: number, bytes: number }} Save */

/**
 * The list of saves.
 * @param {(message?: string, isError?: boolean) => void} tell
 * @param {(session: Session) => void} open
 */
export function savedSessions(tell, open) {
  const rows = h("ul", { class: "saves" });
  const element = h("details", { class: "panel" }, h("summary", {}, "Saved sessions"), rows);
  element.hidden = true;

  /** @param {() => Promise<void>} work */
  async function attempt(work) {
    try {
      await work();
      tell();
    } catch (error) {
      tell(sentence(error));
    }
    await show();
  }

  /** @param {Save} save */
  function row(save) {
    const path = `/v1/workers/saves/${save.id}`;
    const time = new Date(save.saved_at * 1000).toLocaleString();
    return h(
      "li",
      {},
      h("div", { class: "excerpt" }, save.problem),
      h("p", { class: "faint" }, `${save.names.join(", ")}: after ${save.passes} passes, ${time}, ${size(save.bytes)}`),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", onclick: () => attempt(async () => open(await ask(`${path}/restore`, { method: "POST" }))) }, "Go on"),
        h("button", { type: "button", class: "danger", onclick: () => attempt(() => ask(path, { method: "DELETE" })) }, "Delete save"),
      ),
    );
  }

  /** Asks for the list again; servers without a folder for saves show none. */
  async function show() {
    try {
      const { data } = await ask("/v1/workers/saves");
      element.hidden = data.length === 0;
      rows.replaceChildren(...data.map(row));
    } catch {
      element.hidden = true;
    }
  }

  return { element, show };
}
