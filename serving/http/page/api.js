// Requests to the server, and its streams of events.

/** An error that the server has told. */
export class ServerError extends Error {
  /**
   * @param {string} message
   * @param {number} status
   */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const KEY = "jaxshare-key";
/** @type {Promise<void> | null} */
let asking = null;

/**
 * Asks for a key, once for all who wait for it.
 * @param {boolean} wrong the server does not know the one that it was given
 */
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    /** @type {HTMLElement} */ (document.getElementById("key-wrong")).hidden = !wrong;
    const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("key"));
    const input = /** @type {HTMLInputElement} */ (document.getElementById("key-value"));
    input.value = "";
    dialog.addEventListener(
      "close",
      () => {
        sessionStorage.setItem(KEY, input.value.trim());
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}

/**
 * Sends a request; asks for a key where the server does.
 * @param {string} path
 * @param {{ method?: string, body?: unknown, signal?: AbortSignal }} [options]
 * @returns {Promise<Response>}
 */
async function send(path, options = {}) {
  for (;;) {
    /** @type {Record<string, string>} */
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (key) headers.Authorization = `Bearer ${key}`;
    if (options.body !== undefined) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, {
        method: options.method ?? (options.body === undefined ? "GET" : "POST"),
        headers,
        body: options.body === undefined ? undefined : JSON.stringify(options.body),
        signal: options.signal,
      });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new ServerError("The server does not answer.", 0);
    }
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => null);
    if (answer.status === 401) {
      await askForKey(Boolean(key));
      continue;
    }
    throw new ServerError(told?.error?.message ?? `The server answers with ${answer.status}.`, answer.status);
  }
}

/**
 * Asks for JSON.
 * @param {string} path
 * @param {{ method?: string, body?: unknown, signal?: AbortSignal }} [options]
 * @returns {Promise<any>}
 */
export async function ask(path, options) {
  return (await send(path, options)).json();
}

/**
 * Yields the data of server-sent events, up to the end of the stream.
 * @param {string} path
 * @param {{ body?: unknown, signal?: AbortSignal }} [options]
 * @returns {AsyncGenerator<any>}
 */
export async function* events(path, options) {
  const answer = await send(path, options);
  if (!answer.body) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const data = rest
        .slice(0, end)
        .split("\n")
        .filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6))
        .join("\n");
      rest = rest.slice(end + 2);
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, 500);
      yield event;
    }
  }
}

/**
 * True for the error of a request that was stopped on purpose.
 * @param {unknown} error
 */
export function isStop(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/**
 * The sentence of an error.
 * @param {unknown} error
 */
export function sentence(error) {
  return error instanceof Error ? error.message : String(error);
}
