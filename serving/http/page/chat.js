// Chat: a dialogue whose answers stream in, and can be stopped.

import { events, isStop, sentence } from "./api.js";
import { field, following, h, number } from "./dom.js";

/** @typedef {{ role: string, content: string }} Message */

/** @returns {import("./app.js").View} */
export function chatView() {
  /** @type {Message[]} */
  let messages = [];
  /** @type {AbortController | null} */
  let running = null;

  const log = h("div", { class: "log", role: "log", "aria-label": "Dialogue", "aria-live": "polite", tabindex: "0" });
  const told = h("p", { class: "told", role: "status" });
  const input = h("textarea", { rows: 3, placeholder: "Ask something", "aria-label": "Message" });
  const send = h("button", { class: "primary", type: "submit" }, "Send");
  const stop = h("button", { type: "button", onclick: () => running?.abort() }, "Stop");
  const clear = h("button", { type: "button", class: "quiet", onclick: forget }, "New dialogue");
  const system = h("textarea", { rows: 2 });
  const temperature = h("input", { type: "number", min: 0, max: 10, step: "any" });
  const topP = h("input", { type: "number", min: 0, max: 1, step: "any" });
  const most = h("input", { type: "number", min: 1, step: 1, value: 512 });
  const seed = h("input", { type: "number", step: 1 });
  const empty = h("p", { class: "empty" }, "Nothing has been said yet. What you write stays between this tab and your server.");
  log.append(empty);
  stop.hidden = true;

  function forget() {
    running?.abort();
    messages = [];
    log.replaceChildren(empty);
    told.textContent = "";
    input.focus();
  }

  /**
   * Shows a message; returns where its text goes.
   * @param {string} role
   * @param {string} text
   */
  function show(role, text) {
    empty.remove();
    const body = h("div", { class: "words" }, text);
    const thought = h("div", { class: "words" });
    const thinking = h("details", { class: "thinking" }, h("summary", {}, "Thinking"), thought);
    thinking.hidden = true;
    const who = role === "user" ? "You" : "Model";
    following(log, () => log.append(h("article", { class: `message ${role}` }, h("h3", {}, who), role === "user" ? null : thinking, body)));
    return { body, thinking, thought };
  }

  /** @param {Event} event */
  async function submit(event) {
    event.preventDefault();
    const text = input.value.trim();
    if (!text || running) return;
    input.value = "";
    messages.push({ role: "user", content: text });
    show("user", text);
    const { body, thinking, thought } = show("assistant", "");
    running = new AbortController();
    log.setAttribute("aria-busy", "true");
    send.hidden = true;
    stop.hidden = false;
    stop.focus();
    told.textContent = "Writing …";
    const begin = performance.now();
    let answer = "", usage = null, first = 0;
    try {
      for await (const chunk of events("/v1/chat/completions", { body: request(), signal: running.signal })) {
        usage = chunk.usage ?? usage;
        const delta = chunk.choices?.[0]?.delta;
        if (!delta) continue;
        first ||= performance.now();
        following(log, () => {
          if (delta.reasoning_content) {
            thinking.hidden = false;
            thought.append(delta.reasoning_content);
          }
          if (delta.content) {
            answer += delta.content;
            body.append(delta.content);
          }
        });
      }
      told.textContent = summary(usage, begin, first);
    } catch (error) {
      told.textContent = isStop(error) ? "Stopped; what was written stays." : sentence(error);
      told.classList.toggle("error", !isStop(error));
    } finally {
      running = null;
      log.removeAttribute("aria-busy");
      send.hidden = false;
      stop.hidden = true;
      if (document.activeElement === stop || document.activeElement === document.body) input.focus();
      if (!answer && !thought.textContent) body.append(h("span", { class: "faint" }, "(no words)"));
      messages.push({ role: "assistant", content: answer });
    }
  }

  function request() {
    told.classList.remove("error");
    /** @type {Record<string, unknown>} */
    const body = { messages: [...messages], stream: true, stream_options: { include_usage: true } };
    if (system.value.trim()) body.messages = [{ role: "system", content: system.value.trim() }, ...messages];
    const given = { temperature: number(temperature), top_p: number(topP), max_tokens: number(most), seed: number(seed) };
    for (const [name, value] of Object.entries(given)) if (value !== null) body[name] = value;
    return body;
  }

  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });

  const element = h(
    "section",
    { class: "view chat", "aria-labelledby": "chat-title" },
    h("h1", { id: "chat-title", class: "unseen" }, "Chat"),
    log,
    h(
      "form",
      { class: "composer", onsubmit: submit },
      input,
      h("div", { class: "actions" }, told, clear, stop, send),
    ),
    h(
      "details",
      { class: "settings" },
      h("summary", {}, "Settings"),
      h(
        "div",
        { class: "grid" },
        field("Instructions", system),
        field("Temperature", temperature, "empty: the model's own"),
        field("Top p", topP, "empty: the model's own"),
        field("Most tokens", most),
        field("Seed", seed, "empty: a new one each time"),
      ),
    ),
  );
  return { element, show: () => input.focus({ preventScroll: true }), hide: () => {} };
}

/**
 * What an answer has taken.
 * @param {any} usage
 * @param {number} begin
 * @param {number} first
 */
function summary(usage, begin, first) {
  if (!usage) return "";
  const now = performance.now();
  const tokens = usage.completion_tokens, cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const speed = first && now - first > 200 ? `, ${(tokens / ((now - first) / 1000)).toFixed(0)} a second` : "";
  const wait = first ? `, the first after ${((first - begin) / 1000).toFixed(2)} s` : "";
  return `${tokens} tokens${speed}${wait}; ${cached} of ${usage.prompt_tokens} tokens of the prompt were cached.`;
}
