// Talks to the server. Every request that changes something carries the session's CSRF token.

/** A refusal by the server: `status` and its message. */
export class Refused extends Error {
  constructor(status, message, body = {}) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

/** No usable reply: offline, server restarting, or too many requests. Retry later. */
export class Unreachable extends Error {
  constructor(message, wait = 0, body = null) {
    super(message);
    this.wait = wait;
    this.body = body; // null: there was no reply at all
  }
}

const PASSING = [408, 429, 502, 503, 504];
const PATIENCE = 20_000; // ms until a request counts as lost; its nonce makes sending it again harmless
let csrf = "";
export const setCsrf = (token) => { csrf = token; };

async function request(path, options, patience) {
  let reply;
  try {
    reply = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(patience), ...options });
  } catch (error) {
    throw new Unreachable(error.message);
  }
  const text = await reply.text().catch(() => null);
  if (PASSING.includes(reply.status) || text === null) {
    throw new Unreachable(errorOf(text), Number(reply.headers.get("Retry-After")) || 0, parsed(text ?? ""));
  }
  if (!reply.ok) throw new Refused(reply.status, errorOf(text) || reply.statusText, parsed(text));
  return parsed(text);
}

const parsed = (text) => {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
};
const errorOf = (text) => parsed(text)?.error ?? "";

export const get = (path) => request(path, {}, PATIENCE);

/** Sends JSON. `keepalive` lets a request outlive the page that sent it (drafts, when a tab is closed). */
export function post(path, body, { keepalive = false, patience = PATIENCE } = {}) {
  const headers = { "Content-Type": "application/json", "X-CSRF-Token": csrf };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), keepalive }, patience);
}
