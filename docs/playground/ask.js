// Questions to Python: one at a time, and what is loading meanwhile.

/** Python under way, up, or failed; questions wait until it is up. */
export class Python {
  #worker = null;
  #waiting = new Map();
  #next = 0;
  #build;
  #told;
  up = false; // whether a question is answered at once

  /**
   * @param {{bytes: Record<string, number>, edition: string, lock: object, first: string}} build the files by name;
   *   what changes with any of them; which Python they are; a question that loads what others need too
   * @param {(state: {bytes: number, total: number, seconds: number, step: string, ready: boolean, failed: string}) => void} told
   */
  constructor(build, told) {
    this.#build = build;
    this.#told = told;
    this.#start();
  }

  #start() {
    const total = Object.values(this.#build.bytes).reduce((sum, bytes) => sum + bytes, 0);
    const state = { bytes: 0, total, seconds: 0, step: "loading", ready: false, failed: "" };
    const began = performance.now();
    const tell = (change) => {
      Object.assign(state, change, { seconds: (performance.now() - began) / 1000 });
      this.#told({ ...state });
    };
    const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    const failed = (why) => {
      tell({ failed: why });
      for (const { reject } of this.#waiting.values()) reject(new Error(`Python did not start: ${why}`));
      this.#waiting.clear();
    };
    worker.onerror = (event) => {
      event.preventDefault();
      failed(event.message || "its script cannot be loaded");
    };
    worker.onmessage = ({ data }) => {
      if (data.step !== undefined) tell({ step: data.step });
      else if (data.bytes !== undefined) tell({ bytes: Math.min(state.bytes + data.bytes, total) });
      else if (data.ready) {
        this.up = true;
        tell({ ready: true });
      } else if (data.failed !== undefined && data.id === undefined) failed(data.failed);
      else {
        const { resolve, reject } = this.#waiting.get(data.id) ?? {};
        this.#waiting.delete(data.id);
        if (data.failed !== undefined) reject?.(new Error(data.failed));
        else resolve?.(data.answer);
      }
    };
    this.up = false;
    const { bytes: start, edition, lock, first } = this.#build;
    worker.postMessage({ start, edition, lock, first });
    this.#worker = worker;
    tell({});
  }

  /** What the command answers: {words, code, out, err}. Rejects where Python does not run. */
  ask(query, form) {
    const id = ++this.#next;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      this.#worker.postMessage({ id, query, form });
    });
  }

  /** Let go of what is being worked out, and begin anew: a thread cannot be interrupted in another way. */
  stop() {
    this.#worker.terminate();
    for (const { reject } of this.#waiting.values()) reject(new Error("stopped"));
    this.#waiting.clear();
    this.#start();
  }
}
