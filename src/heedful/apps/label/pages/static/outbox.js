// Decisions that have not reached the server yet. They survive a lost connection and a closed tab: they are kept in the
// browser and sent again with the same nonce, so that the server counts each once.
import { post, Refused, Unreachable } from "./api.js";
import { memory } from "./dom.js";

const DELAYS = [1, 2, 4, 8, 10]; // seconds between attempts; the last one repeats

/** An outbox for one person in one project. `waiting(true, error)` is called when something could not be sent, `waiting(false)` when it was. */
export function outbox(owner, waiting) {
  const name = `outbox.${owner}`;

  async function deliver(path, body) {
    for (let attempt = 0; ; attempt += 1) {
      try {
        const reply = await post(path, body);
        memory.set(name, null);
        waiting(false);
        return reply;
      } catch (error) {
        if (error instanceof Refused) {
          if (error.status !== 401) memory.set(name, null); // after signing in again it is sent
          waiting(false);
          throw error;
        }
        if (!(error instanceof Unreachable)) throw error;
        waiting(true, error);
        await pause(Math.max(error.wait, DELAYS[Math.min(attempt, DELAYS.length - 1)]));
      }
    }
  }

  return {
    /** Keeps a request, with a description, and sends it until the server answers; throws `Refused` if it refuses. */
    send(path, body, about) {
      memory.set(name, { path, body, about });
      return deliver(path, body);
    },
    /** Sends the request left by an earlier visit. Returns it with the `error` if the server refuses, else null. */
    async flush() {
      const left = memory.get(name);
      try {
        if (left !== null) await deliver(left.path, left.body);
      } catch (error) {
        if (!(error instanceof Refused) || error.status === 401) throw error;
        return { ...left, error };
      }
      return null;
    },
  };
}

/** Waits some seconds, less if the connection comes back or somebody clicks "try now" (an event `heedful:retry`). */
export function pause(seconds) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      window.removeEventListener("online", done);
      window.removeEventListener("heedful:retry", done);
      resolve();
    };
    const timer = setTimeout(done, 1000 * seconds);
    window.addEventListener("online", done);
    window.addEventListener("heedful:retry", done);
  });
}
