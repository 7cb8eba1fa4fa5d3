// What is asked for again and again while a view is shown.

/**
 * Makes a poll that runs while it is shown, and rests while the tab is hidden.
 * @param {(signal: AbortSignal) => Promise<void>} look
 * @param {number} milliseconds between the end of one and the start of the next
 */
export function poll(look, milliseconds) {
  /** @type {AbortController | null} */
  let running = null;

  async function run(/** @type {AbortController} */ mine) {
    while (running === mine) {
      if (!document.hidden) await look(mine.signal);
      await new Promise((resolve) => setTimeout(resolve, milliseconds));
    }
  }

  return {
    start() {
      running?.abort();
      run((running = new AbortController()));
    },
    stop() {
      running?.abort();
      running = null;
    },
  };
}
