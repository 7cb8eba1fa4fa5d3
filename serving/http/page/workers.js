// Workers: a problem, columns that fill as they write, and the history that all of them read.

import { ask, events, isStop, sentence } from "./api.js";
import { attentionTable } from "./attention.js";
import { following, h, isCalm, size } from "./dom.js";
import { savedSessions } from "./saves.js";
import { sessionForm } from "./session_form.js";

/** @typedef {{ worker: string, step: number, text: string, ended: number | null, asked: boolean, answers: boolean }} Step */
/** @typedef {{ state: string, sees: string[] }} WorkerState */
/** @typedef {{ budget: number, value: string | null, passes: number, extra_passes: number }} Answer */
/**
 * A session as the server describes it.
 * @typedef {{ id: string, status: string, names: string[], passes: number, budget: number, finish_reason: string | null,
 *   workers: Record<string, WorkerState>, blocks: Record<string, number>, moves: Record<string, string>, steps: Step[], answers: Answer[] }} Session
 */

const COLOURS = 8;

/** @returns {import("./app.js").View} */
export function workersView() {
  const told = h("p", { class: "told", role: "status" });
  const picker = h("div", { class: "chips", role: "group", "aria-label": "Sessions" });
  const stage = h("div", { class: "stage" });
  /** @type {Stage | null} */
  let shown = null;

  /** @param {string} [message] */
  function tell(message = "", isError = true) {
    told.textContent = message;
    told.classList.toggle("error", isError && message !== "");
  }

  /** @param {Session | null} session */
  function open(session) {
    shown?.close();
    shown = session && new Stage(session, tell, list, () => open(null));
    stage.replaceChildren(...(shown ? [shown.element] : []));
    shown?.toEnd();
    form.open = !session;
    list();
  }

  async function list() {
    saves.show();
    try {
      const { data } = await ask("/v1/workers");
      picker.replaceChildren(
        ...data.map((/** @type {{ id: string, status: string }} */ each, /** @type {number} */ i) =>
          h(
            "button",
            {
              type: "button",
              class: "chip",
              "aria-pressed": shown?.session.id === each.id ? "true" : "false",
              onclick: async () => {
                try {
                  open(await ask(`/v1/workers/${each.id}`));
                } catch (error) {
                  tell(sentence(error));
                }
              },
            },
            `Session ${i + 1}, ${each.status}`,
          ),
        ),
      );
    } catch (error) {
      tell(sentence(error));
    }
  }

  const form = sessionForm(tell, open);
  const saves = savedSessions(tell, open);
  const element = h(
    "section",
    { class: "view workers", "aria-labelledby": "workers-title" },
    h("h1", { id: "workers-title" }, "Workers"),
    h("p", { class: "lead" }, "Several workers write on one problem at once. Each reads what the others write, token by token, from one shared cache."),
    form,
    saves.element,
    picker,
    told,
    stage,
  );
  return { element, show: list, hide: () => {} };
}

/** What is shown of one session. */
class Stage {
  /**
   * @param {Session} session
   * @param {(message?: string, isError?: boolean) => void} tell
   * @param {() => void} changed called where the session's status is another one
   * @param {() => void} gone
   */
  constructor(session, tell, changed, gone) {
    this.session = session;
    this.tell = tell;
    this.changed = changed;
    this.gone = gone;
    this.stop = new AbortController();
    /** @type {Map<string, HTMLElement>} */
    this.finished = new Map();
    /** @type {Map<string, { box: HTMLElement, text: HTMLElement, step: number, state: HTMLElement, pause: HTMLButtonElement, leave: HTMLButtonElement, raw: string }>} */
    this.columns = new Map();
    /** @type {string[]} */
    this.order = [];
    this.history = h("div", { class: "history", role: "log", "aria-label": "Finished steps", "aria-live": "polite", tabindex: "0" });
    this.row = h("div", { class: "columns" });
    this.bar = h("progress", { "aria-label": "Forward passes of the budget", max: session.budget, value: 0 });
    this.state = h("p", { class: "state" });
    this.answers = h("ol", { class: "answers", "aria-label": "Answers", "aria-live": "polite" });
    /** @type {Map<string, HTMLElement>} */
    this.known = new Map();
    this.attention = h("div", { class: "attention" });
    this.watch = h("input", { type: "checkbox", id: "watch", onchange: () => this.measure() });
    /** @type {(HTMLInputElement | HTMLButtonElement)[]} what a session that is over takes no more */
    this.controls = [];
    this.holds = /** @type {const} */ (["pause", "resume"]).map((what) =>
      h("button", { type: "button", onclick: () => this.all(what) }, what === "pause" ? "Pause all" : "Resume all"),
    );
    this.element = this.build();
    this.apply(session);
    this.read();
    this.timer = setInterval(() => this.refresh(), 1000);
  }

  build() {
    const words = h("input", { "aria-label": "Words to all workers", placeholder: "Say something to all workers", required: true });
    const name = h("input", { "aria-label": "Name of the new worker", placeholder: "Name", size: 10, required: true });
    const speak = h("button", {}, "Say"), add = h("button", {}, "Add worker");
    this.controls = [...this.holds, words, speak, name, add];
    /** @param {Event} event */
    const say = async (event) => {
      event.preventDefault();
      if (await this.command("say", { text: words.value })) words.value = "";
    };
    /** @param {Event} event */
    const join = async (event) => {
      event.preventDefault();
      if (await this.command("add", { name: name.value })) name.value = "";
    };
    return h(
      "div",
      { class: "session" },
      h(
        "div",
        { class: "panel head" },
        this.state,
        this.bar,
        h(
          "div",
          { class: "actions" },
          h("button", { type: "button", onclick: () => this.finish() }, "Answer as it stands"),
          ...this.holds,
          h("button", { type: "button", onclick: () => this.save() }, "Save"),
          h("button", { type: "button", class: "danger", onclick: () => this.remove() }, "Delete session"),
        ),
        this.answers,
      ),
      h("h2", {}, Object.keys(this.session.moves).length ? "Shared history" : "Finished steps"),
      this.history,
      h("form", { class: "say", onsubmit: say }, words, speak),
      h("h2", {}, "Being written"),
      this.row,
      h("form", { class: "say join", onsubmit: join }, name, add),
      h("h2", {}, "Who looks at whom"),
      h("p", { class: "check" }, this.watch, h("label", { for: "watch" }, "Measure attention twice in five seconds; each time takes a forward pass")),
      this.attention,
    );
  }

  close() {
    this.stop.abort();
    clearInterval(this.timer);
    clearInterval(this.measuring);
  }

  toEnd() {
    this.history.scrollTop = this.history.scrollHeight;
  }

  get path() {
    return `/v1/workers/${this.session.id}`;
  }

  /** Reads the events of the session as they come. */
  async read() {
    try {
      for await (const event of events(`${this.path}/events`, { signal: this.stop.signal })) {
        if (event.type === "text") this.write(event);
        else if (event.type === "answer") this.answered(event);
        else if (event.type === "end") this.apply({ ...this.session, ...event, status: "ended" });
        else if (event.type === "error") this.tell(event.message);
      }
      await this.refresh();
    } catch (error) {
      if (!isStop(error)) this.tell(sentence(error));
    }
  }

  async refresh() {
    if (document.hidden || !this.element.isConnected) return;
    try {
      this.apply(await ask(this.path, { signal: this.stop.signal }));
      if (this.session.status === "ended") clearInterval(this.timer);
    } catch (error) {
      if (isStop(error)) return;
      clearInterval(this.timer);
      this.tell(sentence(error));
    }
  }

  /** @param {string} name */
  colour(name) {
    if (!this.order.includes(name)) this.order.push(name);
    return name in this.session.workers || this.columns.has(name) ? `w${this.order.indexOf(name) % COLOURS}` : "person";
  }

  /**
   * Brings all in line with what the server has told.
   * @param {Session} session
   */
  apply(session) {
    if (session.status !== this.session.status) this.changed();
    this.session = session;
    for (const name of session.names) this.column(name);
    for (const name of [...this.columns.keys()]) {
      if (!session.names.includes(name)) {
        this.columns.get(name)?.box.remove();
        this.columns.delete(name);
      }
    }
    for (const step of session.steps) {
      if (step.ended !== null) this.file(step.worker, step.step, step.text, step);
    }
    const isOver = session.finish_reason !== null || ["ended", "failed", "closed"].includes(session.status);
    for (const [name, { state, pause, leave }] of this.columns) {
      const now = session.workers[name]?.state ?? "";
      const text = now === "running" && session.status !== "running" ? session.status : now;
      if (state.textContent !== text) state.textContent = text;
      pause.textContent = now === "paused" ? "Resume" : "Pause";
      pause.disabled = isOver || (now !== "running" && now !== "paused");
      leave.disabled = isOver;
    }
    for (const each of session.answers) this.answered(each);
    for (const each of this.controls) each.disabled = isOver;
    this.progress(session.passes);
  }

  /**
   * Shows an answer among those at other budgets.
   * @param {Answer} found
   */
  answered(found) {
    const words = [
      found.value === null ? "No answer" : h("strong", {}, found.value),
      ` after ${found.passes} passes`,
      found.extra_passes ? `, guessed in ${found.extra_passes} more` : ", given by the workers",
    ];
    const key = `${found.budget}`, known = this.known.get(key);
    if (known) return known.replaceChildren(...words);
    const made = h("li", { class: "answer", "data-budget": found.budget }, ...words);
    this.known.set(key, made);
    const next = [...this.answers.children].find((each) => Number(each.getAttribute("data-budget")) > found.budget);
    this.answers.insertBefore(made, next ?? null);
  }

  /** @param {number} passes */
  progress(passes) {
    const { status, finish_reason: reason, budget } = this.session;
    this.bar.value = passes;
    const end = reason === "answer" ? "with an answer" : reason === "length" || reason === null ? "at its budget" : `(${reason})`;
    const now = status === "ended" ? `ended ${end}` : status === "waiting" ? "waiting" : status;
    const text = `${now[0].toUpperCase()}${now.slice(1)} after ${passes} of ${budget} passes`;
    if (this.state.textContent !== text) this.state.textContent = text;
  }

  /** @param {string} name */
  column(name) {
    const known = this.columns.get(name);
    if (known) return known;
    const text = h("div", { class: "words" }), state = h("span", { class: "badge" });
    const pause = h("button", {
      type: "button",
      class: "quiet",
      "aria-label": `Pause or resume ${name}`,
      onclick: () => this.command(pause.textContent === "Resume" ? "resume" : "pause", { name }),
    }, "Pause");
    const leave = h("button", { type: "button", class: "quiet", "aria-label": `Remove ${name}`, onclick: () => this.command("remove", { name }) }, "Remove");
    const made = { box: /** @type {HTMLElement} */ (h("section")), text, step: 1, state, pause, leave, raw: "" };
    this.columns.set(name, made);
    made.box = h(
      "section",
      { class: `column ${this.colour(name)}`, "aria-label": name },
      h("header", {}, h("h3", {}, name), state, h("span", { class: "spring" }), pause, leave),
      text,
    );
    this.row.append(made.box);
    return made;
  }

  /** @param {{ worker: string, step: number, text: string, passes: number, ends: boolean }} event */
  write(event) {
    const key = `${event.worker}#${event.step}`;
    this.progress(Math.max(event.passes, this.session.passes));
    const column = this.columns.get(event.worker);
    if (this.finished.has(key) || !column) return;
    if (column.step !== event.step) {
      column.step = event.step;
      column.raw = "";
    }
    column.raw += event.text;
    following(column.text, () => {
      column.text.textContent = bare(column.raw, event.worker, event.step);
    });
    if (event.ends) {
      this.file(event.worker, event.step, column.raw, null, column.box);
      column.raw = "";
      column.text.textContent = "";
    }
  }

  /**
   * Puts a finished step into the history.
   * @param {string} worker
   * @param {number} number
   * @param {string} text
   * @param {Step | null} step what the server tells of it
   * @param {HTMLElement} [from] where it comes from
   */
  file(worker, number, text, step, from) {
    const key = `${worker}#${number}`;
    let card = this.finished.get(key);
    if (!card) {
      card = h(
        "article",
        { class: `card ${this.colour(worker)}` },
        h("h3", {}, worker, " ", h("span", { class: "faint" }, `step ${number}`), h("span", { class: "marks" })),
        h("div", { class: "words" }, bare(text, worker, number).trim()),
      );
      this.finished.set(key, card);
      const added = card;
      following(this.history, () => this.history.append(added));
      if (from) fly(card, from);
    }
    const marks = /** @type {HTMLElement} */ (card.querySelector(".marks"));
    if (step && !marks.textContent) {
      marks.textContent = [step.asked ? "asked whether it is redundant" : "", step.answers ? "answers" : ""].filter(Boolean).join(", ");
    }
  }

  /**
   * Asks the session for something; true if it was done.
   * @param {string} what
   * @param {unknown} body
   */
  async command(what, body) {
    try {
      this.apply(await ask(`${this.path}/${what}`, { body }));
      this.tell();
      return true;
    } catch (error) {
      this.tell(sentence(error));
      return false;
    }
  }

  /** @param {string} what */
  async all(what) {
    for (const name of this.session.names) if (!(await this.command(what, { name }))) return;
  }

  async finish() {
    try {
      this.answered(await ask(`${this.path}/finish`, { method: "POST" }));
    } catch (error) {
      this.tell(sentence(error));
    }
  }

  async save() {
    try {
      const { passes, bytes } = await ask(`${this.path}/save`, { method: "POST" });
      this.tell(`Saved after ${passes} passes, in ${size(bytes)}`, false);
      this.changed();
    } catch (error) {
      this.tell(sentence(error));
    }
  }

  async remove() {
    this.close();
    try {
      await ask(this.path, { method: "DELETE" });
      this.tell();
    } catch (error) {
      this.tell(sentence(error));
    }
    this.gone();
  }

  /** Measures attention while the box is checked. */
  measure() {
    clearInterval(this.measuring);
    const once = async () => {
      if (!this.watch.checked || document.hidden || !this.element.isConnected) return;
      try {
        const found = await ask(`${this.path}/attention`, { signal: this.stop.signal });
        this.attention.replaceChildren(attentionTable(found, this.session));
      } catch (error) {
        if (!isStop(error)) this.tell(sentence(error));
        this.watch.checked = false;
      }
    };
    if (!this.watch.checked) return;
    this.measuring = setInterval(once, 2500);
    once();
  }
}

/**
 * A step without the header that names its worker.
 * @param {string} text
 * @param {string} worker
 * @param {number} step
 */
function bare(text, worker, step) {
  const name = worker.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return text.replace(new RegExp(`^[\\s#*>-]*${name}\\s*[\\[(#]?${step}[\\])]?[*]*(:|\\s*\\n)`), "").trimStart();
}

/**
 * Lets a copy of a card come from where its step was written.
 * @param {HTMLElement} card
 * @param {HTMLElement} from
 */
function fly(card, from) {
  if (isCalm() || document.hidden) return;
  const start = from.getBoundingClientRect(), end = card.getBoundingClientRect();
  const ghost = /** @type {HTMLElement} */ (card.cloneNode(true));
  ghost.classList.add("ghost");
  ghost.setAttribute("aria-hidden", "true");
  Object.assign(ghost.style, { left: `${end.left}px`, top: `${end.top}px`, width: `${end.width}px` });
  document.body.append(ghost);
  const timing = { duration: 500, easing: "cubic-bezier(.2, .7, .2, 1)" };
  const path = { transform: [`translate(${start.left - end.left}px, ${start.top - end.top}px) scale(${Math.min(start.width / end.width, 1)})`, "none"] };
  ghost.animate({ ...path, opacity: [0.9, 1] }, timing).finished.then(() => ghost.remove(), () => ghost.remove());
  card.animate({ opacity: [0, 0, 1] }, timing);
}
