// The page: one view at a time, named by the address.

import { ask, sentence } from "./api.js";
import { cacheView } from "./cache.js";
import { chatView } from "./chat.js";
import { engineView } from "./engine.js";
import { treesView } from "./trees.js";
import { workersView } from "./workers.js";

/**
 * A view: its element, and what is done when it is shown and hidden.
 * @typedef {{ element: HTMLElement, show: () => void, hide: () => void }} View
 */

/** @type {Record<string, () => View>} */
const MAKERS = { chat: chatView, workers: workersView, cache: cacheView, trees: treesView, engine: engineView };
/** @type {Record<string, View>} */
const made = {};
/** @type {View | null} */
let shown = null;

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const status = /** @type {HTMLElement} */ (document.getElementById("status"));

function show() {
  const name = location.hash.slice(1) in MAKERS ? location.hash.slice(1) : "chat";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${name}`) {
      link.setAttribute("aria-current", "page");
      document.title = `${link.textContent} · jaxshare`;
    } else link.removeAttribute("aria-current");
  }
  shown?.hide();
  shown = made[name] ??= MAKERS[name]();
  main.replaceChildren(shown.element);
  shown.show();
}

/** Tells the name of the model, and whether the engine is warm. */
async function greet() {
  try {
    const models = await ask("/v1/models");
    const name = /** @type {HTMLElement} */ (document.getElementById("model"));
    name.textContent = models.data[0]?.id ?? "";
    for (;;) {
      const answer = await fetch("/ready");
      const told = await answer.json();
      status.textContent = told.status === "ready" ? "" : told.status;
      if (told.status !== "warming up") return;
      await new Promise((resolve) => setTimeout(resolve, 1500));
    }
  } catch (error) {
    status.textContent = sentence(error);
  }
}

document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", show);
show();
greet();
